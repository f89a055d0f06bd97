"""Embedding and head of the MPMD engine. One rank gathers their parameters, and splits their gradients into shards again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.callables.plan import Name, PlanFunction
from jgraph.callables.shaped import filled, reads_of
from jgraph.mesh import Axis
from jgraph.tree import leaf_names
from jgraph.types import Params, Tree


@dataclass(frozen=True)
class EndPlace:
    """Where an execution plan computes an end."""

    name: Literal["embedding", "head"]  # the first part of the names of shards in the plan
    index: int  # number of a stage on the device
    reader: int  # number of the callable (a stage, or the loss) that reads the parameters
    first: int  # position of the parameter with number 0 among the parameters of `reader`
    ranks: int  # number of ranks, which hold the shards


@dataclass(frozen=True, eq=False)
class End:
    """`embed` or `head` of a pipeline model, as a function of the unsharded parameters that it reads.

    The number of a parameter is its position in `reads`. The rank that computes the function holds whole parameters.
    """

    fn: Callable[..., Array]  # `fn(outer, *args)`, without collectives over `pipe`
    outer: Params  # shapes of all leaves of the argument `outer` (the parameters of embedding and head), unsharded
    kept: Params  # shapes of the same leaves in the state, unsharded, where their dtypes may differ
    reads: tuple[int, ...]  # indices of the leaves that the function reads
    axes: tuple[int | None, ...]  # for each leaf in `reads`, the axis that is sharded over the ranks

    @classmethod
    def trace(
        cls, fn: Callable[..., Array], kept: Params, cast: Callable[[Params], Params], sharded: Mapping[str, int], *args: Tree
    ) -> Self:
        """Finds the parameters that `fn(outer, *args)` reads. Collectives of `fn` over `pipe` are traced for a single rank."""

        def alone(*args: Tree) -> Array:
            # All arguments are mapped, because jax 0.12 refuses a gradient with an axis that its argument does not have.
            mapped = jax.vmap(fn, axis_name=Axis.PIPE, axis_size=1)
            return jax.tree.map(lambda leaf: leaf[0], mapped(*jax.tree.map(lambda leaf: leaf[None], args)))

        outer = jax.eval_shape(cast, kept)
        names = leaf_names(outer)
        reads = reads_of(jax.make_jaxpr(alone)(outer, *args).jaxpr, len(names))
        return cls(alone, outer, kept, reads, tuple(sharded.get(names[i]) for i in reads))

    def __call__(self, arrays: Sequence[Array], *args: Tree) -> Array:
        """Calls `fn` with whole `arrays` for `reads`, in the dtypes of `outer`. Leaves that `fn` does not read are zeros."""
        leaves, structure = jax.tree.flatten(self.outer)
        return self.fn(structure.unflatten(filled(leaves, self.reads, arrays)), *args)

    @cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        leaves = jax.tree.leaves(self.outer)
        return [leaves[i] for i in self.reads]

    def gather(self, place: EndPlace) -> PlanFunction:
        """Makes the function that concatenates the shards of parameters on one rank and casts them."""
        # Other parameters are not part of the function; the callable reads them from the state.
        kept = [jax.tree.leaves(self.kept)[i] for i in self.reads]
        computed = [n for n, s in enumerate(self.shapes) if self.axes[n] is not None or kept[n].dtype != s.dtype]
        shapes = {
            Name(place.name, leaf=n, rank=rank): jax.ShapeDtypeStruct(
                part_shape(kept[n].shape, self.axes[n], place.ranks), kept[n].dtype
            )
            for n in computed
            for rank in range(1 if self.axes[n] is None else place.ranks)
        }

        def parameters(arrays: list[Array]) -> list[Array]:
            parts = iter(arrays)
            params = []
            for n in computed:
                axis = self.axes[n]
                whole = next(parts) if axis is None else jnp.concatenate([next(parts) for _ in range(place.ranks)], axis)
                params.append(whole.astype(self.shapes[n].dtype))
            return params

        parameters.__name__ = f"{place.name}_parameters"
        outs = [Name("params", callable=place.reader, leaf=place.first + n) for n in computed]
        return PlanFunction(parameters, place.index, list(shapes), outs, shapes)

    def split(self, place: EndPlace, losses: Sequence[Name] = ()) -> PlanFunction:
        """Makes the function that splits gradients into shards for the ranks, and sums losses to an array [1]."""
        ins = [Name("sum", callable=place.reader, leaf=place.first + n) for n in range(len(self.reads))]
        outs = [
            Name(place.name, leaf=n, rank=rank)
            for n, axis in enumerate(self.axes)
            for rank in range(1 if axis is None else place.ranks)
        ]

        def gradients(arrays: list[Array]) -> list[Array]:
            parts = []
            for gradient, axis in zip(arrays, self.axes, strict=False):
                parts += [jnp.atleast_1d(gradient)] if axis is None else jnp.split(gradient, place.ranks, axis)
            return [*parts, jnp.reshape(sum(arrays[len(ins) :]), 1)] if losses else parts

        gradients.__name__ = f"{place.name}_gradients"
        return PlanFunction(gradients, place.index, [*ins, *losses], [*outs, Name("total")] if losses else outs)


def part_shape(shape: Sequence[int], axis: int | None, ranks: int) -> tuple[int, ...]:
    """Returns the shape of a rank's shard of an array that is sharded along `axis`; None for an array that is not sharded."""
    return tuple(length // ranks if i == axis else length for i, length in enumerate(shape))
