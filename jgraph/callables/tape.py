"""A tape: a schedule as a list of instructions that a host can follow without thinking.

Every array has a register. An instruction runs one executable, sends some results to other devices, and frees what nothing
reads any more. Consecutive actions of a rank are joined into one executable where no transfer stands between them: what they
need from other ranks was made before the first of them starts, and nobody waits for what they make until the last has ended
(both by the schedule's ticks). Each segment needs only segments that start earlier, so playing them by their starts cannot
deadlock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.callables.program import Compiler, Job, Program, Task
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError
from jgraph.schedule.action import KINDS, Kind
from jgraph.schedule.schedule import Schedule

Join = Literal["segments", "nothing"]
Outputs = Literal["drop", "keep"]

# Tasks in one executable: beyond, compiling takes longer than the launches that it saves.
_MOST_JOINED = 64
# Buffers of a shape that a rank sends from, in turn: the next is written while the last is read. An array that is sent and then
# freed is free when its transfer is over, and what comes next would lie now here, now there.
_BERTHS = 3
# Instructions that have an executable each; of longer tapes equal ones share it.
_MOST_EXECUTABLES = 512
_NEVER = 1 << 62


@dataclass(frozen=True)
class Instruction:
    """Run `program`; send `sends` (from register, to register, device), put back `returns` (from, to), free `frees`."""

    program: Program
    sends: tuple[tuple[int, int, Any], ...]
    returns: tuple[tuple[int, int], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tape:
    """Instructions, and which registers the host fills before and reads after.

    Attributes:
        instructions: in the order in which to run them.
        size: number of registers.
        params: for each callable, the register of each parameter.
        inputs: for each microbatch, registers of the first x.
        extra: (callable, microbatch, place) to register, of arguments after x.
        loss_args: for each microbatch.
        loss_side: their structure and shapes.
        keys: (callable, place) to the register of a key, to be folded.
        steps: for each rank, the register of the step's number; empty without keys.
        microbatches: (rank, microbatch) to the register of that number.
        main_grad: (callable, parameter) to register, of aliased gradients.
        losses: for each microbatch.
        outputs: for each microbatch; empty where they are dropped.
        sums: (callable, parameter) to register, of all gradients.
        starts: whether the sums are to be `zeros` before it is played; `anything` where its first executables write over them.
        devices: of each rank.
        berths: registers of the buffers that are sent from, each with its shape and rank.
        moored: arrays in them, kept from one run to the next; empty before the first.
        pool: registers of buffers that only the tape ever sees, each with its pool.
        home: rank of each register in `pool`.
    """

    instructions: tuple[Instruction, ...]
    size: int
    params: list[list[int]]
    inputs: list[list[int]]
    extra: dict[tuple[int, int, int], int]
    loss_args: list[list[int]]
    loss_side: Side
    keys: dict[tuple[int, int], int]
    steps: list[int]
    microbatches: dict[tuple[int, int], int]
    main_grad: dict[tuple[int, int], int]
    losses: list[int]
    outputs: list[list[int]]
    sums: dict[tuple[int, int], int]
    starts: Literal["zeros", "anything"]
    devices: Sequence[Any]
    berths: Mapping[int, tuple[Any, int]]
    moored: dict[int, jax.Array]
    pool: Mapping[int, str]
    home: Mapping[int, int]


@dataclass
class _Unit:
    """An action of one callable: tasks that always go together, and what they send."""

    rank: int
    tick: int
    tasks: list[Task]
    sends: list[tuple[int, int, Any]]
    needed_at: int = -1
    used_at: int = _NEVER


@dataclass
class _Builder:
    callables: Sequence[Shaped]
    devices: Sequence[Any]
    aliased: Sequence[Sequence[int]]
    reuse: bool
    join: Join
    outputs: Outputs
    loss_side: Side
    loss_aval: Any
    avals: dict[int, Any] = field(default_factory=dict)
    pool: dict[int, str] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)
    external: set[int] = field(default_factory=set)
    values: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    started: set[tuple[int, int]] = field(default_factory=set)
    named: dict[tuple[Any, ...], int] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)
    berths: dict[int, int] = field(default_factory=dict)
    turns: dict[Any, list[int]] = field(default_factory=dict)

    def berth(self, source: int, rank: int) -> int:
        """The register of the buffer that an array is written to before it is sent; those of a shape take turns."""
        aval = self.avals[source]
        turns = self.turns.setdefault((rank, aval.shape, aval.dtype), [])
        turns.append(self.register(aval) if len(turns) < _BERTHS else turns.pop(0))
        self.berths[source] = turns[-1]
        return turns[-1]

    def register(self, aval: Any) -> int:
        register = len(self.avals)
        self.avals[register] = aval
        return register

    def given(self, aval: Any, *name: Any) -> int:
        """The register of something that the caller gives, by name."""
        if name not in self.named:
            self.named[name] = self.register(aval)
            self.external.add(self.named[name])
        return self.named[name]

    def pooled(self, aval: Any, pool: str, rank: int) -> int:
        register = self.register(aval)
        self.pool[register], self.home[register] = pool, rank
        return register

    def unit(self, kind: Kind, rank: int, tick: int, i: int, m: int, neighbours: tuple[int | None, int | None]) -> _Unit:
        """The tasks of an action of callable i; `neighbours` are the ranks of callables i - 1 and i + 1."""
        unit = _Unit(rank, tick, [], [])
        if kind == "forward":
            self._forward(unit, i, m, neighbours[1])
        else:
            self._backward(unit, kind, i, m, neighbours[0])
        return unit

    def params(self, i: int, part: str) -> tuple[int, ...]:
        side = self.callables[i].params
        return tuple(self.given(side.avals[place], "params", i, place) for place in self.callables[i].reads[part])

    def _forward(self, unit: _Unit, i: int, m: int, next_rank: int | None) -> None:
        part = self.callables[i]
        if i == 0:
            self.values["x", 0, m] = [self.given(aval, "x", m, place) for place, aval in enumerate(part.x.avals)]
        ins = [*self.values.pop(("x", i, m)), *self._extra(unit, i, m)]
        if next_rank is None and self.outputs == "keep":
            y = [self.register(aval) for aval in part.y.avals]
        else:
            y = [self.pooled(aval, "activation", unit.rank) for aval in part.y.avals]
        residuals: list[int] = []
        outs: list[int | None] = [*y]
        for place, (aval, source) in enumerate(zip(part.residuals.avals, part.residuals_from, strict=True)):
            pool = "forward_dgrad" if place < part.num_dgrad else "forward_wgrad"
            residuals.append(self.pooled(aval, pool, unit.rank) if source is None else ins[source])
            outs.append(residuals[-1] if source is None else None)
        unit.tasks.append(Task("forward", i, tuple(ins), tuple(outs), self.params(i, "forward")))
        self.values["residuals", i, m] = residuals
        if next_rank is None:
            self._loss(unit, i, m, y)
        else:
            self.values["x", i + 1, m] = self._send(unit, y, part.y.avals, "activation", next_rank)

    def _extra(self, unit: _Unit, i: int, m: int) -> list[int]:
        part = self.callables[i]
        registers = []
        for place, aval in enumerate(part.extra.avals):
            if ("keys", i, place) in self.named:
                key = self.pooled(aval, "forward_wgrad", unit.rank)
                scalar = jax.ShapeDtypeStruct((), np.int32)
                step = self.given(scalar, "step", unit.rank)
                microbatch = self.given(scalar, "microbatch", unit.rank, m)
                unit.tasks.append(Task("key", i, (self.named["keys", i, place], step, microbatch), (key,)))
                registers.append(key)
            else:
                registers.append(self.given(aval, "extra", i, m, place))
        return registers

    def _loss(self, unit: _Unit, i: int, m: int, y: list[int]) -> None:
        part = self.callables[i]
        arguments = [self.given(aval, "loss", m, place) for place, aval in enumerate(self.loss_side.avals)]
        dy = [self.pooled(aval, "gradient", unit.rank) for aval in part.y.avals]
        self.losses[m] = self.register(self.loss_aval)
        unit.tasks.append(Task("loss", i, (*y, *arguments), (self.losses[m], *dy)))
        self.values["y", i, m], self.values["dy", i, m] = y, dy

    def _backward(self, unit: _Unit, kind: Kind, i: int, m: int, previous_rank: int | None) -> None:
        part = self.callables[i]
        residuals = self.values["residuals", i, m]
        if kind == "wgrad":
            ins = [*residuals[part.num_dgrad :], *self.values.pop(("stash", i, m))]
            task = Task(kind, i, tuple(ins), (), self.params(i, "wgrad"), self._grads(i, part.late))
            unit.tasks.append(task)
            return
        ins = [*residuals, *self.values.pop(("dy", i, m))]
        dx: list[int] = []
        if previous_rank is not None and part.takes_gradient:
            dx = [self.pooled(aval, "gradient", unit.rank) for aval in part.x.avals]
        outs: list[int | None] = [*dx] if dx else [None] * part.num_dx
        places, read = (*part.early, *part.late), self.params(i, "dgrad")
        if kind == "dgrad":
            places, stash = part.early, []
            for aval, source in zip(part.stash.avals, part.stash_from, strict=True):
                stash.append(self.pooled(aval, "stash", unit.rank) if source is None else ins[source])
                outs.append(stash[-1] if source is None else None)
            self.values["stash", i, m] = stash
        else:
            read += self.params(i, "wgrad")
        unit.tasks.append(Task(kind, i, tuple(ins), tuple(outs), read, self._grads(i, places)))
        if previous_rank is not None and dx:
            self.values["dy", i - 1, m] = self._send(unit, dx, part.x.avals, "gradient", previous_rank)

    def _grads(self, i: int, places: Sequence[int]) -> tuple[Any, ...]:
        grads = []
        for place in places:
            aval, name = self.callables[i].params.avals[place], (i, place)
            if name not in self.sums:
                self.sums[name] = self.register(jax.ShapeDtypeStruct(aval.shape, np.float32))
            first = "add" if self.join == "nothing" else "over" if place in self.aliased[i] else "start"
            how = "add" if name in self.started else first
            self.started.add(name)
            grads.append((place, self.sums[name], how))
        return tuple(grads)

    def _send(self, unit: _Unit, registers: list[int], avals: Sequence[Any], pool: str, rank: int) -> list[int]:
        if self.devices[rank] == self.devices[unit.rank]:
            return registers
        arrived = [self.pooled(aval, pool, rank) for aval in avals]
        unit.sends += [(a, b, self.devices[rank]) for a, b in zip(registers, arrived, strict=True)]
        return arrived


def make_tape(
    callables: Sequence[Shaped],
    schedule: Schedule,
    *,
    aliased: Sequence[Sequence[int]],
    reuse: bool,
    join: Join,
    outputs: Outputs,
    keyed: Literal["folded", "given"],
    loss_fn: Callable[..., Any],
    loss_args: Any,
    options: Mapping[str, Any],
) -> Tape:
    """Plans and compiles.

    Args:
        callables: in the order of the data.
        schedule: its stages hold them, `num_layers_per_chunk` each.
        aliased: for each callable, places of the parameters whose sums lie in main_grad.
        reuse: whether buffers are donated to, or freed after, their last consumer.
        join: what is one executable.
        outputs: whether those of the last callable are wanted.
        keyed: whether random keys are folded here, or come with `extra`.
        loss_fn, loss_args: and its arguments after y, one microbatch's as shapes.
        options: for XLA.
    """
    loss_side, last = Side.of(tuple(loss_args)), callables[-1]
    loss_aval = shape_of(jax.eval_shape(loss_fn, last.y.shapes(), *loss_args))
    if loss_aval.shape != () or not np.issubdtype(loss_aval.dtype, np.inexact):
        raise CallableError(f"loss_fn gives {loss_aval.dtype}{list(loss_aval.shape)}: must be a floating scalar")
    devices = _devices(callables, schedule)
    builder = _Builder(callables, devices, aliased, reuse, join, outputs, loss_side, loss_aval)
    for i, part in enumerate(callables):
        for place in part.keys if keyed == "folded" else ():
            builder.given(part.extra.avals[place], "keys", i, place)
    units = _units(builder, schedule)
    segments = _segments(units, join)
    result = set(builder.losses.values()) | set(builder.sums.values())
    count = schedule.num_microbatches
    outs = [builder.values["y", len(callables) - 1, m] for m in range(count)] if outputs == "keep" else []
    result |= {r for group in outs for r in group}
    instructions = _compile(builder, segments, result, options, loss_fn)
    named = builder.named

    def group(kind: str) -> dict[Any, int]:
        return {name[1:]: register for name, register in named.items() if name[0] == kind}

    return Tape(
        instructions=tuple(instructions),
        size=len(builder.avals),
        params=[[named.get(("params", i, place), -1) for place in range(len(part.params))] for i, part in enumerate(callables)],
        inputs=[[named["x", m, place] for place in range(len(callables[0].x))] for m in range(count)],
        extra=group("extra"),
        loss_args=[[named["loss", m, place] for place in range(len(loss_side))] for m in range(count)],
        loss_side=loss_side,
        keys=group("keys"),
        steps=[named.get(("step", r), -1) for r in range(schedule.num_ranks)],
        microbatches=group("microbatch"),
        main_grad={name: r for name, r in builder.sums.items() if name[1] in aliased[name[0]]},
        losses=[builder.losses[m] for m in range(count)],
        outputs=outs,
        sums=builder.sums,
        # Then every addition is made by the same executable, whichever comes first: a sum's bits do not depend on the order.
        starts="zeros" if join == "nothing" else "anything",
        devices=devices,
        berths={r: (builder.avals[r], rank) for (rank, *_), turns in builder.turns.items() for r in turns},
        moored={},
        pool=builder.pool,
        home=builder.home,
    )


def _layers(schedule: Schedule) -> list[int]:
    """How many callables each stage has."""
    layers = [0] * schedule.num_stages
    for order, stages in zip(schedule.orders, schedule.placement, strict=True):
        for stage, count in zip(stages, order.num_layers_per_chunk, strict=True):
            layers[stage] = count
    return layers


def _devices(callables: Sequence[Shaped], schedule: Schedule) -> list[Any]:
    """The device of each rank."""
    ranks = np.repeat(schedule.rank_of_stage, _layers(schedule)).tolist()
    of_rank = dict(zip(ranks, (part.device for part in callables), strict=True))
    return [of_rank[rank] for rank in range(schedule.num_ranks)]


def _units(builder: _Builder, schedule: Schedule) -> list[_Unit]:
    """The actions of all ranks by tick, layer by layer, with the ticks that say what may be joined."""
    layers = _layers(schedule)
    first = np.concatenate([[0], np.cumsum(layers)])
    rank_of = np.repeat(schedule.rank_of_stage, layers).tolist()
    made_at, used_at, home = _meetings(schedule)
    actions = []
    for r, order in enumerate(schedule.orders):
        needs, makes, stages = schedule.needs()[r], schedule.makes()[r], schedule.stages[r]
        for p in range(len(order)):
            need, make = int(needs[p]), int(makes[p])
            needed = int(made_at[need]) if need >= 0 and home[need] != r else -1
            used = int(used_at[make]) if make < len(home) and home[make] >= 0 else _NEVER
            kind, m = KINDS[order.kinds[p]], int(order.microbatches[p])
            actions.append((int(schedule.ticks[r][p]), r, kind, int(stages[p]), m, needed, used))
    units = []
    for tick, r, kind, stage, m, needed, used in sorted(actions, key=lambda action: action[:2]):
        places = range(int(first[stage]), int(first[stage + 1]))
        for i in places if kind == "forward" else reversed(places):
            around = (rank_of[i - 1] if i else None, rank_of[i + 1] if i + 1 < len(rank_of) else None)
            unit = builder.unit(kind, r, tick, i, m, around)
            unit.needed_at, unit.used_at = needed, used if unit.sends else _NEVER
            units.append(unit)
    return units


def _meetings(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For everything that one stage makes for another: the ticks that make and use it, and the rank that makes it."""
    size = 2 * schedule.num_stages * schedule.num_microbatches
    made_at, used_at, home = (np.full(size + 1, -1, np.int64) for _ in range(3))
    used_at[:] = _NEVER
    for r, (ticks, needs, makes) in enumerate(zip(schedule.ticks, schedule.needs(), schedule.makes(), strict=True)):
        made_at[makes], home[makes] = ticks, r
        used_at[needs[needs >= 0]] = ticks[needs >= 0]
    return made_at[:size], used_at[:size], home[:size]


