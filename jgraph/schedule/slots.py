"""Slots: which place in a pool each array takes, and when the place is free again.

What a forward leaves is used by its dgrad, its wgrad or both; what a dgrad leaves for its wgrad is the stash; what another rank
sends waits until it is used. A place is given when the array is made and taken back after its *last* use, the wgrad's included.
Live ranges are intervals, so as many places as are ever live at once are enough (Golumbic, Algorithmic Graph Theory, ch. 8);
they go round first in, first out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jgraph.errors import OrderError, check_choice
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

    def bytes_per_rank(self, sizes: Mapping[str, float]) -> np.ndarray:
        """Bytes that a rank's pools take, [P].

        Args:
            sizes: bytes of one place in each pool that there is, the stages of a rank having equal shapes.
        """
        check_sizes(sizes)
        return sum((self.counts[pool] * float(size) for pool, size in sizes.items()), np.zeros(len(self.counts["stash"])))


def check_sizes(sizes: Mapping[str, float]) -> None:
    """Raises OrderError for a pool that there is not, or a size that is none."""
    for pool, size in sizes.items():
        if pool not in POOLS:
            raise OrderError(f"`sizes` has {pool!r}: must be one of {', '.join(POOLS)}", field="sizes")
        if not isinstance(size, (int, float)) or not 0 <= size < float("inf"):
            raise OrderError(f"`sizes` has {size!r} for {pool}: must be bytes >= 0", field="sizes")


def live_ranges(schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """When each array is made and last used: for each pool two tables [S, M] of ticks, both inclusive; -1 where there is none.

    A received array is there from the tick after the one that made it. The first stage receives no activation (its input is the
    caller's) and the last no gradient (its loss makes it). A backward that is not split leaves no stash.
    """
    forward = schedule.when(schedule.ticks, (FORWARD,))
    dgrad = schedule.when(schedule.ticks, _BACKWARDS)
    wgrad = schedule.when(schedule.ticks, _WGRADS)
    none = np.full((1, schedule.num_microbatches), -1)
    split = dgrad != wgrad
    sent_up = np.concatenate([none, forward[:-1] + 1])
    sent_down = np.concatenate([dgrad[1:] + 1, none])
    return {
        "forward_dgrad": (forward, dgrad),
        "forward_wgrad": (forward, wgrad),
        "stash": (np.where(split, dgrad, -1), np.where(split, wgrad, -1)),
        "activation": (sent_up, np.where(sent_up < 0, -1, forward)),
        "gradient": (sent_down, np.where(sent_down < 0, -1, dgrad)),
    }


def assign(
    schedule: Schedule, *, sharing: Literal["rank", "all"] = "rank", release: Literal["wgrad", "dgrad"] = "wgrad"
) -> Slots:
    """Slots for a schedule, as few as its ticks allow.

    Args:
        schedule: what runs when.
        sharing: `rank`: every rank numbers its own. `all`: what is made in the same tick has the same number on every rank,
            and a number is free when the last rank is done with it; then a program that all ranks run can have them as
            constants.
        release: `dgrad` takes back what forward made for wgrad when dgrad has used it, and is refused where that is unsafe.

    Raises:
        OrderError: with `release="dgrad"`, something would be overwritten while a pending wgrad still needs it.
    """
    check_choice("sharing", sharing, ("rank", "all"))
    check_choice("release", release, ("wgrad", "dgrad"))
    if (sharing, release) == ("all", "dgrad"):
        raise OrderError("release='dgrad' is checked rank by rank; take sharing='rank' with it, or release='wgrad'")
    ranges = live_ranges(schedule)
    if release == "dgrad":
        _check_release_at_dgrad(schedule, ranges)
        (made, used), (dgrad, _) = ranges["forward_dgrad"], ranges["stash"]
        ranges |= {"forward_wgrad": (made, used), "stash": (dgrad, dgrad)}
    numbers, counts = {}, {}
    stage_rank = np.repeat(schedule.rank_of_stage, schedule.num_microbatches)
    for pool, (born, died) in ranges.items():
        born, died = born.ravel(), died.ravel()
        slot = np.full(born.shape, -1)
        count = np.zeros(schedule.num_ranks, np.int64)
        kept = np.flatnonzero(born >= 0)
        if sharing == "all":
            places, count[:] = _colour_together(born[kept], died[kept], stage_rank[kept])
            slot[kept] = places
        else:
            for r in range(schedule.num_ranks):
                own = kept[stage_rank[kept] == r]
                slot[own], count[r] = colour(born[own], died[own])
        numbers[pool] = slot.reshape(ranges[pool][0].shape)
        counts[pool] = count
    return Slots(numbers, counts)


def colour(born: np.ndarray, died: np.ndarray) -> tuple[np.ndarray, int]:
    """Numbers for intervals [born, died], both inclusive, such that two that overlap differ; and how many, the fewest there
    can be.

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


def _colour_together(born: np.ndarray, died: np.ndarray, rank: np.ndarray) -> tuple[np.ndarray, int]:
    """One numbering for all ranks: what is made in the same tick is one interval, until the last rank is done with it."""
    if not len(born):
        return np.zeros(0, np.int64), 0
    # What reaches a rank in one tick from several sides is told apart by counting: the first arrivals of all ranks are one
    # interval, the second another.
    at = np.lexsort((rank, born))
    follows = np.r_[False, (np.diff(born[at]) == 0) & (np.diff(rank[at]) == 0)]
    place = np.arange(len(born))
    nth = np.empty(len(born), np.int64)
    nth[at] = place - np.maximum.accumulate(np.where(follows, 0, place))
    most = int(nth.max()) + 1
    keys, group = np.unique(born * most + nth, return_inverse=True)
    last = np.full(len(keys), -1)
    np.maximum.at(last, group, died)
    slots, count = colour(keys // most, last)
    return slots[group], count


def _check_release_at_dgrad(schedule: Schedule, ranges: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Refuses to free at dgrad what a wgrad still needs, if the place would be given to something else before that wgrad."""
    freed = ranges["forward_dgrad"][1]
    clashes = []
    for pool in ("forward_wgrad", "stash"):
        for r, stages in enumerate(schedule.placement):
            born, needed = (table[list(stages)].ravel() for table in ranges[pool])
            kept = np.flatnonzero(born >= 0)
            born, needed, cut = born[kept], needed[kept], freed[list(stages)].ravel()[kept]
            slot, _ = colour(born, cut)
            at = np.lexsort((born, slot))
            overwrites = (slot[at][1:] == slot[at][:-1]) & (born[at][1:] <= needed[at][:-1])
            clashes += [(int(born[at][i + 1]), r, int(needed[at][i])) for i in np.flatnonzero(overwrites)]
    if clashes:
        tick, r, needed = min(clashes)
        position, waiting = (int(np.searchsorted(schedule.ticks[r], t)) for t in (tick, needed))
        raise OrderError(
            f"entry {position}, the {schedule[r][position]}, would overwrite what entry {waiting}, the {schedule[r][waiting]}, "
            f"still needs, if buffers were free after dgrad; release them at wgrad (release='wgrad')",
            position=position,
            rank=r,
        )
