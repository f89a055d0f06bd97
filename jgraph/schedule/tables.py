"""Tables: a schedule as numbers by tick and rank, for a program that all ranks run. No jax.

A scan over `ScheduleTables` plays any schedule whose stages pass between neighbours. Where all ranks do the same kind of
action in a tick (the aligned schedules), `phases` gives the few kinds of round there are: a program then needs no branch.

Where ranks run the same writes, a rank that makes nothing that is to be kept does too. Such a write goes to a slot that is free
at that time, or, if there is none, to one slot more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, get_args

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, KINDS, WGRAD, Kind
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.slots import POOLS, live_ranges, number

# T ticks, P ranks, S stages, M microbatches

Source = Literal["previous", "next", "same"]
Writing = Literal["makers", "all"]

_MAKERS = dict.fromkeys((*POOLS, "loss"), (FORWARD,)) | {"stash": (DGRAD,), "gradient": (DGRAD, BACKWARD)}


@dataclass(frozen=True)
class TickTable:
    """Who does what in each tick. All int32 [T, P].

    Attributes:
        kind: place in `KINDS`; `IDLE` where a rank does nothing.
        stage, chunk, microbatch: of the action; -1 where idle.
    """

    kind: np.ndarray
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray


@dataclass(frozen=True)
class ScheduleTables:
    """Who does what, and where it reads and writes. All int32 [T, P], unless it says otherwise.

    Attributes:
        table: kinds, stages, chunks, microbatches.
        reads: for each pool, the slot that the action may read; 0 where it reads none.
        writes: for each pool that actions write, the slot; never -1.
        arrivals: for each source and for `activation` and `gradient`, the slot that what comes from there at the end of the
            tick is written to; never -1. Only the sources from which something comes at all: the previous rank and the next
            one (both round the ring), and a stage on the same rank.
        enter, leave, back: int32 [T]: the microbatch whose first forward, last forward and last dgrad this tick has; else -1.
        slots: of each pool; `loss` holds the last stage's dy until its dgrad.
        hops: for each source, the pairs (sender, receiver) of ranks.
    """

    table: TickTable
    reads: Mapping[str, np.ndarray]
    writes: Mapping[str, np.ndarray]
    arrivals: Mapping[tuple[Source, str], np.ndarray]
    enter: np.ndarray
    leave: np.ndarray
    back: np.ndarray
    slots: Mapping[str, int]
    hops: Mapping[Source, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Phase:
    """Rounds of one kind, one after another.

    Attributes:
        kinds: of each tick of the round; two where some ranks fill in a pending wgrad while the others do the first.
        first_tick: of the first round, in the table.
        rounds: how many.
        is_handed: whether the wgrads follow their dgrads at once on every rank, and take the stash from their hands.
    """

    kinds: tuple[tuple[Kind, ...], ...]
    first_tick: int
    rounds: int
    is_handed: bool = False


# A schedule never changes: what a program asks for several times is made once.
@lru_cache(maxsize=8)
def tick_table(schedule: Schedule) -> TickTable:
    """Returns who does what in each tick."""
    shape = (schedule.num_ticks, schedule.num_ranks)
    kind, stage, chunk, microbatch = (np.full(shape, fill, np.int32) for fill in (IDLE, -1, -1, -1))
    for r, (order, stages, ticks) in enumerate(zip(schedule.orders, schedule.stages, schedule.ticks, strict=True)):
        kind[ticks, r], stage[ticks, r] = order.kinds, stages
        chunk[ticks, r], microbatch[ticks, r] = order.chunks, order.microbatches
    return TickTable(kind, stage, chunk, microbatch)


@lru_cache(maxsize=8)
def tabulate(schedule: Schedule, *, writing: Writing = "all") -> ScheduleTables:
    """Returns the tables of a schedule.

    Args:
        schedule: consecutive stages are on the same rank or on neighbours in the ring.
        writing: what a rank writes that makes nothing. `all`: in every tick dy of the loss and what arrives; no residuals and
            no stash. `makers`: everything, in the ticks in which some rank makes it, except residuals and stash where others do
            a wgrad. With `makers` a stash that is handed on has no slot.

    Raises:
        OrderError: consecutive stages are on ranks that are not neighbours.
    """
    check_choice("writing", writing, get_args(Writing))
    table, ranges = tick_table(schedule), live_ranges(schedule)
    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    handed = _handed(table) & (writing == "makers")
    for times in ranges["stash"]:
        times[stage[handed], microbatch[handed]] = -1
    # The dy that the loss makes is held as long as the last stage's residuals for dgrad.
    is_last = np.arange(schedule.num_stages)[:, None] == schedule.num_stages - 1
    born, died = ranges["forward_dgrad"]
    ranges["loss"] = np.where(is_last, born, -1), np.where(is_last, died, -1)
    assigned = number(schedule, ranges)
    numbers, counts = assigned.numbers, {pool: int(count.max()) for pool, count in assigned.counts.items()}
    # Whether a slot is in use in a tick, [count (at least 1), T + 1, P].
    taken = {pool: np.zeros((max(count, 1), len(kind) + 1, schedule.num_ranks), bool) for pool, count in counts.items()}
    for pool, (born, died) in ranges.items():
        for (s, m), slot in np.ndenumerate(numbers[pool]):
            if slot >= 0:
                taken[pool][slot, born[s, m] : died[s, m] + 1, schedule.rank_of_stage[s]] = True
    slots = dict(counts)

    def complete(pool: str, column: np.ndarray, late: int) -> np.ndarray:
        """Fills the places where nothing is to be kept; `late` ticks after the column's own is when it is written."""
        makes = np.isin(kind, _MAKERS[pool]).any(1, keepdims=True)
        if pool in POOLS[:3]:
            makes &= (writing == "makers") & ~(kind == WGRAD).any(1, keepdims=True) & ~(handed[:, None] & (pool == "stash"))
        else:
            makes |= writing == "all"
        times = np.minimum(np.arange(len(column)) + late, len(column))
        free = np.argmin(taken[pool][:, times], 0)
        full = np.take_along_axis(taken[pool][:, times], free[None], 0)[0]
        filled = np.where(column >= 0, column, np.where(full & makes, counts[pool], free)).astype(np.int32)
        slots[pool] = max(slots[pool], int(filled.max()) + 1)
        return filled

    def microbatch_where(mask: np.ndarray) -> np.ndarray:
        return np.where(mask, microbatch, -1).max(1).astype(np.int32)

    at = {pool: np.where(kind != IDLE, numbers[pool][stage, microbatch], -1) for pool in numbers}
    writes = {
        pool: complete(pool, np.where(np.isin(kind, _MAKERS[pool]), at[pool], -1), 0)
        for pool in (*POOLS[:3], "loss")
        if counts[pool]
    }
    came, hops = _arrivals(schedule, table, numbers)
    last = schedule.num_stages - 1
    return ScheduleTables(
        table,
        reads={pool: np.maximum(column, 0).astype(np.int32) for pool, column in at.items()},
        writes=writes,
        arrivals={(source, pool): complete(pool, column, 1) for (source, pool), column in came.items()},
        enter=microbatch_where((kind == FORWARD) & (stage == 0)),
        leave=microbatch_where((kind == FORWARD) & (stage == last)),
        back=microbatch_where(np.isin(kind, (DGRAD, BACKWARD)) & (stage == 0)),
        slots=slots,
        hops=hops,
    )


