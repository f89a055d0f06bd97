"""Traces the stages of a pipeline as callables on the arrays of one rank, and makes the execution plan of the schedule."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.autodiff import product_flops
from jgraph.callables.plan import ExecutionPlan, Name, PlanFunction, PlanLoss, make_plan
from jgraph.callables.shaped import Shaped, shape_callable
from jgraph.device import peak_flops
from jgraph.layout import Change, Layout, Param, alone, each, filled, named, packed
from jgraph.pipeline._ends import End, EndPlace
from jgraph.pipeline._program import Pipeline
from jgraph.strategies.base import Options
from jgraph.tree import leaf_names
from jgraph.types import Batch, Carried, JaxDevice, Params, TreeOf

Fact = TypeVar("Fact")

# Minimum seconds of a stage's forward for which the update of a command buffer after arrays moved is negligible. Microbatches
# then share executables, so that a few are compiled instead of hundreds.
_LONG = 2e-4


def chunk_layout(layers: Sequence[Params], weights: Collection[str]) -> Layout[list[Params]]:
    """Packs the layers of a chunk. Weights of FP8 matmuls, given by their paths in a layer, keep arrays of their own."""
    names = [f"{j}/{path}".rstrip("/") for j in range(len(layers)) for path in weights]
    return named(list(layers)).then(alone(names)).then(packed()).then(each(_at_least_1d))


def _at_least_1d(_: str, param: Param) -> Change | None:
    """Gives scalars an axis, so that they can be sharded over the ranks."""
    if param.shape:
        return None
    return Change(replace(param, shape=(1,), axes=(None,)), jnp.atleast_1d, lambda array: array.reshape(()))


class Begun(NamedTuple, Generic[Fact]):
    """The results of the program before the schedule, or a fact of each of these arrays."""

    batch: Sequence[TreeOf[Fact]]  # of each microbatch
    carried: Sequence[TreeOf[Fact]]  # of the layers of each chunk, as bits; empty if layers carry no state
    first: Sequence[Fact]  # for each chunk, the index of its first layer; empty if layers take no key
    key: Sequence[Fact]  # for each microbatch, the data of its key; empty if layers take no key
    layers: Sequence[Mapping[str, Fact]]  # packed, for each chunk
    state: Sequence[TreeOf[Fact]]  # observed state of each chunk
    weights: Sequence[Sequence[TreeOf[Fact]] | None]  # FP8 weights of each chunk; None without FP8


class StageArrays(NamedTuple, Generic[Fact]):
    """The parameters of a stage: the packed arrays of its layers, and those that the embedding reads, for the first stage."""

    layers: Mapping[str, Fact]
    outer: Sequence[Fact] = ()


class StageExtra(NamedTuple, Generic[Fact]):
    """The other inputs of a stage for one microbatch."""

    batch: TreeOf[Fact]  # the microbatch; () for a stage that does not read it
    carried: TreeOf[Fact]  # of the layers, as bits; {} if layers carry no state
    keys: Sequence[Fact]  # key data of the microbatch and index of the first layer; () if layers take no key


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage: its place, its computation and its arguments, which are shards of arrays over all ranks.

    Arrays are given by number: first the leaves of the results of `begin`, then the parameters of embedding and head.
    """

    rank: int
    chunk: int  # index on its rank
    names: tuple[str, ...]  # of the packed arrays of the chunk that the stage reads, its first parameters
    shaped: Shaped  # traced forward, dgrad and wgrad, without a device
    params: list[int]  # numbers of the arrays of the parameters, by leaf
    extra: list[list[int]]  # for each microbatch, numbers of the arrays of the arguments after x, by leaf


def stages_of(
    pipeline: Pipeline,
    chunks: Sequence[Layout[list[Params]]],  # of the layers of each chunk, for the longest stage
    embed: End,
    x: jax.ShapeDtypeStruct,  # for one microbatch on one data rank
    begun: Begun[jax.ShapeDtypeStruct],
    impl: Hashable,
) -> list[Stage]:
    """Traces the stages, from the first to the last. Stages with the same computation are traced once."""
    layout = pipeline.assignment
    leaves = jax.tree.leaves(begun)
    numbers = numbered(begun)
    whole = [chunk.tree_shapes() for chunk in chunks]
    traced: dict[tuple[bool, int, int], Shaped] = {}
    stages = []

    def shape_of(number: int) -> jax.ShapeDtypeStruct:
        return shard(leaves[number])

    for s in range(layout.num_stages):
        rank, c = next((rank, row.index(s)) for rank, row in enumerate(layout.placement) if s in row)
        count = int(layout.active()[rank, c].sum())
        names = tuple(sorted(chunk_layout(whole[c][:count], pipeline.precision.weights).params))
        layers = {name: numbers.layers[c][name] for name in names}
        params = StageArrays(layers)
        shapes = StageArrays(jax.tree.map(shape_of, layers))
        if s == 0:
            params = params._replace(outer=[len(leaves) + i for i in embed.reads])
            shapes = shapes._replace(outer=embed.shapes)
        extra: list[StageExtra[int]] = [
            StageExtra(
                batch=numbers.batch[m] if s == 0 or pipeline.model.context else (),
                carried=numbers.carried[c] if numbers.carried else {},
                keys=(numbers.key[m], numbers.first[c]) if pipeline.model.takes_key else (),
            )
            for m in range(pipeline.schedule.num_microbatches)
        ]
        stage = _function(pipeline, chunks[c], count, embed if s == 0 else None, impl)
        args = (() if s == 0 else x, jax.tree.map(shape_of, extra[0]))
        fn = pipeline.precision.named_function(stage, count, leaf_names(shapes))
        share = Fraction(count, len(whole[c]))
        weights = pipeline.precision.first_weights(fn, (shapes, *args), numbers.weights[c], share)
        more = (numbers.state[c], weights)
        name = (s == 0, count, c)
        if name not in traced:
            given = (shapes, *jax.tree.map(shape_of, more))
            traced[name] = shape_callable(fn, s, given, args, {}, device=None, has_aux=True, recompute=pipeline.recompute)
        shaped = replace(traced[name], index=s)
        stages.append(
            Stage(rank, c, names, shaped, jax.tree.leaves((params, *more)), [jax.tree.leaves(args) for args in extra])
        )
    return stages


