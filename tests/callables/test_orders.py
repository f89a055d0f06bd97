"""Whole orders: every legal order equals the reference run and uses no more buffers than its slots."""

import functools
import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jgraph
from jgraph.callables import _group
from jgraph.schedule import generate
from tests.callables import chain
from tests.schedule.strategies import random_schedule

pytestmark = [pytest.mark.long, pytest.mark.once]

GOLDENS = json.loads((Path(__file__).parents[1] / "schedule/goldens/orders.json").read_text())
HAZARDS = {row["name"]: row["args"] for row in GOLDENS["hazardous"]}
OVERLAPPED = {row["name"]: (row["expect"]["order"], row["params"]) for row in GOLDENS["cases"] if row["params"]["delay_wgrad"]}

ORDERS = {
    "two dgrads, then two wgrads": [1, 1, -1, -1, -1.5, -1.5],
    **{name: row["order"] for name, row in HAZARDS.items()},
    "three chunks": [1, 2, 1, 3, -3, 2, 3, -2, -3.5, -1, -3, -2, -1, -3.5, -2.5, -1.5, -2.5, -1.5],
    "three chunks, whole backwards": [1, 2, 3, 1, -3, 2, -2, -1, 3, -3, -2, -1],
}


def has_wgrads(order):
    return any(entry % 1 for entry in order)


def build(order, **kwargs):
    return chain.build(max(order), order=order, delay_wgrad=has_wgrads(order), **kwargs)


@functools.cache
def without_order(count, delay, param_grads="owned"):
    """Returns callables without an order, for single calls."""
    return chain.build(count, delay_wgrad=delay, param_grads=param_grads)[0]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("param_grads", ["owned", "aliased"])
def test_an_order_equals_single_calls_bit_for_bit_over_three_optimizer_steps(order, param_grads):
    graphed, params = build(order, reuse_buffers=True, param_grads=param_grads)
    xs, loss_args = chain.batches(order.count(1))
    expected, calls = params, without_order(max(order), has_wgrads(order), param_grads)
    for _ in range(3):
        run = graphed.run(None, xs, chain.loss_fn, params=params, loss_args=loss_args, outputs="keep", join="nothing")
        losses, outputs, sums = chain.single_calls(calls, expected, xs, loss_args)
        chain.assert_same_bits((run.losses, run.outputs, run.grads), (losses, outputs, sums))
        params, expected = chain.UPDATE(params, run.grads), chain.UPDATE(expected, tuple(sums))
    chain.assert_same_bits(params, expected)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_an_order_in_segments_equals_plain_jax(order):
    graphed, _ = build(order, reuse_buffers=True)
    xs, loss_args = chain.batches(order.count(1))
    run = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, outputs="keep", join="segments")
    chain.assert_close((run.losses, run.outputs, run.grads), chain.reference(*chain.make_chain(max(order)), xs, loss_args))
    assert run.grads[0]["b"].dtype == jnp.float32


@pytest.mark.parametrize(("order", "params"), OVERLAPPED.values(), ids=OVERLAPPED)
@pytest.mark.parametrize("reuse", [False, True], ids=["own buffers", "reused buffers"])
def test_the_overlapped_orders_of_megatron_equal_single_calls_bit_for_bit(order, params, reuse):
    graphed, weights = build(order, reuse_buffers=reuse)
    xs, loss_args = chain.batches(params["num_microbatches"])
    run = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")
    losses, _, sums = chain.single_calls(without_order(max(order), True), weights, xs, loss_args)
    chain.assert_same_bits((run.losses, run.grads), (losses, sums))


def test_the_goldens_contain_overlapped_orders_with_wgrads():
    assert OVERLAPPED


SCHEDULES = {
    "1f1b": generate("1f1b", pp=4, microbatches=5, chunks=1),
    "interleaved": generate("interleaved-1f1b", pp=2, microbatches=4, chunks=2),
    "zb-h1": generate("zb-h1", pp=4, microbatches=6, chunks=1),
    "zb-v": generate("zb-v", pp=2, microbatches=5, chunks=2),
    "aligned": generate("aligned", pp=4, microbatches=9, chunks=1),
    "aligned, 2 chunks": generate("aligned", pp=2, microbatches=4, chunks=2),
}


