"""Tables: a schedule as arrays over ticks and ranks, for a program that all ranks run.

A scan over `TickTable` plays any schedule whose stages pass between neighbours. Where all ranks do the same kind of action in a
tick (the aligned schedules), `phases` gives the few kinds of round there are, so that a program needs no branch on the kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import FORWARD, IDLE, KINDS, WGRAD, Kind
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.slots import POOLS, Slots, assign

# T ticks, P ranks

Source = Literal["previous", "next", "same"]
SOURCES: tuple[Source, ...] = ("previous", "next", "same")


@dataclass(frozen=True)
class Arrivals:
    """What reaches each rank from one source at the start of a tick, made in the tick before. All int32 [T, P], -1 for nothing.

    Attributes:
        activation: the slot in the pool `activation` that takes it.
        gradient: the slot in the pool `gradient` that takes it.
    """

    activation: np.ndarray
    gradient: np.ndarray


@dataclass(frozen=True)
class TickTable:
    """Who does what in each tick, and where it reads and writes. All int32 [T, P].

    Attributes:
        kind: place in `KINDS`; `IDLE` where a rank does nothing.
        stage, chunk, microbatch: of the action; -1 where idle.
        slots: for each pool, the place that the action writes (what it makes) or reads (what it uses); -1 where it touches
            none. A forward writes forward_dgrad and forward_wgrad and reads activation; a dgrad reads forward_dgrad and
            gradient and writes stash; a wgrad reads forward_wgrad and stash; a backward reads forward_dgrad, forward_wgrad and
            gradient.
        arrivals: what comes from the previous rank, the next one (both round the ring), and from a stage on the same rank.
        counts: places in each pool that every rank must have.
    """

    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    slots: Mapping[str, np.ndarray]
    arrivals: Mapping[Source, Arrivals]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Phase:
    """Rounds of one kind, one after another.

    Attributes:
        name: `fill` before the first dgrad, `drain` after the last forward, `steady` between.
        kinds: of each tick of the round; two where some ranks fill in a pending wgrad while the others do the first.
        first_tick: of the first round, in the table.
        rounds: how many.
    """

    name: Literal["fill", "steady", "drain"]
    kinds: tuple[tuple[Kind, ...], ...]
    first_tick: int
    rounds: int


def tick_table(schedule: Schedule, slots: Slots | None = None) -> TickTable:
    """The tables of a schedule.

    Args:
        schedule: what runs when; consecutive stages on the same rank or on neighbours in the ring.
        slots: where everything is kept; None for `assign(schedule)`.

    Raises:
        OrderError: consecutive stages are on ranks that are not neighbours.
    """
    slots = assign(schedule) if slots is None else slots
    shape = (schedule.num_ticks, schedule.num_ranks)
    kind, stage, chunk, microbatch = (np.full(shape, fill, np.int32) for fill in (IDLE, -1, -1, -1))
    for r, (order, stages, ticks) in enumerate(zip(schedule.orders, schedule.stages, schedule.ticks, strict=True)):
        kind[ticks, r], stage[ticks, r] = order.kinds, stages
        chunk[ticks, r], microbatch[ticks, r] = order.chunks, order.microbatches
    # By kind, the pools that it touches; a place that is not there is -1 in the slots already.
    touches = {
        "forward_dgrad": (1, 1, 0, 1, 0),
        "forward_wgrad": (1, 0, 1, 1, 0),
        "stash": (0, 1, 1, 0, 0),
        "activation": (1, 0, 0, 0, 0),
        "gradient": (0, 1, 0, 1, 0),
    }
    touched = {
        pool: np.where(np.array(touches[pool], bool)[kind], slots.numbers[pool][stage, microbatch], -1).astype(np.int32)
        for pool in POOLS
    }
    counts = {pool: int(slots.counts[pool].max()) for pool in POOLS}
    return TickTable(kind, stage, chunk, microbatch, touched, _arrivals(schedule, slots, kind, stage, microbatch), counts)


def _arrivals(
    schedule: Schedule, slots: Slots, kind: np.ndarray, stage: np.ndarray, microbatch: np.ndarray
) -> dict[Source, Arrivals]:
    ranks, home = schedule.num_ranks, schedule.rank_of_stage
    tables: dict[Source, Arrivals] = {
        source: Arrivals(np.full(kind.shape, -1, np.int32), np.full(kind.shape, -1, np.int32)) for source in SOURCES
    }
    forward = kind == FORWARD
    passes_on = (kind != IDLE) & (kind != WGRAD) & np.where(forward, stage < schedule.num_stages - 1, stage > 0)
    tick, sender = np.nonzero(passes_on)
    up, m = forward[tick, sender], microbatch[tick, sender]
    goes_to = stage[tick, sender] + np.where(up, 1, -1)
    receiver = home[goes_to]
    step = (receiver - sender) % ranks
    # With two ranks the other one is both neighbours; a forward then counts as coming from the previous, a dgrad from the next.
    sources: dict[Source, np.ndarray] = {
        "same": step == 0,
        "previous": (step == 1) & (up | (ranks > 2)),
        "next": (step == ranks - 1) & (step > 0) & (~up | (ranks > 2)),
    }
    stray = ~np.logical_or.reduce(list(sources.values()))
    if stray.any():
        i = int(np.argmax(stray))
        raise OrderError(
            f"rank {sender[i]} sends to rank {receiver[i]} (stage {goes_to[i]}), which is not its neighbour; place consecutive "
            f"stages on the same rank or on neighbours",
            rank=int(sender[i]),
        )
    for source, mask in sources.items():
        for pool, which in (("activation", mask & up), ("gradient", mask & ~up)):
            table = getattr(tables[source], pool)
            table[tick[which] + 1, receiver[which]] = slots.numbers[pool][goes_to[which], m[which]]
    return tables


def phases(table: TickTable) -> tuple[Phase, ...]:
    """The rounds of an aligned schedule, equal ones joined.

    A round is a tick of forwards, then one of dgrads, then one of wgrads, as far as there are any.

    Raises:
        OrderError: in some tick ranks do different things, other than a wgrad beside one other kind.
    """
    found = [np.unique(row[row != IDLE]) for row in table.kind]
    leads = []
    for tick, kinds in enumerate(found):
        others = kinds[kinds != WGRAD]
        if len(others) > 1 or not len(kinds):
            names = " and ".join(KINDS[k] for k in kinds) or "nothing"
            raise OrderError(f"tick {tick} has {names}; in an aligned schedule all ranks do the same, or fill in a wgrad")
        leads.append(int(others[0]) if len(others) else WGRAD)
    rounds: list[list[int]] = []
    for tick, lead in enumerate(leads):
        if not rounds or lead <= leads[rounds[-1][-1]]:
            rounds.append([])
        rounds[-1].append(tick)
    has_dgrad = np.array([lead not in (FORWARD, WGRAD) for lead in leads])
    has_forward = np.array([lead == FORWARD for lead in leads])
    first_dgrad, last_forward = int(np.argmax(has_dgrad)), int(np.flatnonzero(has_forward)[-1])

    def name(ticks: list[int]) -> Literal["fill", "steady", "drain"]:
        return "fill" if ticks[-1] < first_dgrad else "drain" if ticks[0] > last_forward else "steady"

    def key(ticks: list[int]):
        return name(ticks), tuple(tuple(KINDS[k] for k in sorted(found[t], key=lambda k: k == WGRAD)) for t in ticks)

    joined = []
    for (phase, kinds), group in groupby(rounds, key):
        members = list(group)
        joined.append(Phase(phase, kinds, members[0][0], len(members)))
    return tuple(joined)
