"""The stages of a pipeline as functions of what one rank holds, for executables that a rank runs by itself."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.callables.shaped import Shaped, shape_callable
from jgraph.packing import Packing
from jgraph.pipeline.ends import End
from jgraph.pipeline.program import Pipeline
from jgraph.tree import leaf_names

Tree = Any


@dataclass(frozen=True, eq=False)
class Chunk:
    """The layers of a rank's chunk as its executables take them, small parameters side by side; alike on all ranks.

    Attributes:
        packing: of a list with a tree for each place.
        places: of the longest stage.
    """

    packing: Packing
    places: int

    @classmethod
    def of(cls, layers: Sequence[Tree], alone: Collection[str] = ()) -> Self:
        """Packs layers that are given as shapes, all but a layer's parameters of these paths."""
        names = [f"{j}/{path}".rstrip("/") for j in range(len(layers)) for path in alone]
        return cls(Packing.of(list(layers), alone=names), len(layers))

    def pack(self, layers: Sequence[Tree]) -> dict[str, Array]:
        """Returns the arrays by name. None is a scalar, so that those of all ranks make one array."""
        return {name: jnp.atleast_1d(leaf) for name, leaf in self.packing.pack(list(layers)).items()}

    def unpack(self, arrays: Mapping[str, Array]) -> list[Tree]:
        """Inverts `pack`. What is missing is zero."""
        whole = {}
        for name, numbers in self.packing.groups:
            leaves = [self.packing.leaves[i] for i in numbers]
            shape = leaves[0].shape if len(leaves) == 1 else (sum(leaf.size for leaf in leaves),)
            whole[name] = arrays[name].reshape(shape) if name in arrays else jnp.zeros(shape, leaves[0].dtype)
        return self.packing.unpack(whole)

    def names(self, layers: int) -> tuple[str, ...]:
        """Returns the names of the arrays that a stage of so many layers reads, sorted."""
        count = layers * len(self.packing.leaves) // self.places
        return tuple(sorted(name for name, numbers in self.packing.groups if numbers[0] < count))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the arrays by name."""
        arrays = jax.eval_shape(self.pack, self.packing.treedef.unflatten(self.packing.leaves))
        return {name: leaf.shape for name, leaf in arrays.items()}


@dataclass(frozen=True)
class Made:
    """Means the parameter of this number that embedding (0) or head (1) makes on its rank."""

    end: int
    number: int


@dataclass(frozen=True)
class Number:
    """Means an int32 scalar."""

    value: int


# Where an argument of an executable comes from: one of these, or an array over all ranks by its number, of which a rank has a
# part. Those that a step begins with come first, then the parameters of embedding and head.
Source = int | Made | Number


@dataclass(frozen=True, eq=False)
class Stage:
    """Says where a stage is, what its executables compute, and what they are given.

    Attributes:
        rank, chunk: its place.
        names: of its chunk's arrays, which are its first parameters.
        shaped: forward, dgrad and wgrad; without a device.
        params: sources of its parameters.
        extra: by microbatch, sources of its arguments after x.
    """

    rank: int
    chunk: int
    names: tuple[str, ...]
    shaped: Shaped
    params: list[Source]
    extra: list[list[Source]]


def stages_of(
    pipeline: Pipeline, chunks: Sequence[Chunk], embed: End, x: jax.ShapeDtypeStruct, begun: Tree, impl: Any
) -> list[Stage]:
    """Returns the stages in the order of the data, traced; those that compute the same are traced once.

    Args:
        pipeline: the model and where its layers are.
        chunks: a rank's layers.
        embed: what the first stage begins with.
        x: what passes between stages.
        begun: what a step begins with: `batch` by microbatch, `layers` by chunk, perhaps `key` and `carried`; in FP8 by chunk
            the `state` of delayed scaling, and `weights` in the order of the products.
        impl: the kind of the keys.
    """
    layout, (leaves, structure) = pipeline.layout, jax.tree.flatten(begun)
    numbers = structure.unflatten(range(len(leaves)))
    traced: dict[Any, Shaped] = {}
    stages = []

    def shape(source: Source) -> jax.ShapeDtypeStruct:
        return shard(leaves[source]) if isinstance(source, int) else jax.ShapeDtypeStruct((), jnp.int32)

    for s in range(layout.num_stages):
        rank, c = next((rank, row.index(s)) for rank, row in enumerate(layout.placement) if s in row)
        count, first = int(layout.active()[rank, c].sum()), int(layout.layers()[rank, c, 0])
        params: Tree = {"layers": {name: numbers["layers"][c][name] for name in chunks[c].names(count)}}
        shapes = jax.tree.map(shape, params)
        if s == 0:
            params["outer"], shapes["outer"] = sources_of(embed, 0, len(leaves)), embed.shapes
        keys = (numbers["key"], Number(first)) if pipeline.model.takes_key else ()
        extra = [
            {
                "batch": numbers["batch"][m] if s == 0 or pipeline.model.context else (),
                "carried": numbers["carried"][c] if "carried" in numbers else {},
                "keys": (*keys, Number(m)) if keys else (),
            }
            for m in range(pipeline.schedule.num_microbatches)
        ]
        fn: Any = _function(pipeline, chunks[c], count, embed if s == 0 else None, impl)
        args = (() if s == 0 else x, jax.tree.map(shape, extra[0]))
        fn = pipeline.precision.named_function(fn, count, leaf_names(shapes))
        share = Fraction(count, chunks[c].places)
        weights = pipeline.precision.first_weights(fn, (shapes, *args), numbers["weights"][c], share)
        more = (numbers["state"][c], weights)
        params, shapes = (params, *more), (shapes, *jax.tree.map(shape, more))
        name = (s == 0, count, c)
        if name not in traced:
            traced[name] = shape_callable(fn, s, shapes, args, {}, device=None, has_aux=True, recompute=pipeline.recompute)
        given = jax.tree.leaves(params), [jax.tree.leaves(own) for own in extra]
        stages.append(Stage(rank, c, chunks[c].names(count), replace(traced[name], index=s), *given))
    return stages


def sources_of(end: End, number: int, first: int) -> list[Source]:
    """Returns where embedding (0) or head (1) gets what it reads; arrays over all ranks of `outer` are counted from `first`."""
    made = {n: Made(number, k) for k, n in enumerate(end.made)}
    return [made.get(n, first + i) for n, i in enumerate(end.reads)]


def shard(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a device's part."""
    assert aval.sharding is not None
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


def _function(
    pipeline: Pipeline, chunk: Chunk, count: int, embed: End | None, impl: Any
) -> Callable[[Tree, Array, Tree], tuple[Array, Tree]]:
    """Returns a stage of so many layers as `fn(params, x, extra) -> (y, carried)`; the first one embeds a batch."""

    def stage(params: Tree, x: Array, extra: Tree) -> tuple[Array, Tree]:
        if embed is not None:
            x = embed(params["outer"], extra["batch"])
        key, first = (), None
        if extra["keys"]:
            data, first, m = extra["keys"]
            key = (jax.random.fold_in(jax.random.wrap_key_data(data, impl=impl), m),)
        context = pipeline.model.context_of(extra["batch"])
        return pipeline.through(chunk.unpack(params["layers"])[:count], x, context, key, first, extra["carried"])

    return stage
