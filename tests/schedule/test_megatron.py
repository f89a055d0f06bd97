"""`megatron_order` equals Megatron-LM's orders, entry for entry."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from jgraph.errors import OrderError
from jgraph.schedule import Order, Schedule, megatron_order
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD

CASES = json.loads((Path(__file__).parent / "goldens/orders.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_order_equals_the_upstream_order(case):
    params = dict(case["params"])
    order = megatron_order(params.pop("pp_size"), params.pop("pp_rank"), params.pop("num_microbatches"), **params)
    assert order.to_list() == case["expect"].get("overlap_order", case["expect"]["order"])
    # With overlap every layer is a separate chunk; without, the number of layers per chunk is metadata.
    assert order.num_layers_per_chunk == tuple(
        case["expect"].get("num_layers_per_chunk_after", case["params"]["num_layers_per_chunk"])
    )


def test_golden_cases_cover_overlap_and_delayed_wgrads():
    flags = [(case["params"]["overlap_moe_ep"], case["params"]["delay_wgrad"]) for case in CASES]
    assert len(CASES) == 11
    assert set(flags) == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize("overlap", [False, True])
def test_the_orders_of_all_ranks_form_a_schedule(overlap):
    for pp, chunks, group, rounds in itertools.product((1, 2, 3, 4), (None, 2, 3), (0, 1, 2), (1, 2, 3)):
        if pp == 1 and chunks:
            continue
        orders = tuple(
            megatron_order(
                pp,
                r,
                pp * rounds,
                vpp=chunks,
                microbatch_group_size=pp * (1 + group),
                overlap_moe_ep=overlap,
                delay_wgrad=overlap,
            )
            for r in range(pp)
        )
        assert Schedule(orders).num_microbatches == (1 if pp == 1 and not overlap else pp * rounds)


def layer_placement(layers):
    """Numbers layers as stages, in the sequence of a microbatch; `layers` is [P][C]."""
    stage, rows = itertools.count(), [[] for _ in layers]
    for chunk in range(len(layers[0])):
        for row, own in zip(rows, layers, strict=True):
            row += [next(stage) for _ in range(own[chunk])]
    return tuple(map(tuple, rows))


def step_by_layer(layers, microbatches, group, *, vpp, delay=False):
    """Returns the schedule of all ranks with overlap; `layers` is [P][C]."""
    pp = len(layers)
    orders = tuple(
        megatron_order(
            pp,
            r,
            microbatches,
            vpp=vpp,
            microbatch_group_size=group,
            num_layers_per_chunk=layers[r],
            overlap_moe_ep=True,
            delay_wgrad=delay,
        )
        for r in range(pp)
    )
    return Schedule(orders, layer_placement(layers))


@pytest.mark.parametrize("delay", [False, True])
def test_uneven_and_empty_chunks_form_a_schedule_if_all_groups_have_at_least_pp_microbatches(delay):
    rng = np.random.default_rng(int(delay))
    for _ in range(100):
        pp, chunks = int(rng.integers(2, 6)), int(rng.integers(1, 5))
        group = pp + int(rng.integers(4))
        last = int(rng.choice([0, *range(pp, group)]))
        layers = rng.integers(0, 4, (pp, chunks))
        layers[:, rng.integers(chunks)] += 1
        step = step_by_layer(
            layers.tolist(), group * int(rng.integers(1, 4)) + last, group, vpp=None if chunks == 1 else chunks, delay=delay
        )
        assert step.num_stages == layers.sum()


@pytest.mark.parametrize(("pp", "vpp", "group", "microbatches"), [(3, 2, 1, 3), (4, 2, 2, 8), (4, 3, 4, 5), (5, 3, 6, 25)])
def test_short_groups_that_deadlock_are_refused_as_a_schedule(pp, vpp, group, microbatches):
    orders = tuple(megatron_order(pp, r, microbatches, vpp=vpp, microbatch_group_size=group) for r in range(pp))
    with pytest.raises(OrderError, match="deadlocks: rank"):
        Schedule(orders)


def test_the_group_size_has_no_effect_without_a_virtual_pipeline():
    for pp, microbatches in itertools.product((1, 2, 4), (1, 3, 8)):
        orders = [[megatron_order(pp, r, microbatches, microbatch_group_size=g) for r in range(pp)] for g in (1, pp, pp + 3)]
        assert orders[0] == orders[1] == orders[2]
        assert Schedule(tuple(orders[0])).num_ranks == pp


@pytest.mark.parametrize("layers", [(3, 2), (0, 2), (2, 0), (1, 4)])
@pytest.mark.parametrize("delay", [False, True])
def test_uneven_and_empty_chunks_are_expanded_to_layers(layers, delay):
    order = megatron_order(
        2, 0, 4, vpp=2, microbatch_group_size=2, num_layers_per_chunk=layers, overlap_moe_ep=True, delay_wgrad=delay
    )
    assert order.num_chunks == sum(layers)
    assert order.num_microbatches == 4
    assert order.delay_wgrad == (delay,) * sum(layers)
    assert Order.parse(order.to_list()) == order


@pytest.mark.parametrize("layers", [(3, 2), (0, 2), (2, 0, 1), (1, 4), (1, 1)])
@pytest.mark.parametrize("delay", [False, True])
def test_layers_are_numbered_across_chunks_and_follow_the_sequence_of_chunks(layers, delay):
    sizes = {"vpp": len(layers), "microbatch_group_size": 3}
    whole = megatron_order(2, 0, 6, **sizes)
    order = megatron_order(2, 0, 6, num_layers_per_chunk=layers, overlap_moe_ep=True, delay_wgrad=delay, **sizes)
    first = np.cumsum((0, *layers))

    def by_layer(kind, step):
        chunks = whole.chunks[whole.kinds == kind]
        return [layer for c in chunks for layer in range(first[c], first[c + 1])[::step]]

    def chunks_of(*kinds):
        return order.chunks[np.isin(order.kinds, kinds)].tolist()

    assert chunks_of(FORWARD) == by_layer(FORWARD, 1)
    assert chunks_of(DGRAD, BACKWARD) == by_layer(BACKWARD, -1)
    assert chunks_of(WGRAD) == (by_layer(BACKWARD, -1) if delay else [])


def test_an_empty_chunk_leaves_no_gap_in_the_layer_numbers():
    order = megatron_order(2, 1, 2, vpp=2, num_layers_per_chunk=(0, 2), overlap_moe_ep=True, delay_wgrad=True)
    # By chunk: 1 1 2 (2 -2) -2 -1 -1, forward and backward paired in parentheses. Chunk 1 is empty and has no entries.
    assert order.to_list() == [1, 2, 1, -2, -2.5, 2, -1, -1.5, -2, -2.5, -1, -1.5]


def test_numpy_integers_are_accepted():
    assert megatron_order(np.int64(2), np.int32(0), np.int64(4), vpp=np.int64(2)) == megatron_order(2, 0, 4, vpp=2)


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((0, 0, 4), {}, "`pp_size` is 0"),
        ((4, 4, 4), {}, "`pp_rank` is 4: with pp_size=4 it must be 0 to 3"),
        ((4, -1, 4), {}, "`pp_rank` is -1"),
        ((4, 0, 0), {}, "`num_microbatches` is 0"),
        ((4, 0, True), {}, "`num_microbatches` is True"),
        ((4, "0", 4), {}, "`pp_rank` is '0'"),
        ((4, True, 4), {}, "`pp_rank` is True"),
        ((2.0, 0, 4), {}, r"`pp_size` is 2\.0"),
        ((None, 0, 4), {}, "`pp_size` is None"),
        ((4, 0, float("nan")), {}, "`num_microbatches` is nan"),
        ((4, 0, 4), {"vpp": 0}, "`vpp` is 0"),
        ((4, 0, 4), {"vpp": -1}, "`vpp` is -1"),
        ((4, 0, 4), {"vpp": True}, "`vpp` is True"),
        ((4, 0, 4), {"vpp": 2, "microbatch_group_size": True}, "`microbatch_group_size` is True"),
        ((4, 0, 4), {"vpp": 2, "microbatch_group_size": "4"}, "`microbatch_group_size` is '4'"),
        ((4, 0, 4), {"vpp": 2, "microbatch_group_size": 4.0}, r"`microbatch_group_size` is 4\.0"),
        ((4, 0, 4), {"vpp": 2, "num_layers_per_chunk": (1, 2, 3)}, "one integer for each of 2 chunks"),
        ((4, 0, 4), {"num_layers_per_chunk": ()}, "one integer for each of 1 chunks"),
        ((4, 0, 4), {"num_layers_per_chunk": "2"}, "`num_layers_per_chunk` is '2'"),
        ((4, 0, 4), {"num_layers_per_chunk": (True,)}, "`num_layers_per_chunk` is True"),
        ((4, 0, 4), {"num_layers_per_chunk": (1.5,)}, r"`num_layers_per_chunk` is 1\.5"),
        ((1, 0, 4), {"vpp": 2}, "with pp_size=1 a rank has one chunk"),
        ((4, 0, 4), {"vpp": 2, "microbatch_group_size": 0}, "`microbatch_group_size` is 0"),
        ((4, 0, 4), {"vpp": 2, "num_layers_per_chunk": (1,)}, "one integer for each of 2 chunks"),
        ((4, 0, 4), {"vpp": 2, "num_layers_per_chunk": (1, -1)}, "`num_layers_per_chunk` is -1"),
        ((4, 0, 4), {"delay_wgrad": True}, "needs overlap_moe_ep=True"),
        ((4, 0, 4), {"num_layers_per_chunk": (0,), "overlap_moe_ep": True}, "at least one layer"),
    ],
)
def test_invalid_arguments_are_refused_by_name(args, kwargs, match):
    with pytest.raises(OrderError, match=match):
        megatron_order(*args, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"vpp": "2"}, "`vpp` is '2'"),
        ({"vpp": 1.0}, "`vpp` is 1"),
        ({"num_layers_per_chunk": 3}, "`num_layers_per_chunk` is 3"),
    ],
)
def test_an_argument_of_a_wrong_type_is_an_order_error(kwargs, match):
    with pytest.raises(OrderError, match=match):
        megatron_order(2, 0, 4, **kwargs)