def plan_of(
    pipeline: Pipeline,
    ends: tuple[End, End],
    stages: Sequence[Stage],
    microbatch: Batch,  # shapes on one data rank
    devices: Sequence[JaxDevice],  # of each rank
    options: Options,
) -> ExecutionPlan:
    """Compiles the schedule for one device per rank, that is for one replica of the pipeline."""
    shaped = [replace(stage.shaped, device=devices[stage.rank]) for stage in stages]
    embed, head = ends
    of_embed = EndPlace("embedding", index=0, reader=0, first=len(stages[0].names), ranks=len(devices))
    of_head = EndPlace("head", index=len(stages) - 1, reader=len(stages), first=0, ranks=len(devices))
    losses = [Name("loss", microbatch=m) for m in range(pipeline.schedule.num_microbatches)]
    carrying = stages if jax.tree.leaves(pipeline.carried.layer) else ()

    def loss(params: list[Array], y: Array, batch: Batch) -> Array:
        return head(params, y, batch).astype(jnp.float32)

    return make_plan(
        shaped,
        pipeline.schedule,
        PlanLoss.trace(loss, shaped[-1].y, (microbatch,), head.shapes),
        # All gradients are accumulated in the buffers of the previous step.
        aliased=[(*stage.early, *stage.late) for stage in shaped] + [tuple(range(len(head.reads)))],
        reuse=True,
        options=options,
        copies="shared" if _is_long(shaped[-1]) else "each",
        # Arguments named `embedding` and `head` (leaf, rank) are shards of parameters, and results with these names are shards
        # of gradients. Other results are `total`, the sum of the losses, and `state` (callable, leaf), the carried state.
        before=[gather for gather in (embed.gather(of_embed), head.gather(of_head)) if gather.outs],
        after=[embed.split(of_embed), head.split(of_head, losses), *(_reduction(pipeline, stage) for stage in carrying)],
    )


def _reduction(pipeline: Pipeline, stage: Stage) -> PlanFunction:
    """Makes the function that reduces the carried state of a stage over microbatches."""
    aux = stage.shaped.aux
    i = stage.shaped.index
    count = pipeline.schedule.num_microbatches

    def reduce(arrays: list[Array]) -> list[Array]:
        trees = [aux.unflatten(arrays[m * len(aux) : (m + 1) * len(aux)]) for m in range(count)]
        return jax.tree.leaves(pipeline.carried.together(trees, pipeline.assignment.layers_per_stage))

    reduce.__name__ = f"carried_{i}"
    names = [Name("aux", i, m, n) for m in range(count) for n in range(len(aux))]
    return PlanFunction(reduce, i, names, [Name("state", callable=i, leaf=n) for n in range(len(aux))])


def _is_long(shaped: Shaped) -> bool:
    """True if a stage's forward takes more than `_LONG` seconds, or the peak FLOP/s of the device are unknown."""
    rate = peak_flops(shaped.device.device_kind)
    inputs = [*shaped.x.avals, *shaped.extra.avals]
    return rate is None or product_flops(shaped.forward, list(shaped.params.avals), inputs) / rate > _LONG


def numbered(tree: Begun[jax.ShapeDtypeStruct]) -> Begun[int]:
    """Returns a tree in which each leaf is its index among the leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(range(len(leaves)))


def shard(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of one device's shard, without a sharding. `aval` must have one."""
    assert aval.sharding is not None
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


def _function(
    pipeline: Pipeline, chunk: Layout[list[Params]], count: int, embed: End | None, impl: Hashable
) -> Callable[[StageArrays[Array], Array, StageExtra[Array]], tuple[Array, Carried]]:
    """Makes the function `fn(params, x, extra) -> (y, carried)` of a stage with `count` layers. The first stage has `embed`."""

    def stage(params: StageArrays[Array], x: Array, extra: StageExtra[Array]) -> tuple[Array, Carried]:
        if embed is not None:
            x = embed(params.outer, extra.batch)
        key = ()
        first = 0
        if extra.keys:
            data, (first,) = extra.keys
            key = (jax.random.wrap_key_data(data, impl=impl),)
        context = pipeline.model.context_of(extra.batch)
        layers = chunk.unpack(filled(params.layers, chunk.params))[:count]
        return pipeline.through(layers, x, context, key, first, extra.carried)

    return stage
