"""Megatron-LM's orders, entry for entry."""

import itertools
import json
from pathlib import Path

import pytest

from jgraph.errors import OrderError
from jgraph.schedule import Order, Schedule, megatron_order

CASES = json.loads((Path(__file__).parent / "goldens/orders.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_order_is_upstreams(case):
    params = dict(case["params"])
    order = megatron_order(params.pop("pp_size"), params.pop("pp_rank"), params.pop("num_microbatches"), **params)
    assert order.to_list() == case["expect"].get("overlap_order", case["expect"]["order"])


@pytest.mark.parametrize("overlap", [False, True])
def test_the_orders_of_all_ranks_make_a_schedule(overlap):
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


@pytest.mark.parametrize(("pp", "vpp", "group", "microbatches"), [(3, 2, 1, 3), (4, 2, 2, 8), (4, 3, 4, 5)])
def test_groups_shorter_than_the_ring_are_refused_where_they_deadlock(pp, vpp, group, microbatches):
    with pytest.raises(OrderError, match="take groups of at least pp_size"):
        megatron_order(pp, 0, microbatches, vpp=vpp, microbatch_group_size=group)


def test_groups_shorter_than_the_ring_are_accepted_where_they_run():
    orders = tuple(megatron_order(2, r, 5, vpp=2, microbatch_group_size=2) for r in range(2))
    assert Schedule(orders).num_microbatches == 5


@pytest.mark.parametrize("layers", [(3, 2), (0, 2), (2, 0), (1, 4)])
@pytest.mark.parametrize("delay", [False, True])
def test_uneven_and_empty_chunks_become_layers(layers, delay):
    order = megatron_order(
        2, 0, 4, vpp=2, microbatch_group_size=2, num_layers_per_chunk=layers, overlap_moe_ep=True, delay_wgrad=delay
    )
    assert order.num_chunks == sum(layers)
    assert order.num_microbatches == 4
    assert order.delay_wgrad == (delay,) * sum(layers)
    assert Order.parse(order.to_list()) == order


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((0, 0, 4), {}, "pp_size is 0"),
        ((4, 4, 4), {}, "pp_rank is 4; with pp_size=4 it must be 0 to 3"),
        ((4, -1, 4), {}, "pp_rank is -1"),
        ((4, 0, 0), {}, "num_microbatches is 0"),
        ((4, 0, True), {}, "num_microbatches is True"),
        ((4, "0", 4), {}, "pp_rank is '0'"),
        ((4, 0, 4), {"vpp": 0}, "vpp is 0"),
        ((1, 0, 4), {"vpp": 2}, "a single rank has one chunk"),
        ((4, 0, 4), {"vpp": 2, "microbatch_group_size": 0}, "microbatch_group_size is 0"),
        ((4, 0, 4), {"vpp": 2, "num_layers_per_chunk": (1,)}, "1 values for 2 chunks"),
        ((4, 0, 4), {"vpp": 2, "num_layers_per_chunk": (1, -1)}, "num_layers_per_chunk is -1"),
        ((4, 0, 4), {"delay_wgrad": True}, "needs overlap_moe_ep=True"),
        ((4, 0, 4), {"num_layers_per_chunk": (0,), "overlap_moe_ep": True}, "at least one layer"),
    ],
)
def test_parameters_that_make_no_order_are_named(args, kwargs, match):
    with pytest.raises(OrderError, match=match):
        megatron_order(*args, **kwargs)
