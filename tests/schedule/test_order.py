"""Orders that can run are accepted, and all others are refused at the first invalid entry."""

import itertools
import json
import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jgraph
from jgraph.errors import JgraphError, OrderError
from jgraph.schedule import Action, Order
from jgraph.schedule.action import KINDS
from tests.schedule.strategies import schedules

GOLDENS = json.loads((Path(__file__).parent / "goldens/orders.json").read_text())
ROWS = {row["name"]: row for row in GOLDENS["invalid"]}

# Position of the invalid entry, for every golden row about the order.
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
# Accepted on purpose. The first order can run; upstream refuses it because its graphs cannot be captured twice. The others
# violate upstream's rules for arguments: here None means one layer each, and an int applies to all chunks.
CAN_RUN = ("two_dgrads_then_two_wgrads", "no_layers_per_chunk", "int_layers_per_chunk_with_wgrad")
ABOUT_CALLABLES = ("inference_with_order", "inference_reuse", "callables_mismatch", "sample_args_mismatch")


def parse_row(row):
    args = row["args"]
    bounds = [0, *itertools.accumulate(args["layers_per_chunk"])]
    delayed = [any(a <= d < b for d in args.get("dw", ())) for a, b in itertools.pairwise(bounds)]
    return Order.parse(args["order"], args.get("nlpc", args["layers_per_chunk"]), delayed)


def test_every_invalid_golden_row_is_classified():
    assert set(ROWS) == {*POSITIONS, *CAN_RUN, *ABOUT_CALLABLES}


@pytest.mark.parametrize("name", POSITIONS)
def test_an_invalid_golden_order_is_refused_at_its_position(name):
    with pytest.raises(OrderError) as caught:
        parse_row(ROWS[name])
    assert caught.value.position == POSITIONS[name]
    if caught.value.position is not None:
        assert f"entry {caught.value.position} " in str(caught.value)


@pytest.mark.parametrize("name", [*CAN_RUN, *ABOUT_CALLABLES])
def test_golden_rows_with_a_valid_order_are_accepted(name):
    assert parse_row(ROWS[name]).to_list() == ROWS[name]["args"]["order"]


@pytest.mark.parametrize("row", GOLDENS["hazardous"], ids=lambda row: row["name"])
def test_orders_hazardous_only_for_reused_buffers_are_accepted(row):
    assert parse_row(row).to_list() == row["args"]["order"]


@pytest.mark.parametrize(
    ("numbers", "arguments", "message"),
    [
        ([], {}, "the order is empty; add at least one forward and one backward, e.g. [1, -1]"),
        ([1, 0], {}, "entry 1 is 0; chunks must be numbered from 1 without gaps"),
        ([1.0, -1], {}, "entry 0 is 1.0 (float); forwards and dgrads are integers: write 1 (int)"),
        ([1, -1.25], {}, "entry 1 is -1.25 (float); only a wgrad has a fraction, written -c-0.5, e.g. -1.5 for chunk 1"),
        ([1, None], {}, "entry 1 is None (NoneType); must be a number: c forward, -c dgrad, -c-0.5 wgrad of chunk c"),
        ([1, 3, -3, -1], {}, "entry 1 is of chunk 3, but chunk 2 has no entry; number the chunks from 1 without gaps"),
        ([-1, 1], {}, "entry 0 is the dgrad of chunk 1, microbatch 0, which comes before its forward; move it after entry 1"),
        (
            [1, -1.5, -1],
            {},
            "entry 1 is the wgrad of chunk 1, microbatch 0, which comes before its dgrad; move it after entry 2",
        ),
        ([1, 1, -1], {}, "entry 1 is the forward of chunk 1, microbatch 1, but its dgrad is missing; add -1"),
        (
            [1, 1, -1, -1, -1.5],
            {},
            "entry 3 is the dgrad of chunk 1, microbatch 1, but its wgrad is missing; add -1.5",
        ),
        (
            [1, -1, -1],
            {},
            "entry 2 is the dgrad of chunk 1, microbatch 1, which comes before its forward; the order has only 1 of them",
        ),
        (
            [1, 2, -1, -2],
            {},
            "entry 2 is the dgrad of chunk 1, microbatch 0, which needs the dgrad of chunk 2, a later entry; "
            "move it after entry 3",
        ),
        (
            [1, 2, 1, -2, -1, -1],
            {},
            "entry 2 is the forward of chunk 1, microbatch 1, but chunk 2 has only 1 microbatches; "
            "all chunks must have the same number",
        ),
        (
            [1, -1],
            {"delay_wgrad": True},
            "entry 1 is -1, but chunk 1 has no wgrad although delay_wgrad is True; "
            "add one -1.5 for each -1, or pass delay_wgrad=False",
        ),
        (
            [1, -1, -1.5],
            {"delay_wgrad": False},
            "entry 2 is -1.5, a wgrad of chunk 1, although delay_wgrad is False; remove it, or pass delay_wgrad=True",
        ),
        (
            [1, -1, -1.5],
            {"num_layers_per_chunk": 2},
            "entry 2 is the wgrad of chunk 1, microbatch 0, which has 2 layers; "
            "to delay its wgrad, make every layer a separate chunk",
        ),
        (
            [1, -1],
            {"num_layers_per_chunk": [1, 1]},
            "`num_layers_per_chunk` has 2 values, but there are 1 chunks: give one per chunk",
        ),
        ([1, -1], {"delay_wgrad": 1}, "`delay_wgrad` is 1 (int): must be one bool, or one per chunk"),
    ],
)
def test_the_message_gives_entry_problem_and_remedy(numbers, arguments, message):
    with pytest.raises(OrderError) as caught:
        Order.parse(numbers, **arguments)
    assert str(caught.value) == message
    entry = message.removeprefix("entry ").split()[0]
    assert caught.value.position == (int(entry) if message.startswith("entry ") else None)


