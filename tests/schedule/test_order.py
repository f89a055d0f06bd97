"""What an order may say, and what is said when it may not."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jgraph
from jgraph.errors import JgraphError, OrderError
from jgraph.schedule import Action, Order

GOLDENS = json.loads((Path(__file__).parent / "goldens/orders.json").read_text())
ROWS = {row["name"]: row for row in GOLDENS["invalid"]}

# Where the entry at fault is, for every row that is about the order.
POSITIONS = {
    "wgrad_before_dgrad": 1,
    "wgrad_before_dgrad_chunk2": 4,
    "delayed_modules_but_no_float": 1,
    "float_but_no_delayed_module": 2,
    "diff_0.25_alone": 2,
    "layers_gt_1": 2,
    "odd_length": 1,
    "bwd_before_fwd": 0,
    "float_forward_1.0": 0,
    "float_dgrad_-1.0": 1,
    "zero_entry": 1,
    "empty": None,
    "layers_list_wrong_len": None,
}
# They can run; upstream refuses the first because its graphs cannot be captured twice, the others by rules of its arguments.
CAN_RUN = ("two_dgrads_then_two_wgrads", "no_layers_per_chunk", "int_layers_per_chunk_with_wgrad")
ABOUT_CALLABLES = ("inference_with_order", "inference_reuse", "callables_mismatch", "sample_args_mismatch")


def parse_row(row):
    args = row["args"]
    bounds = [0, *itertools.accumulate(args["layers_per_chunk"])]
    delayed = [any(a <= d < b for d in args.get("dw", ())) for a, b in itertools.pairwise(bounds)]
    return Order.parse(args["order"], args.get("nlpc", args["layers_per_chunk"]), delayed)


def test_every_invalid_golden_row_is_sorted():
    assert set(ROWS) == {*POSITIONS, *CAN_RUN, *ABOUT_CALLABLES}


@pytest.mark.parametrize("name", POSITIONS)
def test_an_invalid_golden_order_is_refused_at_its_position(name):
    with pytest.raises(OrderError) as caught:
        parse_row(ROWS[name])
    assert caught.value.position == POSITIONS[name]
    if caught.value.position is not None:
        assert f"entry {caught.value.position} " in str(caught.value)


@pytest.mark.parametrize("name", [*CAN_RUN, *ABOUT_CALLABLES])
def test_golden_rows_whose_order_can_run_are_accepted(name):
    assert parse_row(ROWS[name]).to_list() == ROWS[name]["args"]["order"]


@pytest.mark.parametrize(
    ("numbers", "position"),
    [
        ([1, -1, -1], 2),
        ([1, -1, 2], 2),
        ([1, 3, -3, -1], 1),
        ([1, 2, -1, -2], 2),
        ([2, 1, -2, -1], 0),
        ([1, 2, 1, -2, -1, -1], 2),
        ([1, -1, -1.5, -1.5], 3),
        ([1, -0.5], 1),
        ([1.5, -1], 0),
        ([1, math.nan], 1),
        ([1, math.inf], 1),
        ([1, -math.inf], 1),
        ([True, -1], 0),
        ([1, "-1"], 1),
        ([1, None], 1),
        ([[1], -1], 0),
        ([10**30, -1], 0),
        ([1, -(10**30)], 1),
        ([1, -1e300], 1),
        ([1, Fraction(-3, 2)], 1),
        ([1, 1j], 1),
        ([1, np.array([-1, 1])], 1),
        ([1, np.float64(-1.0)], 1),
    ],
)
def test_what_cannot_run_is_refused_at_the_first_entry_at_fault(numbers, position):
    with pytest.raises(OrderError) as caught:
        Order.parse(numbers)
    assert caught.value.position == position


@pytest.mark.parametrize(
    "numbers", ["1,-1", b"\x01", None, 5, 1.5, {}, {1: 2}, [], (), np.zeros((0,)), np.array(1), {-1, 1}, object()]
)
def test_what_is_no_sequence_of_numbers_is_refused(numbers):
    with pytest.raises(OrderError):
        Order.parse(numbers)


def test_an_entry_that_cannot_be_printed_is_refused_all_the_same():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(OrderError, match="entry 1 is something that cannot be printed"):
        Order.parse([1, Silent()])


@pytest.mark.parametrize(
    "numbers", [np.array([1, -1]), (np.int64(1), np.float64(-1.5), -1)[::2], (n for n in (1, -1)), range(1, -2, -2)]
)
def test_any_sequence_of_integers_may_say_an_order(numbers):
    assert Order.parse(numbers).to_list() == [1, -1]


def test_wgrad_may_be_a_numpy_scalar():
    assert Order.parse([np.int32(1), -1, np.float32(-1.5)]).delay_wgrad == (True,)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
SIGNED = st.sampled_from([1, 2, 3, -1, -2, -3, -1.5, -2.5, 0, 1.0])


@given(
    numbers=JUNK | st.lists(SIGNED, max_size=8),
    layers=JUNK | st.integers(1, 2),
    delay=JUNK | st.lists(st.booleans(), max_size=3),
)
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_whatever_comes_in_an_order_or_an_order_error_comes_out(numbers, layers, delay):
    try:
        order = Order.parse(numbers, layers, delay)
    except OrderError:
        return
    assert Order.parse(order.to_list(), layers, delay) == order


def test_the_error_is_public_and_of_the_family():
    assert jgraph.OrderError is OrderError
    assert issubclass(OrderError, JgraphError)
    assert issubclass(OrderError, ValueError)
    assert jgraph.Order is Order


def test_microbatches_are_counted_first_in_first_out():
    order = Order.parse([1, 1, -1, -1, -1.5, -1.5])
    assert [(a.kind, a.microbatch) for a in order] == [
        ("forward", 0),
        ("forward", 1),
        ("dgrad", 0),
        ("dgrad", 1),
        ("wgrad", 0),
        ("wgrad", 1),
    ]


def test_a_backward_without_wgrad_entries_is_whole():
    assert [a.kind for a in Order.parse([1, -1])] == ["forward", "backward"]


def test_chunks_may_differ_in_whether_they_delay():
    order = Order.parse([1, 2, -2, -2.5, -1])
    assert order.delay_wgrad == (False, True)
    assert Order.parse(order.to_list(), delay_wgrad=[False, True]) == order
    with pytest.raises(OrderError) as caught:
        Order.parse(order.to_list(), delay_wgrad=True)
    assert caught.value.position == 4


def test_splitting_puts_each_wgrad_after_its_dgrad():
    assert Order.parse([1, 2, -2, -1]).split().to_list() == [1, 2, -2, -2.5, -1, -1.5]


def test_a_whole_backward_may_not_overtake_a_pending_wgrad():
    actions = [
        Action("forward", 0, 0),
        Action("forward", 0, 1),
        Action("dgrad", 0, 0),
        Action("backward", 0, 1),
        Action("wgrad", 0, 0),
    ]
    with pytest.raises(OrderError, match="first in, first out") as caught:
        Order.of(actions)
    assert caught.value.position == 3


def test_an_order_comes_back_from_its_actions():
    order = Order.parse([1, 2, 1, 2, -2, -2.5, -1, -1.5, -2, -1, -2.5, -1.5])
    assert Order.of(order) == order
    assert hash(Order.of(order)) == hash(order)
    assert order[2:4] == [order[2], order[3]]
    assert order[-1] == Action("wgrad", 0, 1)


def test_an_action_with_a_microbatch_out_of_turn_is_refused():
    with pytest.raises(OrderError, match="must be microbatch 0") as caught:
        Order.of([Action("forward", 0, 1), Action("backward", 0, 0)])
    assert caught.value.position == 0


def test_an_order_cannot_be_changed():
    order = Order.parse([1, -1])
    with pytest.raises(ValueError, match="read-only"):
        order.kinds[0] = 1


def test_layers_count_for_chunks_that_do_not_delay():
    assert Order.parse([1, -1], num_layers_per_chunk=3).num_layers_per_chunk == (3,)
    with pytest.raises(OrderError, match="num_layers_per_chunk is 0"):
        Order.parse([1, -1], num_layers_per_chunk=0)
    with pytest.raises(OrderError, match="has 3 values"):
        Order.parse([1, -1], num_layers_per_chunk=[1, 1, 1])


@pytest.mark.parametrize(("kinds", "chunks"), [([0, 7], [0, 0]), ([0, -1], [0, 0]), ([0, 3], [0, -1]), ([0, 3], [0])])
def test_arrays_that_are_no_actions_are_refused(kinds, chunks):
    with pytest.raises(OrderError, match=r"entry \d has kind"):
        Order(np.array(kinds), np.array(chunks))
