"""The second engine of a pipeline: a stage's forward, dgrad and wgrad as executables, which the host hands to the ranks.

A step begins with a program that all ranks run together: it casts the parameters, in FP8 it quantizes the weights, and it deals
out the batch. The schedule follows: each rank runs executables of its own, on arrays that lie on it alone. Nothing is masked or
padded there, no rank waits for another one's tick, and embedding and head are whole on the ranks of the first and the last
stage. What was summed then becomes arrays over all ranks again, for the update, which is the other engine's. All of it lies in
the same buffers at every step.
"""

# P ranks, D replicas of the pipeline, M microbatches

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError
from jgraph.mesh import Axis, batch_axes
from jgraph.pipeline.ends import End, part_shape
from jgraph.pipeline.program import Pipeline
from jgraph.pipeline.replica import Replica
from jgraph.pipeline.stages import Chunk, Stage, shard, stages_of
from jgraph.strategies.objective import Carry
from jgraph.xla import CaptureReport, check_identity, compile_and_report

Tree = Any


@dataclass(frozen=True, eq=False)
class _Result:
    """An array of what a step leaves.

    Attributes:
        aval: its shape over all devices, with its sharding.
        part: (replica, rank) -> what of it is on the device.
    """

    aval: jax.ShapeDtypeStruct
    part: Callable[[Replica, int], Array]


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Gradients of a step by executables that the host hands over, for one set of shapes. Made by `dispatched`.

    One thread at a time calls it, since its buffers are used again.

    Attributes:
        pipeline: the model, its schedule, where its layers are.
        shapes: of the parameters, as `Pipeline.stack` gives them.
        chunks: a rank's layers as executables take them.
        ends: embedding and head.
        begin: the program before the schedule: (its last results, donated; params; carried; step; batch) -> results, a list
            with None for those that nobody reads.
        report: what of it is captured.
        replicas: of the pipeline, each with a part of the batch.
        buffers: `begun`, the last results of `begin`.
    """

    pipeline: Pipeline
    shapes: Tree
    chunks: tuple[Chunk, ...]
    ends: tuple[End, End]
    begin: jax.stages.Compiled
    report: CaptureReport | None
    replicas: tuple[Replica, ...]
    buffers: dict[str, Any]

    def __str__(self) -> str:
        reports = [self.report, *(report for replica in self.replicas for _, report in replica.reports)]
        count = sum(len(replica.plan.instructions) for replica in self.replicas)
        text = f"dispatched: the host hands over {count} executables a step; {len(reports)} are compiled"
        if not (known := [report for report in reports if report is not None]):
            return text
        whole = sum(report.command_buffers == 1 and report.captured == report.total for report in known)
        return f"{text}, {whole} of them one command buffer each"

    @property
    def executables(self) -> list[jax.stages.Compiled]:
        """Returns what a call runs, in this order, but for what is done to embedding and head."""
        plans = [replica.plan for replica in self.replicas]
        return [self.begin, *(one.executable.compiled for plan in plans for one in plan.instructions)]

    def __call__(self, params: Tree, carry: Carry, step: Array, batch: Tree) -> Tree:
        """Plays the schedule. Returns what `collect` takes; sums of gradients stay in the buffers that they are in.

        Args:
            params, carry, step: of the state; not donated.
            batch: A batch from `TrainStep.place`.
        """
        # Not popped: an argument that `begin` refuses must not cost the buffers.
        begun = in_turn(self.begin(self.buffers["begun"], params, carry, step, batch))
        self.buffers["begun"] = begun
        outer = jax.tree.leaves(params["outer"])
        for replica in self.replicas:
            replica.play(begun, outer)

        def whole(result: _Result) -> Array:
            parts = [result.part(replica, rank) for replica, rank in self._homes]
            return jax.make_array_from_single_device_arrays(result.aval.shape, result.aval.sharding, parts)

        return jax.tree.map(whole, self._results)

    @property
    def results(self) -> Tree:
        """Shapes of what a call returns."""
        return jax.tree.map(lambda result: result.aval, self._results)

    def collect(self, results: Tree) -> tuple[Array, Tree, list[Tree], Tree]:
        """Returns mean loss, mean gradients, carried state and histories from traced results, as `Pipeline.step` does."""
        pipeline, data = self.pipeline, batch_axes(self.pipeline.mesh)
        specs = pipeline.specs(self.shapes)

        def local(results: Tree) -> tuple[Array, Tree, list[Tree], Tree]:
            layers = [chunk.unpack(arrays) for chunk, arrays in zip(self.chunks, results["layers"], strict=True)]
            leaves, structure = jax.tree.flatten(self.shapes["outer"])
            found: dict[int, Array] = {}
            for end, own in zip(self.ends, results["ends"], strict=True):
                for i, axis, gradient in zip(end.reads, end.axes, own, strict=True):
                    gradient = gradient.reshape(part_shape(leaves[i].shape, axis, pipeline.mesh.shape[Axis.PIPE]))
                    found[i] = found[i] + gradient if i in found else gradient
            outer = [found.get(i, jnp.zeros(leaf.shape, jnp.float32)) for i, leaf in enumerate(leaves)]
            grads = {"outer": structure.unflatten(outer), "layers": jax.tree.map(lambda g: g[None], layers)}
            count, after = pipeline.schedule.num_microbatches, []
            histories = pipeline.precision.finish(results["histories"], data, pipeline.layout)
            if results["carried"]:
                total = jax.tree.map(lambda *chunks: jnp.stack(chunks), *results["carried"])
                after = pipeline.carried.finish(total, count, data, pipeline.layout)
            means = jax.tree.map(lambda total: lax.pmean(total, data) / count, (results["loss"][0], grads))
            return *means, after, histories

        in_specs = jax.tree.map(lambda shape: shape.sharding.spec, self.results)
        out_specs = (PartitionSpec(), specs, PartitionSpec(), PartitionSpec())
        return jax.shard_map(local, mesh=pipeline.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(results)

    @cached_property
    def _homes(self) -> list[tuple[Replica, int]]:
        """The replica and rank of each device, in their order."""
        places = {replica.shards[rank]: (replica, rank) for replica in self.replicas for rank in range(len(replica.devices))}
        return [places[place] for place in sorted(places)]

    @cached_property
    def _results(self) -> Tree:
        mesh = self.pipeline.mesh

        def result(shape: tuple[int, ...], axis: int | None, part: Callable[[Replica, int], Array], dtype: Any) -> _Result:
            return _Result(_over_all(mesh, shape, axis, dtype), part)

        def of_end(number: int, n: int) -> _Result:
            end = self.ends[number]
            shape = part_shape(end.shapes[n].shape, end.axes[n], mesh.shape[Axis.PIPE]) or (1,)
            return result(shape, end.axes[n], lambda replica, rank: replica.end(rank, number, n), jnp.float32)

        def of_layers(chunk: int, name: str, shape: tuple[int, ...]) -> _Result:
            return result(shape, 0, lambda replica, rank: replica.layers(rank, chunk, name, shape), jnp.float32)

        def of_state(chunk: int, n: int, aval: jax.ShapeDtypeStruct) -> _Result:
            shape = (self.chunks[chunk].places, *aval.shape)
            return result(shape, 0, lambda replica, rank: replica.state(rank, chunk, n), aval.dtype)

        def of_history(chunk: int, n: int, aval: jax.ShapeDtypeStruct) -> _Result:
            return result(aval.shape, 0, lambda replica, rank: replica.history(rank, chunk, n), jnp.float32)

        def of_chunks(of: Callable[..., _Result], shapes: Tree) -> list[Tree]:
            leaves, structure = jax.tree.flatten(shapes)
            return [structure.unflatten([of(c, n, s) for n, s in enumerate(leaves)]) for c in range(len(self.chunks))]

        state, precision = self.pipeline.carried.layer, self.pipeline.precision
        history = jax.eval_shape(partial(precision.state, self.pipeline.layout.layers_per_stage))
        return {
            "carried": of_chunks(of_state, state) if jax.tree.leaves(state) else [],
            "histories": of_chunks(of_history, history),
            "ends": [[of_end(number, n) for n in range(len(end.reads))] for number, end in enumerate(self.ends)],
            "layers": [{n: of_layers(c, n, s) for n, s in chunk.shapes().items()} for c, chunk in enumerate(self.chunks)],
            "loss": result((1,), None, lambda replica, rank: replica.loss(rank), jnp.float32),
        }


def dispatched(
    pipeline: Pipeline,
    params: Tree,
    carry: Carry,
    unpack: Callable[[Tree], Tree],
    batch: Tree,
    key: Array,
    options: Mapping[str, Any],
) -> Dispatched:
    """Traces and compiles everything.

    Args:
        pipeline: the model with its schedule.
        params, carry: of the state, as shapes with their shardings; "outer" are the parameters of embedding and head.
        unpack: makes of them what `Pipeline.stack` gives.
        batch: Shapes of a placed batch, [M, B/M, ...], with their shardings.
        key: of the training. It is folded as the other engine does it: by step, replica, microbatch, layer.
        options: XLA's.

    Raises:
        ConfigError: the pipeline has an axis `fsdp`, or devices of other processes.
    """
    _check(pipeline)
    model, mesh = pipeline.model, pipeline.mesh
    shapes = jax.eval_shape(unpack, params)
    alone = pipeline.precision.weights  # a product in FP8 has a parameter for its weight, not a part of one
    chunks = tuple(Chunk.of(jax.eval_shape(pipeline.of_rank, chunk), alone) for chunk in shapes["layers"])
    program, step = _begin(pipeline, chunks, unpack, key, (shapes, batch)), jax.ShapeDtypeStruct((), jnp.int32)
    begun = _placed(pipeline, jax.eval_shape(program, params, carry, step, batch))
    microbatch = jax.tree.map(shard, begun["batch"][0])
    embed = End.of(model.embed, shapes["outer"], lambda outer: outer, model.sharded, microbatch)
    x = jax.eval_shape(embed, embed.shapes, microbatch)
    head = End.of(model.head, shapes["outer"], pipeline.cast, model.sharded, x, microbatch)
    stages = stages_of(pipeline, chunks, embed, x, begun, jax.random.key_impl(key))
    read = _read(stages, begun)

    def begin_step(_: Tree, *args: Tree) -> list[Array | None]:
        return [leaf if i in read else None for i, leaf in enumerate(jax.tree.leaves(program(*args)))]

    held = [leaf if i in read else None for i, leaf in enumerate(jax.tree.leaves(begun))]
    shardings = jax.tree.map(lambda leaf: leaf.sharding, held)
    jitted = jax.jit(begin_step, donate_argnums=0, keep_unused=True, out_shardings=shardings)
    begin, report = compile_and_report(jitted.lower(held, params, carry, step, batch), options)
    check_identity(begin, held)
    by_rank = np.moveaxis(mesh.devices, mesh.axis_names.index(Axis.PIPE), -1).reshape(-1, mesh.shape[Axis.PIPE])
    replicas = tuple(Replica.of(pipeline, (embed, head), stages, begun, row.tolist(), options) for row in by_rank)
    zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), held), out_shardings=shardings)
    return Dispatched(pipeline, shapes, chunks, (embed, head), begin, report, replicas, {"begun": in_turn(zeros())})


def _check(pipeline: Pipeline) -> None:
    """Raises ConfigError for what this engine does not do."""
    wrong = ""
    if Axis.FSDP in pipeline.mesh.axis_names:
        wrong = "over a mesh with the axis fsdp"
    elif any(device.process_index != jax.process_index() for device in pipeline.mesh.devices.flat):
        wrong = "over several processes"
    if wrong:
        raise ConfigError(f"`engine` is dispatch: must be program {wrong}", field="engine")


def _stage_args(pipeline: Pipeline, shapes: Tree, batch: Tree, key: Array) -> tuple[Tree, ...]:
    """Returns the shapes of the arguments of a stage: of the longest one, without the embedding."""
    layers = jax.eval_shape(pipeline.of_rank, shapes["layers"][0])
    extra = {"carried": pipeline.carried.bits(len(layers)), "first": jax.ShapeDtypeStruct((), jnp.int32)}
    keys = [jax.eval_shape(jax.random.key_data, key)] * pipeline.model.takes_key
    return (layers, extra), *pipeline.inputs(shapes, batch), *keys


def _read(stages: Sequence[Stage], begun: Tree) -> set[Any]:
    """Returns the numbers of what is read of a step's beginning: of the parameters, not those that are there in FP8."""
    leaves, structure = jax.tree.flatten(begun)
    read = {stage.params[place] for stage in stages for places in stage.shaped.reads.values() for place in places}
    extra = {source for stage in stages for own in stage.extra for source in own}
    return read | extra | {*jax.tree.leaves(structure.unflatten(range(len(leaves)))["batch"])}


