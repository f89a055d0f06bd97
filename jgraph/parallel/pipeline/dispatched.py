"""The second engine of a pipeline: a stage's forward, dgrad and wgrad as executables, which the host hands to the ranks.

A step begins with a program that all ranks run together: it casts the parameters and deals out the batch. The schedule follows:
each rank runs executables of its own, on arrays that lie on it alone. Nothing is masked or padded there, no rank waits for
another one's tick, and embedding and head are whole on the ranks of the first and the last stage. What was summed then becomes
arrays over all ranks again, for the update, which is the other engine's. All of it lies in the same buffers at every step.
"""

# P ranks, D replicas of the pipeline, M microbatches

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jgraph.device import peak_flops
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError
from jgraph.graphed.plan import ExecutionPlan, make_plan, play
from jgraph.graphed.shaped import Shaped, shape_callable
from jgraph.mesh import Axis, batch_axes
from jgraph.packing import Packing
from jgraph.parallel.accumulate import by_microbatch
from jgraph.parallel.pipeline.ends import End
from jgraph.parallel.pipeline.program import Pipeline
from jgraph.trace.flops import product_flops
from jgraph.xla import CaptureReport, check_identity, compile_and_report

Tree = Any

# Seconds of a stage's forward from which on the update of its command buffer, where arrays moved, is nothing beside it. Then
# microbatches share executables: a few to compile, not hundreds.
_LONG = 2e-4


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
    def of(cls, layers: Sequence[Tree]) -> Self:
        """Packs layers that are given as shapes."""
        return cls(Packing.of(list(layers)), len(layers))

    def pack(self, layers: Sequence[Tree]) -> dict[str, Array]:
        """Returns the arrays by name. None is a scalar, so that those of all ranks make one array."""
        return {name: jnp.atleast_1d(leaf) for name, leaf in self.packing.pack(list(layers)).items()}

    def unpack(self, arrays: Mapping[str, Array]) -> list[Tree]:
        """Inverts `pack`. What is missing is zero."""
        whole = {}
        for name, numbers in self.packing.groups:
            shapes = [self.packing.leaves[i].shape for i in numbers]
            shape = shapes[0] if len(shapes) == 1 else (-1,)
            whole[name] = arrays[name].reshape(shape) if name in arrays else self._zeros(name)
        return self.packing.unpack(whole)

    def _zeros(self, name: str) -> Array:
        leaves = [self.packing.leaves[i] for i in dict(self.packing.groups)[name]]
        shape = leaves[0].shape if len(leaves) == 1 else (sum(leaf.size for leaf in leaves),)
        return jnp.zeros(shape, leaves[0].dtype)

    def names(self, layers: int) -> tuple[str, ...]:
        """Returns the names of the arrays that a stage of so many layers reads."""
        count = layers * len(self.packing.leaves) // self.places
        return tuple(sorted(name for name, numbers in self.packing.groups if numbers[0] < count))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the arrays by name."""
        return {name: leaf.shape for name, leaf in jax.eval_shape(self.pack, self.packing.treedef.unflatten(self.packing.leaves)).items()}


@dataclass(frozen=True)
class _Made:
    """Of embedding (0) or head (1), the parameter of this number that is made on its rank."""

    end: int
    number: int


@dataclass(frozen=True)
class _Number:
    """An int32 scalar."""

    value: int


# An argument of an executable: one of these, or the number of an array over all ranks, of which the rank has its part.
_Source = int | _Made | _Number


@dataclass(frozen=True, eq=False)
class _Stage:
    """Where a stage is, what its executables compute, and what they are given.

    Attributes:
        rank, chunk: its place.
        names: of its chunk's arrays that it reads, which are its first parameters.
        shaped: forward, dgrad and wgrad.
        params: sources of its parameters.
        extra: by microbatch, sources of its arguments after x.
    """

    rank: int
    chunk: int
    names: tuple[str, ...]
    shaped: Shaped
    params: list[_Source]
    extra: list[list[_Source]]


@dataclass(frozen=True, eq=False)
class _Replica:
    """One pipeline: a device for each rank, and what is done there.

    Attributes:
        devices: by rank.
        shards: by rank, the place of its device among all.
        plan: the schedule as instructions.
        registers: the array where it is the same at every step, else None.
        filled: the registers that are filled at every step: (register, source, rank).
        make, deal: of embedding and head, each on its rank.
        together: of stages that carry state, its reduction over microbatches.
        buffers: what stays from step to step: `sums` by callable and place, and what the programs above gave.
    """

    devices: tuple[Any, ...]
    shards: tuple[int, ...]
    plan: ExecutionPlan
    registers: list[Any]
    filled: list[tuple[int, int | _Made, int]]
    make: list[jax.stages.Compiled]
    deal: list[jax.stages.Compiled]
    together: list[jax.stages.Compiled]
    buffers: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Result:
    """An array of what a step leaves.

    Attributes:
        shape: of a rank's part.
        axis: along which the ranks share it; None where all have the same.
        part: (replica, rank) -> the array on its device.
        dtype: of it.
    """

    shape: tuple[int, ...]
    axis: int | None
    part: Callable[[_Replica, int], Array]
    dtype: Any = jnp.float32


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Gradients of a step by executables that the host hands over, for one set of shapes. Made by `dispatched`.

    One thread at a time calls it, since its buffers are used again.

    Attributes:
        pipeline: the model, its schedule, where its layers are.
        shapes: of the parameters, as `Pipeline.stack` gives them.
        chunks: a rank's layers as executables take them.
        ends: embedding and head.
        stages: in the order of the data.
        begin: the program before the schedule: (its last results, donated; params; carried; step; batch) -> results.
        replicas: of the pipeline.
        reports: the name of each executable, and what of it is captured.
        buffers: `begun`, the last results of `begin`.
    """

    pipeline: Pipeline
    shapes: Tree
    chunks: tuple[Chunk, ...]
    ends: tuple[End, End]
    stages: tuple[_Stage, ...]
    begin: jax.stages.Compiled
    replicas: tuple[_Replica, ...]
    reports: tuple[tuple[str, CaptureReport | None], ...]
    buffers: dict[str, Any]

    def __str__(self) -> str:
        instructions = [one for replica in self.replicas for one in replica.plan.instructions]
        known = [report for _, report in self.reports if report is not None]
        text = f"engine dispatch: {len(instructions)} executables handed over a step, {len(self.reports)} compiled"
        if not known:
            return text
        buffers, captured, total = (sum(getattr(r, name) for r in known) for name in ("command_buffers", "captured", "total"))
        return f"{text}; command buffers: {buffers}, captured {captured} of {total} thunks"

    def __call__(self, params: Tree, carried: Tree, step: Array, batch: Tree) -> Tree:
        """Plays the schedule. Returns what `collect` takes; sums of gradients stay in the buffers that they are in.

        Args:
            params, carried, step: of the state; not donated.
            batch: a whole batch, where `TrainStep.place` puts it.
        """
        begun = in_turn(self.begin(self.buffers.pop("begun"), params, carried, step, batch))
        self.buffers["begun"] = begun
        outer = jax.tree.leaves(params["outer"])
        for replica in self.replicas:
            self._play(replica, [*jax.tree.leaves(begun), *outer], outer)

        def whole(result: _Result) -> Array:
            mesh = self.pipeline.mesh
            shape, spec = _over_all(mesh, result.shape, result.axis)
            ranks = range(len(self.replicas[0].devices))
            parts = {replica.shards[rank]: result.part(replica, rank) for replica in self.replicas for rank in ranks}
            return jax.make_array_from_single_device_arrays(
                shape, NamedSharding(mesh, spec), [parts[place] for place in range(mesh.size)]
            )

        return jax.tree.map(whole, self._results)

    @property
    def results(self) -> Tree:
        """Shapes of what a call returns."""
        mesh = self.pipeline.mesh

        def of(result: _Result) -> jax.ShapeDtypeStruct:
            shape, spec = _over_all(mesh, result.shape, result.axis)
            return jax.ShapeDtypeStruct(shape, result.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(of, self._results)

    def collect(self, results: Tree) -> tuple[Array, Tree, list[Tree]]:
        """Returns mean loss, mean gradients and the carried state of every layer, as `Pipeline.step` does, of traced results."""
        pipeline, data = self.pipeline, batch_axes(self.pipeline.mesh)
        specs = pipeline.specs(self.shapes)

        def local(results: Tree) -> tuple[Array, Tree, list[Tree]]:
            layers = [chunk.unpack(arrays) for chunk, arrays in zip(self.chunks, results["layers"], strict=True)]
            leaves, structure = jax.tree.flatten(self.shapes["outer"])
            found: dict[int, Array] = {}
            for end, own in zip(self.ends, results["ends"], strict=True):
                for i, axis, gradient in zip(end.reads, end.axes, own, strict=True):
                    gradient = gradient.reshape(_part(leaves[i].shape, axis, pipeline.mesh.shape[Axis.PIPE]))
                    found[i] = found[i] + gradient if i in found else gradient
            outer = [found.get(i, jnp.zeros(leaf.shape, jnp.float32)) for i, leaf in enumerate(leaves)]
            grads = {"outer": structure.unflatten(outer), "layers": jax.tree.map(lambda g: g[None], layers)}
            loss, grads = lax.pmean((results["loss"][0], grads), data)
            if not results["carried"]:
                return loss, grads, []
            total = jax.tree.map(lambda *chunks: jnp.stack(chunks), *results["carried"])
            after = pipeline.carried.finish(total, pipeline.schedule.num_microbatches, data, pipeline.layout)
            return loss, grads, after

        in_specs = jax.tree.map(lambda shape: shape.sharding.spec, self.results)
        out_specs = (PartitionSpec(), specs, PartitionSpec())
        return jax.shard_map(local, mesh=pipeline.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False)(results)

    @cached_property
    def _results(self) -> Tree:
        ranks, places = self.pipeline.mesh.shape[Axis.PIPE], {(one.rank, one.chunk): one for one in self.stages}

        def of_layers(chunk: int, name: str, shape: tuple[int, ...]) -> _Result:
            def part(replica: _Replica, rank: int) -> Array:
                stage = places[rank, chunk]
                if name in stage.names:
                    return replica.buffers["sums"][stage.shaped.index, stage.names.index(name)]
                return replica.buffers["zeros"].setdefault((rank, shape), jnp.zeros(shape, device=replica.devices[rank]))

            return _Result(shape, 0, part)

        def of_end(number: int, n: int) -> _Result:
            end = self.ends[number]
            axis, shape = end.axes[n], end.shapes[n].shape

            def part(replica: _Replica, rank: int) -> Array:
                parts = replica.buffers["dealt"][number][0][n]
                return jax.device_put(parts[0 if axis is None else rank], replica.devices[rank])

            return _Result(_part(shape, axis, ranks) or (1,), axis, part)

        def loss(replica: _Replica, rank: int) -> Array:
            return jax.device_put(replica.buffers["dealt"][1][1], replica.devices[rank])

        def of_state(chunk: int, n: int, aval: jax.ShapeDtypeStruct) -> _Result:
            def part(replica: _Replica, rank: int) -> Array:
                return replica.buffers["together"][places[rank, chunk].shaped.index][n]

            return _Result((self.chunks[chunk].places, *aval.shape), 0, part, aval.dtype)

        state, structure = jax.tree.flatten(self.pipeline.carried.layer)
        carried = [structure.unflatten([of_state(c, n, s) for n, s in enumerate(state)]) for c in range(len(self.chunks))]
        return {
            "carried": carried if state else [],
            "layers": [{n: of_layers(c, n, s) for n, s in chunk.shapes().items()} for c, chunk in enumerate(self.chunks)],
            "ends": [[of_end(number, n) for n in range(len(end.reads))] for number, end in enumerate(self.ends)],
            "loss": _Result((1,), None, loss),
        }

    def _play(self, replica: _Replica, arrays: Sequence[Array], outer: Sequence[Array]) -> None:
        """Plays the schedule on one replica. `arrays` are those over all ranks that sources count, the last of them `outer`."""
        plan, buffers, homes = replica.plan, replica.buffers, (self.stages[0].rank, self.stages[-1].rank)
        made = []
        for end, home, make, last in zip(self.ends, homes, replica.make, buffers["made"], strict=True):
            parts = []
            for n in end.made:
                shards = [replica.shards[home]] if end.axes[n] is None else replica.shards
                own = [outer[end.reads[n]].addressable_shards[shard].data for shard in shards]
                parts.append([jax.device_put(part, replica.devices[home]) for part in own])
            made.append(make(last, parts))
        registers = replica.registers.copy()
        for register, source, rank in replica.filled:
            if isinstance(source, _Made):
                registers[register] = made[source.end][source.number]
            else:
                registers[register] = arrays[source].addressable_shards[replica.shards[rank]].data
        for name, register in plan.flow.sums.items():
            registers[register] = buffers["sums"][name]
        play(plan, registers)
        sums = {name: registers[register] for name, register in plan.flow.sums.items()}
        losses = [registers[register] for _, register in sorted(plan.flow.losses.items())]
        places = ((0, len(self.stages[0].names)), (len(self.stages), 0))
        dealt = [
            deal([sums[i, first + n] for n in range(len(end.reads))], losses if i else [])
            for end, deal, (i, first) in zip(self.ends, replica.deal, places, strict=True)
        ]
        together = [
            run([[registers[r] for r in plan.flow.aux[i, m]] for m in range(self.pipeline.schedule.num_microbatches)])
            for i, run in enumerate(replica.together)
        ]
        buffers.update(made=made, sums=sums, dealt=dealt, together=together)


def dispatched(
    pipeline: Pipeline,
    params: Tree,
    carried: Tree,
    unpack: Callable[[Tree], Tree],
    batch: Tree,
    key: Array,
    options: Mapping[str, Any],
) -> Dispatched:
    """Traces and compiles everything.

    Args:
        pipeline: the model with its schedule.
        params, carried: of the state, as shapes with their shardings; "outer" are the parameters of embedding and head.
        unpack: makes of them what `Pipeline.stack` gives.
        batch: shapes of a whole batch, with their shardings.
        key: of the training. It is folded as the other engine does it: by step, replica, microbatch, layer.
        options: XLA's.

    Raises:
        ConfigError: the pipeline has an axis `fsdp`, or devices of other processes.
    """
    _check(pipeline)
    model, mesh = pipeline.model, pipeline.mesh
    shapes = jax.eval_shape(unpack, params)
    chunks = tuple(Chunk.of(jax.eval_shape(pipeline.of_rank, chunk)) for chunk in shapes["layers"])
    program, step = _begin(pipeline, chunks, unpack, key), jax.ShapeDtypeStruct((), jnp.int32)
    begun = _placed(pipeline, jax.eval_shape(program, None, params, carried, step, batch))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, begun)
    jitted = jax.jit(program, donate_argnums=0, keep_unused=True, out_shardings=shardings)
    lowered = jitted.lower(begun, params, carried, step, batch)
    begin, report = compile_and_report(lowered, options)
    check_identity(begin, begun)
    microbatch = jax.tree.map(_shard, begun["batch"][0])
    embed = End.of(model.embed, shapes["outer"], lambda outer: outer, model.sharded, microbatch)
    x = jax.eval_shape(embed, embed.shapes, microbatch)
    head = End.of(model.head, shapes["outer"], pipeline.cast, model.sharded, x, microbatch)
    stages = tuple(_stages(pipeline, chunks, embed, x, begun, jax.random.key_impl(key)))
    names = mesh.axis_names.index(Axis.PIPE)
    replicas, reports = [], [("begin", report)]
    for devices in np.moveaxis(mesh.devices, names, -1).reshape(-1, mesh.shape[Axis.PIPE]):
        replica, own = _replica(pipeline, (embed, head), stages, begun, devices.tolist(), options)
        replicas.append(replica)
        reports += own
    zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), begun), out_shardings=shardings)
    return Dispatched(
        pipeline, shapes, chunks, (embed, head), stages, begin, tuple(replicas), tuple(reports), {"begun": in_turn(zeros())}
    )


