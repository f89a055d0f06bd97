"""All ranks together: who waits for whom."""

import numpy as np
import pytest

from jgraph.errors import OrderError
from jgraph.schedule import Order, Schedule, generate, loop, vee


def test_a_circle_of_waiting_is_told_with_rank_position_and_reason():
    # Rank 0 wants the first gradient before it sends the second activation; rank 1 wants both before it starts back.
    orders = (Order.parse([1, -1, 1, -1]), Order.parse([1, 1, -1, -1]))
    with pytest.raises(
        OrderError, match=r"deadlocks: rank 0 at entry 1 .* waits for rank 1's dgrad of stage 1, microbatch 0"
    ) as caught:
        Schedule(orders)
    assert (caught.value.rank, caught.value.position) == (0, 1)


def test_each_action_has_the_earliest_tick():
    schedule = generate("1f1b", pp=3, microbatches=3)
    assert [t.tolist() for t in schedule.ticks] == [[0, 1, 2, 5, 7, 9], [1, 2, 4, 5, 6, 8], [2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("orders", "placement", "match"),
    [
        ((), (), "at least one rank"),
        (([1, -1], [1, -1]), ((0,),), "1 ranks, but there are 2 orders"),
        (([1, -1], [1, -1]), ((0,), (0,)), "each of 0 to 1 must be on exactly one"),
        (([1, -1], [1, -1]), ((0,), (2,)), "each of 0 to 1"),
        (([1, 2, -2, -1],), ((1, 0),), "ascending"),
        (([1, 2, -2, -1], [1, -1]), (), "rank 1 has an order of 1 chunks"),
        (([1, -1], [1, 1, -1, -1]), (), "rank 1 has 2 microbatches, rank 0 has 1"),
    ],
)
def test_orders_that_do_not_fit_together_are_refused(orders, placement, match):
    with pytest.raises(OrderError, match=match):
        Schedule(tuple(map(Order.parse, orders)), placement)


@pytest.mark.parametrize(
    ("ticks", "match"),
    [
        (([0, 3], [0, 2]), r"rank 1, entry 0 .* is at tick 0, but what it needs is made at tick 0"),
        (([0, 2], [1, 2]), r"rank 0, entry 1 .* is at tick 2, but what it needs is made at tick 2"),
        (([0, 0], [1, 2]), "ticks are whole numbers from 0 and go up"),
        (([-1, 3], [1, 2]), "ticks are whole numbers"),
        (([0.0, 3.0], [1, 2]), "ticks are whole numbers"),
        (([0, 3, 4], [1, 2]), "rank 0 has 2 actions, but 3 ticks"),
        (([0, 3],), "ticks for 1 ranks, but 2 orders"),
    ],
)
def test_ticks_that_come_too_early_are_refused(ticks, match):
    with pytest.raises(OrderError, match=match):
        Schedule((Order.parse([1, -1]),) * 2, (), tuple(map(np.array, ticks)))


def test_later_ticks_than_the_earliest_are_taken_as_given():
    schedule = Schedule((Order.parse([1, -1]),) * 2, (), (np.array([0, 9]), np.array([3, 5])))
    assert schedule.num_ticks == 10


def test_placements_put_every_stage_somewhere():
    assert loop(2, 2) == ((0, 2), (1, 3))
    assert vee(2) == ((0, 3), (1, 2))
    assert generate("zb-v", pp=2, microbatches=4).rank_of_stage.tolist() == [0, 1, 1, 0]


def test_any_order_is_a_schedule_of_one_rank():
    order = generate("aligned", pp=4, microbatches=8, chunks=2)[1]
    assert Schedule((order,)).num_ticks == len(order)
