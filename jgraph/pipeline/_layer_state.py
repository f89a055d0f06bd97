"""Carried state of the layers of a pipeline.

Every microbatch of a layer starts from the state at the beginning of the step. The states after all microbatches are reduced.
The state is small, so every rank holds the state of all layers. A rank selects the state of its layers and reduces the results
of its forwards. At the end of the step, the ranks all-gather the reduced state.
"""

# P ranks, C chunks, N places (layers of the longest stage)

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError, ShapeError
from jgraph.pipeline.partition import AXIS, PipelineModel, StageAssignment
from jgraph.strategies.objective import before_any, merged, reduced
from jgraph.types import Carried, Reduction, Reductions, TreeOf

Bits: TypeAlias = Carried
"""Carried state with floats reinterpreted as unsigned integers of the same width."""


@dataclass(frozen=True)
class LayerState:
    """The shapes and the reductions of the carried state of a layer. All layers have the same.

    Letters in shapes: C chunks of a rank, N places (layers of the longest stage).

    Attributes:
        layer: Shapes and dtypes of the state; {} if layers carry no state.
        reductions: The reduction of each array over microbatches and data ranks, a tree with the structure of `layer`: `max`,
            `sum`, `mean`, `last` (the value of the last microbatch) or `halt` (`max`, and a positive value halts the step).
    """

    layer: Carried = field(default_factory=dict)
    reductions: Reductions = field(default_factory=dict)

    @classmethod
    def of(cls, model: PipelineModel, shapes: Carried, reductions: Reductions, num_layers: int) -> "LayerState":
        """Finds the state of a layer in the carried state of a model.

        Args:
            model: The model. Its functions `split_carried` and `join_carried` are called with arrays and with shapes.
            shapes: Shapes of the carried state of the model; empty if there is none.
            reductions: The reduction of each array (`max`, `sum`, `mean`, `last` or `halt`), a tree like `shapes`.
            num_layers: Number of layers of the model.

        Returns:
            The shapes and reductions of one layer.

        Raises:
            ConfigError: If an array belongs to no layer, layers differ in shapes or reductions, or an array of a layer combines
                arrays with different reductions.
        """
        leaves, structure = jax.tree.flatten(shapes)
        if not leaves:
            return cls()
        # Every leaf is filled with its index, which shows the origin of each element in the state of a layer.
        numbers = [np.full(leaf.shape, i, np.int32) for i, leaf in enumerate(leaves)]
        layers = model.split_carried(structure.unflatten(numbers))
        is_per_layer = isinstance(layers, list | tuple) and len(layers) == num_layers
        joined, joined_structure = jax.tree.flatten(model.join_carried(list(layers)) if is_per_layer else None)
        if joined_structure != structure or not all(map(np.array_equal, joined, numbers)):
            raise ConfigError(
                f"`carried` has arrays outside the {num_layers} layers: PipelineModel.split_carried must return one tree per "
                "layer, and join_carried must invert it",
                field="carried",
            )
        kinds = jax.tree.leaves(reductions)
        names = [jax.tree.map(lambda leaf: "|".join({kinds[i] for i in np.unique(leaf)}), layer) for layer in layers]
        parts = jax.eval_shape(model.split_carried, shapes)
        if any(pair != (names[0], _described(parts[0])) for pair in zip(names, map(_described, parts), strict=True)):
            raise ConfigError("`carried` differs between layers: must have equal shapes and `reductions`", field="carried")
        if any("|" in name for name in jax.tree.leaves(names)):
            raise ConfigError(f"`reductions` is {names[0]} for a layer: must be one per array of the layer", field="reductions")
        return cls(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), parts[0]), names[0])

    def bits(self, *lead: int) -> Bits:
        """Returns the shapes of the state as bits, with leading axes of the lengths `lead`.

        Bits are floats reinterpreted as unsigned integers of the same width. Other dtypes are unchanged.
        """
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), _bits(s.dtype)), self.layer)

    def pick(self, layers: Sequence[Carried], table_CN: Array) -> Bits:
        """Selects the state of the layers in a table, as bits.

        Floats are reinterpreted as unsigned integers of the same width, because a stage does not differentiate integers and
        does not store them in the residuals of every microbatch.

        Args:
            layers: The state of every layer, one tree per layer; empty if layers carry no state.
            table_CN: Index of the layer at every place of a rank, int32 [C, N].

        Returns:
            A tree like `layer`, with leaves [C, N, ...]; {} if `layers` is empty.
        """

        def of(*leaves: Array) -> Array:
            return lax.bitcast_convert_type(jnp.stack(leaves)[table_CN], _bits(leaves[0].dtype))

        return jax.tree.map(of, *layers) if layers else {}

    def at(self, bits_N: Bits, place: int) -> tuple[Carried, ...]:
        """Returns the additional arguments of a layer: a tuple with its state, or () if layers carry no state.

        Args:
            bits_N: The state of a stage as bits, leaves [N, ...].
            place: Index of the layer in its stage.
        """
        if not jax.tree.leaves(self.layer):
            return ()
        return (jax.tree.map(lambda s, bits: lax.bitcast_convert_type(bits[place], s.dtype), self.layer, bits_N),)

    def taken(self, made: Array | tuple[Array, Carried]) -> tuple[Array, Carried]:
        """Returns the result of a layer unchanged, after a check.

        Args:
            made: The result of the function `layer` of a model with carried state.

        Returns:
            The pair of x and the carried state after the microbatch.

        Raises:
            ShapeError: If the result is not such a pair, or the state has other shapes or dtypes than `self.layer`.
        """
        x, after = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if (found := _described(after)) != (must := _described(self.layer)):
            raise ShapeError(f"`layer` returns carried state {found}: must return (x, carried) with carried state {must}")
        return x, after

    def start(self, chunks: int, after_N: Carried) -> Carried:
        """Returns the initial accumulator of a rank: zeros, or the lowest number of the dtype for maxima.

        Args:
            chunks: C, the number of chunks of the rank.
            after_N: Shapes of the state after a forward of one chunk, leaves [N, ...].

        Returns:
            A tree like `after_N`, with leaves [C, N, ...].
        """
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((chunks, *s.shape), s.dtype), after_N)
        return before_any(self.reductions, shapes)

    def together(self, afters: Sequence[Carried], places: int) -> Carried:
        """Merges the states after the forwards of a stage over microbatches, and pads them to the longest stage.

        Args:
            afters: The state after the forward of each microbatch, in the order of microbatches, with leaves [layers, ...].
            places: N, the number of layers of the longest stage.

        Returns:
            The merged state, leaves [N, ...], zero in the padding. Means are sums, which `finish` divides.
        """

        def padded(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, places - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        total = before_any(self.reductions, afters[0])
        for after in afters:
            total = jax.tree.map(merged, self.reductions, total, after)
        return jax.tree.map(padded, total)

    def add(self, total: Carried, new_N: Carried, chunk: Array | int, counts: Array) -> Carried:
        """Merges the state after a forward of a chunk into the accumulator of the rank.

        Args:
            total: The accumulator, leaves [C, N, ...].
            new_N: The state after the forward, leaves [N, ...].
            chunk: Index of the chunk, an integer or an int32 scalar.
            counts: Bool scalar; False keeps the accumulator, for example in a tick without a forward.

        Returns:
            The new accumulator. Means are sums, which `finish` divides.
        """

        def add(kind: Reduction, total: Array, new: Array) -> Array:
            is_chunk = (jnp.arange(len(total)) == chunk) & counts
            return jnp.where(is_chunk.reshape(-1, *[1] * new.ndim), merged(kind, total, new), total)

        return jax.tree.map(add, self.reductions, total, new_N)

    def finish(self, total: Carried, count: int, axes: Sequence[str], layout: StageAssignment) -> list[Carried]:
        """Reduces the accumulators of all ranks. Call it under `jax.shard_map`: collective over `axes` and the axis `pipe`.

        Args:
            total: The accumulator of this rank, leaves [C, N, ...].
            count: Number of microbatches, which divides means.
            axes: Names of the mesh axes of the data ranks; empty without them.
            layout: The assignment of layers to ranks.

        Returns:
            The carried state of every layer after the step, a list from the first to the last layer; the same on all ranks.
        """
        whole = jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS), reduced(self.reductions, total, count, axes))
        return [jax.tree.map(lambda leaf, at=at: leaf[at], whole) for at in layout.places()]


def _described(tree: Carried) -> TreeOf[str]:
    return jax.tree.map(lambda s: f"{jnp.result_type(s)}{list(jnp.shape(s))}", tree)


def _bits(dtype: np.dtype) -> np.dtype:
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if jnp.issubdtype(dtype, jnp.floating) else dtype