def _segments(units: Sequence[_Unit], join: Join) -> list[list[_Unit]]:
    """Units that are one executable, by their first tick."""
    done: list[list[_Unit]] = []
    open_: dict[int, list[_Unit]] = {}
    for unit in units:
        segment = open_.get(unit.rank)
        joins = (
            join == "segments"
            and segment is not None
            and unit.needed_at < segment[0].tick
            and all(other.used_at > unit.tick for other in segment)
            and sum(len(other.tasks) for other in segment) < _MOST_JOINED
        )
        if joins and segment is not None:
            segment.append(unit)
        else:
            open_[unit.rank] = segment = [unit]
            done.append(segment)
    return sorted(done, key=lambda segment: segment[0].tick)


def _compile(
    builder: _Builder,
    segments: Sequence[Sequence[_Unit]],
    result: set[int],
    options: Mapping[str, Any],
    loss_fn: Callable[..., Any],
) -> list[Instruction]:
    """Which registers leave each segment, where each is read last, and the executables."""
    kept = result | builder.external
    last: dict[int, int] = {}
    for n, segment in enumerate(segments):
        for unit in segment:
            for task in unit.tasks:
                last |= dict.fromkeys(task.ins, n)
            last |= dict.fromkeys((a for a, _, _ in unit.sends), n)
    made_in = {
        r: n for n, segment in enumerate(segments) for unit in segment for t in unit.tasks for r in t.outs if r is not None
    }
    made_in |= {b: n for n, segment in enumerate(segments) for unit in segment for _, b, _ in unit.sends}
    sent = {a for segment in segments for unit in segment for a, _, _ in unit.sends}
    jobs = []
    for n, segment in enumerate(segments):
        tasks = [task for unit in segment for task in unit.tasks]
        outs = {r for task in tasks for r in task.outs if r is not None}
        wanted = {r for r in outs if r in result or r in sent or last.get(r, n) > n} | {
            register for task in tasks for _, register, _ in task.grads
        }
        dying = (
            {r for task in tasks for r in task.ins if last[r] == n and r not in kept and r not in sent}
            if builder.reuse
            else set()
        )
        stored = [(a, builder.berth(a, unit.rank)) for unit in segment for a, _, _ in unit.sends if made_in.get(a) == n]
        jobs.append(Job(tasks, wanted, dying, stored if builder.reuse else ()))
    # A command buffer whose arrays lie elsewhere than at its last launch is updated first, which takes as long as the launch.
    # With an executable to itself, an instruction finds them where they were a step ago (notes/measurements.md).
    captures = any(part.device.platform != "cpu" for part in builder.callables)
    copies = "each" if captures and len(jobs) <= _MOST_EXECUTABLES else "shared"
    compiler = Compiler(dict(enumerate(builder.callables)), options, loss_fn)
    programs = compiler.programs(jobs, builder.avals, builder.loss_side.tree, copies=copies)
    ended: list[list[int]] = [[] for _ in segments]
    for r, n in last.items():
        if r not in kept and r not in builder.berths and (made_in[r] < n or r in sent):
            ended[n if builder.reuse else len(segments) - 1].append(r)
    instructions = []
    for segment, program, frees in zip(segments, programs, ended, strict=True):
        sends = tuple(send for unit in segment for send in unit.sends)
        returns = tuple((a, builder.berths[a]) for a, _, _ in sends if a in builder.berths)
        instructions.append(Instruction(program, sends, returns, tuple(r for r in frees if r not in program.donated)))
    return instructions


