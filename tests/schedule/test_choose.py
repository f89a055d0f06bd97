"""Choosing a schedule."""

import pytest

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Costs, best, generate, simulate

COSTS = Costs(6.6, 7.1, 6.4)
SIZES = {"forward_wgrad": 100.0, "stash": 50.0, "activation": 10.0, "gradient": 10.0}


def brute_force(limit):
    found = []
    for name in NAMES:
        for chunks in (1, 2):
            try:
                schedule = generate(name, pp=4, microbatches=16, chunks=chunks)
            except OrderError:
                continue
            if len(schedule.placement[0]) != chunks:
                continue
            run = simulate(schedule, COSTS.per_chunk(chunks))
            sizes = {"forward_wgrad": 100 / chunks, "stash": 50 / chunks, "activation": 10, "gradient": 10}
            if run.peak(sizes).max() <= limit:
                found.append((run.makespan, name))
    return min(found)


@pytest.mark.parametrize("limit", [450, 560, 700, 1100, 1e9])
def test_the_fastest_that_fits_wins(limit):
    choice = best(pp=4, microbatches=16, costs=COSTS, sizes=SIZES, memory_limit=limit)
    assert choice.candidates[0].makespan == pytest.approx(brute_force(limit)[0], rel=1e-9)
    assert choice.candidates[0].peak_bytes <= limit
    assert choice.schedule.name == choice.candidates[0].name


def test_every_candidate_says_why_it_lost():
    choice = best(pp=4, microbatches=16, costs=COSTS, sizes=SIZES, memory_limit=560)
    assert choice.candidates[0].verdict == "fastest that fits"
    for candidate in choice.candidates[1:]:
        over = candidate.peak_bytes is not None and candidate.peak_bytes > 560
        assert ("more than the limit" in candidate.verdict) == over
        assert candidate.verdict
    assert len({(c.name, c.chunks) for c in choice.candidates}) == len(choice.candidates)


def test_of_equally_fast_ones_the_smallest_wins():
    # With one rank nobody idles, whatever the order; only memory tells them apart.
    choice = best(pp=1, microbatches=4, costs=COSTS, sizes=SIZES, chunks=(1,))
    assert choice.candidates[0].peak_bytes == min(c.peak_bytes for c in choice.candidates if c.peak_bytes is not None)


def test_if_nothing_fits_the_nearest_is_told():
    with pytest.raises(OrderError, match=r"no schedule fits into 70 bytes a rank; the nearest is \S+ with \d chunks.* more"):
        best(pp=4, microbatches=16, costs=COSTS, sizes=SIZES, memory_limit=70)


def test_if_no_schedule_is_possible_the_reason_is_told():
    with pytest.raises(OrderError, match="dualpipe-v on 4 ranks needs at least 8"):
        best(pp=4, microbatches=4, costs=COSTS, names=("dualpipe-v",))
