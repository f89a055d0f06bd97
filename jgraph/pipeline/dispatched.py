"""The MPMD engine of a pipeline: the host starts separate executables for every rank.

A step begins with one SPMD program, which casts the parameters, quantizes the weights to FP8, and distributes the batch. Then
every rank plays its order with separate executables (`jgraph.callables`). Nothing is masked or padded, no rank waits for the
tick of another rank, and the ranks of the first and last stage hold the whole embedding and head. The gradients then become
arrays over all ranks again, for the update program that both engines share. All arrays stay in the same buffers in every step.
"""

# P ranks, D replicas of the pipeline, M microbatches, C chunks of a rank, N layers of a chunk

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.callables.plan import ExecutionPlan, Name, play
from jgraph.dispatch import in_turn
from jgraph.errors import require
from jgraph.layout import Layout, StackedTree
from jgraph.mesh import Axis, batch_axes
from jgraph.pipeline._ends import End, part_shape
from jgraph.pipeline._program import Pipeline, PipelineParams, StepResult
from jgraph.pipeline._stage import StageInputs
from jgraph.pipeline._stages import Begun, Stage, chunk_layout, numbered, plan_of, shard, stages_of
from jgraph.strategies.base import Options
from jgraph.strategies.objective import Carry
from jgraph.tree import leaf_names
from jgraph.types import Arrays, Batch, Carried, JaxDevice, Key, Observed, Params, TreeOf
from jgraph.xla import CaptureReport, check_identity, compile_and_report

Fact = TypeVar("Fact")

# Results of the program before the schedule that the ranks share. Each rank has its own of the others.
_OF_BATCH = ("batch", "key")


class Results(NamedTuple, Generic[Fact]):
    """The results of a call, or a fact of each of these arrays."""

    carried: list[TreeOf[Fact]]  # of the layers of each chunk; empty if layers carry no state
    ends: list[list[Fact]]  # gradients of embedding and of head
    histories: list[TreeOf[Fact]]  # observed state of each chunk
    layers: list[dict[str, Fact]]  # gradients of the packed arrays of each chunk
    loss: Fact  # sum of the losses


@dataclass(frozen=True, eq=False)
class _Result:
    """An array that a step returns."""

    aval: jax.ShapeDtypeStruct  # with the sharding over all devices
    shards: Sequence[Name | None]  # for each rank, the name of the plan's result that is the rank's shard; None for zeros


