"""Tabulates a schedule by tick and rank for an SPMD program. Does not import JAX.

A scan over the rows of `ScheduleTables` runs any schedule that transfers arrays only between neighboring ranks. In an aligned
schedule all ranks run the same kind of action in a tick. `phases` groups its ticks into a few kinds of rounds, so that the
program needs no branch.

All ranks of an SPMD program execute the same writes, even if a rank has no array to store. Such a write goes to a slot that is
free in this tick, or to one additional slot if none is free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, get_args

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule._slots import POOLS, assign, live_ranges
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, KINDS, WGRAD, Kind
from jgraph.schedule.schedule import Schedule

# T ticks, P ranks, S stages, M microbatches

# The previous or next rank of the ring, or another stage on the same rank.
Source = Literal["previous", "next", "same"]
# The ticks in which the program also writes to a pool on ranks that compute no array for it. In these ticks such a rank gets a
# free slot, or an additional slot if none is free.
# all: every tick for the pools `loss`, `activation` and `gradient`, and no tick for the other pools.
# makers: for each pool the ticks in which some rank computes an array for it, but for residuals and stash no tick with a wgrad.
#   A stash also has no slot if all ranks run a wgrad in the tick directly after its dgrad.
Writing = Literal["makers", "all"]

_MAKERS = dict.fromkeys((*POOLS, "loss"), (FORWARD,)) | {"stash": (DGRAD,), "gradient": (DGRAD, BACKWARD)}


@dataclass(frozen=True)
class TickTable:
    """The action of each rank in each tick, int32 [T, P]."""

    kind: np.ndarray  # index in `KINDS`, or `IDLE`
    stage: np.ndarray  # -1 if idle, as in the next two
    chunk: np.ndarray  # of its rank
    microbatch: np.ndarray


@dataclass(frozen=True)
class ScheduleTables:
    """The actions of a schedule and the slots that they read and write, int32 [T, P]. A slot is memory for one array."""

    # The pools are `POOLS`, and `loss` with dy, the gradient of the loss for the output of the last stage. It is kept from the
    # forward of the last stage to its dgrad.
    table: TickTable
    reads: Mapping[str, np.ndarray]  # the slot that has the array for the action's stage and microbatch; 0 if there is none
    # The slot that the rank writes in the tick, for `loss` and the pools that are not received, if they have slots. It is never
    # -1. If the action computes no array for the pool, it is a free or an additional slot in the ticks that `Writing` selects.
    # In other ticks it may be a slot in use, so the program must not write.
    writes: Mapping[str, np.ndarray]
    # The slot for the `activation` or `gradient` that the rank receives at the end of the tick; those of a rank that receives
    # nothing follow the rule of `writes`. Pairs without transfers have no key.
    arrivals: Mapping[tuple[Source, str], np.ndarray]
    enter: np.ndarray  # int32 [T], the microbatch of a forward of the first stage in this tick; -1 for none
    leave: np.ndarray  # the same for a forward of the last stage
    back: np.ndarray  # the same for a dgrad or full backward of the first stage
    slots: Mapping[str, int]  # the number of slots, the same on every rank, including additional slots
    # The (sender, receiver) pairs of ranks for `previous` and `next`: the argument `perm` of `jax.lax.ppermute`.
    hops: Mapping[Source, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds of an aligned schedule with the same kinds of actions. A round is at most three ticks."""

    # One tuple per tick of a round. It has two kinds, the second of them `wgrad`, if some ranks run a wgrad while others run
    # the first kind. Else it has one kind.
    kinds: tuple[tuple[Kind, ...], ...]
    first_tick: int
    rounds: int
    # In every round, all ranks run a dgrad in one tick and the wgrad of the same stage and microbatch in the next tick. The
    # stash of these dgrads then needs no slot.
    is_handed: bool = False


@lru_cache(maxsize=8)
def tick_table(schedule: Schedule) -> TickTable:
    """Returns the action of each rank in each tick. Cached by the identity of the schedule: do not write to the arrays."""
    shape = (schedule.num_ticks, schedule.num_ranks)
    kind, stage, chunk, microbatch = (np.full(shape, fill, np.int32) for fill in (IDLE, -1, -1, -1))
    for r, (order, stages, ticks) in enumerate(zip(schedule.orders, schedule.stages, schedule.ticks, strict=True)):
        kind[ticks, r] = order.kinds
        stage[ticks, r] = stages
        chunk[ticks, r] = order.chunks
        microbatch[ticks, r] = order.microbatches
    return TickTable(kind, stage, chunk, microbatch)


