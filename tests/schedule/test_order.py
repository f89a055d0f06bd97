"""What an order may say, and what is said when it may not."""

import itertools
import json
import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jgraph
from jgraph.errors import JgraphError, OrderError
from jgraph.schedule import Action, Order
from tests.schedule.strategies import schedules

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
# Accepted on purpose. The first can run; upstream refuses it because its graphs cannot be captured twice. The others break
# upstream's rules for arguments: here None means one layer each, and an int is for all chunks.
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


@pytest.mark.parametrize("row", GOLDENS["hazardous"], ids=lambda row: row["name"])
def test_orders_that_are_hazardous_only_for_reused_buffers_can_run(row):
    assert parse_row(row).to_list() == row["args"]["order"]


@pytest.mark.parametrize(
    ("numbers", "arguments", "message"),
    [
        ([], {}, "the order is empty; it needs at least one forward and one backward, e.g. [1, -1]"),
        ([1, 0], {}, "entry 1 is 0; chunks count from 1, without gaps"),
        ([1.0, -1], {}, "entry 0 is 1.0 (float); forwards and dgrads are integers: 1 (int)"),
        ([1, -1.25], {}, "entry 1 is -1.25 (float); only a wgrad has a fraction, and it is -c-0.5, e.g. -1.5 for chunk 1"),
        ([1, None], {}, "entry 1 is None (NoneType); an entry is a number: c forward, -c dgrad, -c-0.5 wgrad of chunk c"),
        ([1, 3, -3, -1], {}, "entry 1 is of chunk 3, but no entry is of chunk 2; number the chunks from 1, without gaps"),
        ([-1, 1], {}, "entry 0 is the dgrad of chunk 1, microbatch 0, before its forward; move it after entry 1"),
        ([1, -1.5, -1], {}, "entry 1 is the wgrad of chunk 1, microbatch 0, before its dgrad; move it after entry 2"),
        ([1, 1, -1], {}, "entry 1 is the forward of chunk 1, microbatch 1, and its dgrad never comes; add -1 for it"),
        (
            [1, 1, -1, -1, -1.5],
            {},
            "entry 3 is the dgrad of chunk 1, microbatch 1, and its wgrad never comes; add -1.5 for it",
        ),
        ([1, -1, -1], {}, "entry 2 is the dgrad of chunk 1, microbatch 1, before its forward; only 1 come in all"),
        (
            [1, 2, -1, -2],
            {},
            "entry 2 is the dgrad of chunk 1, microbatch 0, before that of chunk 2, which it needs; move it after entry 3",
        ),
        (
            [1, 2, 1, -2, -1, -1],
            {},
            "entry 2 is the forward of chunk 1, microbatch 1, but chunk 2 has only 1 microbatches; "
            "every chunk sees the same ones",
        ),
        (
            [1, -1],
            {"delay_wgrad": True},
            "entry 1 is -1, but no wgrad of chunk 1 comes, and delay_wgrad says that they are delayed; "
            "add one -1.5 for each -1, or pass delay_wgrad=False",
        ),
        (
            [1, -1, -1.5],
            {"delay_wgrad": False},
            "entry 2 is -1.5, a wgrad of chunk 1, but delay_wgrad says that they are not delayed; "
            "remove it, or pass delay_wgrad=True",
        ),
        (
            [1, -1, -1.5],
            {"num_layers_per_chunk": 2},
            "entry 2 is the wgrad of chunk 1, microbatch 0, which has 2 layers; "
            "where wgrad is delayed, make every layer a chunk of its own",
        ),
        (
            [1, -1],
            {"num_layers_per_chunk": [1, 1]},
            "`num_layers_per_chunk` has 2 values, but there are 1 chunks: give one per chunk",
        ),
        ([1, -1], {"delay_wgrad": 1}, "`delay_wgrad` is 1 (int): must be one bool, or one per chunk"),
    ],
)
def test_a_message_says_where_what_why_and_the_remedy(numbers, arguments, message):
    with pytest.raises(OrderError) as caught:
        Order.parse(numbers, **arguments)
    assert str(caught.value) == message
    said = message.removeprefix("entry ").split()[0]
    assert caught.value.position == (int(said) if message.startswith("entry ") else None)


def test_of_several_faults_the_first_entry_is_told():
    with pytest.raises(OrderError) as caught:
        Order.parse([1, 2, -2.5, -1.5, -2, -1])
    assert caught.value.position == 2


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
        ([1, -1.25], 1),
        ([1, -0.0], 1),
        ([1, -3.5], 1),
        ([np.True_, -1], 0),
        ([1, [[-1]]], 1),
        ([1, np.float64(math.nan)], 1),
        (np.array([[1, -1]]), 0),
        (np.array(["1", "-1"]), 0),
        (np.array([1.0, -1.0]), 0),
        (np.ma.array([1, -1], mask=[0, 1]), 1),
        ([10**5000, -1], 0),
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
    for arguments in ([Silent()], [[1, -1], Silent()], [[1, -1], [Silent()]], [[1, -1], None, Silent()]):
        with pytest.raises(OrderError, match="something that cannot be printed"):
            Order.parse(*arguments)


