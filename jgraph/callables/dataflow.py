"""What flows where when a schedule is played: which task reads and writes which array, and what may be one executable.

Every array has a register, a number. The actions of all ranks are walked by tick, layer by layer, and every array gets its
register where it is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from jgraph.callables.compile import Task, left_by
from jgraph.callables.shaped import Shaped, Side
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, KINDS, Kind
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.tables import tick_table

Join = Literal["segments", "nothing"]
Outputs = Literal["drop", "keep"]

# Tasks in one executable: beyond, compiling takes longer than the launches that it saves.
_MOST_JOINED = 64
# Buffers of a shape that a rank sends from, in turn: the next is written while the last is read. An array that is sent and then
# freed is free when its transfer is over, and what comes next would lie now here, now there.
_SEND_BUFFERS = 3
_NEVER = 1 << 62


@dataclass
class Unit:
    """An action of one callable: tasks that always go together, and what they send."""

    rank: int
    tick: int
    tasks: list[Task]
    sends: list[tuple[int, int, Any]]
    needed_at: int = -1
    used_at: int = _NEVER


@dataclass
class Flow:
    """Registers given out so far.

    Attributes:
        callables, devices, aliased, reuse: as `make_plan` takes them; devices by rank.
        loss_params, loss_side, loss_aval: of the loss's parameters, of its arguments after y, and of the loss.
        avals: of every register.
        named: registers of what the caller gives, by name; see `given`.
        values: what waits for its next reader: ("x" | "y" | "dy" | "residuals" | "stash", callable, microbatch).
        sums: (callable, parameter) to register; the loss is one callable more.
        losses: by microbatch.
        aux: (callable, microbatch) to the registers of what its forward gives besides y.
        send_buffers: of what is sent, the register of the buffer that it is written to; `turns`, those of a rank and shape.
    """

    callables: Sequence[Shaped]
    devices: Sequence[Any]
    aliased: Sequence[Sequence[int]]
    reuse: bool
    loss_params: Side
    loss_side: Side
    loss_aval: Any
    avals: dict[int, Any] = field(default_factory=dict)
    values: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    named: dict[tuple[Any, ...], int] = field(default_factory=dict)
    losses: dict[int, int] = field(default_factory=dict)
    aux: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    send_buffers: dict[int, int] = field(default_factory=dict)
    turns: dict[Any, list[int]] = field(default_factory=dict)

    def send_buffer(self, source: int, rank: int, busy: set[int]) -> int:
        """Returns the register of the buffer that an array is written to before it is sent; those of a shape take turns.

        `busy` are those that the same executable writes already; the new one is added.
        """
        aval = self.avals[source]
        turns = self.turns.setdefault((rank, aval.shape, aval.dtype), [])
        free = [r for r in turns if r not in busy]
        send_buffer = free[0] if free and len(turns) >= _SEND_BUFFERS else self.register(aval)
        turns[:] = [*(r for r in turns if r != send_buffer), send_buffer]
        busy.add(send_buffer)
        self.send_buffers[source] = send_buffer
        return send_buffer

    def register(self, aval: Any) -> int:
        register = len(self.avals)
        self.avals[register] = aval
        return register

    def given(self, aval: Any, *name: Any) -> int:
        """Returns the register of something that the caller gives.

        Its name is ("params", callable, place), where the loss is one callable more, ("x" or "loss", microbatch, place),
        ("extra", callable, microbatch, place), ("keys", callable, place) for a random key to be folded, ("step", rank), or
        ("microbatch", rank, number).
        """
        if name not in self.named:
            self.named[name] = self.register(aval)
        return self.named[name]

    def params(self, i: int, part: str) -> tuple[int, ...]:
        side = self.callables[i].params
        return tuple(self.given(side.avals[place], "params", i, place) for place in self.callables[i].reads[part])

    def forward(self, unit: Unit, i: int, m: int, next_rank: int | None) -> None:
        shaped = self.callables[i]
        if i == 0:
            self.values["x", 0, m] = [self.given(aval, "x", m, place) for place, aval in enumerate(shaped.x.avals)]
        ins = [*self.values.pop(("x", i, m)), *self._extra(unit, i, m)]
        y = [self.register(aval) for aval in shaped.y.avals]
        residuals, written = left_by(shaped.residuals, shaped.residuals_from, ins, self.register)
        self.aux[i, m] = [self.register(aval) for aval in shaped.aux.avals]
        unit.tasks.append(Task("forward", i, tuple(ins), (*y, *written, *self.aux[i, m]), self.params(i, "forward")))
        self.values["residuals", i, m] = residuals
        if next_rank is None:
            self._loss(unit, i, m, y)
        else:
            self.values["x", i + 1, m] = self._send(unit, y, shaped.y.avals, next_rank)

    def _extra(self, unit: Unit, i: int, m: int) -> list[int]:
        shaped = self.callables[i]
        registers = []
        for place, aval in enumerate(shaped.extra.avals):
            if ("keys", i, place) in self.named:
                key = self.register(aval)
                scalar = jax.ShapeDtypeStruct((), np.int32)
                step = self.given(scalar, "step", unit.rank)
                microbatch = self.given(scalar, "microbatch", unit.rank, m)
                unit.tasks.append(Task("key", i, (self.named["keys", i, place], step, microbatch), (key,)))
                registers.append(key)
            else:
                registers.append(self.given(aval, "extra", i, m, place))
        return registers

    def _loss(self, unit: Unit, i: int, m: int, y: list[int]) -> None:
        shaped = self.callables[i]
        arguments = [self.given(aval, "loss", m, place) for place, aval in enumerate(self.loss_side.avals)]
        dy = [self.register(aval) for aval in shaped.y.avals]
        self.losses[m] = self.register(self.loss_aval)
        params, places = self.loss_params.avals, range(len(self.loss_params))
        read = tuple(self.given(params[place], "params", i + 1, place) for place in places)
        grads = self._grads(i + 1, places)
        unit.tasks.append(Task("loss", i, (*y, *arguments), (self.losses[m], *dy), read, grads))
        self.values["y", i, m], self.values["dy", i, m] = y, dy

    def backward(self, unit: Unit, kind: Kind, i: int, m: int, previous_rank: int | None) -> None:
        shaped = self.callables[i]
        residuals = self.values["residuals", i, m]
        if kind == "wgrad" and not shaped.late:
            del self.values["stash", i, m]
            return
        if kind == "wgrad":
            ins = [*residuals[shaped.num_dgrad :], *self.values.pop(("stash", i, m))]
            task = Task(kind, i, tuple(ins), (), self.params(i, "wgrad"), self._grads(i, shaped.late))
            unit.tasks.append(task)
            return
        ins = [*residuals, *self.values.pop(("dy", i, m))]
        dx: list[int] = []
        if previous_rank is not None and shaped.takes_gradient:
            dx = [self.register(aval) for aval in shaped.x.avals]
        outs: list[int | None] = [*dx] if dx else [None] * shaped.num_dx
        places, read = (*shaped.early, *shaped.late), self.params(i, "dgrad")
        if kind == "dgrad":
            places = shaped.early
            self.values["stash", i, m], written = left_by(shaped.stash, shaped.stash_from, ins, self.register)
            outs += written
        else:
            read += self.params(i, "wgrad")
        unit.tasks.append(Task(kind, i, tuple(ins), tuple(outs), read, self._grads(i, places)))
        if previous_rank is not None and dx:
            self.values["dy", i - 1, m] = self._send(unit, dx, shaped.x.avals, previous_rank)

    def _grads(self, i: int, places: Sequence[int]) -> tuple[Any, ...]:
        params, grads = (*(shaped.params for shaped in self.callables), self.loss_params)[i], []
        for place in places:
            aval, name = params.avals[place], (i, place)
            how = "add" if name in self.sums else "over" if place in self.aliased[i] else "start"
            if name not in self.sums:
                self.sums[name] = self.register(jax.ShapeDtypeStruct(aval.shape, np.float32))
            grads.append((place, self.sums[name], how))
        return tuple(grads)

    def _send(self, unit: Unit, registers: list[int], avals: Sequence[Any], rank: int) -> list[int]:
        if self.devices[rank] == self.devices[unit.rank]:
            return registers
        arrived = [self.register(aval) for aval in avals]
        unit.sends += [(a, b, self.devices[rank]) for a, b in zip(registers, arrived, strict=True)]
        return arrived


def units_of(flow: Flow, schedule: Schedule) -> list[Unit]:
    """Returns the actions of all ranks by tick, layer by layer, with the ticks by which they may be joined."""
    ends = np.cumsum(schedule.num_layers).tolist()
    rank_of = np.repeat(schedule.rank_of_stage, schedule.num_layers).tolist()
    # The ticks of forwards and dgrads, and none before the first stage and after the last.
    forward, dgrad = (
        np.pad(schedule.when(schedule.ticks, kinds), ((1, 1), (0, 0)), constant_values=-1)
        for kinds in ((FORWARD,), (DGRAD, BACKWARD))
    )
    home = np.pad(schedule.rank_of_stage, 1, constant_values=-1)
    table, units = tick_table(schedule), []
    for tick, r in np.argwhere(table.kind != IDLE).tolist():
        kind, stage, m = KINDS[table.kind[tick, r]], int(table.stage[tick, r]), int(table.microbatch[tick, r])
        # What an action needs comes from one neighbour, and what it makes goes to the other.
        ticks, step = (forward, 1) if kind == "forward" else (dgrad, -1)
        before, after = stage + 1 - step, stage + 1 + step
        places = range(ends[stage] - schedule.num_layers[stage], ends[stage])
        for i in places if kind == "forward" else reversed(places):
            unit = Unit(r, tick, [], [])
            if kind == "forward":
                flow.forward(unit, i, m, rank_of[i + 1] if i + 1 < len(rank_of) else None)
            else:
                flow.backward(unit, kind, i, m, rank_of[i - 1] if i else None)
            if kind != "wgrad" and home[before] != r:
                unit.needed_at = int(ticks[before, m])
            if unit.sends:
                unit.used_at = int(ticks[after, m])
            # The wgrad of a callable that has nothing to delay is none.
            units += [unit] if unit.tasks else []
    return units


def segments_of(units: Sequence[Unit], join: Join) -> list[list[Unit]]:
    """Returns the units of each executable, by their first tick.

    Consecutive actions of a rank are joined where no transfer stands between them: what they need from other ranks was made
    before the first of them starts, and nobody waits for what they make until the last has ended, both by the schedule's ticks.
    So every segment needs only segments that start earlier, and playing them by their starts cannot deadlock.
    """
    done: list[list[Unit]] = []
    open_: dict[int, list[Unit]] = {}
    for unit in units:
        segment = open_.get(unit.rank, [])
        if (
            join == "segments"
            and segment
            and unit.needed_at < segment[0].tick
            and all(other.used_at > unit.tick for other in segment)
            and sum(len(other.tasks) for other in segment) < _MOST_JOINED
        ):
            segment.append(unit)
        else:
            open_[unit.rank] = [unit]
            done.append(open_[unit.rank])
    return sorted(done, key=lambda segment: segment[0].tick)
