"""One pipeline whose ranks run executables of their own: a device for each rank, and what the host does with them in a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import SingleDeviceSharding

from jgraph.autodiff import product_flops
from jgraph.callables.plan import ExecutionPlan, make_plan, play
from jgraph.callables.shaped import Shaped
from jgraph.device import peak_flops
from jgraph.pipeline.ends import End
from jgraph.pipeline.program import Pipeline
from jgraph.pipeline.stages import Made, Number, Source, Stage, shard, sources_of
from jgraph.xla import CaptureReport, compile_and_report

Tree = Any
Reports = list[tuple[str, CaptureReport | None]]

# Seconds of a stage's forward from which on the update of its command buffer, where arrays moved, is nothing beside it. Then
# microbatches share executables: a few to compile, not hundreds.
_LONG = 2e-4


@dataclass(frozen=True, eq=False)
class Replica:
    """Plays the schedule on one device for each rank. One thread at a time.

    Attributes:
        devices: by rank.
        shards: by rank, the place of its device among all.
        stages: in the order of the data.
        ends: embedding and head.
        plan: the schedule as instructions.
        registers: of the plan: the array where it is the same at every step, else None.
        filled: registers that are filled at every step: (register, source, rank).
        make, deal: of embedding and head, each on its rank.
        together: of every stage that carries state, its reduction over the microbatches.
        buffers: what stays from step to step: `sums` by callable and place, and what these programs gave.
        reports: the name of each executable, and what of it is captured.
    """

    devices: tuple[Any, ...]
    shards: tuple[int, ...]
    stages: tuple[Stage, ...]
    ends: tuple[End, End]
    plan: ExecutionPlan
    registers: list[Any]
    filled: list[tuple[int, int | Made, int]]
    make: list[jax.stages.Compiled]
    deal: list[jax.stages.Compiled]
    together: list[jax.stages.Compiled]
    buffers: dict[str, Any]
    reports: Reports

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        ends: tuple[End, End],
        stages: Sequence[Stage],
        begun: Tree,
        devices: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Self:
        """Compiles everything for these devices, one for each rank."""
        plan = _plan(pipeline, ends[1], stages, begun, devices, options)
        registers, filled = _sources(plan, ends[1], stages, begun, devices)
        reports = {id(one.executable): (one.executable.io.name, one.executable.report) for one in plan.instructions}
        compiling = _Compiling(dict(options), list(reports.values()))
        sums = {name: plan.flow.avals[register] for name, register in plan.flow.sums.items()}
        losses = [plan.flow.avals[register] for register in plan.flow.losses.values()]
        make, deal, made = [], [], []
        for number, (end, name) in enumerate(zip(ends, ("embedding", "head"), strict=True)):
            device, own = devices[stages[-number].rank], [sums[name] for name in _sums_of(end, number, stages)]

            def make_whole(_: Tree, parts: Tree, end: End = end) -> Tree:
                return end.make(parts)

            def deal_out(sums: Tree, losses: Tree, end: End = end) -> Tree:
                return end.deal(sums, len(devices)), jnp.reshape(sum(losses), 1)

            whole = [end.shapes[n] for n in end.made]
            make.append(compiling(f"{name}_parameters", make_whole, (whole, end.parts(len(devices))), device, donate=(0,)))
            deal.append(compiling(f"{name}_gradients", deal_out, (own, losses * number), device))
            made.append([jnp.zeros(s.shape, s.dtype, device=device) for s in whole])
        together = []
        for i, stage in enumerate(stages if jax.tree.leaves(pipeline.carried.layer) else ()):

            def reduce(afters: list[list[Array]], stage: Stage = stage) -> list[Array]:
                trees = [stage.shaped.aux.unflatten(after) for after in afters]
                return jax.tree.leaves(pipeline.carried.together(trees, pipeline.layout.layers_per_stage))

            given = [list(stage.shaped.aux.avals)] * pipeline.schedule.num_microbatches
            together.append(compiling(f"carried_{i}", reduce, (given,), devices[stage.rank]))
        zeros = {(i, n): jnp.zeros(s.shape, s.dtype, device=devices[_rank_of(i, stages)]) for (i, n), s in sums.items()}
        order = list(pipeline.mesh.devices.flat)
        return cls(
            tuple(devices),
            tuple(map(order.index, devices)),
            tuple(stages),
            ends,
            plan,
            registers,
            filled,
            make,
            deal,
            together,
            {"sums": zeros, "made": made, "zeros": {}},
            compiling.reports,
        )

    def play(self, begun: Sequence[Array | None], outer: Sequence[Array]) -> None:
        """Plays the schedule, and leaves what it summed in the buffers.

        Args:
            begun: over all ranks, the leaves of what a step begins with; None for those that nobody reads.
            outer: over all ranks, the leaves of the parameters of embedding and head.
        """
        buffers, flow, arrays = self.buffers, self.plan.flow, [*begun, *outer]
        buffers["made"] = [self._made(number, outer) for number in range(2)]
        registers = self.registers.copy()
        for register, source, rank in self.filled:
            if isinstance(source, Made):
                registers[register] = buffers["made"][source.end][source.number]
            else:
                array = arrays[source]
                assert array is not None, "what is read is there"
                registers[register] = part(array, self.shards[rank])
        for name, register in flow.sums.items():
            registers[register] = buffers["sums"][name]
        play(self.plan, registers)
        buffers["sums"] = {name: registers[register] for name, register in flow.sums.items()}
        losses = [registers[register] for _, register in sorted(flow.losses.items())]
        buffers["dealt"] = [
            deal([buffers["sums"][name] for name in _sums_of(end, number, self.stages)], losses * number)
            for number, (end, deal) in enumerate(zip(self.ends, self.deal, strict=True))
        ]
        count = len(losses)
        buffers["together"] = [
            run([[registers[r] for r in flow.aux[i, m]] for m in range(count)]) for i, run in enumerate(self.together)
        ]

    def _made(self, number: int, outer: Sequence[Array]) -> list[Array]:
        """Returns the parameters that embedding or head makes on its rank, in the buffers of those of the step before."""
        end, home = self.ends[number], self.stages[-number].rank
        parts = []
        for n in end.made:
            shards = [self.shards[home]] if end.axes[n] is None else self.shards
            parts.append([jax.device_put(part(outer[end.reads[n]], one), self.devices[home]) for one in shards])
        return self.make[number](self.buffers["made"][number], parts)

    # What a step left, each on the device of a rank.

    def layers(self, rank: int, chunk: int, name: str, shape: tuple[int, ...]) -> Array:
        """Returns the sum for one of a chunk's arrays; zeros for what is only padding there."""
        stage = self.stages[self._numbers[rank, chunk]]
        if name in stage.names:
            return self.buffers["sums"][stage.shaped.index, stage.names.index(name)]
        zeros = self.buffers["zeros"]
        if (rank, shape) not in zeros:
            zeros[rank, shape] = jnp.zeros(shape, device=self.devices[rank])
        return zeros[rank, shape]

    def end(self, rank: int, number: int, n: int) -> Array:
        """Returns a rank's part of the sum for what embedding or head reads."""
        parts = self.buffers["dealt"][number][0][n]
        return jax.device_put(parts[0 if self.ends[number].axes[n] is None else rank], self.devices[rank])

    def loss(self, rank: int) -> Array:
        """Returns the sum of the losses that the plan gives, [1]."""
        return jax.device_put(self.buffers["dealt"][1][1], self.devices[rank])

    def state(self, rank: int, chunk: int, n: int) -> Array:
        """Returns a leaf of what the layers of a stage carry, reduced over microbatches."""
        return self.buffers["together"][self._numbers[rank, chunk]][n]

    def history(self, rank: int, chunk: int, n: int) -> Array:
        """Returns a leaf of a stage's amax histories after the step."""
        shaped = self.stages[self._numbers[rank, chunk]].shaped
        return self.buffers["sums"][shaped.index, shaped.maxima[n]]

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], int]:
        """Returns the number of the stage that is a rank's chunk."""
        return {(stage.rank, stage.chunk): i for i, stage in enumerate(self.stages)}