@pytest.mark.parametrize(
    ("schedule", "reuse"),
    [*((SCHEDULES[name], True) for name in SCHEDULES), (SCHEDULES["interleaved"], False), (SCHEDULES["zb-v"], False)],
    ids=[*SCHEDULES, "interleaved, own buffers", "zb-v, own buffers"],
)
def test_a_schedule_on_several_devices_equals_one_device_bit_for_bit(schedule, reuse):
    delay = any(schedule[0].delay_wgrad)
    devices = jax.devices()[: schedule.num_ranks]
    spread, params = chain.build(4, devices=devices, reuse_buffers=reuse, order=schedule, delay_wgrad=delay)
    xs, loss_args = chain.batches(schedule.num_microbatches)
    placed = spread.place(params)
    for _ in range(3):
        run = spread.run(None, xs, chain.loss_fn, params=placed, loss_args=loss_args, outputs="keep", join="nothing")
        losses, outputs, sums = chain.single_calls(without_order(4, delay), params, xs, loss_args)
        chain.assert_same_bits((run.losses, run.outputs, run.grads), (losses, outputs, sums))
        for i, grads in enumerate(run.grads):
            rank = int(schedule.rank_of_stage[i])
            assert all(leaf.devices() == {devices[rank]} for leaf in jax.tree.leaves(grads))
        placed = tuple(chain.UPDATE((p,), (g,))[0] for p, g in zip(placed, run.grads, strict=True))
        params = tuple(chain.UPDATE((p,), (g,))[0] for p, g in zip(params, sums, strict=True))
    chain.assert_same_bits(placed, params)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_joined_segments_use_fewer_executables_and_equal_plain_jax(schedule):
    devices = jax.devices()[: schedule.num_ranks]
    graphed, params = chain.build(
        4, order=schedule, delay_wgrad=any(schedule[0].delay_wgrad), devices=devices, reuse_buffers=True
    )
    xs, loss_args = chain.batches(schedule.num_microbatches)
    given = {"params": graphed.place(params), "loss_args": loss_args, "outputs": "keep"}
    run = graphed.run(None, xs, chain.loss_fn, **given)
    chain.assert_close((run.losses, run.outputs, run.grads), chain.reference(*chain.make_chain(4), xs, loss_args))
    joined = len(next(iter(graphed._plans.values())).instructions)
    assert joined < sum(map(len, schedule))


def test_an_order_on_one_device_is_one_executable():
    graphed, _ = build([1, 2, -2, -1, -2.5, -1.5])
    xs, loss_args = chain.batches(1)
    graphed.run(None, xs, chain.loss_fn, loss_args=loss_args)
    (plan,) = graphed._plans.values()
    assert len(plan.instructions) == 1


def test_a_steady_state_round_of_an_aligned_schedule_is_one_executable():
    schedule = generate("aligned", pp=4, microbatches=16, chunks=1)
    graphed, params = chain.build(4, order=schedule, delay_wgrad=True, devices=jax.devices()[:4])
    xs, loss_args = chain.batches(16)
    graphed.run(None, xs, chain.loss_fn, params=graphed.place(params), loss_args=loss_args)
    (plan,) = graphed._plans.values()
    kinds = Counter("".join(t.kind[0] for t in i.executable.io.tasks if t.kind != "loss") for i in plan.instructions)
    rounds = sum(count for kinds, count in kinds.items() if sorted(kinds) == ["d", "f", "w"])
    assert rounds >= 4 * (16 - 7)
    assert len({id(i.executable.compiled) for i in plan.instructions}) < 40


@settings(max_examples=4)
@given(seed=st.integers(0, 10_000))
def test_random_schedules_with_random_placements_equal_plain_jax(seed):
    rng = np.random.default_rng(seed)
    schedule = random_schedule(rng, most_ranks=3, most_chunks=2, most_microbatches=3)
    count = schedule.num_stages
    flags = {
        s: late
        for row, stages in zip(schedule, schedule.placement, strict=True)
        for s, late in zip(stages, row.delay_wgrad, strict=True)
    }
    graphed, params = chain.build(
        count,
        order=schedule,
        delay_wgrad=[flags[s] for s in range(count)],
        devices=jax.devices()[: schedule.num_ranks],
        reuse_buffers=True,
    )
    xs, loss_args = chain.batches(schedule.num_microbatches)
    run = graphed.run(None, xs, chain.loss_fn, params=graphed.place(params), loss_args=loss_args, join="segments")
    losses, _, sums = chain.reference(*chain.make_chain(count), xs, loss_args)
    chain.assert_close((run.losses, run.grads), (losses, sums))