def _check(pipeline: Pipeline) -> None:
    """Raises ConfigError for what this engine does not do."""
    wrong = ""
    if Axis.FSDP in pipeline.mesh.axis_names:
        wrong = "over a mesh with the axis fsdp"
    elif any(device.process_index != jax.process_index() for device in pipeline.mesh.devices.flat):
        wrong = "over several processes"
    if wrong:
        raise ConfigError(f"`engine` is dispatch: must be program {wrong}", field="engine")


def _begin(pipeline: Pipeline, chunks: Sequence[Chunk], unpack: Callable[[Tree], Tree], key: Array) -> Callable[..., Tree]:
    """Returns the program before the schedule; each rank gets its chunks' parameters, the microbatches, the step's key."""
    mesh, impl = pipeline.mesh, jax.random.key_impl(key)
    batch_spec = batch_axes(mesh) or None

    def begin(_: Tree, params: Tree, carried: Tree, step: Array, batch: Tree) -> Tree:
        def local(layers: Tree, states: list[Tree], batch_M: Tree, data: Array) -> Tree:
            own = {
                "batch": [jax.tree.map(lambda leaf, m=m: leaf[m], batch_M) for m in range(pipeline.schedule.num_microbatches)],
                "layers": [chunk.pack(pipeline.of_rank(places)) for chunk, places in zip(chunks, layers, strict=True)],
            }
            if states:
                bits = pipeline.carried.pick(states, pipeline.own(pipeline.layout.layers()))
                own["carried"] = [jax.tree.map(lambda leaf, c=c: leaf[c], bits) for c in range(len(chunks))]
            if not pipeline.model.takes_key:
                return own
            key = jax.random.wrap_key_data(data, impl=impl)
            if any(mesh.shape[axis] > 1 for axis in batch_axes(mesh)):
                key = jax.random.fold_in(key, lax.axis_index(batch_axes(mesh)))
            return own | {"key": jax.random.key_data(key)}

        whole, data = unpack(params), jax.random.key_data(jax.random.fold_in(key, step))
        states = pipeline.model.split_carried(carried) if jax.tree.leaves(carried) else []
        in_specs = (pipeline.specs(whole)["layers"], PartitionSpec(), PartitionSpec(None, batch_spec), PartitionSpec())
        out_specs = {"batch": PartitionSpec(batch_spec), "layers": PartitionSpec(Axis.PIPE)}
        out_specs |= {"key": PartitionSpec(batch_spec)} if pipeline.model.takes_key else {}
        out_specs |= {"carried": PartitionSpec(Axis.PIPE)} if states else {}
        run = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return run(whole["layers"], states, by_microbatch(batch, pipeline.schedule.num_microbatches), data)

    return begin