@pytest.mark.parametrize(
    "numbers", [np.array([1, -1]), (np.int64(1), np.float64(-1.5), -1)[::2], (n for n in (1, -1)), range(1, -2, -2)]
)
def test_any_sequence_of_integers_may_say_an_order(numbers):
    assert Order.parse(numbers).to_list() == [1, -1]


def test_wgrad_may_be_a_numpy_scalar():
    assert Order.parse([np.int32(1), -1, np.float32(-1.5)]).delay_wgrad == (True,)
    assert Order.parse([np.int64(1), np.int8(-1), np.float64(-1.5)]).to_list() == [1, -1, -1.5]


class Unprintable:
    def __repr__(self):
        raise RuntimeError


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.builds(Unprintable)
    | st.sampled_from([1j, np.int64(1), np.float64(-1.5), np.True_, np.float16(math.nan), 10**30, Order, range(2)])
    | st.sampled_from([np.zeros((2, 2)), np.array([1, -1]), np.array(["x"]), np.array([True]), frozenset([1, -1])])
)
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: (item for item in items))
    ),
    max_leaves=6,
)
SIGNED = st.sampled_from([1, 2, 3, -1, -2, -3, -1.5, -2.5, 0, 1.0, np.int64(1), np.float64(-1.5)])
# Often an order that can run, so that what is wrong with the other arguments is looked at too.
NUMBERS = JUNK | st.lists(SIGNED, max_size=8) | st.sampled_from([[1, -1], [1, -1, -1.5], [1, 2, -2, -1], [1, 2, -2, -2.5, -1]])


@given(
    numbers=NUMBERS,
    layers=JUNK | st.none() | st.integers(1, 2) | st.lists(st.integers(0, 2), max_size=3),
    delay=JUNK | st.none() | st.lists(st.booleans(), max_size=3),
)
@settings(max_examples=800, deadline=None, derandomize=True)
def test_whatever_comes_in_an_order_or_an_order_error_comes_out(numbers, layers, delay):
    try:
        order = Order.parse(numbers, layers, delay)
    except OrderError:
        return
    assert Order.parse(order.to_list(), order.num_layers_per_chunk, order.delay_wgrad) == order


@pytest.mark.parametrize(
    ("numbers", "arguments"),
    [
        ([1, -1], {"num_layers_per_chunk": np.array(1)}),
        ([1, -1, -1.5], {"delay_wgrad": np.array(True)}),
        ([1, -1, -1.5], {"num_layers_per_chunk": 10**5000}),
    ],
)
def test_arguments_that_only_look_like_a_number_are_taken_or_refused(numbers, arguments):
    try:
        Order.parse(numbers, **arguments)
    except OrderError as error:
        assert next(iter(arguments)) in str(error) or error.position is not None  # noqa: PT017 - either is right


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


def test_delay_wgrad_may_be_read_off_said_for_all_or_said_per_chunk():
    whole, split, mixed = [1, 2, -2, -1], [1, 2, -2, -2.5, -1, -1.5], [1, 2, -2, -2.5, -1]
    for numbers, said in ((whole, False), (split, True)):
        orders = {Order.parse(numbers, delay_wgrad=delay) for delay in (None, said, [said, said], np.array([said] * 2))}
        assert {order.delay_wgrad for order in orders} == {(said, said)}
        assert len(orders) == 1
    assert Order.parse(mixed, delay_wgrad=(False, True)) == Order.parse(mixed)


@pytest.mark.parametrize("delay", [[True], [True] * 3, [], "no", 0, 1.0, [1, 0], {True: 1}, b"\x01"])
def test_a_delay_wgrad_that_is_not_one_bool_or_one_per_chunk_is_refused(delay):
    with pytest.raises(OrderError, match="delay_wgrad") as caught:
        Order.parse([1, 2, -2, -2.5, -1, -1.5], delay_wgrad=delay)
    assert caught.value.position is None


@pytest.mark.parametrize("layers", [0, -1, True, 1.0, math.nan, "2", b"2", [1, 0], [True, 1], [[1], [1]], [1], [], {1: 1}])
def test_a_num_layers_per_chunk_that_is_not_one_count_or_one_per_chunk_is_refused(layers):
    with pytest.raises(OrderError, match="num_layers_per_chunk") as caught:
        Order.parse([1, 2, -2, -1], num_layers_per_chunk=layers)
    assert caught.value.position is None


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


