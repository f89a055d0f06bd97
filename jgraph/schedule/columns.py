"""A schedule as columns of numbers: what each rank does in each tick, and which slots it reads and writes then. No jax.

All ranks run the same writes, also a rank that makes nothing that is to be kept. Such a write goes to a slot that is free at
that time, or, if there is none, to one slot more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.slots import POOLS, assign, colour, live_ranges
from jgraph.schedule.table import SOURCES, Source, TickTable, tick_table

# T ticks, P ranks, S stages, M microbatches

_MAKERS = {
    "forward_dgrad": (FORWARD,),
    "forward_wgrad": (FORWARD,),
    "stash": (DGRAD,),
    "loss": (FORWARD,),
    "activation": (FORWARD,),
    "gradient": (DGRAD, BACKWARD),
}


@dataclass(frozen=True)
class ScheduleTables:
    """Everything int32 [T, P], -1 where there is nothing, unless it says otherwise.

    Attributes:
        table: kinds, stages, chunks, microbatches.
        reads: for each pool, the slot that the action may read; 0 where it reads none.
        writes: for each pool that actions write, the slot; never -1.
        arrivals: for each source and for `activation` and `gradient`, the slot that what comes from there at the end of the
            tick is written to; never -1. Only the sources from which something comes at all.
        enter, leave, back: int32 [T]: the microbatch whose first forward, last forward and last dgrad this tick has.
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


def columns(schedule: Schedule, *, writing: Literal["makers", "all"] = "all") -> ScheduleTables:
    """The columns of a schedule.

    Args:
        schedule: what runs when.
        writing: in which ticks a program writes to a pool: `all` of them, or those in which some rank makes something for it.

    Raises:
        OrderError: consecutive stages are on ranks that are not neighbours.
    """
    assigned = assign(schedule)
    table = tick_table(schedule, assigned)
    ranges, numbers = live_ranges(schedule), dict(assigned.numbers)
    counts = {pool: int(assigned.counts[pool].max()) for pool in POOLS}
    ranges["loss"], numbers["loss"], counts["loss"] = _loss_pool(schedule)
    home = np.repeat(schedule.rank_of_stage[:, None], schedule.num_microbatches, 1)
    taken = {pool: _taken(numbers[pool], ranges[pool], counts[pool], home, table.kind.shape) for pool in numbers}
    slots = dict(counts)

    def complete(pool: str, column: np.ndarray, late: int) -> np.ndarray:
        """Fills the places where nothing is to be kept; `late` ticks after the column's own is when it is written."""
        makes = np.isin(table.kind, _MAKERS[pool]).any(1, keepdims=True) | (writing == "all")
        times = np.minimum(np.arange(len(column)) + late, len(column))
        free = np.argmin(taken[pool][:, times], 0)
        full = np.take_along_axis(taken[pool][:, times], free[None], 0)[0]
        filled = np.where(column >= 0, column, np.where(full & makes, counts[pool], free)).astype(np.int32)
        slots[pool] = max(slots[pool], int(filled.max()) + 1)
        return filled

    kind, stage, microbatch = table.kind, table.stage, table.microbatch
    at = {pool: np.where(kind != IDLE, numbers[pool][stage, microbatch], -1) for pool in numbers}
    reads = {pool: np.maximum(column, 0).astype(np.int32) for pool, column in at.items()}
    writes = {
        pool: complete(pool, np.where(np.isin(kind, makers), at[pool], -1), 0)
        for pool, makers in _MAKERS.items()
        if counts[pool] and pool not in ("activation", "gradient")
    }
    arrivals = {}
    for source in SOURCES:
        for pool in ("activation", "gradient"):
            column = getattr(table.arrivals[source], pool)
            if (column >= 0).any():
                # The table says what is there when a tick starts, which is what came at the end of the one before.
                arrivals[source, pool] = complete(pool, np.append(column[1:], np.full_like(column[:1], -1), axis=0), 1)
    last = schedule.num_stages - 1
    return ScheduleTables(
        table,
        reads,
        writes,
        arrivals,
        enter=_of((kind == FORWARD) & (stage == 0), microbatch),
        leave=_of((kind == FORWARD) & (stage == last), microbatch),
        back=_of(np.isin(kind, (DGRAD, BACKWARD)) & (stage == 0), microbatch),
        slots=slots,
        hops=_hops(table, arrivals),
    )


def _of(mask: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
    """int32 [T]: the microbatch where the mask holds on a rank, else -1."""
    return np.where(mask, microbatch, -1).max(1).astype(np.int32)


def _loss_pool(schedule: Schedule) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, int]:
    """Live ranges and slots of the dy that the loss makes, as [S, M]; only the last stage has any."""
    forward = schedule.when(schedule.ticks, (FORWARD,))
    dgrad = schedule.when(schedule.ticks, (DGRAD, BACKWARD))
    none = np.full_like(forward, -1)
    born, died, numbers = none.copy(), none.copy(), none.copy()
    born[-1], died[-1] = forward[-1], dgrad[-1]
    numbers[-1], count = colour(born[-1], died[-1])
    return (born, died), numbers, count


def _taken(
    numbers: np.ndarray,
    ranges: tuple[np.ndarray, np.ndarray],
    count: int,
    home: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """bool [count (at least 1), T + 1, P]: whether a slot is in use in a tick."""
    ticks, ranks = shape
    taken = np.zeros((max(count, 1), ticks + 1, ranks), bool)
    for (s, m), slot in np.ndenumerate(numbers):
        if slot >= 0:
            taken[slot, ranges[0][s, m] : ranges[1][s, m] + 1, home[s, m]] = True
    return taken


def _hops(table: TickTable, arrivals: Mapping[tuple[Source, str], np.ndarray]) -> dict[Source, tuple[tuple[int, int], ...]]:
    ranks = table.kind.shape[1]
    steps: dict[Source, int] = {"previous": 1, "next": -1}
    hops = {}
    for source, step in steps.items():
        pools = [getattr(table.arrivals[source], pool) for s, pool in arrivals if s == source]
        receivers = sorted({int(r) for column in pools for r in np.flatnonzero((column >= 0).any(0))})
        if receivers:
            hops[source] = tuple(((r - step) % ranks, r) for r in receivers)
    return hops
