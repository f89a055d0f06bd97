"""Tests that `best` selects the fastest schedule within the memory limit."""

import re

import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import JgraphError, OrderError
from jgraph.schedule import NAMES, Costs, best, generate, simulate

COSTS = Costs(6.6, 7.1, 6.4)
SIZES = {"forward_dgrad": 20.0, "forward_wgrad": 100.0, "stash": 50.0, "activation": 10.0, "gradient": 10.0}
BETWEEN = ("activation", "gradient")


def brute_force(pp, microbatches, costs, sizes, chunks=(1, 2), **how):
    """Returns (makespan, peak bytes) of every possible schedule, by (name, chunks)."""
    found = {}
    for name in NAMES:
        for count in chunks:
            try:
                schedule = generate(name, pp=pp, microbatches=microbatches, chunks=count)
            except OrderError:
                continue
            if len(schedule.placement[0]) != count:
                continue
            per_chunk = Costs(costs.forward / count, costs.dgrad / count, costs.wgrad / count)
            run = simulate(schedule, per_chunk, **how)
            share = {pool: size if pool in BETWEEN else size / count for pool, size in sizes.items()}
            found[name, count] = (run.makespan, max(run.peak(share)))
    return found


STEP = {"pp": 4, "microbatches": 16, "costs": COSTS, "sizes": SIZES}
ALL = brute_force(**STEP)
LIMIT = 600.0


@pytest.mark.parametrize("limit", [530, 560, LIMIT, 700, 1100, None])
def test_best_selects_the_fastest_schedule_within_the_limit(limit):
    choice = best(**STEP, memory_limit=limit)
    winner = choice.candidates[0]
    fits = [time for time, peak in ALL.values() if limit is None or peak <= limit]
    assert winner.makespan == pytest.approx(min(fits), rel=1e-9)
    assert (winner.makespan, winner.peak_bytes) == pytest.approx(ALL[winner.name, winner.chunks], rel=1e-9)
    assert limit is None or winner.peak_bytes <= limit
    assert (choice.schedule.name, len(choice.schedule.placement[0])) == (winner.name, winner.chunks)
    assert choice.schedule.num_microbatches == 16
    assert choice.schedule.num_ranks == 4


def test_a_peak_equal_to_the_limit_fits():
    _, peak = min((time, peak) for time, peak in ALL.values())
    assert best(**STEP, memory_limit=peak).candidates[0].peak_bytes == peak
    assert best(**STEP, memory_limit=peak - 0.5).candidates[0].peak_bytes < peak


@given(
    pp=st.integers(1, 4),
    microbatches=st.integers(1, 10),
    times=st.tuples(*[st.integers(1, 9)] * 3),
    bytes_each=st.tuples(*[st.integers(0, 9)] * 5),
    limit=st.integers(1, 100),
    chunks=st.sampled_from([(1,), (2,), (1, 2), (3, 1), (2, 4)]),
    latency=st.sampled_from([0.0, 0.5]),
    execution=st.sampled_from(["dataflow", "neighbours", "lockstep"]),
)
@settings(max_examples=40)
def test_the_choice_equals_brute_force_for_random_arguments(
    pp, microbatches, times, bytes_each, limit, chunks, latency, execution
):
    step = {"pp": pp, "microbatches": microbatches, "costs": Costs(*times), "chunks": chunks, "latency": latency}
    step |= {"sizes": dict(zip(SIZES, bytes_each, strict=True)), "execution": execution}
    found = brute_force(**step)
    fits = [row for row in found.values() if row[1] <= limit]
    if not fits:
        with pytest.raises(OrderError, match="no schedule fits into"):
            best(**step, memory_limit=limit)
        return
    winner = best(**step, memory_limit=limit).candidates[0]
    fastest = min(time for time, _ in fits)
    least = min(peak for time, peak in fits if time <= fastest * (1 + 1e-8))
    assert (winner.makespan, winner.peak_bytes) == pytest.approx((fastest, least), rel=1e-8)


def test_every_schedule_is_listed_once_with_makespan_and_peak():
    candidates = best(**STEP, memory_limit=LIMIT).candidates
    possible = {(c.name, c.chunks): (c.makespan, c.peak_bytes) for c in candidates if c.makespan is not None}
    assert possible.keys() == ALL.keys()
    for key, numbers in possible.items():
        assert numbers == pytest.approx(ALL[key], rel=1e-9)
    assert len({(c.name, c.chunks) for c in candidates}) == len(candidates)
    assert {c.name for c in candidates} == set(NAMES)


def test_candidates_are_sorted_winner_first_then_by_makespan_then_impossible():
    candidates = best(**STEP, memory_limit=LIMIT).candidates
    times = [c.makespan for c in candidates[1:]]
    possible = [time for time in times if time is not None]
    assert times == [*possible, *[None] * (len(times) - len(possible))]
    assert [round(time, 6) for time in possible] == sorted(round(time, 6) for time in possible)


def test_every_verdict_gives_the_reason_and_the_margin():
    winner, *others = best(**STEP, memory_limit=LIMIT).candidates
    assert winner.verdict == "fastest that fits"
    reasons = set()
    for other in others:
        if other.makespan is None:
            alone = other.name == "interleaved-1f1b"
            expected = "needs at least 2 chunks per rank; use 1f1b for one" if alone else "supports only 1 chunk per rank"
        elif other.peak_bytes > LIMIT:
            expected = f"needs {other.peak_bytes - LIMIT:,.0f} bytes more than the limit"
        else:
            expected = f"{100 * (other.makespan / winner.makespan - 1):.1f}% slower"
        assert other.verdict.endswith(expected)
        reasons.add(expected.split()[0])
    assert {"supports", "needs"} < reasons


