"""Assigns a slot in a pool to every array of a schedule.

There are five pools. `forward_dgrad` and `forward_wgrad` hold the residuals of a forward for its dgrad and its wgrad. `stash`
holds the values that a dgrad passes to its wgrad. `activation` and `gradient` hold received arrays until they are read. A slot
is allocated when its array is computed, and freed after the last read, including reads by a wgrad.

Live ranges are intervals, so the maximum number of live arrays is also the number of slots needed (Golumbic, Algorithmic Graph
Theory, ch. 8). Freed slots are reused first in, first out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD
from jgraph.schedule.schedule import Schedule

POOLS = ("forward_dgrad", "forward_wgrad", "stash", "activation", "gradient")

_BACKWARDS, _WGRADS = (DGRAD, BACKWARD), (WGRAD, BACKWARD)


# S stages, M microbatches, P ranks, N actions of a rank

# For each pool, the start and the end of each array's live range, [S, M].
Ranges = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Slots:
    """The slot of every array of a schedule, by pool."""

    # int64 [S, M]: the slot of the array of a stage and microbatch on the stage's rank, or -1 if there is no such array. Slots
    # are numbered from 0 in each pool on each rank.
    numbers: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]  # number of slots of each rank, int64 [P]; an SPMD program needs the maximum


def check_sizes(sizes: Mapping[str, float]) -> None:
    """Raises OrderError if a pool is not in `POOLS`, or its bytes are no finite number >= 0."""
    for pool, size in sizes.items():
        if pool not in POOLS:
            raise OrderError(f"`sizes` has {pool!r}: must be one of {', '.join(POOLS)}", field="sizes")
        if not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
            raise OrderError(f"`sizes` has {size!r} for {pool}: must be bytes >= 0", field="sizes")


def live_ranges(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the first and the last tick in which each array is live, both inclusive, int64 [S, M]; -1 if there is none."""
    spans = live_spans(schedule, schedule.ticks, [row + 1 for row in schedule.ticks], missing=-1)
    return {pool: (born, np.where(died < 0, -1, died - 1)) for pool, (born, died) in spans.items()}


def live_spans(
    schedule: Schedule, starts: Sequence[np.ndarray], ends: Sequence[np.ndarray], *, latency: float = 0, missing: float = np.nan
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the start and the end of the live range of each array, [S, M] in the unit of `starts` and `ends`."""
    # The default of `missing` requires floating times. A transfer on the same rank takes no time.
    # Residuals are live from the start of their forward to the end of their dgrad or wgrad, a stash from its dgrad to its
    # wgrad, and a received array from its arrival to the end of the action that reads it. The first stage receives no
    # activation, because its input comes from the caller. The last stage receives no gradient, because its loss computes it.
    # A full backward has no stash.
    f0, i0 = (schedule.when(starts, (kind,), missing) for kind in (FORWARD, DGRAD))
    f1, d1, w1, i1 = (schedule.when(ends, kinds, missing) for kinds in ((FORWARD,), _BACKWARDS, _WGRADS, (WGRAD,)))
    # Transfer time between stages s and s + 1: zero if both are on the same rank.
    travel = np.diff(schedule.rank_of_stage).astype(bool)[:, None] * latency
    none = np.full((1, schedule.num_microbatches), missing)
    return {
        "forward_dgrad": (f0, d1),
        "forward_wgrad": (f0, w1),
        "stash": (i0, i1),
        "activation": (np.concatenate([none, f1[:-1] + travel]), np.concatenate([none, f1[1:]])),
        "gradient": (np.concatenate([d1[1:] + travel, none]), np.concatenate([d1[:-1], none])),
    }


def assign(schedule: Schedule, ranges: Ranges | None = None) -> Slots:
    """Assigns a slot to every array, with the minimum number of slots on each rank. `ranges` may have pools of any name."""
    numbers, counts = {}, {}
    for pool, (born, died) in (ranges or live_ranges(schedule)).items():
        slot = np.full(born.shape, -1)
        count = np.zeros(schedule.num_ranks, np.int64)
        for r in range(schedule.num_ranks):
            of_rank = (born >= 0) & (schedule.rank_of_stage == r)[:, None]
            slot[of_rank], count[r] = _color_intervals(born[of_rank], died[of_rank])
        numbers[pool], counts[pool] = slot, count
    return Slots(numbers, counts)


def _color_intervals(born: np.ndarray, died: np.ndarray) -> tuple[np.ndarray, int]:
    """Gives overlapping intervals with inclusive ends different colors. Returns the colors and their minimum number."""
    # Let K be the maximum number of overlapping intervals. In the order of their starts, the first K intervals get colors 0 to
    # K - 1. Interval j >= K gets the color of the (j - K)-th interval to end. This interval has ended: when interval j starts,
    # at least j + 1 - K intervals have ended, because otherwise more than K would overlap.
    if not len(born):
        return np.zeros(0, np.int64), 0
    by_birth, by_death = np.argsort(born, kind="stable"), np.argsort(died, kind="stable")
    ended_before = np.searchsorted(died[by_death], born[by_birth], side="left")
    count = int((np.arange(1, len(born) + 1) - ended_before).max())
    place = np.empty(len(born), np.int64)
    place[by_birth] = np.arange(len(born))
    heirs = place[by_death].tolist()
    slots = list(range(count))
    for j in range(count, len(born)):
        slots.append(slots[heirs[j - count]])
    return np.array(slots[: len(born)])[place], count
