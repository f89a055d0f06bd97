"""Random schedules: valid ones are accepted and never clash, and mutations are refused exactly if they cannot run.

Every case comes from a seeded generator. Each valid schedule and each mutated schedule counts once.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import OrderError
from jgraph.schedule import Order, Schedule
from tests.schedule.referee import can_run, kinds_and_chunks, referee, ticks_are_valid
from tests.schedule.strategies import MUTATIONS, delayed_ticks, mutate, mutate_kinds, random_schedule, schedules

pytestmark = pytest.mark.long

LEGAL, CHANGED, FUSED, TICKS = 7_000, 15_000, 4_000, 2_000
PARTS = 5  # for parallel test workers


def test_this_file_has_at_least_20000_cases():
    assert LEGAL + CHANGED + FUSED + TICKS >= 20_000
    assert LEGAL % PARTS == CHANGED % PARTS == 0


def parse(rows: list[list[int | float]], placement: tuple[tuple[int, ...], ...]) -> Schedule:
    return Schedule(tuple(Order.parse(row) for row in rows), placement)


@pytest.mark.parametrize("part", range(PARTS))
def test_random_valid_schedules_are_accepted_and_pass_the_referee(part):
    rng = np.random.default_rng([1, part])
    seen, uses = 0, 0
    for _ in range(LEGAL // PARTS):
        schedule = random_schedule(rng)
        if rng.random() < 0.25:
            schedule = delayed_ticks(rng, schedule)
        uses += referee(schedule)
        seen += 1
    assert seen == LEGAL // PARTS
    assert uses > 50 * seen


@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_orders_are_refused_exactly_if_they_cannot_run(part):
    rng = np.random.default_rng([2, part])
    seen: Counter[tuple[str, bool]] = Counter()
    while seen.total() < CHANGED // PARTS:
        schedule = random_schedule(rng)
        original = [order.to_list() for order in schedule.orders]
        assert can_run([kinds_and_chunks(row) for row in original], schedule.placement)
        for _ in range(3):
            rows = list(original)
            for _ in range(rng.choice([1, 1, 1, 2])):
                r = int(rng.integers(len(rows)))
                if rows[r]:
                    name, rows[r] = mutate(rng, rows[r])
            if rows == original:
                continue
            problem = None
            try:
                changed = parse(rows, schedule.placement)
            except OrderError as error:
                problem = error
            expected = can_run([kinds_and_chunks(row) for row in rows], schedule.placement)
            assert (problem is None) == expected, (rows, schedule.placement, problem)
            if problem is None:
                referee(changed)
            elif problem.position is not None:
                # Without a rank, the error is in a single order, one of the mutated ones.
                lengths = [len(row) for row in rows] if problem.rank is None else [len(rows[problem.rank])]
                assert 0 <= problem.position < max(lengths)
            seen[name, problem is None] += 1
    assert CHANGED // PARTS <= seen.total() <= CHANGED // PARTS + 2
    # Every mutation occurs; most break the schedule, some do not.
    assert all(seen[name, False] > 100 for name in MUTATIONS)
    assert sum(seen[name, True] for name in MUTATIONS) > 150


def test_joining_and_splitting_backwards_is_refused_exactly_if_wgrads_leave_fifo_order():
    rng = np.random.default_rng(4)
    seen: Counter[bool] = Counter()
    for _ in range(FUSED):
        schedule = random_schedule(rng)
        rows = [list(zip(order.kinds.tolist(), order.chunks.tolist(), strict=True)) for order in schedule.orders]
        r = int(rng.integers(len(rows)))
        rows[r] = mutate_kinds(rng, rows[r])
        try:
            changed = Schedule(tuple(Order(*np.array(row).T) for row in rows), schedule.placement)
        except OrderError:
            changed = None
        assert (changed is not None) == can_run(rows, schedule.placement), (rows, schedule.placement)
        if changed is not None:
            referee(changed)
        seen[changed is not None] += 1
    assert seen.total() == FUSED
    assert min(seen.values()) > FUSED // 5


def test_random_ticks_are_refused_exactly_if_an_array_is_used_too_early():
    rng = np.random.default_rng(5)
    seen: Counter[bool] = Counter()
    for _ in range(TICKS):
        schedule = delayed_ticks(rng, random_schedule(rng))
        ticks = [row.copy() for row in schedule.ticks]
        for _ in range(rng.integers(1, 4)):
            row = ticks[rng.integers(len(ticks))]
            row[rng.integers(len(row))] += rng.choice([-2, -1, 1, 2])
        try:
            changed = Schedule(schedule.orders, schedule.placement, tuple(ticks))
        except OrderError:
            changed = None
        assert (changed is not None) == ticks_are_valid(schedule, ticks), (schedule.orders, schedule.placement, ticks)
        if changed is not None:
            referee(changed)
        seen[changed is not None] += 1
    assert seen.total() == TICKS
    assert min(seen.values()) > TICKS // 5


@given(schedules())
@settings(max_examples=150)
def test_schedules_drawn_by_hypothesis_pass_the_referee(schedule):
    referee(schedule)


@given(schedules(), st.data())
@settings(max_examples=150)
def test_a_swap_of_two_entries_is_refused_exactly_if_the_order_cannot_run(schedule, data):
    rows = [order.to_list() for order in schedule.orders]
    row = data.draw(st.sampled_from(rows))
    i, j = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[i], row[j] = row[j], row[i]
    try:
        changed = parse(rows, schedule.placement)
    except OrderError:
        assert not can_run([kinds_and_chunks(row) for row in rows], schedule.placement)
    else:
        referee(changed)


def test_mutations_return_a_new_list_and_change_its_length_by_at_most_one():
    rng = np.random.default_rng(3)
    numbers = [1, 2, -2, -2.5, -1, -1.5]
    for _ in range(200):
        name, changed = mutate(rng, numbers)
        assert len(changed) - len(numbers) == {"drop": -1, "duplicate": 1}.get(name, 0)
        assert all(type(entry) is (int if entry == int(entry) else float) for entry in changed)
    assert numbers == [1, 2, -2, -2.5, -1, -1.5]
