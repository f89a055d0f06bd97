"""Schedules of all ranks: deadlocks, ticks and placements."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Order, Schedule, generate, loop, vee
from tests.schedule.referee import can_run, counted, kinds_and_chunks
from tests.schedule.strategies import schedules


def test_a_deadlock_is_reported_with_rank_position_and_reason():
    # Rank 0 needs the first gradient before it sends the second activation; rank 1 needs both activations before its first
    # dgrad.
    orders = (Order.parse([1, -1, 1, -1]), Order.parse([1, 1, -1, -1]))
    with pytest.raises(
        OrderError, match=r"deadlocks: rank 0 at entry 1 .* waits for rank 1's dgrad of stage 1, microbatch 0"
    ) as caught:
        Schedule(orders)
    assert (caught.value.rank, caught.value.position) == (0, 1)


def test_a_deadlock_names_every_rank_of_the_cycle_and_the_action_it_needs():
    # Rank 2 runs stage 1 twice before stage 2, rank 1 needs stage 2 first, and rank 0 needs stage 3 before it runs stage 0
    # again.
    rows = [1, 2, 1, 2, -2, -1, -2, -1], [1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, 2, -2, -2, -1, -1]
    with pytest.raises(OrderError) as caught:
        Schedule(tuple(map(Order.parse, rows)), ((0, 4), (3, 5), (1, 2)))
    assert str(caught.value) == (
        "the schedule deadlocks: "
        "rank 0 at entry 1 (forward of chunk 2, microbatch 0) waits for rank 1's forward of stage 3, microbatch 0; "
        "rank 1 at entry 0 (forward of chunk 1, microbatch 0) waits for rank 2's forward of stage 2, microbatch 0; "
        "rank 2 at entry 1 (forward of chunk 1, microbatch 1) waits for rank 0's forward of stage 0, microbatch 1; "
        "move the needed actions forward"
    )
    assert (caught.value.rank, caught.value.position) == (0, 1)


def test_a_deadlock_of_four_ranks_shows_the_first_three():
    rows = (
        [1, 2, 1, 2, -2, -2, -1, -1],
        [1, 2, 1, 2, -2, -2, -1, -1],
        [1, 1, 2, 2, -2, -2, -1, -1],
        [1, 2, 1, 2, -2, -2, -1, -1],
    )
    with pytest.raises(OrderError) as caught:
        Schedule(tuple(map(Order.parse, rows)), ((5, 7), (2, 4), (1, 3), (0, 6)))
    assert str(caught.value).count("waits for") == 3
    assert "microbatch 1 ...; move" in str(caught.value)
    assert (caught.value.rank, caught.value.position) == (0, 0)


def test_a_rank_outside_the_cycle_is_not_reported():
    # Ranks 1 and 2 wait for each other; rank 0 waits for them.
    orders = (Order.parse([1, 1, -1, -1]), Order.parse([1, -1, 1, -1]), Order.parse([1, 1, -1, -1]))
    with pytest.raises(OrderError, match=r"rank 1 at entry 1 .* waits for rank 2's dgrad of stage 2, microbatch 0") as caught:
        Schedule(orders)
    assert (caught.value.rank, caught.value.position) == (1, 1)
    assert "rank 0 at" not in str(caught.value)


def test_all_deadlocks_of_three_ranks_and_only_deadlocks_are_refused():
    rows = [[1, 1, 1, -1, -1, -1], [1, 1, -1, 1, -1, -1], [1, 1, -1, -1, 1, -1], [1, -1, 1, 1, -1, -1], [1, -1, 1, -1, 1, -1]]
    seen = Counter()
    for step in itertools.product(rows, repeat=3):
        try:
            Schedule(tuple(map(Order.parse, step)))
            runs = True
        except OrderError:
            runs = False
        assert runs == can_run([kinds_and_chunks(row) for row in step], loop(3, 1))
        seen[runs] += 1
    # No rank may be ahead of the previous one: chains of three in the Stanley lattice of five paths, 1 + 4 + 9 + 16.
    assert seen == {True: 30, False: 95}


def legal_ticks(orders, most):
    """Yields all valid ticks below `most` of the orders of two ranks, by brute force."""
    sizes = [len(order) for order in orders]
    for ticks in itertools.product(*(itertools.combinations(range(most), n) for n in sizes)):
        try:
            yield Schedule(orders, (), tuple(map(np.array, ticks))).ticks
        except OrderError:
            continue


@pytest.mark.parametrize(
    "numbers", [([1, 1, -1, -1], [1, -1, 1, -1]), ([1, -1, -1.5], [1, -1, -1.5]), ([1, -1], [1, -1, -1.5])]
)
def test_no_valid_ticks_of_two_ranks_have_an_earlier_action(numbers):
    orders = tuple(map(Order.parse, numbers))
    earliest = Schedule(orders).ticks
    ways = list(legal_ticks(orders, 8))
    assert len(ways) > 10
    assert [np.min(column, axis=0).tolist() for column in zip(*ways, strict=True)] == [t.tolist() for t in earliest]


@given(schedules())
@settings(max_examples=120)
def test_every_action_runs_in_the_tick_after_its_last_dependency(schedule):
    rows = counted(schedule)
    made = {("F" if kind == 0 else "B", stage, m): tick for row in rows for tick, kind, stage, m in row if kind != 2}
    for row in rows:
        for before, (tick, kind, stage, m) in zip([None, *row], row, strict=False):
            source = {0: ("F", stage - 1, m), 2: None}.get(kind, ("B", stage + 1, m))
            waits = [-1, before[0] if before else -1, made.get(source, -1)]
            assert tick == max(waits) + 1


def test_1f1b_has_the_earliest_ticks():
    schedule = generate("1f1b", pp=3, microbatches=3)
    assert [t.tolist() for t in schedule.ticks] == [[0, 1, 2, 5, 7, 9], [1, 2, 4, 5, 6, 8], [2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("orders", "placement", "match"),
    [
        ((), (), "at least one Order"),
        (([1, -1], [1, -1]), ((0,),), "1 rows for 2 orders"),
        (([1, -1], [1, -1]), ((0,), (0,)), "each of 0 to 1 must occur exactly once"),
        (([1, -1], [1, -1]), ((0,), (2,)), "each of 0 to 1"),
        (([1, 2, -2, -1],), ((1, 0),), "ascending"),
        (([1, 2, -2, -1], [1, -1]), (), "rank 1 has 1 chunks in its order"),
        (([1, -1], [1, 1, -1, -1]), (), "rank 1 has 2 microbatches, but rank 0 has 1"),
        (([1, -1], [1, -1]), ((0,), (-1,)), "each of 0 to 1"),
        (([1, -1], [1, -1]), ((0,), (1, 2)), "rank 1 has 1 chunks in its order, but 2 stages in its placement"),
        (([1, -1], [1, -1]), ((), (0, 1)), "rank 0 has 1 chunks in its order, but 0 stages in its placement"),
        (([1, 2, -2, -1],), ((0, 0),), "each of 0 to 1 must occur exactly once"),
        (([1, 2, -2, -1], [1, 2, -2, -1]), ((0, 1), (2, 4)), r"have stages \[0, 1, 2, 4\]; each of 0 to 3"),
    ],
)
def test_inconsistent_orders_and_placements_are_refused(orders, placement, match):
    with pytest.raises(OrderError, match=match):
        Schedule(tuple(map(Order.parse, orders)), placement)


@pytest.mark.parametrize(
    ("ticks", "rank", "position"),
    [
        (([0, 3], [0, 2]), 1, 0),
        (([0, 2], [1, 2]), 0, 1),
        (([0, 1], [1, 2]), 0, 1),
        (([5, 9], [4, 8]), 1, 0),
        (([0, 0], [1, 2]), 0, 1),
        (([0, 3], [2, 1]), 1, 1),
        (([-1, 3], [1, 2]), 0, 0),
        (([0, 3], [1, 2, 3]), 1, None),
        (([0, 3], []), 1, None),
        (([0, 3],), None, None),
        (([0, 3], [1, 2], [3, 4]), None, None),
    ],
)
def test_invalid_ticks_are_refused_with_rank_and_position(ticks, rank, position):
    with pytest.raises(OrderError) as caught:
        Schedule((Order.parse([1, -1]),) * 2, (), tuple(map(np.array, ticks)))
    assert (caught.value.rank, caught.value.position) == (rank, position)


def test_a_wgrad_may_be_at_any_tick_after_its_dgrad():
    orders = (Order.parse([1, -1, -1.5]),) * 2
    assert Schedule(orders, (), (np.array([0, 3, 4]), np.array([1, 2, 3]))).num_ticks == 5
    assert Schedule(orders, (), (np.array([0, 3, 4]), np.array([1, 2, 90]))).num_ticks == 91


@pytest.mark.parametrize("name", NAMES)
def test_the_ticks_of_a_generated_schedule_are_valid_ticks(name):
    schedule = generate(name, pp=3, microbatches=6, chunks=2 if name == "interleaved-1f1b" else 1)
    copy = Schedule(schedule.orders, schedule.placement, schedule.ticks)
    assert [t.tolist() for t in copy.ticks] == [t.tolist() for t in schedule.ticks]


def test_split_keeps_name_and_placement_and_uses_the_earliest_ticks():
    schedule = generate("dualpipe-v", pp=2, microbatches=5)
    split = schedule.split()
    assert (split.name, split.placement) == (schedule.name, schedule.placement)
    assert split.orders == tuple(order.split() for order in schedule.orders)
    assert [t.tolist() for t in split.ticks] == [t.tolist() for t in Schedule(split.orders, split.placement).ticks]


def test_ranks_may_have_different_numbers_of_stages():
    schedule = Schedule((Order.parse([1, 2, -2, -1]), Order.parse([1, -1])), ((0, 2), (1,)))
    assert [t.tolist() for t in schedule.ticks] == [[0, 2, 3, 5], [1, 4]]


@pytest.mark.parametrize("ticks", [np.array([5, 3], np.uint64), np.array([100, -100], np.int8)])
def test_descending_ticks_are_refused_in_any_integer_type(ticks):
    with pytest.raises(OrderError, match="ascending integers"):
        Schedule((Order.parse([1, -1]),), (), (ticks,))


@pytest.mark.parametrize(
    ("orders", "placement", "ticks"),
    [
        ((Order.parse([1, -1]),), (), (np.zeros((2, 2), int),)),
        ((Order.parse([1, -1]),), (), (["a", "b"],)),
        ((Order.parse([1, -1]),), (), (3,)),
        ((Order.parse([1, -1]),), (), np.array([[1, 0]])),
        ((Order.parse([1, -1]),), ((0.0,),), ()),
        (([1, -1],), (), ()),
    ],
)
def test_orders_stages_and_ticks_of_a_wrong_type_are_refused(orders, placement, ticks):
    with pytest.raises(OrderError):
        Schedule(orders, placement, ticks)


@pytest.mark.parametrize("given", [False, True])
def test_ticks_are_copied_and_read_only(given):
    ticks = (np.array([0, 3]), np.array([1, 2]))
    schedule = Schedule((Order.parse([1, -1]),) * 2, (), ticks if given else ())
    ticks[0][0] = 9
    assert schedule.ticks[0].tolist() == [0, 3]
    assert not schedule.ticks[0].flags.writeable


@pytest.mark.parametrize(
    ("ticks", "match"),
    [
        (([0, 3], [0, 2]), r"rank 1, entry 0 .* is at tick 0, but it needs a result of tick 0"),
        (([0, 2], [1, 2]), r"rank 0, entry 1 .* is at tick 2, but it needs a result of tick 2"),
        (([0, 0], [1, 2]), "ticks must be ascending integers >= 0"),
        (([-1, 3], [1, 2]), "ticks must be ascending integers"),
        (([0.0, 3.0], [1, 2]), "ticks must be ascending integers"),
        (([0, 3, 4], [1, 2]), "rank 0 has 2 actions, but 3 ticks"),
        (([0, 3],), "1 rows for 2 orders"),
    ],
)
def test_the_error_for_invalid_ticks_gives_the_reason(ticks, match):
    with pytest.raises(OrderError, match=match):
        Schedule((Order.parse([1, -1]),) * 2, (), tuple(map(np.array, ticks)))


def test_ticks_may_be_later_than_the_earliest():
    schedule = Schedule((Order.parse([1, -1]),) * 2, (), (np.array([0, 9]), np.array([3, 5])))
    assert schedule.num_ticks == 10


def test_placements_list_every_stage_once():
    assert loop(2, 2) == ((0, 2), (1, 3))
    assert vee(2) == ((0, 3), (1, 2))
    assert generate("zb-v", pp=2, microbatches=4).rank_of_stage.tolist() == [0, 1, 1, 0]


def test_any_order_is_a_schedule_of_one_rank():
    order = generate("aligned", pp=4, microbatches=8, chunks=2)[1]
    assert Schedule((order,)).num_ticks == len(order)


@pytest.mark.parametrize("orders", [5, None, np.array(2), np.array([1, 2]), object(), iter(())])
def test_orders_must_be_a_sequence_of_orders(orders):
    with pytest.raises(OrderError, match="must be a sequence of at least one Order"):
        Schedule(orders)


@pytest.mark.parametrize("placement", [5, (0, 1), (None, None), object()])
def test_placement_must_have_a_row_of_stages_per_rank(placement):
    with pytest.raises(OrderError, match="one row of stages per rank"):
        Schedule((Order.parse([1, -1]),) * 2, placement)


def test_repr_shows_the_sizes_in_one_line():
    assert repr(Order.parse([1, 2, -2, -1, -1.5])) == "Order([1, 2, -2, -1, -1.5]: 5 actions, 2 chunks)"
    schedule = generate("zb-h1", pp=2, microbatches=8)
    assert repr(schedule) == "Schedule(zb-h1: 2 ranks, 2 stages, 8 microbatches, 25 ticks)"
    assert repr(schedule[0]) == "Order([1, 1, -1, -1.5, 1, -1, -1.5, 1, -1, -1.5, 1, -1, ...]: 24 actions, 1 chunk)"
