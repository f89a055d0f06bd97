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
from jgraph.pipeline._partition import AXIS, PipelineModel, StageAssignment
from jgraph.strategies.objective import before_any, merged, reduced
from jgraph.types import Carried, Reduction, Reductions, TreeOf

Bits: TypeAlias = Carried
"""Carried state with floats reinterpreted as unsigned integers of the same width."""


@dataclass(frozen=True)
class LayerState:
    """The shapes and the reductions of the carried state of a layer. All layers have the same."""

    layer: Carried = field(default_factory=dict)  # shapes and dtypes; {} if layers carry no state
    # Like `layer`; `mean` is a sum over microbatches and data ranks until `finish` divides it
    reductions: Reductions = field(default_factory=dict)

    @classmethod
    def from_model(cls, model: PipelineModel, shapes: Carried, reductions: Reductions, num_layers: int) -> "LayerState":
        """Finds the state of a layer in the carried state of a model, by calls of `split_carried` and `join_carried`."""
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
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), _bits(s.dtype)), self.layer)

    def pick(self, layers: Sequence[Carried], table_CN: Array) -> Bits:
        """Selects the state of the layers of a rank, leaves [C, N, ...], from that of all layers."""

        def picked(*leaves: Array) -> Array:
            # A stage does not differentiate integers, and does not store them in the residuals of every microbatch.
            return lax.bitcast_convert_type(jnp.stack(leaves)[table_CN], _bits(leaves[0].dtype))

        return jax.tree.map(picked, *layers) if layers else {}

    def at(self, bits_N: Bits, place: int) -> tuple[Carried, ...]:
        """Returns the additional arguments of a layer: its state, from the bits of its stage; () if layers carry no state."""
        if not jax.tree.leaves(self.layer):
            return ()
        return (jax.tree.map(lambda s, bits: lax.bitcast_convert_type(bits[place], s.dtype), self.layer, bits_N),)

    def taken(self, made: Array | tuple[Array, Carried]) -> tuple[Array, Carried]:
        """Returns the result of a layer after a check that it is x and a state with the shapes and dtypes of `layer`."""
        x, after = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if (found := _described(after)) != (must := _described(self.layer)):
            raise ShapeError(f"`layer` returns carried state {found}: must return (x, carried) with carried state {must}")
        return x, after

    def start(self, chunks: int, after_N: Carried) -> Carried:
        """Returns the accumulator of a rank before the first forward, from the shapes [N, ...] of the state after one."""
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((chunks, *s.shape), s.dtype), after_N)
        return before_any(self.reductions, shapes)

    def together(self, afters: Sequence[Carried], places: int) -> Carried:
        """Merges the states [layers, ...] after all forwards of a stage, and pads them with zeros to [N, ...]."""

        def padded(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, places - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        total = before_any(self.reductions, afters[0])
        for after in afters:
            total = jax.tree.map(merged, self.reductions, total, after)
        return jax.tree.map(padded, total)

    def add(self, total: Carried, new_N: Carried, chunk: Array | int, counts: Array) -> Carried:
        """Merges the state [N, ...] after a forward of a chunk into the accumulator [C, N, ...], if `counts`."""

        def add(kind: Reduction, total: Array, new: Array) -> Array:
            is_chunk = (jnp.arange(len(total)) == chunk) & counts
            return jnp.where(is_chunk.reshape(-1, *[1] * new.ndim), merged(kind, total, new), total)

        return jax.tree.map(add, self.reductions, total, new_N)

    def finish(self, total: Carried, count: int, axes: Sequence[str], layout: StageAssignment) -> list[Carried]:
        """Returns the reduced state of every layer, the same on all ranks. Collective over `axes` (data ranks) and `pipe`."""
        whole = jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS), reduced(self.reductions, total, count, axes))
        return [jax.tree.map(lambda leaf, at=at: leaf[at], whole) for at in layout.places()]


def _described(tree: Carried) -> TreeOf[str]:
    return jax.tree.map(lambda s: f"{jnp.result_type(s)}{list(jnp.shape(s))}", tree)


def _bits(dtype: np.dtype) -> np.dtype:
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if jnp.issubdtype(dtype, jnp.floating) else dtype
