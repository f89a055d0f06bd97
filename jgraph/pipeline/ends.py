"""Embedding and head on one rank: their parameters are gathered there and their gradients are split again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.autodiff import replay
from jgraph.mesh import Axis
from jgraph.tree import leaf_names

Tree = Any


@dataclass(frozen=True, eq=False)
class End:
    """`embed` or `head` of a pipeline model as a function of the parameters that it reads, whole.

    Attributes:
        fn: `fn(outer, *args)`.
        outer: shapes of all its parameters, as it takes them.
        kept: shapes of the same as they are kept.
        reads: numbers of the leaves that it reads.
        axes: of each of these, the axis along which the ranks share it, or None.
    """

    fn: Callable[..., Array]
    outer: Tree
    kept: Tree
    reads: tuple[int, ...]
    axes: tuple[int | None, ...]

    @classmethod
    def of(
        cls, fn: Callable[..., Array], kept: Tree, cast: Callable[[Tree], Tree], sharded: Mapping[str, int], *args: Tree
    ) -> Self:
        """Finds what the function reads.

        Args:
            fn: under the axis `pipe`, whose collectives become those of one rank.
            kept: shapes of the parameters.
            cast: makes of them what the function takes.
            sharded: axis by name, as a `PipelineModel` has it.
            args: shapes of the function's other arguments.
        """

        def alone(*args: Tree) -> Tree:
            # All arguments have the axis: jax 0.12 refuses gradients that have it of arguments that have not.
            mapped = jax.vmap(fn, axis_name=Axis.PIPE, axis_size=1)
            return jax.tree.map(lambda leaf: leaf[0], mapped(*jax.tree.map(lambda leaf: leaf[None], args)))

        outer = jax.eval_shape(cast, kept)
        names = leaf_names(outer)
        jaxpr = jax.make_jaxpr(alone)(outer, *args).jaxpr
        needed, _ = replay.needs(jaxpr, [True] * len(jaxpr.outvars))
        reads = tuple(i for i in range(len(names)) if needed[i])
        return cls(alone, outer, kept, reads, tuple(sharded.get(names[i]) for i in reads))

    def __call__(self, arrays: Sequence[Array], *args: Tree) -> Array:
        """Returns the function's result from the arrays that it reads."""
        given = dict(zip(self.reads, arrays, strict=True))
        leaves, structure = jax.tree.flatten(self.outer)
        filled = [given[i] if i in given else replay.zeros(leaf) for i, leaf in enumerate(leaves)]
        return self.fn(structure.unflatten(filled), *args)

    @cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays that it reads, whole."""
        leaves = jax.tree.leaves(self.outer)
        return [leaves[i] for i in self.reads]

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Returns which of the arrays that it reads must be made; the others are read where they are kept."""
        kept = jax.tree.leaves(self.kept)
        pairs = enumerate(zip(self.reads, self.axes, strict=True))
        return tuple(n for n, (i, axis) in pairs if axis is not None or kept[i].dtype != self.shapes[n].dtype)

    def parts(self, ranks: int) -> list[list[jax.ShapeDtypeStruct]]:
        """Returns the shapes of the ranks' parts of each array that must be made."""
        kept, found = jax.tree.leaves(self.kept), []
        for n in self.made:
            leaf, axis = kept[self.reads[n]], self.axes[n]
            part = jax.ShapeDtypeStruct(part_shape(leaf.shape, axis, ranks), leaf.dtype)
            found.append([part] * (1 if axis is None else ranks))
        return found

    def make(self, parts: Sequence[Sequence[Array]]) -> list[Array]:
        """Returns the arrays that must be made, from the ranks' parts of each."""
        made = []
        for n, own in zip(self.made, parts, strict=True):
            axis = self.axes[n]
            made.append((own[0] if axis is None else jnp.concatenate(own, axis)).astype(self.shapes[n].dtype))
        return made

    def deal(self, gradients: Sequence[Array], ranks: int) -> list[list[Array]]:
        """Returns each gradient's parts for the ranks; one part for all where they do not share it. None is a scalar."""
        pairs = zip(gradients, self.axes, strict=True)
        return [[jnp.atleast_1d(g)] if axis is None else jnp.split(g, ranks, axis) for g, axis in pairs]


def part_shape(shape: Sequence[int], axis: int | None, ranks: int) -> tuple[int, ...]:
    """Returns the shape of a rank's part of an array that the ranks share along an axis."""
    return tuple(length // ranks if i == axis else length for i, length in enumerate(shape))