def _begin(
    pipeline: Pipeline, chunks: Sequence[Chunk], unpack: Callable[[Tree], Tree], key: Array, shapes: tuple[Tree, Tree]
) -> Callable[..., Tree]:
    """Returns the program before the schedule; each rank gets its chunks' parameters, the microbatches, the step's key.

    A rank also gets the observed state and the prepared weights of its chunks. `shapes` are those of parameters and batch.
    """
    mesh, impl = pipeline.mesh, jax.random.key_impl(key)
    batch_spec = batch_axes(mesh) or None
    args = _stage_args(pipeline, *shapes, key)
    function = pipeline.stage(impl, len(args[0][0]))

    def begin(params: Tree, carry: Carry, step: Array, batch: Tree) -> Tree:
        def local(layers: Tree, states: list[Tree], history: Tree, batch_M: Tree, data: Array) -> Tree:
            table_CN = pipeline.own(pipeline.layout.layers())
            own = {
                "batch": [jax.tree.map(lambda leaf, m=m: leaf[m], batch_M) for m in range(pipeline.schedule.num_microbatches)],
                "layers": [chunk.pack(pipeline.of_rank(places)) for chunk, places in zip(chunks, layers, strict=True)],
            }
            parts, shards = jax.tree.map(lambda leaf: leaf[0], layers), [()] * len(chunks)
            own["state"] = pipeline.precision.pick(history, table_CN)
            weights = pipeline.precision.prepare(function, args, parts, own["state"], shards, ())
            own["weights"] = jax.tree.map(jnp.atleast_1d, weights)
            if states:
                bits = pipeline.carried.pick(states, table_CN)
                own["carried"] = [jax.tree.map(lambda leaf, c=c: leaf[c], bits) for c in range(len(chunks))]
            if not pipeline.model.takes_key:
                return own
            key = jax.random.wrap_key_data(data, impl=impl)
            if any(mesh.shape[axis] > 1 for axis in batch_axes(mesh)):
                key = jax.random.fold_in(key, lax.axis_index(batch_axes(mesh)))
            return own | {"key": jax.random.key_data(key)}

        whole, data = unpack(params), jax.random.key_data(jax.random.fold_in(key, step))
        states = pipeline.model.split_carried(carry.model) if jax.tree.leaves(carry.model) else []
        of_layers, of_batch = pipeline.specs(whole)["layers"], PartitionSpec(None, batch_spec)
        in_specs = (of_layers, PartitionSpec(), PartitionSpec(), of_batch, PartitionSpec())
        out_specs = {"batch": PartitionSpec(batch_spec), "layers": PartitionSpec(Axis.PIPE)}
        out_specs |= {"key": PartitionSpec(batch_spec)} if pipeline.model.takes_key else {}
        out_specs |= {"carried": PartitionSpec(Axis.PIPE)} if states else {}
        out_specs |= dict.fromkeys(("state", "weights"), PartitionSpec(Axis.PIPE))
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return run(whole["layers"], states, carry.observed, batch, data)

    return begin


def _placed(pipeline: Pipeline, begun: Tree) -> Tree:
    """Returns the shapes of what the first program makes, with their shardings."""
    of_ranks, of_data = PartitionSpec(Axis.PIPE), PartitionSpec(batch_axes(pipeline.mesh) or None)

    def placed(name: str, aval: Any) -> jax.ShapeDtypeStruct:
        spec = of_data if name in ("batch", "key") else of_ranks
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(pipeline.mesh, spec))

    return {name: jax.tree.map(partial(placed, name), tree) for name, tree in begun.items()}


def _over_all(mesh: Mesh, shape: Sequence[int], axis: int | None, dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the array over all devices whose parts have this shape.

    Replicas are along its first axis, ranks along `axis`; None: all ranks have the same.
    """
    along: list[tuple[str, ...]] = [() for _ in shape]
    along[0] += batch_axes(mesh)
    if axis is not None:
        along[axis] += (Axis.PIPE.value,)
    lengths = (length * math.prod(mesh.shape[name] for name in names) for length, names in zip(shape, along, strict=True))
    where = NamedSharding(mesh, PartitionSpec(*(names or None for names in along)))
    return jax.ShapeDtypeStruct(tuple(lengths), dtype, sharding=where)
