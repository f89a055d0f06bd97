"""Slots: which place in a pool each array takes, and when the place is free again.

What a forward leaves is used by its dgrad, its wgrad or both; what a dgrad leaves for its wgrad is the stash; what another rank
sends waits until it is used. A place is given when the array is made and taken back after its *last* use, the wgrad's included.
Live ranges are intervals, so as many places as are ever live at once are enough (Golumbic, Algorithmic Graph Theory, ch. 8);
they go round first in, first out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD
from jgraph.schedule.schedule import Schedule

POOLS = ("forward_dgrad", "forward_wgrad", "stash", "activation", "gradient")

_BACKWARDS, _WGRADS = (DGRAD, BACKWARD), (WGRAD, BACKWARD)


@dataclass(frozen=True)
class Slots:
    """Places in each pool.

    Attributes:
        numbers: of each pool, int [S, M]: the place of what belongs to a stage and microbatch; -1 where nothing is kept.
        counts: of each pool, int [P]: how many places a rank needs; an SPMD program needs the maximum on every rank.
    """

    numbers: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]


def check_sizes(sizes: Mapping[str, float]) -> None:
    """Raises OrderError for a pool that there is not, or a size that is none."""
    for pool, size in sizes.items():
        if pool not in POOLS:
            raise OrderError(f"`sizes` has {pool!r}: must be one of {', '.join(POOLS)}", field="sizes")
        if not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
            raise OrderError(f"`sizes` has {size!r} for {pool}: must be bytes >= 0", field="sizes")


def live_ranges(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns when each array is made and last used: for each pool two tables [S, M] of ticks, both inclusive; -1 for none.

    A received array is there from the tick after the one that made it. The first stage receives no activation (its input is the
    caller's) and the last no gradient (its loss makes it). A backward that is not split leaves no stash.
    """
    spans = live_spans(schedule, schedule.ticks, [row + 1 for row in schedule.ticks], missing=-1)
    return {pool: (born, np.where(died < 0, -1, died - 1)) for pool, (born, died) in spans.items()}


def live_spans(
    schedule: Schedule, starts: Sequence[np.ndarray], ends: Sequence[np.ndarray], *, latency: float = 0, missing: float = np.nan
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns from when to when each array is held, if the actions start and end at these times: two tables [S, M] per pool."""
    f0, i0 = (schedule.when(starts, (kind,), missing) for kind in (FORWARD, DGRAD))
    f1, d1, w1, i1 = (schedule.when(ends, kinds, missing) for kinds in ((FORWARD,), _BACKWARDS, _WGRADS, (WGRAD,)))
    # Between stage s and the next: nothing where both are on one rank.
    travel = np.diff(schedule.rank_of_stage).astype(bool)[:, None] * latency
    none = np.full((1, schedule.num_microbatches), missing)
    return {
        "forward_dgrad": (f0, d1),
        "forward_wgrad": (f0, w1),
        "stash": (i0, i1),
        "activation": (np.concatenate([none, f1[:-1] + travel]), np.concatenate([none, f1[1:]])),
        "gradient": (np.concatenate([d1[1:] + travel, none]), np.concatenate([d1[:-1], none])),
    }


def assign(schedule: Schedule) -> Slots:
    """Gives every array of a schedule a place in its pool, with as few places on each rank as the ticks allow."""
    return number(schedule, live_ranges(schedule))


def number(schedule: Schedule, ranges: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Slots:
    """Returns slots for what is made and last used in these ticks, by pool."""
    numbers, counts = {}, {}
    for pool, (born, died) in ranges.items():
        slot, count = np.full(born.shape, -1), np.zeros(schedule.num_ranks, np.int64)
        for r in range(schedule.num_ranks):
            own = (born >= 0) & (schedule.rank_of_stage == r)[:, None]
            slot[own], count[r] = colour(born[own], died[own])
        numbers[pool], counts[pool] = slot, count
    return Slots(numbers, counts)


def colour(born: np.ndarray, died: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns numbers for intervals [born, died], both inclusive, such that two that overlap differ; and how many there are.

    With K the most that overlap, the first K take 0 to K - 1 and the j-th after that takes over from the (j - K)-th to end:
    when the j-th begins, at least j + 1 - K have ended, or more than K would overlap.
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