def test_an_impossible_candidate_has_the_reason_and_no_numbers():
    candidates = best(pp=4, microbatches=4, costs=COSTS, names=("gpipe", "dualpipe-v"), chunks=(2,)).candidates
    assert candidates[-1].verdict.startswith("dualpipe-v on 4 ranks needs at least 8 microbatches, got 4")
    assert (candidates[-1].makespan, candidates[-1].bubble, candidates[-1].peak_bytes) == (None, None, None)


def test_equally_fast_schedules_are_ranked_by_peak_memory():
    # One rank never idles, so the schedules differ only in memory.
    candidates = best(pp=1, microbatches=4, costs=COSTS, sizes=SIZES, chunks=(1,)).candidates
    winner, *others = (candidate for candidate in candidates if candidate.name != "interleaved-1f1b")
    assert winner.peak_bytes == min(c.peak_bytes for c in (winner, *others))
    assert winner.bubble == pytest.approx(0, abs=1e-9)
    for other in others:
        more = other.peak_bytes - winner.peak_bytes
        assert other.verdict == (f"as fast, needs {more:,.0f} bytes more" if more else "as fast")
    assert len({other.verdict for other in others}) > 1


def test_without_sizes_and_limit_best_selects_the_fastest_schedule():
    winner = best(pp=4, microbatches=16, costs=COSTS).candidates[0]
    assert winner.makespan == pytest.approx(min(time for time, _ in ALL.values()), rel=1e-9)
    assert winner.peak_bytes == 0


def test_only_the_given_names_and_chunks_are_tried():
    choice = best(**STEP, names=("zb-h1", "gpipe"), chunks=(1,))
    assert {(c.name, c.chunks) for c in choice.candidates} == {("zb-h1", 1), ("gpipe", 1)}


@pytest.mark.parametrize("limit", [0, 70, 99.6])
def test_if_nothing_fits_the_error_names_the_smallest_schedule_and_the_missing_bytes(limit):
    with pytest.raises(OrderError) as caught:
        best(**STEP, memory_limit=limit)
    found = re.fullmatch(
        r"no schedule fits into (\S+) bytes per rank; the smallest is (\S+) with (\d) chunks and needs (\S+), (\S+) more; "
        r"raise the memory limit",
        str(caught.value),
    )
    shown_limit, name, chunks, needed, more = found.groups()
    least = min(peak for _, peak in ALL.values())
    assert ALL[name, int(chunks)][1] == pytest.approx(least)
    assert [shown_limit, needed, more] == [f"{number:,.0f}" for number in (limit, least, least - limit)]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"microbatches": 4, "names": ("dualpipe-v",)}, "no schedule can be generated: dualpipe-v on 4 ranks needs at least 8"),
        ({"names": ("1f1b",), "chunks": (2,)}, "no schedule can be generated: 1f1b with chunks=2: supports only 1 chunk"),
        ({"names": ("fastest",)}, "`name` is 'fastest': must be one of"),
        ({"pp": 0}, "`pp` is 0"),
        ({"microbatches": True}, "`microbatches` is True"),
        ({"chunks": (0,)}, "`chunks` is 0"),
        ({"names": ()}, "select no schedule"),
        ({"chunks": ()}, "select no schedule"),
        # zb-v always has two chunks per rank.
        ({"names": ("zb-v",), "chunks": (1,)}, "select no schedule"),
        ({"sizes": {"stack": 1.0}}, "`sizes` has 'stack'"),
        ({"latency": -1.0}, "`latency` is -1"),
        ({"execution": "eager"}, "`execution` is 'eager'"),
        ({"costs": Costs(forward=0.0)}, "`forward` is 0"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason(changes, match):
    with pytest.raises(JgraphError, match=match):
        best(**(STEP | changes))


@pytest.mark.parametrize(
    "asked", [{"names": ("gpipe", "gpipe")}, {"chunks": (1, 1)}, {"names": ("gpipe", "dualpipe-v"), "microbatches": 4}]
)
def test_candidates_are_listed_once_for_repeated_arguments(asked):
    candidates = best(**(STEP | asked)).candidates
    # dualpipe-v has a single schedule, with two chunks, whether or not it can be generated.
    keys = [(c.name, 2 if c.name == "dualpipe-v" else c.chunks) for c in candidates]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_limit": "1e9"},
        {"sizes": {"stash": "50"}},
        {"sizes": {"stash": -1.0}},
        {"sizes": {"stash": float("nan")}},
        {"chunks": 2},
        {"costs": Costs("6.6")},
    ],
)
def test_an_argument_of_a_wrong_type_is_an_order_error(changes):
    with pytest.raises(OrderError):
        best(**(STEP | changes))


def test_the_head_adds_to_every_forward_of_the_last_stage():
    alone, with_head = (best(pp=1, microbatches=3, costs=Costs(), head=head) for head in (0, 0.5))
    assert with_head.candidates[0].makespan == pytest.approx(alone.candidates[0].makespan + 3 * 0.5)
