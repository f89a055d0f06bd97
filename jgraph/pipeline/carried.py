"""Carried state in a pipeline: every microbatch of a layer starts from what the step began with, and all results are reduced.

The state is small, so it lies on every rank as the model has it. A rank picks its layers' out of it, reduces what its forwards
give, and at the end of the step the ranks put their layers' together.
"""

# P ranks, C chunks, N places of a stage

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError, ShapeError
from jgraph.mesh import Axis
from jgraph.pipeline.partition import PipelineModel, StageAssignment
from jgraph.strategies.objective import before_any, merged, reduced

Tree = Any


@dataclass(frozen=True)
class Carried:
    """Shapes of the state that a layer carries, and how it is reduced.

    Attributes:
        layer: shapes of a layer's state; empty where nothing is carried.
        reductions: a tree of names as `layer`.
    """

    layer: Tree = field(default_factory=dict)
    reductions: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, model: PipelineModel, shapes: Tree, reductions: Tree, num_layers: int) -> "Carried":
        """Finds a layer's part in a model's carried state, from its shapes and a tree of names.

        Raises:
            ConfigError: some of the state is no layer's, or the layers differ in theirs.
        """
        leaves, structure = jax.tree.flatten(shapes)
        if not leaves:
            return cls()
        # With numbers of leaves in place of the state, a layer's part says which leaves it is of.
        numbers = [np.full(leaf.shape, i, np.int32) for i, leaf in enumerate(leaves)]
        layers = model.split_carried(structure.unflatten(numbers))
        there = isinstance(layers, list | tuple) and len(layers) == num_layers
        back, again = jax.tree.flatten(model.join_carried(list(layers)) if there else None)
        if again != structure or not all(map(np.array_equal, back, numbers)):
            raise ConfigError(
                f"`carried` has state that is not of the {num_layers} layers: must be what PipelineModel.split_carried takes "
                f"apart, and join_carried puts together again",
                field="carried",
            )
        kinds = jax.tree.leaves(reductions)
        names = [jax.tree.map(lambda leaf: "|".join({kinds[i] for i in np.unique(leaf)}), layer) for layer in layers]
        parts = jax.eval_shape(model.split_carried, shapes)
        if any(pair != (names[0], _described(parts[0])) for pair in zip(names, map(_described, parts), strict=True)):
            raise ConfigError("`carried` differs from layer to layer: must agree in shapes and `reductions`", field="carried")
        if any("|" in name for name in jax.tree.leaves(names)):
            raise ConfigError(f"`reductions` has {names[0]} for a layer: must be one for each array of it", field="reductions")
        return cls(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), parts[0]), names[0])

    def bits(self, *lead: int) -> Tree:
        """Returns shapes of what a stage takes with its parameters; `lead` dimensions are in front of a layer's."""
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*lead, *s.shape), _bits(s.dtype)), self.layer)

    def pick(self, layers: Sequence[Tree], table_CN: Array) -> Tree:
        """Returns the state of the layers in a table, [C, N, ...].

        It comes as bits: a stage's integers are neither differentiated nor kept for the backward, for every microbatch anew.
        """

        def of(*leaves: Array) -> Array:
            return lax.bitcast_convert_type(jnp.stack(leaves)[table_CN], _bits(leaves[0].dtype))

        return jax.tree.map(of, *layers) if layers else {}

    def at(self, bits_N: Tree, place: int) -> tuple[Tree, ...]:
        """Returns what a layer takes after its other arguments: its state, or nothing where nothing is carried."""
        if not jax.tree.leaves(self.layer):
            return ()
        return (jax.tree.map(lambda s, bits: lax.bitcast_convert_type(bits[place], s.dtype), self.layer, bits_N),)

    def taken(self, made: Any) -> tuple[Array, Tree]:
        """Returns x and the state after it from what a layer returned. Raises ShapeError where it is no such pair."""
        after = made[1] if isinstance(made, tuple) and len(made) == 2 else None
        if (found := _described(after)) != (must := _described(self.layer)):
            raise ShapeError(f"`layer` returns as carried state {found}: must return (x, carried), with carried {must}")
        return made

    def start(self, chunks: int, after_N: Tree) -> Tree:
        """Returns a rank's sums before the first forward, [C, N, ...], from the shapes of what a forward gives."""
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct((chunks, *s.shape), s.dtype), after_N)
        return before_any(self.reductions, shapes)

    def together(self, afters: Sequence[Tree], places: int) -> Tree:
        """Returns a stage's sums, [N, ...] of so many places, from what its forwards gave for fewer, by microbatch."""

        def padded(leaf: Array) -> Array:
            return jnp.pad(leaf, [(0, places - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

        total = before_any(self.reductions, afters[0])
        for after in afters:
            total = jax.tree.map(merged, self.reductions, total, after)
        return jax.tree.map(padded, total)

    def add(self, total: Tree, new_N: Tree, chunk: Any, counts: Array) -> Tree:
        """Returns the sums with what a forward of a chunk gave, where it counts; a stage's forwards come by microbatch."""

        def one(kind: Any, total: Array, new: Array) -> Array:
            here = (jnp.arange(len(total)) == chunk) & counts
            return jnp.where(here.reshape(-1, *[1] * new.ndim), merged(kind, total, new), total)

        return jax.tree.map(one, self.reductions, total, new_N)

    def finish(self, total: Tree, count: int, axes: Sequence[str], layout: StageAssignment) -> list[Tree]:
        """Returns the state of every layer, from all ranks' sums over so many microbatches; reduced over mesh axes."""
        whole = jax.tree.map(lambda leaf: lax.all_gather(leaf, Axis.PIPE), reduced(self.reductions, total, count, axes))
        return [jax.tree.map(lambda leaf, at=at: leaf[at], whole) for at in layout.places()]


def _described(tree: Tree) -> Tree:
    return jax.tree.map(lambda s: f"{jnp.result_type(s)}{list(jnp.shape(s))}", tree)


def _bits(dtype: Any) -> Any:
    return jnp.dtype(f"uint{8 * dtype.itemsize}") if jnp.issubdtype(dtype, jnp.floating) else dtype
