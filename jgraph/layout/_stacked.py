"""Layers stacked over the ranks of a pipeline: one array for the parameters at the same place of all ranks.

The model's own code (`PipelineModel.split`) takes its tree apart into embedding, layers and head. This is the only layout that
cannot know where a parameter goes, so it follows parameters and axes through traces of that code, on marked shapes.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.layout._layout import Layout, named
from jgraph.layout._param import KINDS, Description, Kind, Param
from jgraph.mesh import Axis, axis_names
from jgraph.tree import leaf_names
from jgraph.types import Arrays, Avals, Leaf, Params, Registered, TreeOf

AXIS = Axis.PIPE.value

Fact = TypeVar("Fact")

Place: TypeAlias = tuple[int, int, int]
"""Rank, chunk and place of a layer."""


class StackedTree(NamedTuple, Generic[Fact]):
    """The parameters of a pipeline as its engines compute with them, or a fact of each of these arrays."""

    layers: list[list[TreeOf[Fact]]]  # by chunk and place; the ranks are the first axis of the arrays
    outer: TreeOf[Fact]  # of embedding and head


@dataclass(frozen=True, eq=False)
class Stacked:
    """Stacks the layers of a model over the ranks of a pipeline. Called with the description of the model's parameters.

    The arrays are named `outer/PATH` for embedding and head, and `layers/CHUNK/PLACE/PATH`.
    """

    own: Layout[Params]
    split: Callable[[Params], tuple[Params, list[Params]]]  # of `PipelineModel`: the parameters outside of layers, and layers
    join: Callable[[Params, list[Params]], Params]  # its inverse
    places: Sequence[Place]  # of each layer
    over_ranks: Mapping[str, int]  # axes of parameters outside of layers that are sharded over the ranks, by their path
    mesh_shape: Mapping[str, int]

    @cached_property
    def tree(self) -> Layout[StackedTree[Leaf | Registered]]:
        shapes: StackedTree[Leaf | Registered] = jax.eval_shape(
            lambda tree: self._stack(*self.split(tree)), self.own.tree_shapes()
        )
        return named(shapes)

    def __call__(self, params: Description) -> Layout[Arrays]:
        leaves = _Followed(self, params).leaves()
        names = self.tree.shapes()
        if unknown := next((path for path in self.over_ranks if f"outer/{path}" not in names), None):
            outer = ", ".join(name.removeprefix("outer/") for name in names if name.startswith("outer/"))
            raise ConfigError(f"PipelineModel.sharded has {unknown!r}: must be one of {outer}", field="pp")

        def pack(arrays: Arrays) -> Arrays:
            return self.tree.pack(self._stack(*self.split(self.own.unpack(arrays))))

        def unpack(arrays: Arrays) -> Arrays:
            tree = self.tree.unpack(arrays)
            of_rank = [(rank, tree.layers[chunk][place]) for rank, chunk, place in self.places]
            own = [jax.tree.map(lambda leaf, rank=rank: leaf[rank], layer) for rank, layer in of_rank]
            return self.own.pack(self.join(tree.outer, own))

        return Layout({name: self._describe(name, leaves) for name in names}, pack, unpack)

    def _stack(self, outer: Params, layers: Sequence[Params]) -> StackedTree[Leaf | Registered]:
        """Stacks the layers of all ranks at each chunk and place, with zeros where a rank has none."""
        assert len(layers) == len(self.places), "`split` returns all layers"
        at = dict(zip(self.places, layers, strict=True))
        ranks, chunks, longest = (1 + max(index) for index in zip(*self.places, strict=True))
        zeros = jax.tree.map(jnp.zeros_like, layers[0])

        def stack(chunk: int, place: int) -> Params:
            of_ranks = [at.get((rank, chunk, place), zeros) for rank in range(ranks)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_ranks)

        return StackedTree([[stack(chunk, place) for place in range(longest)] for chunk in range(chunks)], outer)

    def _describe(self, name: str, leaves: Description) -> Param:
        """Describes an array from the leaves of `split` that it holds."""
        if name.startswith("outer"):
            path = name.removeprefix("outer/")
            param = replace(leaves["0" + name.removeprefix("outer")], joins=False)
            return param if (axis := self.over_ranks.get(path)) is None else self._over_ranks(param, path, axis)
        _, chunk, place, *path = name.split("/")
        ranks = 1 + max(rank for rank, _, _ in self.places)
        at = {home: "/".join(["1", str(layer), *path]) for layer, home in enumerate(self.places)}
        homes = [(rank, int(chunk), int(place)) for rank in range(ranks)]
        rows = [leaves[at[home]] if home in at else None for home in homes]
        # A place can be padding on all ranks. It is described like the first layer.
        some = [row for row in rows if row is not None] or [leaves["/".join(["1", "0", *path])]]
        asks = next((row for row in some if isinstance(row.wanted, int)), some[0])
        wanted = asks.wanted + 1 if isinstance(asks.wanted, int) else asks.wanted
        trained = [some[0].is_trained if row is None else row.is_trained for row in rows]
        return replace(asks, shape=(ranks, *asks.shape), axes=(AXIS, *asks.axes), trained=tuple(trained), wanted=wanted)

    def _over_ranks(self, param: Param, path: str, axis: int) -> Param:
        """Shards a parameter outside of layers over the ranks, and over another mesh axis too where both divide it."""
        ranks = self.mesh_shape[AXIS]
        length = param.shape[axis]
        others = axis_names(param.axes[axis])
        if length % ranks:
            must = f"must be a multiple of `pp` {ranks}"
            message = f"PipelineModel.sharded shards {path} along axis {axis} of length {length}: {must}"
            raise ConfigError(message, field="pp")
        shards = ranks * math.prod(self.mesh_shape[other] for other in others)
        return param.placed(axis, AXIS, *(others if length % shards == 0 else ()))


@dataclass(frozen=True, eq=False)
class _Followed:
    """Follows parameters through `PipelineModel.split`.

    A *leaf* is a name in the result of `split`: `0/PATH` outside of layers, `1/LAYER/PATH` in a layer.
    """

    stacked: Stacked
    params: Description

    def leaves(self) -> dict[str, Param]:
        """Describes each leaf. Leaves that share an array have the same axes."""
        params = self.params.values()
        kinds: dict[str, Kind] = {}
        for kind in reversed(KINDS):
            kinds |= dict.fromkeys(self._where(lambda p, kind=kind: p.kind == kind), kind)
        trained = self._where(lambda p: p.is_trained)
        alone = self._where(lambda p: not p.joins)
        free = "none" if any(p.wanted == "none" for p in params) else "any"
        found = {}
        for leaf, aval in self._plain.items():
            kind = kinds.get(leaf, "vector")
            axes = (None,) * aval.ndim
            found[leaf] = Param(aval.shape, aval.dtype, kind, axes, (leaf in trained,), leaf not in alone, free)
        for entry in {entry for p in params for entry in p.axes if entry is not None}:
            for leaf, axis in self._axes({name: p.axes.index(entry) for name, p in self.params.items() if entry in p.axes}):
                found[leaf] = found[leaf].placed(axis, *axis_names(entry))
        by_array: dict[str, tuple[str, int]] = {}
        for name, param in self.params.items():
            if not isinstance(wanted := param.wanted, int):
                continue
            for leaf, axis in self._wanted(name, wanted):
                array = re.sub(r"^1/(\d+)", lambda match: str(self.stacked.places[int(match[1])][1:]), leaf)
                before, other = by_array.setdefault(array, (name, axis))
                if other != axis:
                    must = f"must be the axis of {before}, which shares an array with it in a pipeline"
                    raise _cannot(name, wanted, must)
                found[leaf] = replace(found[leaf], wanted=axis, groups=param.groups)
        return found

    def _wanted(self, name: str, axis: int) -> list[tuple[str, int]]:
        """Follows the axis of a parameter to shard over `fsdp`, and refuses one that is not an axis of each layer."""
        ranks = self.stacked.mesh_shape[Axis.FSDP]
        shape = self.params[name].shape
        if axis >= len(shape):
            raise _cannot(name, axis, f"must be less than {len(shape)}, because its shape is {shape}")
        try:
            found = self._axes({name: axis})
        except (TypeError, ValueError):
            raise _cannot(name, axis, "must be an axis that PipelineModel.split leaves unchanged") from None
        if not found:
            must = "must be an axis of each layer, because this axis of layers is divided among the ranks of a pipeline"
            raise _cannot(name, axis, must)
        for leaf, i in found:
            if leaf.startswith("0/") and self.stacked.over_ranks.get(leaf.removeprefix("0/")) == i:
                raise _cannot(name, axis, "must be a different axis, because `pp` shards this one")
            if (length := self._plain[leaf].shape[i]) % ranks:
                raise _cannot(name, axis, f"its length {length} must be a multiple of `fsdp` {ranks} in a pipeline")
        return found

    def _axes(self, axes: Mapping[str, int]) -> list[tuple[str, int]]:
        """Traces `split` with these axes twice as long. Returns leaf and index of each axis that changed."""

        def doubled(name: str, param: Param) -> jax.ShapeDtypeStruct:
            shape = [n * 2 if i == axes.get(name) else n for i, n in enumerate(param.shape)]
            return jax.ShapeDtypeStruct(shape, param.dtype)

        after = self._trace({name: doubled(name, param) for name, param in self.params.items()})
        return [
            (leaf, i)
            for leaf, aval in self._plain.items()
            for i, (a, b) in enumerate(zip(aval.shape, after[leaf].shape, strict=True))
            if a != b
        ]

    def _where(self, holds: Callable[[Param], bool]) -> set[str]:
        """Returns the leaves with elements of certain parameters: traces `split` with a wider dtype for these."""
        dtypes = {name: jnp.int16 if holds(param) else jnp.int8 for name, param in self.params.items()}
        marked = {name: jax.ShapeDtypeStruct(param.shape, dtypes[name]) for name, param in self.params.items()}
        return {leaf for leaf, aval in self._trace(marked).items() if aval.dtype == jnp.int16}

    @cached_property
    def _plain(self) -> Avals:
        return self._trace({name: param.aval for name, param in self.params.items()})

    def _trace(self, shapes: Avals) -> Avals:
        result = jax.eval_shape(lambda arrays: self.stacked.split(self.stacked.own.unpack(arrays)), shapes)
        return dict(zip(leaf_names(result), jax.tree.leaves(result), strict=True))


def _cannot(name: str, axis: int, reason: str) -> ConfigError:
    return ConfigError(f"`shard_rules` shards {name} along axis {axis}: {reason}", field="shard_rules")