def _placed(pipeline: Pipeline, begun: Tree) -> Tree:
    """Returns the shapes of what the first program makes, with their shardings."""
    data = batch_axes(pipeline.mesh) or None

    def of(name: str) -> NamedSharding:
        return NamedSharding(pipeline.mesh, PartitionSpec(Axis.PIPE if name in ("layers", "carried") else data))

    return {
        name: jax.tree.map(lambda s, where=of(name): jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), part)
        for name, part in begun.items()
    }


def _stages(
    pipeline: Pipeline, chunks: Sequence[Chunk], embed: End, x: jax.ShapeDtypeStruct, begun: Tree, impl: Any
) -> list[_Stage]:
    """Returns the stages, traced; those that compute the same are traced once."""
    layout, (leaves, structure) = pipeline.layout, jax.tree.flatten(begun)
    numbers = structure.unflatten(range(len(leaves)))

    def shape(source: _Source) -> jax.ShapeDtypeStruct:
        return _shard(leaves[source]) if isinstance(source, int) else jax.ShapeDtypeStruct((), jnp.int32)

    traced: dict[Any, Shaped] = {}
    stages = []
    for s in range(layout.num_stages):
        rank, c = next((r, row.index(s)) for r, row in enumerate(layout.placement) if s in row)
        count, first = int(layout.active()[rank, c].sum()), int(layout.layers()[rank, c, 0])
        names = chunks[c].names(count)
        params: Tree = {"layers": {name: numbers["layers"][c][name] for name in names}}
        if s == 0:
            made = {n: _Made(0, k) for k, n in enumerate(embed.made)}
            params["outer"] = [made.get(n, len(leaves) + i) for n, i in enumerate(embed.reads)]
        keys = (numbers["key"], _Number(first)) if pipeline.model.takes_key else ()
        extra = [
            {
                "batch": numbers["batch"][m] if s == 0 else (),
                "keys": (*keys, _Number(m)) if keys else (),
                "carried": numbers["carried"][c] if "carried" in numbers else {},
            }
            for m in range(pipeline.schedule.num_microbatches)
        ]

        shapes: Tree = {"layers": jax.tree.map(shape, params["layers"])}
        shapes |= {"outer": embed.shapes} if s == 0 else {}
        name = (s == 0, count, c)
        if name not in traced:
            fn = _stage_function(pipeline, chunks[c], count, embed if s == 0 else None, impl)
            args = (() if s == 0 else x, jax.tree.map(shape, extra[0]))
            traced[name] = shape_callable(fn, s, shapes, args, {}, device=None, has_aux=True)
        flat = [jax.tree.leaves(own) for own in extra]
        stages.append(_Stage(rank, c, names, replace(traced[name], index=s), jax.tree.leaves(params), flat))
    return stages


