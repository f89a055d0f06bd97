"""Generated schedules run, and their idle time and memory match closed formulas and golden rows."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Costs, Schedule, generate, simulate
from jgraph.schedule.action import DGRAD, FORWARD, WGRAD
from tests.schedule.referee import referee

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "bubbles.json").read_text())

# Name in the goldens -> name, chunks, execution, column. Golden values have four decimals.
ROWS = {
    "GPipe": ("gpipe", 1, "dataflow", "async_bubble"),
    "1F1B": ("1f1b", 1, "dataflow", "async_bubble"),
    "1F1B-I(v2)": ("interleaved-1f1b", 2, "dataflow", "async_bubble"),
    "ZB-H1": ("zb-h1", 1, "dataflow", "async_bubble"),
    "ZB-H2": ("zb-h2", 1, "dataflow", "async_bubble"),
    "ZB-V": ("zb-v", 2, "dataflow", "async_bubble"),
    "DualPipeV": ("dualpipe-v", 2, "dataflow", "async_bubble"),
    "Aligned+Wdefer": ("aligned", 1, "lockstep", "lock_bubble"),
    "Aligned-I(v2)+Wdefer": ("aligned", 2, "lockstep", "lock_bubble"),
}
CHUNKS = {"1f1b": (1,), "zb-h1": (1,), "zb-h2": (1,), "zb-v": (2,), "dualpipe-v": (2,)}
CHUNKS |= {"interleaved-1f1b": (2, 3, 4)}
costs = st.floats(0.25, 4.0)


def microbatches(name: str, P: int) -> list[int]:
    least = 2 * P if name == "dualpipe-v" else 1
    return [M for M in sorted({1, 2, 3, P, 2 * P, 2 * P + 1, 3 * P + 1, 32}) if least <= M]


def in_flight(schedule: Schedule, *, until: int) -> list[int]:
    """Returns the maximum number of microbatches per rank between their forward and their dgrad or wgrad (`until`)."""
    most = []
    for order in schedule.orders:
        alive = np.cumsum((order.kinds == FORWARD).astype(int) - np.isin(order.kinds, (until, 3)))
        most.append(int(alive.max()))
    return most


@cache
def aligned(P: int, M: int, C: int = 1) -> Schedule:
    return generate("aligned", pp=P, microbatches=M, chunks=C)


@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_every_generated_schedule_passes_the_referee(name, P):
    for chunks in CHUNKS.get(name, (1, 2, 3, 4)):
        for M in microbatches(name, P):
            schedule = generate(name, pp=P, microbatches=M, chunks=chunks)
            assert schedule.name == name
            assert (schedule.num_ranks, schedule.num_microbatches, len(schedule.placement[0])) == (P, M, chunks)
            assert referee(schedule) > 0


@pytest.mark.parametrize(
    "row",
    [row for row in GOLDEN if row["schedule"] in ROWS],
    ids=lambda row: "-".join(str(value) for value in (row["schedule"], row["P"], row["M"], *row["T"])),
)
def test_the_bubble_is_at_most_the_bubble_of_the_golden_row(row):
    name, chunks, execution, column = ROWS[row["schedule"]]
    schedule = generate(name, pp=row["P"], microbatches=row["M"], chunks=chunks)
    run = simulate(schedule, Costs(*row["T"]).per_chunk(chunks), execution=execution)
    assert run.bubble <= row[column] + 5e-5


def test_golden_rows_cover_every_name_both_costs_and_all_sizes():
    rows = [(ROWS[r["schedule"]][0], r["P"], r["M"], tuple(r["T"])) for r in GOLDEN if r["schedule"] in ROWS]
    assert {name for name, *_ in rows} == set(NAMES)
    sizes = {(P, M) for P in (4, 8) for M in (8, 16, 32)}
    for name in NAMES:
        # DualPipeV needs 2P microbatches.
        expected = {(P, M) for P, M in sizes if name != "dualpipe-v" or M >= 2 * P}
        for T in ((1, 1, 1), (1, 1.1, 0.8)):
            assert {(P, M) for n, P, M, t in rows if (n, t) == (name, T)} == expected, name


@pytest.mark.parametrize("P", range(1, 9))
def test_aligned_with_one_chunk_takes_3m_plus_p_minus_1_ticks_for_enough_microbatches(P):
    for M in range(1, 4 * P + 2):
        ticks = aligned(P, M).num_ticks
        assert ticks <= 3 * M + 2 * (P - 1)
        if M >= 2 * P - 1:
            assert ticks == 3 * M + P - 1


@pytest.mark.parametrize("P", range(1, 9))
def test_aligned_with_chunks_takes_3mc_plus_p_minus_1_ticks_for_enough_microbatches(P):
    for chunks in (2, 3, 4):
        for M in range(2 * P - 1, 3 * P + 2):
            assert aligned(P, M, chunks).num_ticks == 3 * M * chunks + P - 1


@pytest.mark.parametrize("P", range(1, 9))
def test_a_tick_of_aligned_has_one_kind_of_action_and_wgrads(P):
    for chunks in (1, 2, 3):
        for M in microbatches("aligned", P):
            schedule = aligned(P, M, chunks)
            rows: list[list[int]] = [[] for _ in range(schedule.num_ticks)]
            for order, ticks in zip(schedule.orders, schedule.ticks, strict=True):
                for tick, kind in zip(ticks, order.kinds, strict=True):
                    rows[tick].append(int(kind))
            for tick, kinds in enumerate(rows):
                assert kinds, f"all ranks idle in tick {tick}"
                assert set(kinds) - {WGRAD} in ({FORWARD}, {DGRAD}, set())


@given(name=st.sampled_from(["gpipe", "1f1b"]), P=st.integers(1, 8), M=st.integers(1, 24), F=costs, I=costs, W=costs)
@settings(max_examples=150)
def test_gpipe_and_1f1b_idle_for_p_minus_1_forwards_and_backwards_at_any_costs(name, P, M, F, I, W):  # noqa: E741
    run = simulate(generate(name, pp=P, microbatches=M), Costs(F, I, W))
    assert run.makespan - M * (F + I + W) == pytest.approx((P - 1) * (F + I + W), abs=1e-9)


@given(
    name=st.sampled_from(["gpipe", "interleaved-1f1b"]),
    P=st.integers(1, 8),
    extra=st.integers(0, 16),
    chunks=st.integers(2, 4),
    each=st.tuples(costs, costs, costs),
)
@settings(max_examples=150)
def test_chunks_divide_the_idle_time_of_gpipe_and_interleaved_1f1b(name, P, extra, chunks, each):
    M = P + extra  # includes numbers that are not a multiple of P
    run = simulate(generate(name, pp=P, microbatches=M, chunks=chunks), Costs(*each).per_chunk(chunks))
    assert run.makespan - M * sum(each) == pytest.approx((P - 1) * sum(each) / chunks, abs=1e-9)


@given(P=st.integers(1, 8), extra=st.integers(0, 16), F=costs, W=costs, share=st.floats(0.05, 1.0))
@settings(max_examples=150)
def test_zb_h2_idles_for_p_minus_1_forwards_if_dgrad_is_cheapest(P, extra, F, W, share):
    # Measured: if dgrad costs more than forward or wgrad, the idle time is longer for some numbers of microbatches.
    M, I = P + extra, share * min(F, W)  # noqa: E741
    run = simulate(generate("zb-h2", pp=P, microbatches=M), Costs(F, I, W))
    assert run.makespan - M * (F + I + W) == pytest.approx((P - 1) * F, abs=1e-9)


@given(P=st.integers(1, 8), extra=st.integers(0, 8), chunks=st.integers(1, 4), F=costs, I=costs, share=st.floats(0.05, 1.0))
@settings(max_examples=150)
def test_aligned_in_lockstep_idles_as_zb_h1_divided_by_chunks_if_wgrad_is_cheapest(P, extra, chunks, F, I, share):  # noqa: E741
    M, W = 2 * P - 1 + extra, share * min(F, I)
    run = simulate(aligned(P, M, chunks), Costs(F, I, W).per_chunk(chunks), execution="lockstep")
    assert run.makespan - M * (F + I + W) == pytest.approx((P - 1) * (F + I - W) / chunks, abs=1e-9)


@given(P=st.integers(1, 8), extra=st.integers(0, 16), F=costs, I=costs, share=st.floats(0.05, 1.0))
@settings(max_examples=150)
def test_zb_h1_idles_for_p_minus_1_of_forward_plus_dgrad_minus_wgrad_if_wgrad_is_cheapest(P, extra, F, I, share):  # noqa: E741
    # Measured: the idle time differs if wgrad costs more than forward or dgrad, or with fewer than P microbatches.
    M, W = P + extra, share * min(F, I)
    run = simulate(generate("zb-h1", pp=P, microbatches=M), Costs(F, I, W))
    assert run.makespan - M * (F + I + W) == pytest.approx((P - 1) * (F + I - W), abs=1e-9)


@pytest.mark.parametrize("P", range(1, 9))
def test_zb_h2_with_equal_costs_idles_only_until_the_first_forward(P):
    M = 2 * P + 3
    assert simulate(generate("zb-h2", pp=P, microbatches=M)).makespan == 3 * M + P - 1


@pytest.mark.parametrize("P", range(1, 9))
def test_ranks_hold_at_most_the_published_number_of_microbatches(P):
    for M in (1, P, 2 * P, 32):
        limits = {
            "gpipe": [M] * P,
            "1f1b": [P - r for r in range(P)],
            "zb-h1": [P] * P,
            "zb-h2": [2 * P - 1] * P,
            "aligned": [2 * P - 1] * P,
            "zb-v": [2 * P] * P,
            "dualpipe-v": [2 * P + 1] * P,
        }
        for name, limit in limits.items():
            if M in microbatches(name, P):
                chunks = CHUNKS.get(name, (1,))[0]
                held = in_flight(generate(name, pp=P, microbatches=M, chunks=chunks), until=WGRAD)
                assert held == [min(most, M * chunks) for most in limit] or (name == "zb-v" and M < 2 * P - 1), name
                assert all(h <= most for h, most in zip(held, limit, strict=True)), name


def test_v_schedules_have_two_chunks_for_chunks_1_and_2():
    for name in ("zb-v", "dualpipe-v"):
        one, two = (generate(name, pp=3, microbatches=6, chunks=chunks) for chunks in (1, 2))
        assert one.placement == two.placement == ((0, 5), (1, 4), (2, 3))
        assert one.orders == two.orders


@pytest.mark.parametrize(
    ("parameters", "named", "remedy"),
    [
        ({"name": "zb-3"}, "'zb-3'", "must be one of gpipe, 1f1b"),
        ({"pp": 0}, "`pp` is 0", "integer >= 1"),
        ({"pp": True}, "`pp` is True", "integer >= 1"),
        ({"pp": 1.5}, "`pp` is 1.5", "integer >= 1"),
        ({"pp": None}, "`pp` is None", "integer >= 1"),
        ({"microbatches": -3}, "`microbatches` is -3", "integer >= 1"),
        ({"microbatches": "8"}, "`microbatches` is '8'", "integer >= 1"),
        ({"chunks": 0}, "`chunks` is 0", "integer >= 1"),
        ({"name": "1f1b", "chunks": 2}, "1f1b with chunks=2", "supports only 1 chunk per rank"),
        ({"name": "zb-h1", "chunks": 3}, "zb-h1 with chunks=3", "supports only 1 chunk per rank"),
        ({"name": "zb-v", "chunks": 3}, "zb-v with chunks=3", "supports only 2 chunks per rank"),
        ({"name": "interleaved-1f1b"}, "interleaved-1f1b with chunks=1", "at least 2 chunks per rank; use 1f1b for one"),
        ({"name": "dualpipe-v", "microbatches": 7}, "got 7", "at least 8 microbatches"),
    ],
)
def test_invalid_arguments_are_refused_with_value_and_remedy(parameters, named, remedy):
    with pytest.raises(OrderError) as caught:
        generate(**{"name": "gpipe", "pp": 4, "microbatches": 8} | parameters)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("name", [None, [], {}, 3])
def test_a_name_that_is_not_a_string_is_refused(name):
    with pytest.raises(OrderError, match=r"`name` is .*: must be one of"):
        generate(name, pp=2, microbatches=2)
