"""Carried state of the layers of a pipeline.

Every microbatch of a layer starts from the state at the beginning of the step. The states after all microbatches are reduced.
The state is small, so every rank holds the state of all layers. A rank selects the state of its layers and reduces the results
of its forwards. At the end of the step, the ranks all-gather the reduced state.
"""

# P ranks, C chunks, N places (layers of the longest stage)

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError, ShapeError
from jgraph.pipeline.partition import AXIS, PipelineModel, StageAssignment, Tree
from jgraph.strategies.objective import before_any, merged, reduced


@dataclass(frozen=True)
class LayerState:
    """The shapes and the reductions of the carried state of a layer.

    Attributes:
        layer: Shapes and dtypes of the state; empty if layers carry no state.
        reductions: The reduction of each array over microbatches, a tree with the structure of `layer`.
    """

    layer: Tree = field(default_factory=dict)
    reductions: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, model: PipelineModel, shapes: Tree, reductions: Tree, num_layers: int) -> "LayerState":
        """Finds the state of a layer in the carried state of a model.

        Args:
            model: The model.
            shapes: Shapes of the carried state of the model.
            reductions: The reduction of each array, a tree with the structure of `shapes`.
            num_layers: Number of layers of the model.

        Returns:
            The shapes and reductions of one layer.

        Raises:
            ConfigError: If an array belongs to no layer, or layers differ in shapes or reductions.
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

    def bits(self, *lead: int) -> Tree:
        """Returns the shapes of the state as bits (see `pick`), with leading axes of the lengths `lead`."""
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), _bits(s.dtype)), self.layer)

    def pick(self, layers: Sequence[Tree], table_CN: Array) -> Tree:
        """Selects the state of the layers in a table, as bits with leaves [C, N, ...].

        Floats are reinterpreted as integers of the same width, because a stage does not differentiate integers and does not
        store them in the residuals of every microbatch.
        """

        def of(*leaves: Array) -> Array:
            return lax.bitcast_convert_type(jnp.stack(leaves)[table_CN], _bits(leaves[0].dtype))

        return jax.tree.map(of, *layers) if layers else {}

    def at(self, bits_N: Tree, place: int) -> tuple[Tree, ...]:
        """Returns a tuple with the state of the layer at a place; an empty tuple if layers carry no state."""
        if not jax.tree.leaves(self.layer):
            return ()
        return (jax.tree.map(lambda s, bits: lax.bitcast_convert_type(bits[place], s.dtype), self.layer, bits_N),)

    def taken(self, made: Any) -> tuple[Array, Tree]:
        """Returns `made`, the result of a layer. Raises ShapeError if it is not a pair of x and the carried state."""
        after = made[1] if isinstance(made, tuple) and len(made) == 2 else None
        if (found := _described(after)) != (must := _described(self.layer)):
            raise ShapeError(f"`layer` returns carried state {found}: must return (x, carried) with carried state {must}")
        return made

    def start(self, chunks: int, after_N: Tree) -> Tree:
        """Returns the initial accumulator of a rank, leaves [C, N, ...]. `after_N` is the shape of a forward's new state."""
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((chunks, *s.shape), s.dtype), after_N)
        return before_any(self.reductions, shapes)

    def together(self, afters: Sequence[Tree], places: int) -> Tree:
        """Merges the states after the forwards of a stage, in the order of microbatches, and pads them to [N, ...]."""

        def padded(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, places - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        total = before_any(self.reductions, afters[0])
        for after in afters:
            total = jax.tree.map(merged, self.reductions, total, after)
        return jax.tree.map(padded, total)

    def add(self, total: Tree, new_N: Tree, chunk: Any, counts: Array) -> Tree:
        """Merges the state after a forward of a chunk into the accumulator of the rank, if `counts` is True."""

        def add(kind: Any, total: Array, new: Array) -> Array:
            is_chunk = (jnp.arange(len(total)) == chunk) & counts
            return jnp.where(is_chunk.reshape(-1, *[1] * new.ndim), merged(kind, total, new), total)

        return jax.tree.map(add, self.reductions, total, new_N)

    def finish(self, total: Tree, count: int, axes: Sequence[str], layout: StageAssignment) -> list[Tree]:
        """Reduces the accumulators of all ranks. Collective over `axes` and the axis `pipe`.

        Args:
            total: The accumulator of this rank.
            count: Number of microbatches.
            axes: Mesh axes to reduce over.
            layout: The assignment of layers to ranks.

        Returns:
            The carried state of every layer after the step.
        """
        whole = jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS), reduced(self.reductions, total, count, axes))
        return [jax.tree.map(lambda leaf, at=at: leaf[at], whole) for at in layout.places()]


def _described(tree: Tree) -> Tree:
    return jax.tree.map(lambda s: f"{jnp.result_type(s)}{list(jnp.shape(s))}", tree)


def _bits(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if jnp.issubdtype(dtype, jnp.floating) else dtype