def test_chunks_with_different_numbers_of_layers_equal_plain_jax():
    order = [1, 1, 2, 2, -2, -1, -2, -1]
    fns, params = chain.make_chain(4)
    graphed = jgraph.make_graphed_callables(
        fns, params, chain.sample(4), order=order, num_layers_per_chunk=[3, 1], reuse_buffers=True
    )
    xs, loss_args = chain.batches(2)
    run = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")
    losses, _, sums = chain.reference(fns, params, xs, loss_args)
    chain.assert_close((run.losses, run.grads), (losses, sums))


@pytest.mark.parametrize("join", ["segments", "nothing"])
def test_more_equal_arrays_than_send_buffers_can_be_transferred_at_once(join):
    """No executable may write a send buffer twice, or before the buffer was read."""
    schedule = generate("aligned", pp=2, microbatches=4, chunks=1)

    def wide(params, x):
        return {name: chain.stage(params, leaf) + leaf * i for i, (name, leaf) in enumerate(x.items())}

    names = "abcdef"
    xs = [{n: jax.random.normal(jax.random.key(m * 10 + i), (2, chain.D)) for i, n in enumerate(names)} for m in range(4)]
    params = tuple(map(chain.make_params, range(2)))
    graphed = jgraph.make_graphed_callables(
        (wide,) * 2, params, ((xs[0],),) * 2, order=schedule, delay_wgrad=True, reuse_buffers=True, devices=jax.devices()[:2]
    )

    def loss_of(y):
        return sum(jnp.sum(jnp.square(leaf)) * (i + 1) for i, leaf in enumerate(y.values()))

    def total(params):
        return sum(loss_of(wide(params[1], wide(params[0], x))) for x in xs)

    for _ in range(2):
        run = graphed.run(None, xs, loss_of, params=graphed.place(params), join=join)
    chain.assert_close(sum(map(np.asarray, run.losses)), total(params))
    for mine, theirs in zip(run.grads, jax.grad(total)(params), strict=True):
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


def test_run_accepts_another_order_than_the_build():
    graphed, _ = build([1, 2, -2, -1])
    xs, loss_args = chain.batches(3)
    run = graphed.run([1, 2, -2, -1] * 3, xs, chain.loss_fn, loss_args=loss_args)
    chain.assert_close(run.grads, chain.reference(*chain.make_chain(2), xs, loss_args)[2])


def live_counts(graphed, schedule, params, xs, loss_args, monkeypatch):
    """Returns the number of new live arrays after each instruction, and the plan."""
    counts, plans, original = [], [], _group.play

    def play(plan, registers):
        plans.append(plan)
        gc.collect()
        before = len(jax.live_arrays())
        for instruction in plan.instructions:
            original(replace(plan, instructions=(instruction,)), registers)
            counts.append(len(jax.live_arrays()) - before)

    monkeypatch.setattr(_group, "play", play)
    graphed.run(schedule, xs, chain.loss_fn, params=params, loss_args=loss_args, join="nothing")
    return counts, plans[0]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_live_arrays_match_the_slots_of_the_order(order, monkeypatch):
    """Compares `jax.live_arrays` with `assign`: residuals, stash, activations and their gradients."""
    graphed, params = build(order, reuse_buffers=True, param_grads="aliased")
    xs, loss_args = chain.batches(order.count(1))
    graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")  # allocates main_grad
    counts, plan = live_counts(graphed, None, params, xs, loss_args, monkeypatch)
    schedule = graphed.schedule
    live = live_by_slots(schedule, graphed)
    num_losses = np.cumsum([any(t.kind == "loss" for t in i.executable.io.tasks) for i in plan.instructions])
    assert counts == [a + b for a, b in zip(live, num_losses.tolist(), strict=True)]
    assert counts[-1] == schedule.num_microbatches  # only the losses remain