@dataclass(frozen=True, eq=False)
class _Compiling:
    """Compiles functions of one device with XLA's `options`, and keeps their `reports`."""

    options: dict[str, Any]
    reports: Reports

    def __call__(
        self, name: str, fn: Callable[..., Tree], args: Tree, device: Any, donate: tuple[int, ...] = ()
    ) -> jax.stages.Compiled:
        where = SingleDeviceSharding(device)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), args)
        fn.__name__ = fn.__qualname__ = name
        compiled, report = compile_and_report(
            jax.jit(fn, donate_argnums=donate, keep_unused=True).lower(*shapes), self.options, platform=device.platform
        )
        self.reports.append((name, report))
        return compiled


def part(array: Array, place: int) -> Array:
    """Returns what of an array over several devices lies on the device of this place among them, without a copy."""
    return array.addressable_shards[place].data


def _plan(
    pipeline: Pipeline, head: End, stages: Sequence[Stage], begun: Tree, devices: Sequence[Any], options: Mapping[str, Any]
) -> ExecutionPlan:
    """Returns the schedule as instructions for these devices."""
    shaped = [replace(stage.shaped, device=devices[stage.rank]) for stage in stages]
    # All sums lie where they lay, whichever part they come from.
    aliased = [(*one.early, *one.late) for one in shaped] + [tuple(range(len(head.reads)))]

    def loss(params: Tree, y: Array, batch: Tree) -> Array:
        return head(params, y, batch).astype(jnp.float32)

    return make_plan(
        shaped,
        pipeline.schedule,
        aliased=aliased,
        reuse=True,
        join="segments",
        outputs="drop",
        keyed="given",
        loss_fn=loss,
        loss_args=(jax.tree.map(shard, begun["batch"][0]),),
        loss_params=head.shapes,
        options=options,
        copies="shared" if _is_long(shaped[-1]) else "each",
    )


