"""Embedding and head on one rank: their parameters are gathered there, and their gradients are split again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.callables.plan import PlanFunction
from jgraph.callables.shaped import filled, reads_of
from jgraph.mesh import Axis
from jgraph.tree import leaf_names

Tree = Any


@dataclass(frozen=True, eq=False)
class End:
    """`embed` or `head` of a pipeline model as a function of the whole parameters that it reads.

    A parameter's number is its position in `reads`.

    Attributes:
        fn: `fn(outer, *args)`.
        outer: Shapes of all its parameters, as it takes them.
        kept: Shapes of the same parameters in the state.
        reads: The leaves that it reads.
        axes: For each of them, the axis that is sharded over the ranks, or None.
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
        """Finds the parameters that a function reads.

        Args:
            fn: A function under the axis `pipe`. Its collectives become those of one rank.
            kept: Shapes of the parameters.
            cast: Converts them to the dtypes that the function takes.
            sharded: Sharded axes by name, as in `PipelineModel`.
            args: Shapes of the function's other arguments.
        """

        def alone(*args: Tree) -> Tree:
            # All arguments have the axis: jax 0.12 refuses gradients with an axis that the argument does not have.
            mapped = jax.vmap(fn, axis_name=Axis.PIPE, axis_size=1)
            return jax.tree.map(lambda leaf: leaf[0], mapped(*jax.tree.map(lambda leaf: leaf[None], args)))

        outer = jax.eval_shape(cast, kept)
        names = leaf_names(outer)
        reads = reads_of(jax.make_jaxpr(alone)(outer, *args).jaxpr, len(names))
        return cls(alone, outer, kept, reads, tuple(sharded.get(names[i]) for i in reads))

    def __call__(self, arrays: Sequence[Array], *args: Tree) -> Array:
        """Calls the function with the parameters that it reads."""
        leaves, structure = jax.tree.flatten(self.outer)
        return self.fn(structure.unflatten(filled(leaves, self.reads, arrays)), *args)

    @cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the parameters that it reads, whole."""
        leaves = jax.tree.leaves(self.outer)
        return [leaves[i] for i in self.reads]

    def gather(self, name: str, index: int, callable_: int, first: int, ranks: int) -> PlanFunction:
        """Returns the function that gathers and casts parameters on one rank. Others are read from the state.

        Args:
            name: `embedding` or `head`.
            index: The stage that shares its device.
            callable_: The callable that reads the parameters.
            first: The first of these parameters of the callable.
            ranks: Number of ranks.
        """
        kept = [jax.tree.leaves(self.kept)[i] for i in self.reads]
        made = [n for n, s in enumerate(self.shapes) if self.axes[n] is not None or kept[n].dtype != s.dtype]
        shapes = {
            (name, n, rank): jax.ShapeDtypeStruct(part_shape(kept[n].shape, self.axes[n], ranks), kept[n].dtype)
            for n in made
            for rank in range(1 if self.axes[n] is None else ranks)
        }

        def parameters(arrays: list[Array]) -> list[Array]:
            parts, whole = iter(arrays), []
            for n in made:
                axis = self.axes[n]
                own = next(parts) if axis is None else jnp.concatenate([next(parts) for _ in range(ranks)], axis)
                whole.append(own.astype(self.shapes[n].dtype))
            return whole

        parameters.__name__ = f"{name}_parameters"
        return PlanFunction(parameters, index, list(shapes), [("params", callable_, first + n) for n in made], shapes)

    def split(self, name: str, index: int, callable_: int, first: int, ranks: int, losses: Sequence[Any] = ()) -> PlanFunction:
        """Returns the function that splits gradients into shards for the ranks, and sums the named losses, if any."""
        ins = [("sum", callable_, first + n) for n in range(len(self.reads))]
        outs = [(name, n, rank) for n, axis in enumerate(self.axes) for rank in range(1 if axis is None else ranks)]

        def gradients(arrays: list[Array]) -> list[Array]:
            parts = []
            for gradient, axis in zip(arrays, self.axes, strict=False):
                parts += [jnp.atleast_1d(gradient)] if axis is None else jnp.split(gradient, ranks, axis)
            return [*parts, jnp.reshape(sum(arrays[len(ins) :]), 1)] if losses else parts

        gradients.__name__ = f"{name}_gradients"
        return PlanFunction(gradients, index, [*ins, *losses], [*outs, ("total",)] if losses else outs)


def part_shape(shape: Sequence[int], axis: int | None, ranks: int) -> tuple[int, ...]:
    """Returns the shape of a rank's shard of an array that is sharded along an axis."""
    return tuple(length // ranks if i == axis else length for i, length in enumerate(shape))