def test_the_first_of_several_invalid_entries_is_reported():
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
def test_an_order_that_cannot_run_is_refused_at_the_first_invalid_entry(numbers, position):
    with pytest.raises(OrderError) as caught:
        Order.parse(numbers)
    assert caught.value.position == position


@pytest.mark.parametrize(
    "numbers", ["1,-1", b"\x01", None, 5, 1.5, {}, {1: 2}, [], (), np.zeros((0,)), np.array(1), {-1, 1}, object()]
)
def test_numbers_must_be_a_non_empty_sequence(numbers):
    with pytest.raises(OrderError):
        Order.parse(numbers)


def test_an_unprintable_entry_is_refused():
    class Silent:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(OrderError, match="entry 1 is an unprintable object"):
        Order.parse([1, Silent()])
    for arguments in ([Silent()], [[1, -1], Silent()], [[1, -1], [Silent()]], [[1, -1], None, Silent()]):
        with pytest.raises(OrderError, match="an unprintable object"):
            Order.parse(*arguments)


@pytest.mark.parametrize(
    "numbers", [np.array([1, -1]), (np.int64(1), np.float64(-1.5), -1)[::2], (n for n in (1, -1)), range(1, -2, -2)]
)
def test_any_iterable_of_integers_is_accepted(numbers):
    assert Order.parse(numbers).to_list() == [1, -1]


def test_entries_may_be_numpy_scalars():
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
# Often a valid order, so that errors in the other arguments are reached too.
NUMBERS = JUNK | st.lists(SIGNED, max_size=8) | st.sampled_from([[1, -1], [1, -1, -1.5], [1, 2, -2, -1], [1, 2, -2, -2.5, -1]])


@pytest.mark.long
@given(
    numbers=NUMBERS,
    layers=JUNK | st.none() | st.integers(1, 2) | st.lists(st.integers(0, 2), max_size=3),
    delay=JUNK | st.none() | st.lists(st.booleans(), max_size=3),
)
@settings(max_examples=800)
def test_arbitrary_arguments_give_an_order_or_an_order_error(numbers, layers, delay):
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
def test_number_like_arguments_are_accepted_or_refused_by_name(numbers, arguments):
    try:
        Order.parse(numbers, **arguments)
    except OrderError as error:
        assert next(iter(arguments)) in str(error) or error.position is not None  # noqa: PT017 - both errors are correct


def test_order_and_its_error_are_public():
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


def test_a_backward_without_wgrad_entries_is_a_full_backward():
    assert [a.kind for a in Order.parse([1, -1])] == ["forward", "backward"]


def test_delay_wgrad_may_differ_between_chunks():
    order = Order.parse([1, 2, -2, -2.5, -1])
    assert order.delay_wgrad == (False, True)
    assert Order.parse(order.to_list(), delay_wgrad=[False, True]) == order
    with pytest.raises(OrderError) as caught:
        Order.parse(order.to_list(), delay_wgrad=True)
    assert caught.value.position == 4


def test_delay_wgrad_may_be_inferred_or_given_for_all_chunks_or_per_chunk():
    full, split, mixed = [1, 2, -2, -1], [1, 2, -2, -2.5, -1, -1.5], [1, 2, -2, -2.5, -1]
    for numbers, delayed in ((full, False), (split, True)):
        orders = {
            Order.parse(numbers, delay_wgrad=delay) for delay in (None, delayed, [delayed, delayed], np.array([delayed] * 2))
        }
        assert {order.delay_wgrad for order in orders} == {(delayed, delayed)}
        assert len(orders) == 1
    assert Order.parse(mixed, delay_wgrad=(False, True)) == Order.parse(mixed)