def _stage_function(pipeline: Pipeline, chunk: Chunk, count: int, embed: End | None, impl: Any) -> Callable[..., Array]:
    """Returns a stage of so many layers as `fn(params, x, extra) -> (y, carried)`; the first one embeds a batch instead of x."""

    def stage(params: Tree, x: Array, extra: Tree) -> tuple[Array, Tree]:
        if embed is not None:
            x = embed(params["outer"], extra["batch"])
        keys: list[tuple[Array, ...]] = [()] * count
        if extra["keys"]:
            data, first, m = extra["keys"]
            key = jax.random.fold_in(jax.random.wrap_key_data(data, impl=impl), m)
            keys = [(jax.random.fold_in(key, first + j),) for j in range(count)]
        return pipeline.through(chunk.unpack(params["layers"])[:count], x, keys, extra["carried"])

    return stage


def _replica(
    pipeline: Pipeline, ends: tuple[End, End], stages: Sequence[_Stage], begun: Tree, devices: Sequence[Any], options: Any
) -> tuple[_Replica, list[tuple[str, CaptureReport | None]]]:
    """Compiles what plays the schedule on these devices, one for each rank. Returns the reports too."""
    schedule, ranks = pipeline.schedule, len(devices)
    (embed, head), leaves = ends, jax.tree.leaves(begun)
    numbers = jax.tree.unflatten(jax.tree.structure(begun), range(len(leaves)))
    shaped = [replace(stage.shaped, device=devices[stage.rank]) for stage in stages]
    aliased = [(*one.early, *one.late) for one in shaped] + [tuple(range(len(head.reads)))]
    share = 1 / schedule.num_microbatches

    def loss(params: Tree, y: Array, batch: Tree) -> Array:
        return head(params, y, batch).astype(jnp.float32) * share

    plan = make_plan(
        shaped,
        schedule,
        aliased=aliased,
        reuse=True,
        join="segments",
        outputs="drop",
        keyed="given",
        loss_fn=loss,
        loss_args=(jax.tree.map(_shard, begun["batch"][0]),),
        loss_params=head.shapes,
        options=options,
        copies="shared" if _is_long(shaped[-1]) else "each",
    )
    made = {n: _Made(1, k) for k, n in enumerate(head.made)}
    of_head: list[_Source] = [made.get(n, len(leaves) + i) for n, i in enumerate(head.reads)]
    registers: list[Any] = [None] * len(plan.flow.avals)
    filled: list[tuple[int, int | _Made, int]] = []
    for (kind, *where), register in plan.flow.named.items():
        i, source = len(stages), None
        match kind, where:
            case "params", (i, place):
                source = (stages[i].params if i < len(stages) else of_head)[place]
            case "extra", (i, m, place):
                source = stages[i].extra[m][place]
            case "loss", (m, place):
                source = jax.tree.leaves(numbers["batch"][m])[place]
        rank = stages[min(i, len(stages) - 1)].rank
        if isinstance(source, _Number):
            registers[register] = jnp.asarray(source.value, jnp.int32, device=devices[rank])
        else:
            assert source is not None, f"the plan asks for {kind}"
            filled.append((register, source, rank))
    reports = list({id(one.executable.compiled): (one.executable.io.name, one.executable.report) for one in plan.instructions}.values())
    make, deal, buffers = [], [], []
    sums = {name: plan.flow.avals[register] for name, register in plan.flow.sums.items()}
    losses = [plan.flow.avals[register] for register in plan.flow.losses.values()]
    places = ((0, len(stages[0].names)), (len(stages), 0))
    for end, (i, first), name in zip(ends, places, ("embedding", "head"), strict=True):
        device = devices[stages[min(i, len(stages) - 1)].rank]
        whole = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in (end.shapes[n] for n in end.made)]
        own = [sums[i, first + n] for n in range(len(end.reads))]

        def parted(_: Tree, parts: Tree, end: End = end) -> Tree:
            return end.make(parts)

        def summed(sums: Tree, losses: Tree, end: End = end) -> Tree:
            return end.deal(sums, ranks), jnp.reshape(sum(losses), 1)

        for found, what, fn, args in (
            (make, "parameters", parted, (whole, end.parts(ranks))),
            (deal, "gradients", summed, (own, losses if i else [])),
        ):
            compiled, report = _compile(f"{name}_{what}", fn, args, device, options)
            found.append(compiled)
            reports.append((f"{name} {what}", report))
        buffers.append([jnp.zeros(shape.shape, shape.dtype, device=device) for shape in whole])
    together = []
    for i, one in enumerate(shaped if jax.tree.leaves(pipeline.carried.layer) else ()):

        def reduce(afters: list[Any], one: Shaped = one) -> list[Array]:
            return jax.tree.leaves(pipeline.carried.together([one.aux.unflatten(after) for after in afters], pipeline.layout.layers_per_stage))

        args = ([list(one.aux.avals)] * schedule.num_microbatches,)
        compiled, report = _compile(f"carried_{i}", reduce, args, one.device, options)
        together.append(compiled)
        reports.append((f"carried {i}", report))
    of_sum = {name: devices[stages[min(name[0], len(stages) - 1)].rank] for name in sums}
    zeros = {name: jnp.zeros(aval.shape, aval.dtype, device=of_sum[name]) for name, aval in sums.items()}
    order = list(pipeline.mesh.devices.flat)
    shards = tuple(map(order.index, devices))
    start = {"sums": zeros, "made": buffers, "zeros": {}}
    return _Replica(tuple(devices), shards, plan, registers, filled, make, deal, together, start), reports