@dataclass(frozen=True, eq=False)
class Dispatched:
    """The compiled MPMD engine for one set of shapes. A call launches the executables of a step; `collect` reduces its result.

    Not thread-safe, because a call reuses the buffers of the previous call.
    """

    pipeline: Pipeline
    shapes: PipelineParams
    chunks: tuple[Layout[list[Params]], ...]  # the layers of each chunk, the same on all ranks
    ends: tuple[End, End]  # embedding and head
    stages: tuple[Stage, ...]  # from the first to the last
    batch: list[list[int]]  # for each microbatch, the positions of its leaves in the result of `begin`
    # `begin(previous, params, carry, step, batch)` returns a list of arrays, with None for each array that nothing reads.
    # `previous` is this list from the previous step, and is donated.
    begin: jax.stages.Compiled
    report: CaptureReport | None  # of `begin`; None if it has none
    plans: tuple[ExecutionPlan, ...]  # for each replica of the pipeline
    # `begun`: the list from `begin` in the previous step, zeros before the first; replaced by a call
    buffers: dict[str, list[Array | None]]
    # By shape and device: gradients of layers that a shorter stage does not have
    zeros: dict[tuple[tuple[int, ...], JaxDevice], Array] = field(default_factory=dict)

    def __str__(self) -> str:
        reports = [self.report, *(report for plan in self.plans for _, report in plan.reports)]
        text = f"dispatched: the host starts {len(self.executables) - 1} executables per step; {len(reports)} are compiled"
        if not (known := [report for report in reports if report is not None]):
            return text
        whole = sum(report.command_buffers == 1 and report.captured == report.total for report in known)
        return f"{text}, {whole} of them as one command buffer"

    @property
    def executables(self) -> list[jax.stages.Compiled]:
        """All executables that a call launches, in the order of launches: `begin`, then the plan of each replica."""
        return [self.begin, *(step.executable.compiled for plan in self.plans for step in plan.instructions)]

    def __call__(self, params: Arrays, carry: Carry, step: Array, batch: Batch) -> Results[Array]:
        """Launches the executables, without waiting for the devices. The next call overwrites the results."""
        # Not removed from the dictionary, because the buffers must survive if `begin` refuses an argument.
        begun = in_turn(self.begin(self.buffers["begun"], params, carry, step, batch))
        self.buffers["begun"] = begun
        arrays = [*begun, *(params[name] for name in self._outer)]
        played = [self._play(plan, arrays) for plan in self.plans]
        homes = {device: (d, rank) for d, plan in enumerate(self.plans) for rank, device in enumerate(plan.flow.devices)}

        def local(result: _Result, device: JaxDevice) -> Array:
            d, rank = homes[device]
            if (name := result.shards[rank]) is not None:
                array = played[d][name]
                return array if array.devices() == {device} else jax.device_put(array, device)
            shape = shard(result.aval).shape
            if (shape, device) not in self.zeros:
                self.zeros[shape, device] = jnp.zeros(shape, device=device)
            return self.zeros[shape, device]

        def whole(result: _Result) -> Array:
            shards = [local(result, device) for device in self.pipeline.mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(result.aval.shape, result.aval.sharding, shards)

        return jax.tree.map(whole, self._results)

    def _play(self, plan: ExecutionPlan, arrays: Sequence[Array]) -> dict[Name, Array]:
        """Plays a replica's plan on its shards of `arrays`: the results of `begin`, then the leaves of `shapes.outer`."""
        head = self.ends[1]
        last = len(self.stages) - 1
        first = len(arrays) - len(jax.tree.leaves(self.shapes.outer))
        params = [*(stage.params for stage in self.stages), [first + i for i in head.reads]]
        ranks = [stage.rank for stage in (*self.stages, self.stages[-1])]
        order = list(self.pipeline.mesh.devices.flat)
        positions = [order.index(device) for device in plan.flow.devices]

        def local(number: int, rank: int) -> Array:
            return arrays[number].addressable_shards[positions[rank]].data

        def part(end: End, home: int, name: Name) -> Array:
            source = home if end.axes[name.leaf] is None else name.rank
            return jax.device_put(local(first + end.reads[name.leaf], source), plan.flow.devices[home])

        registers = plan.fill(
            {
                "params": lambda name: local(params[name.callable][name.leaf], ranks[name.callable]),
                "extra": lambda name: local(self.stages[name.callable].extra[name.microbatch][name.leaf], ranks[name.callable]),
                "loss_args": lambda name: local(self.batch[name.microbatch][name.leaf], ranks[last]),
                "embedding": partial(part, self.ends[0], ranks[0]),
                "head": partial(part, head, ranks[last]),
            }
        )
        play(plan, registers)
        return {name: registers[register] for name, register in plan.flow.results.items()}

    @cached_property
    def _outer(self) -> list[str]:
        """Names of the arrays of embedding and head, in the order of their leaves."""
        return [f"outer/{name}".rstrip("/") for name in leaf_names(self.shapes.outer)]

    @property
    def results(self) -> Results[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the results, known before the first call, so that `collect` can be compiled for them."""
        return jax.tree.map(lambda result: result.aval, self._results)

    def collect(self, results: Results) -> StepResult:
        """Reduces the results of a call over all devices, under `jax.jit`. Gradients are sharded like the parameters."""
        pipeline = self.pipeline
        data = batch_axes(pipeline.mesh)

        def local(results: Results[Array]) -> StepResult:
            layers = [chunk.unpack(arrays) for chunk, arrays in zip(self.chunks, results.layers, strict=True)]
            leaves, structure = jax.tree.flatten(self.shapes.outer)
            sums: dict[int, Array] = {}
            for end, gradients in zip(self.ends, results.ends, strict=True):
                for i, axis, gradient in zip(end.reads, end.axes, gradients, strict=True):
                    gradient = gradient.reshape(part_shape(leaves[i].shape, axis, pipeline.mesh.shape[Axis.PIPE]))
                    sums[i] = sums[i] + gradient if i in sums else gradient
            outer = [sums.get(i, jnp.zeros(leaf.shape, jnp.float32)) for i, leaf in enumerate(leaves)]
            grads = StackedTree(jax.tree.map(lambda g: g[None], layers), structure.unflatten(outer))
            count = pipeline.schedule.num_microbatches
            after = []
            histories = pipeline.precision.finish(results.histories, data, pipeline.assignment)
            if results.carried:
                total = jax.tree.map(lambda *chunks: jnp.stack(chunks), *results.carried)
                after = pipeline.carried.finish(total, count, data, pipeline.assignment)
            means = jax.tree.map(lambda total: lax.pmean(total, data) / count, (results.loss[0], grads))
            return *means, after, histories

        in_specs = jax.tree.map(lambda shape: shape.sharding.spec, self.results)
        out_specs = (PartitionSpec(), pipeline.specs, PartitionSpec(), PartitionSpec())
        return jax.shard_map(local, mesh=pipeline.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(results)

    @cached_property
    def _results(self) -> Results[_Result]:
        pipeline = self.pipeline
        mesh = pipeline.mesh
        flow = self.plans[0].flow
        ranks = range(mesh.shape[Axis.PIPE])
        carried = pipeline.carried.layer
        history = jax.eval_shape(partial(pipeline.precision.state, pipeline.assignment.layers_per_stage))

        def result(shards: Sequence[Name | None], axis: int | None = 0) -> _Result:
            aval = next(flow.avals[flow.results[name]] for name in shards if name is not None)
            return _Result(_over_all(mesh, aval, axis), shards)

        def sum_of(stage: Stage, leaf: int) -> Name:
            return Name("sum", callable=stage.shaped.index, leaf=leaf)

        def of_chunk(c: int) -> tuple[dict[str, _Result], TreeOf[_Result], TreeOf[_Result]]:
            stages = [next(stage for stage in self.stages if (stage.rank, stage.chunk) == (rank, c)) for rank in ranks]
            sums = {
                name: [sum_of(s, s.names.index(name)) if name in s.names else None for s in stages]
                for name in self.chunks[c].params
            }
            states = [
                [Name("state", callable=s.shaped.index, leaf=n) for s in stages] for n in range(len(jax.tree.leaves(carried)))
            ]
            maxima = [[sum_of(s, s.shaped.maxima[n]) for s in stages] for n in range(len(jax.tree.leaves(history)))]
            return (
                {name: result(shards) for name, shards in sums.items()},
                jax.tree.structure(carried).unflatten(map(result, states)),
                jax.tree.structure(history).unflatten(map(result, maxima)),
            )

        def of_end(end: End, name: str) -> list[_Result]:
            shards = [
                [Name(name, leaf=n, rank=0 if axis is None else rank) for rank in ranks] for n, axis in enumerate(end.axes)
            ]
            return list(map(result, shards, end.axes))

        layers, states, histories = zip(*map(of_chunk, range(len(self.chunks))), strict=True)
        return Results(
            carried=list(states) if jax.tree.leaves(carried) else [],
            ends=list(map(of_end, self.ends, ("embedding", "head"))),
            histories=list(histories),
            layers=list(layers),
            loss=result([Name("total")] * len(ranks), None),
        )


def dispatched(
    pipeline: Pipeline,
    params: Arrays,  # shapes and shardings; embedding and head are not packed
    carry: Carry,
    unpack: Callable[[Arrays], PipelineParams],
    batch: Batch,  # shapes and shardings, leaves [M, B/M, ...]
    key: Key,
    options: Options,
) -> Dispatched:
    """Traces and compiles all executables of the MPMD engine, and allocates its buffers."""
    require(Axis.FSDP not in pipeline.mesh.axis_names, "engine", "dispatch", "program for a mesh with the axis fsdp")
    is_local = all(device.process_index == jax.process_index() for device in pipeline.mesh.devices.flat)
    require(is_local, "engine", "dispatch", "program for several processes")
    model = pipeline.model
    mesh = pipeline.mesh
    shapes: PipelineParams = jax.eval_shape(unpack, params)
    layers = (jax.eval_shape(pipeline.of_rank, chunk) for chunk in shapes.layers)
    chunks = tuple(chunk_layout(chunk, pipeline.precision.weights) for chunk in layers)
    program = _begin(pipeline, chunks, unpack, key, shapes, batch)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    begun = _placed(pipeline, jax.eval_shape(program, params, carry, step, batch))
    microbatch = jax.tree.map(shard, begun.batch[0])
    embed = End.trace(model.embed, shapes.outer, lambda outer: outer, model.sharded, microbatch)
    x = jax.eval_shape(embed, embed.shapes, microbatch)
    head = End.trace(model.head, shapes.outer, pipeline.cast, model.sharded, x, microbatch)
    stages = stages_of(pipeline, chunks, embed, x, begun, jax.random.key_impl(key))
    batch_numbers = [jax.tree.leaves(numbers) for numbers in numbered(begun).batch]
    # Numbers of the leaves of `begun` that a stage or the loss reads. Unquantized parameters of FP8 matmuls are not read.
    read = {stage.params[place] for stage in stages for places in stage.shaped.reads.values() for place in places}
    read |= {i for numbers in (*batch_numbers, *(args for stage in stages for args in stage.extra)) for i in numbers}

    def begin_step(_: list[Array | None], params: Arrays, carry: Carry, step: Array, batch: Batch) -> list[Array | None]:
        begun = program(params, carry, step, batch)
        return [leaf if i in read else None for i, leaf in enumerate(jax.tree.leaves(begun))]

    held = [leaf if i in read else None for i, leaf in enumerate(jax.tree.leaves(begun))]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, held)
    jitted = jax.jit(begin_step, donate_argnums=0, keep_unused=True, out_shardings=shardings)
    begin, report = compile_and_report(jitted.lower(held, params, carry, step, batch), options)
    check_identity(begin, held)
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index(Axis.PIPE), -1).reshape(-1, mesh.shape[Axis.PIPE])
    zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), held), out_shardings=shardings)
    plans = tuple(plan_of(pipeline, (embed, head), stages, microbatch, devices, options) for devices in by_rank.tolist())
    buffers = {"begun": in_turn(zeros())}
    return Dispatched(pipeline, shapes, chunks, (embed, head), tuple(stages), batch_numbers, begin, report, plans, buffers)


def _begin(
    pipeline: Pipeline,
    chunks: Sequence[Layout[list[Params]]],
    unpack: Callable[[Arrays], PipelineParams],
    key: Key,
    shapes: PipelineParams,
    batch: Batch,
) -> Callable[[Arrays, Carry, Array, Batch], Begun[Array]]:
    """Makes `begin(params, carry, step, batch)`, the program before the schedule. `shapes` are those of the parameters."""
    mesh = pipeline.mesh
    impl = jax.random.key_impl(key)
    count = pipeline.schedule.num_microbatches
    layers = jax.eval_shape(pipeline.of_rank, shapes.layers[0])
    extra = StageInputs(None, pipeline.carried.bits(len(layers)), jax.eval_shape(jnp.int32, 0))
    # Shapes of the arguments of the longest stage, without the embedding.
    args = ((layers, extra), *pipeline.stage_args(batch, key))
    function = pipeline.stage(impl, len(layers))

    def begin(params: Arrays, carry: Carry, step: Array, batch: Batch) -> Begun[Array]:
        def local(
            layers: list[list[Params]], states: list[Carried], history: Observed, batch_M: Batch, data: Array
        ) -> Begun[Array]:
            table_CN = pipeline.own(pipeline.assignment.layers())
            parts = jax.tree.map(lambda leaf: leaf[0], layers)
            state = pipeline.precision.pick(history, table_CN)
            weights = pipeline.precision.prepared_weights(function, args, parts, state, [[]] * len(chunks), ())
            bits = pipeline.carried.pick(states, table_CN)
            begun = Begun(
                batch=[jax.tree.map(lambda leaf, m=m: leaf[m], batch_M) for m in range(count)],
                carried=[jax.tree.map(lambda leaf, c=c: leaf[c], bits) for c in range(len(chunks))] if states else (),
                first=(),
                key=(),
                layers=[chunk.pack(pipeline.of_rank(places)) for chunk, places in zip(chunks, layers, strict=True)],
                state=state,
                weights=jax.tree.map(jnp.atleast_1d, weights),
            )
            if not pipeline.model.takes_key:
                return begun
            key = jax.random.wrap_key_data(data, impl=impl)
            if any(mesh.shape[axis] > 1 for axis in batch_axes(mesh)):
                key = jax.random.fold_in(key, lax.axis_index(batch_axes(mesh)))
            keys = [jax.random.key_data(jax.random.fold_in(key, m)) for m in range(count)]
            return begun._replace(key=keys, first=[table_CN[c, :1] for c in range(len(chunks))])

        # The key is a constant of the program. That of a layer is folded by step, replica, microbatch and layer, as in the SPMD
        # engine.
        data = jax.random.key_data(jax.random.fold_in(key, step))
        states = pipeline.model.split_carried(carry.model) if jax.tree.leaves(carry.model) else []
        batch_spec = batch_axes(mesh) or None
        in_specs = (pipeline.specs.layers, PartitionSpec(), PartitionSpec(), PartitionSpec(None, batch_spec), PartitionSpec())
        # A spec in place of a field holds for all its arrays.
        out_specs = Begun._make(PartitionSpec(batch_spec if name in _OF_BATCH else Axis.PIPE) for name in Begun._fields)
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return run(unpack(params).layers, states, carry.observed, batch, data)

    return begin


def _placed(pipeline: Pipeline, begun: Begun[jax.ShapeDtypeStruct]) -> Begun[jax.ShapeDtypeStruct]:
    """Adds shardings to the shapes of the results of `begin`."""

    def placed(name: str, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = batch_axes(pipeline.mesh) or None if name in _OF_BATCH else Axis.PIPE
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(pipeline.mesh, PartitionSpec(axes)))

    return Begun(*(jax.tree.map(partial(placed, name), tree) for name, tree in begun._asdict().items()))


def _over_all(mesh: Mesh, aval: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
    """Returns the shape over all devices from that of a shard: replicas on axis 0, ranks on `axis`; None if they are equal."""
    along: list[tuple[str, ...]] = [() for _ in aval.shape]
    along[0] += batch_axes(mesh)
    if axis is not None:
        along[axis] += (Axis.PIPE.value,)
    lengths = (length * math.prod(mesh.shape[name] for name in names) for length, names in zip(aval.shape, along, strict=True))
    sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in along)))
    return jax.ShapeDtypeStruct(tuple(lengths), aval.dtype, sharding=sharding)