@given(schedules())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_random_orders_come_back_from_numbers_and_from_actions(schedule):
    for order in schedule.orders:
        again = Order.of(list(order))
        assert again == order
        assert hash(again) == hash(order)
        numbers = Order.parse(order.to_list())
        # Signed numbers say of a chunk, not of an entry, whether wgrads are delayed.
        assert numbers.split() == order.split()
        assert numbers.delay_wgrad == order.delay_wgrad
        assert numbers.to_list() == order.to_list()
        assert (order.num_chunks, order.num_microbatches) == (numbers.num_chunks, schedule.num_microbatches)


@given(schedules())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_split_order_has_every_wgrad_at_once_after_the_dgrad_that_was_fused_with_it(schedule):
    for order in schedule.orders:
        expected = []
        for action in order:
            parts = ("dgrad", "wgrad") if action.kind == "backward" else (action.kind,)
            expected += [Action(part, action.chunk, action.microbatch) for part in parts]
        assert list(order.split()) == expected
        assert order.split().split() == order.split()
        assert all(order.split().delay_wgrad)


@given(schedules(), st.slices(8))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_an_order_is_indexed_and_sliced_like_the_list_of_its_actions(schedule, part):
    order = schedule[0]
    actions = list(order)
    assert order[part] == actions[part]
    assert [order[i] for i in range(-len(order), len(order))] == actions + actions
    assert list(reversed(order)) == actions[::-1]
    assert order.index(actions[-1]) == len(order) - 1
    assert (len(order), actions[0] in order) == (len(actions), True)
    for i in (len(order), -len(order) - 1):
        with pytest.raises(IndexError):
            order[i]


def test_orders_are_equal_if_they_do_the_same_with_as_many_layers():
    order = Order.parse([1, -1])
    assert order == Order.parse((1, -1), 1, False)
    assert len({order, Order.parse([1, -1]), Order.parse([1, -1], 2), order.split()}) == 3
    assert order != Order.parse([1, -1], 2)
    assert order != order.split()
    assert order != Order.parse([1, 1, -1, -1])
    assert order != [1, -1]
    assert order != list(order)


def test_an_action_with_a_microbatch_out_of_turn_is_refused():
    with pytest.raises(OrderError, match="must be microbatch 0") as caught:
        Order.of([Action("forward", 0, 1), Action("backward", 0, 0)])
    assert caught.value.position == 0


def test_an_order_cannot_be_changed():
    order = Order.parse([1, -1])
    for array in (order.kinds, order.chunks, order.microbatches):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(FrozenInstanceError):
        order.kinds = order.chunks


def test_an_order_does_not_change_with_the_arrays_that_it_was_made_from():
    kinds, chunks = np.array([0, 3], np.int8), np.zeros(2, np.int32)
    order = Order(kinds, chunks)
    kinds[:] = 0
    assert order.to_list() == [1, -1]


def test_layers_count_for_chunks_that_do_not_delay():
    assert Order.parse([1, -1], num_layers_per_chunk=3).num_layers_per_chunk == (3,)
    with pytest.raises(OrderError, match="`num_layers_per_chunk` is 0"):
        Order.parse([1, -1], num_layers_per_chunk=0)
    with pytest.raises(OrderError, match="has 3 values"):
        Order.parse([1, -1], num_layers_per_chunk=[1, 1, 1])


@pytest.mark.parametrize(("kinds", "chunks"), [([0, 7], [0, 0]), ([0, -1], [0, 0]), ([0, 3], [0, -1]), ([0, 3], [0])])
def test_arrays_that_are_no_actions_are_refused(kinds, chunks):
    with pytest.raises(OrderError, match=r"entry \d is of kind|one of each per entry"):
        Order(np.array(kinds), np.array(chunks))


@pytest.mark.parametrize(
    ("kinds", "chunks", "layers"),
    [
        ([0, 259], [0, 0], ()),
        ([0.0, 3.7], [0.0, 0.0], ()),
        ([[0, 3]], [[0, 0]], ()),
        ([0, 3], [0, 0], (1, 1)),
        ([0, 3], [0, 0], (-1,)),
    ],
)
def test_arrays_and_layers_that_cannot_be_are_refused(kinds, chunks, layers):
    with pytest.raises(OrderError):
        Order(np.array(kinds), np.array(chunks), layers)


@pytest.mark.parametrize("actions", [[1, -1], None, [Action("weight", 0, 0)]])
def test_what_are_no_actions_is_refused(actions):
    with pytest.raises(OrderError):
        Order.of(actions)


@pytest.mark.parametrize("chunk", [None, "0", "abc", 0.5, math.nan, math.inf, True, -1, 2, 2**31, 10**30, []])
def test_an_action_of_what_is_no_chunk_is_refused_with_its_position(chunk):
    with pytest.raises(OrderError) as caught:
        Order.of([Action("forward", 0, 0), Action("backward", chunk, 0)])
    assert caught.value.position == 1


def test_numbers_of_layers_may_be_an_array():
    assert Order([0, 0, 3, 3], [0, 1, 1, 0], np.array([2, 3])).num_layers_per_chunk == (2, 3)