def _is_long(shaped: Shaped) -> bool:
    """Returns whether a stage's forward takes so long that the update of a command buffer does not matter."""
    rate = peak_flops(shaped.device.device_kind)
    inputs = [*shaped.x.avals, *shaped.extra.avals]
    return rate is None or product_flops(shaped.forward, list(shaped.params.avals), inputs) / rate > _LONG


def _sources(
    plan: ExecutionPlan, head: End, stages: Sequence[Stage], begun: Tree, devices: Sequence[Any]
) -> tuple[list[Any], list[tuple[int, int | Made, int]]]:
    """Returns the registers with what never changes, and what the others are filled with."""
    leaves, structure = jax.tree.flatten(begun)
    numbers = structure.unflatten(range(len(leaves)))
    params = [*(stage.params for stage in stages), sources_of(head, 1, len(leaves))]
    registers: list[Any] = [None] * len(plan.flow.avals)
    filled: list[tuple[int, int | Made, int]] = []
    for (kind, *where), register in plan.flow.named.items():
        source: Source
        match kind:
            case "params":
                i, place = where
                source = params[i][place]
            case "extra":
                i, m, place = where
                source = stages[i].extra[m][place]
            case _:
                assert kind == "loss", f"a stage has no {kind}"
                i, (m, place) = len(stages), where
                source = jax.tree.leaves(numbers["batch"][m])[place]
        rank = _rank_of(i, stages)
        if isinstance(source, Number):
            registers[register] = jnp.asarray(source.value, jnp.int32, device=devices[rank])
        else:
            filled.append((register, source, rank))
    return registers, filled


def _rank_of(i: int, stages: Sequence[Stage]) -> int:
    """Returns the rank of a callable: of a stage, or of the loss, which is one more and where the last stage is."""
    return stages[min(i, len(stages) - 1)].rank


def _sums_of(end: End, number: int, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Returns (callable, place) of the sums for what embedding (0), in the first stage, or head (1), the loss, reads."""
    i, first = ((0, len(stages[0].names)), (len(stages), 0))[number]
    return [(i, first + n) for n in range(len(end.reads))]