@lru_cache(maxsize=8)
def tabulate(schedule: Schedule, *, writing: Writing = "all") -> ScheduleTables:
    """Builds the tables of a schedule for an SPMD program. Cached by identity: do not write to the arrays."""
    check_choice("writing", writing, get_args(Writing))
    table, ranges = tick_table(schedule), live_ranges(schedule)
    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    handed = _handed(table) & (writing == "makers")
    for times in ranges["stash"]:
        times[stage[handed], microbatch[handed]] = -1
    # dy of the loss has the live range of the last stage's residuals for dgrad.
    is_last = np.arange(schedule.num_stages)[:, None] == schedule.num_stages - 1
    born, died = ranges["forward_dgrad"]
    ranges["loss"] = np.where(is_last, born, -1), np.where(is_last, died, -1)
    assigned = assign(schedule, ranges)
    numbers = assigned.numbers
    counts = {pool: int(count.max()) for pool, count in assigned.counts.items()}
    # Slots in use, bool [max(count, 1), T + 1, P].
    taken = {pool: np.zeros((max(count, 1), len(kind) + 1, schedule.num_ranks), bool) for pool, count in counts.items()}
    for pool, (born, died) in ranges.items():
        for (s, m), slot in np.ndenumerate(numbers[pool]):
            if slot >= 0:
                taken[pool][slot, born[s, m] : died[s, m] + 1, schedule.rank_of_stage[s]] = True
    slots = dict(counts)

    def fill_unused(pool: str, column: np.ndarray, delay: int) -> np.ndarray:
        """Replaces -1 in a column of slots by a free or an additional slot. The write is `delay` ticks later."""
        makes = np.isin(kind, _MAKERS[pool]).any(1, keepdims=True)
        if pool in POOLS[:3]:
            makes &= (writing == "makers") & ~(kind == WGRAD).any(1, keepdims=True) & ~(handed[:, None] & (pool == "stash"))
        else:
            makes |= writing == "all"
        times = np.minimum(np.arange(len(column)) + delay, len(column))
        free = np.argmin(taken[pool][:, times], 0)
        full = np.take_along_axis(taken[pool][:, times], free[None], 0)[0]
        filled = np.where(column >= 0, column, np.where(full & makes, counts[pool], free)).astype(np.int32)
        slots[pool] = max(slots[pool], int(filled.max()) + 1)
        return filled

    def microbatch_where(mask: np.ndarray) -> np.ndarray:
        return np.where(mask, microbatch, -1).max(1).astype(np.int32)

    at = {pool: np.where(kind != IDLE, numbers[pool][stage, microbatch], -1) for pool in numbers}
    writes = {
        pool: fill_unused(pool, np.where(np.isin(kind, _MAKERS[pool]), at[pool], -1), 0)
        for pool in (*POOLS[:3], "loss")
        if counts[pool]
    }
    received, hops = _arrivals(schedule, table, numbers)
    last = schedule.num_stages - 1
    return ScheduleTables(
        table,
        reads={pool: np.maximum(column, 0).astype(np.int32) for pool, column in at.items()},
        writes=writes,
        arrivals={(source, pool): fill_unused(pool, column, 1) for (source, pool), column in received.items()},
        enter=microbatch_where((kind == FORWARD) & (stage == 0)),
        leave=microbatch_where((kind == FORWARD) & (stage == last)),
        back=microbatch_where(np.isin(kind, (DGRAD, BACKWARD)) & (stage == 0)),
        slots=slots,
        hops=hops,
    )


def _arrivals(schedule: Schedule, table: TickTable, numbers: Mapping[str, np.ndarray]) -> tuple[dict, dict]:
    """Finds, for each source and pool, the slot of the array that arrives at the end of each tick, or -1; and the hops."""
    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    ranks = schedule.num_ranks
    home = schedule.rank_of_stage
    forward = kind == FORWARD
    sends = (kind != IDLE) & (kind != WGRAD) & np.where(forward, stage < schedule.num_stages - 1, stage > 0)
    tick, sender = np.nonzero(sends)
    up = forward[tick, sender]
    m = microbatch[tick, sender]
    goes_to = stage[tick, sender] + np.where(up, 1, -1)
    receiver = home[goes_to]
    step = (receiver - sender) % ranks
    # With two ranks, the other rank is both neighbors: activations come from `previous` and gradients from `next`.
    sources: dict[Source, np.ndarray] = {
        "previous": (step == 1) & (up | (ranks > 2)),
        "next": (step == ranks - 1) & (step > 0) & (~up | (ranks > 2)),
        "same": step == 0,
    }
    distant = ~np.logical_or.reduce(list(sources.values()))
    if distant.any():
        i = int(np.argmax(distant))
        problem = f" sends to rank {receiver[i]} (stage {goes_to[i]}), which is not its neighbor"
        remedy = "place consecutive stages on the same rank or on neighbors"
        raise OrderError.of_rank(int(sender[i]), f"{problem}; {remedy}")
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
    """Groups the ticks of an aligned schedule without full backwards into phases of equal rounds."""
    # A schedule is aligned if, in every tick, all ranks that are not idle run the same kind of action, or a wgrad in its place.
    # A round is a tick of forwards, a tick of dgrads and a tick of wgrads, in this order; each may be missing.
    found = [np.unique(row[row != IDLE]) for row in table.kind]
    leads = []
    for tick, kinds in enumerate(found):
        others = kinds[kinds != WGRAD]
        if len(others) > 1 or not len(kinds):
            names = " and ".join(KINDS[k] for k in kinds) or "nothing"
            raise OrderError(f"tick {tick} has {names}; in an aligned schedule all ranks run the same kind, or a wgrad")
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
    """Returns bool [T], True if all ranks run a dgrad in this tick and its wgrad in the next one."""
    follows = (table.kind[:-1] == DGRAD) & (table.kind[1:] == WGRAD)
    for column in (table.stage, table.microbatch):
        follows &= column[:-1] == column[1:]
    return np.append(follows.all(1), False)