@pytest.mark.parametrize("delay", [[True], [True] * 3, [], "no", 0, 1.0, [1, 0], {True: 1}, b"\x01"])
def test_delay_wgrad_must_be_one_bool_or_one_per_chunk(delay):
    with pytest.raises(OrderError, match="delay_wgrad") as caught:
        Order.parse([1, 2, -2, -2.5, -1, -1.5], delay_wgrad=delay)
    assert caught.value.position is None


@pytest.mark.parametrize("layers", [0, -1, True, 1.0, math.nan, "2", b"2", [1, 0], [True, 1], [[1], [1]], [1], [], {1: 1}])
def test_num_layers_per_chunk_must_be_one_integer_or_one_per_chunk(layers):
    with pytest.raises(OrderError, match="num_layers_per_chunk") as caught:
        Order.parse([1, 2, -2, -1], num_layers_per_chunk=layers)
    assert caught.value.position is None


def test_splitting_puts_each_wgrad_after_its_dgrad():
    assert Order.parse([1, 2, -2, -1]).split().to_list() == [1, 2, -2, -2.5, -1, -1.5]


def test_a_full_backward_must_not_overtake_a_pending_wgrad():
    kinds = np.array([KINDS.index(kind) for kind in ("forward", "forward", "dgrad", "backward", "wgrad")])
    with pytest.raises(OrderError, match="first in, first out") as caught:
        Order(kinds, np.zeros(5, int))
    assert caught.value.position == 3


@pytest.mark.long
@given(schedules())
@settings(max_examples=120)
def test_random_orders_round_trip_through_numbers(schedule):
    for order in schedule.orders:
        numbers = Order.parse(order.to_list())
        # Signed numbers cannot mix full and split backwards in a chunk.
        assert numbers.split() == order.split()
        assert numbers.delay_wgrad == order.delay_wgrad
        assert numbers.to_list() == order.to_list()
        assert (order.num_chunks, order.num_microbatches) == (numbers.num_chunks, schedule.num_microbatches)


@pytest.mark.long
@given(schedules())
@settings(max_examples=100)
def test_split_replaces_a_full_backward_by_a_dgrad_and_its_wgrad(schedule):
    for order in schedule.orders:
        expected = []
        for action in order:
            parts = ("dgrad", "wgrad") if action.kind == "backward" else (action.kind,)
            expected += [Action(part, action.chunk, action.microbatch) for part in parts]
        assert list(order.split()) == expected
        assert order.split().split() == order.split()
        assert all(order.split().delay_wgrad)


@pytest.mark.long
@given(schedules(), st.slices(8))
@settings(max_examples=100)
def test_an_order_is_indexed_and_sliced_like_a_list_of_actions(schedule, part):
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


def test_orders_are_equal_if_actions_and_layers_are_equal():
    order = Order.parse([1, -1])
    assert order == Order.parse((1, -1), 1, False)
    assert len({order, Order.parse([1, -1]), Order.parse([1, -1], 2), order.split()}) == 3
    assert order != Order.parse([1, -1], 2)
    assert order != order.split()
    assert order != Order.parse([1, 1, -1, -1])
    assert order != [1, -1]
    assert order != list(order)


def test_an_order_is_immutable():
    order = Order.parse([1, -1])
    for array in (order.kinds, order.chunks, order.microbatches):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(FrozenInstanceError):
        order.kinds = order.chunks


def test_an_order_copies_its_arrays():
    kinds, chunks = np.array([0, 3], np.int8), np.zeros(2, np.int32)
    order = Order(kinds, chunks)
    kinds[:] = 0
    assert order.to_list() == [1, -1]


def test_a_chunk_without_delayed_wgrads_may_have_several_layers():
    assert Order.parse([1, -1], num_layers_per_chunk=3).num_layers_per_chunk == (3,)
    with pytest.raises(OrderError, match="`num_layers_per_chunk` is 0"):
        Order.parse([1, -1], num_layers_per_chunk=0)
    with pytest.raises(OrderError, match="has 3 values"):
        Order.parse([1, -1], num_layers_per_chunk=[1, 1, 1])


@pytest.mark.parametrize(("kinds", "chunks"), [([0, 7], [0, 0]), ([0, -1], [0, 0]), ([0, 3], [0, -1]), ([0, 3], [0])])
def test_arrays_with_invalid_actions_are_refused(kinds, chunks):
    with pytest.raises(OrderError, match=r"entry \d is of kind|integer arrays of shape"):
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
def test_invalid_arrays_and_layers_are_refused(kinds, chunks, layers):
    with pytest.raises(OrderError):
        Order(np.array(kinds), np.array(chunks), layers)


def test_num_layers_per_chunk_may_be_an_array():
    assert Order([0, 0, 3, 3], [0, 1, 1, 0], np.array([2, 3])).num_layers_per_chunk == (2, 3)