def _arrivals(schedule: Schedule, table: TickTable, numbers: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    """Returns, for each source and pool that is used, the slot of what comes at the end of each tick, -1 for none; and
    for each neighbour the pairs (sender, receiver)."""
    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    ranks, home = schedule.num_ranks, schedule.rank_of_stage
    forward = kind == FORWARD
    passes_on = (kind != IDLE) & (kind != WGRAD) & np.where(forward, stage < schedule.num_stages - 1, stage > 0)
    tick, sender = np.nonzero(passes_on)
    up, m = forward[tick, sender], microbatch[tick, sender]
    goes_to = stage[tick, sender] + np.where(up, 1, -1)
    receiver = home[goes_to]
    step = (receiver - sender) % ranks
    # With two ranks the other one is both neighbours; a forward then counts as coming from the previous, a dgrad from the next.
    sources: dict[Source, np.ndarray] = {
        "previous": (step == 1) & (up | (ranks > 2)),
        "next": (step == ranks - 1) & (step > 0) & (~up | (ranks > 2)),
        "same": step == 0,
    }
    stray = ~np.logical_or.reduce(list(sources.values()))
    if stray.any():
        i = int(np.argmax(stray))
        raise OrderError(
            f"rank {sender[i]} sends to rank {receiver[i]} (stage {goes_to[i]}), which is not its neighbour; place consecutive "
            f"stages on the same rank or on neighbours",
            rank=int(sender[i]),
        )
    found, hops = {}, {}
    for source, mask in sources.items():
        if source != "same" and mask.any():
            pairs = set(zip(receiver[mask].tolist(), sender[mask].tolist(), strict=True))
            hops[source] = tuple((a, b) for b, a in sorted(pairs))
        for pool, which in (("activation", mask & up), ("gradient", mask & ~up)):
            if which.any():
                found[source, pool] = np.full(kind.shape, -1, np.int32)
                found[source, pool][tick[which], receiver[which]] = numbers[pool][goes_to[which], m[which]]
    return found, hops


def phases(table: TickTable) -> tuple[Phase, ...]:
    """Returns the rounds of an aligned schedule, equal ones joined.

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

    def kinds_of(ticks: list[int]) -> tuple[tuple[Kind, ...], ...]:
        return tuple(tuple(KINDS[k] for k in sorted(found[t], key=lambda k: k == WGRAD)) for t in ticks)

    handed = _handed(table)
    joined = ((key, list(group)) for key, group in groupby(rounds, lambda ticks: (kinds_of(ticks), bool(handed[ticks].any()))))
    return tuple(Phase(kinds, group[0][0], len(group), is_handed) for (kinds, is_handed), group in joined)


def _handed(table: TickTable) -> np.ndarray:
    """Returns bool [T]: where all ranks do a dgrad, and its wgrad in the next tick."""
    follows = (table.kind[:-1] == DGRAD) & (table.kind[1:] == WGRAD)
    for column in (table.stage, table.microbatch):
        follows &= column[:-1] == column[1:]
    return np.append(follows.all(1), False)