def _compile(
    name: str, fn: Callable[..., Tree], args: Tree, device: Any, options: Mapping[str, Any]
) -> tuple[jax.stages.Compiled, CaptureReport | None]:
    """Compiles a function for one device; its first argument is donated where it is there to be written over."""
    where = SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), args)
    fn.__name__ = name
    donated = (0,) if name.endswith("parameters") else ()
    return compile_and_report(jax.jit(fn, donate_argnums=donated, keep_unused=True).lower(*shapes), options)


def _is_long(shaped: Shaped) -> bool:
    """Returns whether a stage's forward takes so long that the update of a command buffer does not matter."""
    rate = peak_flops(shaped.device.device_kind)
    inputs = [*shaped.x.avals, *shaped.extra.avals]
    return rate is None or product_flops(shaped.forward, list(shaped.params.avals), inputs) / rate > _LONG


def _shard(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the shape of a device's part."""
    assert aval.sharding is not None
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


def _part(shape: Sequence[int], axis: int | None, ranks: int) -> tuple[int, ...]:
    """Returns the shape of a rank's part of an array that the ranks share along an axis."""
    return tuple(length // ranks if i == axis else length for i, length in enumerate(shape))


def _over_all(mesh: Mesh, shape: Sequence[int], axis: int | None) -> tuple[tuple[int, ...], PartitionSpec]:
    """Returns shape and spec of the array over all devices whose parts have this shape; replicas are along its first axis."""
    along: list[tuple[str, ...]] = [() for _ in shape]
    along[0] += batch_axes(mesh)
    if axis is not None:
        along[axis] += (Axis.PIPE.value,)
    lengths = (length * math.prod(mesh.shape[name] for name in names) for length, names in zip(shape, along, strict=True))
    return tuple(lengths), PartitionSpec(*(names or None for names in along))