def play(tape: Tape, registers: list[Any], watch: Callable[[int], None] | None = None) -> None:
    """Runs the instructions on filled registers.

    Args:
        tape: what to run.
        registers: arrays by register; updated.
        watch: called with each instruction's number after it was handed over; for tests.
    """
    for r, (aval, rank) in tape.berths.items():
        # Also after a run that failed half-way.
        array = tape.moored.pop(r, None)
        registers[r] = jnp.zeros(aval.shape, aval.dtype, device=tape.devices[rank]) if array is None else array
    for n, instruction in enumerate(tape.instructions):
        program = instruction.program
        sums, outs = program.compiled(
            [registers[r] for r in program.sums],
            [registers[r] for r in program.donated],
            [registers[r] for r in program.read],
        )
        for r, value in zip(program.sums, sums, strict=True):
            registers[r] = value
        for r in program.donated:
            registers[r] = None
        for r, value in zip(program.outs, outs, strict=True):
            registers[r] = value
        for source, target, device in instruction.sends:
            registers[target] = jax.device_put(registers[source], device)
        for source, target in instruction.returns:
            registers[target], registers[source] = registers[source], None
        for r in instruction.frees:
            registers[r].delete()
            registers[r] = None
        if watch is not None:
            watch(n)
    tape.moored.update((r, registers[r]) for r in tape.berths)
