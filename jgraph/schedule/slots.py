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


# For each pool, the start and the end of each array's live range, [S, M].
Ranges = Mapping[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Slots:
    """The slot of every array of a schedule, by pool, for P ranks, S stages and M microbatches. Returned by `assign`.

    A slot is memory for one array of a pool on a rank. It is reused when its array is no longer needed. The pools are
    `forward_dgrad` and `forward_wgrad` (residuals of a forward for its dgrad and its wgrad), `stash` (values that a dgrad keeps
    for its wgrad), `activation` and `gradient` (arrays received from another stage, until they are read).

    Attributes:
        numbers: Maps each pool to an int64 array [S, M]: the slot of the array of a stage and microbatch on the stage's rank,
            or -1 if there is no such array. Slots are numbered from 0 in each pool on each rank.
        counts: Maps each pool to the number of slots of each rank, int64 [P]. An SPMD program needs the maximum over ranks.
    """

    numbers: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]


def check_sizes(sizes: Mapping[str, float]) -> None:
    """Checks the names of pools and their bytes. Returns nothing.

    Args:
        sizes: Bytes of one array by pool. The pools are the names in `POOLS`: `forward_dgrad`, `forward_wgrad`, `stash`,
            `activation` and `gradient`. Any of them may be missing.

    Raises:
        OrderError: If a key is not one of these names, or a size is not a finite number >= 0.
    """
    for pool, size in sizes.items():
        if pool not in POOLS:
            raise OrderError(f"`sizes` has {pool!r}: must be one of {', '.join(POOLS)}", field="sizes")
        if not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
            raise OrderError(f"`sizes` has {size!r} for {pool}: must be bytes >= 0", field="sizes")


def live_ranges(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the first and the last tick in which each array is live, for the ticks of the schedule.

    Residuals are live from their forward to their dgrad or wgrad, and a stash from its dgrad to its wgrad. A received array is
    live from the tick after the action that computed it, to the action that reads it. The first stage receives no activation,
    because its input comes from the caller. The last stage receives no gradient, because its loss computes it. A full backward
    has no stash.

    Args:
        schedule: The schedule, with S stages and M microbatches.

    Returns:
        Maps each of the pools `forward_dgrad`, `forward_wgrad`, `stash`, `activation` and `gradient` (`POOLS`) to a pair of
        int64 arrays [S, M]: the first and the last tick, both inclusive. Both are -1 for a stage and microbatch without such an
        array.
    """
    spans = live_spans(schedule, schedule.ticks, [row + 1 for row in schedule.ticks], missing=-1)
    return {pool: (born, np.where(died < 0, -1, died - 1)) for pool, (born, died) in spans.items()}


def live_spans(
    schedule: Schedule, starts: Sequence[np.ndarray], ends: Sequence[np.ndarray], *, latency: float = 0, missing: float = np.nan
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Computes the start and the end of the live range of each array, from the times of the actions.

    Residuals are live from the start of their forward to the end of their dgrad or wgrad. A stash is live from the start of its
    dgrad to the end of its wgrad. A received array is live from its arrival to the end of the action that reads it.

    Args:
        schedule: The schedule, with S stages and M microbatches.
        starts: Start of each action in any unit: one array [N] per rank, for the N actions of its order.
        ends: End of each action, with the form and unit of `starts`.
        latency: Time of a transfer to another rank, in the unit of `starts`. A transfer on the same rank takes no time.
        missing: Value for a stage and microbatch without such an array. The default NaN requires floating `starts` and `ends`.

    Returns:
        Maps each of the pools `forward_dgrad`, `forward_wgrad`, `stash`, `activation` and `gradient` (`POOLS`) to a pair of
        arrays [S, M]: the start and the end of the live range, in the unit of `starts`.
    """
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
    """Assigns a slot to every array of a schedule, with the minimum number of slots on each rank.

    Arrays of the same pool and rank that are live in the same tick get different slots.

    Args:
        schedule: The schedule, with S stages and M microbatches.
        ranges: Maps the name of a pool to a pair of integer arrays [S, M]: the first and the last tick in which each array is
            live, both inclusive; -1 if there is no array. Names are arbitrary. None for the result of `live_ranges`.

    Returns:
        The slots, with the pools of `ranges`.
    """
    numbers, counts = {}, {}
    for pool, (born, died) in (ranges or live_ranges(schedule)).items():
        slot, count = np.full(born.shape, -1), np.zeros(schedule.num_ranks, np.int64)
        for r in range(schedule.num_ranks):
            of_rank = (born >= 0) & (schedule.rank_of_stage == r)[:, None]
            slot[of_rank], count[r] = _color_intervals(born[of_rank], died[of_rank])
        numbers[pool], counts[pool] = slot, count
    return Slots(numbers, counts)


def _color_intervals(born: np.ndarray, died: np.ndarray) -> tuple[np.ndarray, int]:
    """Colors an interval graph with the minimum number of colors: overlapping intervals get different colors.

    Let K be the maximum number of overlapping intervals. In the order of their starts, the first K intervals get colors 0 to
    K - 1. Interval j >= K gets the color of the (j - K)-th interval to end. This interval has ended: when interval j starts, at
    least j + 1 - K intervals have ended, because otherwise more than K would overlap.

    Args:
        born: Starts, int [N], inclusive.
        died: Ends, int [N], inclusive.

    Returns:
        The color of each interval, int64 [N], and the number of colors.
    """
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