def live_by_slots(schedule, graphed):
    """Returns the number of live arrays after each action, from the live ranges and the arrays of each pool."""
    from jgraph.schedule._slots import live_ranges

    ranges = live_ranges(schedule)
    part = graphed[0].shaped
    own = [source is None for source in part.residuals_from]
    sizes = {
        "forward_dgrad": sum(own[: part.num_dgrad]),
        "forward_wgrad": sum(own[part.num_dgrad :]),
        "stash": sum(source is None for source in part.stash_from),
    }
    last = schedule.num_stages - 1
    counts = []
    for tick in sorted(schedule.ticks[0].tolist()):
        count = 0
        for pool, (born, died) in ranges.items():
            for s in range(schedule.num_stages):
                for m in range(schedule.num_microbatches):
                    if pool in sizes:
                        count += sizes[pool] * int(0 <= born[s, m] <= tick < died[s, m])
        # x is a residual and dy is in the stash, so an array passed between callables lives until the wgrad.
        wgrad = ranges["forward_wgrad"][1]
        for s in range(1, schedule.num_stages):
            made = ranges["activation"][0][s] - 1
            count += int(((made <= tick) & (tick < wgrad[s])).sum())
        for s in range(schedule.num_stages):
            born = ranges["forward_dgrad"][0][s] if s == last else ranges["gradient"][0][s] - 1
            count += int(((born <= tick) & (tick < wgrad[s])).sum())
        counts.append(count)
    return counts


@pytest.mark.parametrize("microbatches", [6, 12])
def test_reused_buffers_do_not_grow_with_the_number_of_microbatches(microbatches, monkeypatch):
    order = [1, 2, -2, -1, -2.5, -1.5] * microbatches
    graphed, params = build(order, reuse_buffers=True, param_grads="aliased")
    xs, loss_args = chain.batches(microbatches)
    graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")
    counts, _ = live_counts(graphed, None, params, xs, loss_args, monkeypatch)
    assert max(c - m // 6 for m, c in enumerate(counts)) == MOST_OF_ONE_MICROBATCH


MOST_OF_ONE_MICROBATCH = 8


def test_without_reuse_every_microbatch_has_its_own_buffers(monkeypatch):
    peaks = []
    for microbatches in (2, 4):
        order = [1, -1, -1.5] * microbatches
        graphed, params = build(order, param_grads="aliased")
        xs, loss_args = chain.batches(microbatches)
        graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")
        counts, _ = live_counts(graphed, None, params, xs, loss_args, monkeypatch)
        peaks.append(counts[-2])
    assert peaks[1] >= 2 * peaks[0] - 2


@pytest.mark.parametrize(
    ("delay", "reuse", "param_grads", "join"),
    [
        (False, False, "owned", "segments"),
        (True, True, "owned", "nothing"),
        (True, True, "aliased", "nothing"),
        (True, True, "aliased", "segments"),
    ],
)
def test_run_accumulates_bfloat16_gradients_in_float32(delay, reuse, param_grads, join):
    """256 + 1 is 256 in bfloat16, so a bfloat16 sum would stay at 256."""

    def linear(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": jnp.zeros((2, 3), jnp.bfloat16), "b": jnp.zeros((3,), jnp.bfloat16)}
    x = jnp.ones((1, 2), jnp.bfloat16)
    scales = [256.0, *[1.0] * 8]
    order = [1, -1, -1.5] if delay else [1, -1]
    graphed = jgraph.make_graphed_callables(
        linear, params, (x,), order=order * len(scales), delay_wgrad=delay, reuse_buffers=reuse, param_grads=param_grads
    )
    run = graphed.run(None, [x] * len(scales), scaled_sum, loss_args=[(jnp.bfloat16(s),) for s in scales], join=join)
    for gradient in run.grads[0].values():
        assert gradient.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(gradient), np.full(gradient.shape, 264.0))


def scaled_sum(y, scale):
    return jnp.sum(y * scale)


def shifted(params, x):
    """A layer without a matmul, so it has no wgrad to delay."""
    return x * params["scale"] + params["b"]


def with_and_without():
    shift = {"scale": jnp.full((chain.D,), 0.5), "b": jnp.ones((chain.D,))}
    return (chain.stage, shifted), (chain.make_params(0), shift)


@pytest.mark.parametrize(("join", "reuse"), [("segments", True), ("nothing", False)])
def test_chunks_with_and_without_wgrads_can_be_mixed(join, reuse):
    fns, params = with_and_without()
    graphed = jgraph.make_graphed_callables(
        fns, params, chain.sample(2), order=[1, 2, -2, -1, -1.5] * 2, delay_wgrad=[True, False], reuse_buffers=reuse
    )
    xs, loss_args = chain.batches(2)
    run = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join=join)
    losses, _, sums = chain.reference(fns, params, xs, loss_args)
    chain.assert_close((run.losses, run.grads), (losses, sums))
