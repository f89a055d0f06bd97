"""Tests that a halted step and all later steps change nothing, and that a replay equals a run without a halt."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError
from jgraph.pipeline import Pipelined, PipelineModel
from jgraph.schedule import generate
from jgraph.step import elementwise, train_step
from jgraph.step.state import TrainState
from jgraph.step.train_step import TrainStep
from jgraph.strategies import Loss
from tests.pipeline import test_pipelined_step as pipelined
from tests.precision import test_step as precision
from tests.step.test_train_step import errors, new_params, strategy

pytestmark = pytest.mark.long

STEPS, PLANTED, NEEDED, SMALL, LARGE = 6, 3, 7, 4, 10
ROWS = 16
CARRIED = {"overflow": jnp.int32(0), "seen": jnp.float32(0)}
REDUCTIONS = {"overflow": "halt", "seen": "sum"}


def counted(carried, needed, capacity):
    """Returns the carried state after a microbatch with `needed` rows. Overwrites the flag."""
    return {"overflow": jnp.where(needed > capacity, needed, 0), "seen": carried["seen"] + jnp.sum(needed)}


def loss(params, batch, key, carried, *, capacity):
    noise = 1 + 0.1 * jax.random.normal(key)  # the replay must use the same random numbers
    return Loss(
        noise * jnp.sum(errors(params, batch)), len(batch["x"]), {}, counted(carried, jnp.sum(batch["needs"]), capacity)
    )


def batches():
    """Makes batches. The last row of batch PLANTED needs more than SMALL, on one device and in one microbatch."""
    found = []
    for number in range(1, STEPS + 1):
        rng, needs = np.random.default_rng(number), np.zeros(ROWS, np.int32)
        needs[-1] = NEEDED * (number == PLANTED)
        found.append({"x": rng.standard_normal((ROWS, 6), np.float32), "y": rng.standard_normal((ROWS, 3), np.float32)})
        found[-1]["needs"] = needs
    return found


def step_of(name: str, capacity: int, num_microbatches: int = 1) -> TrainStep:
    given = {"carried": CARRIED, "reductions": REDUCTIONS, "num_microbatches": num_microbatches, "clip_norm": 1.0}
    return train_step(partial(loss, capacity=capacity), elementwise(optax.adam(1e-2)), strategy(name), **given)


def run(step: TrainStep, state: TrainState, rows: list, compiled=None):
    """Runs one step per batch in `rows`. Returns the final state and the metrics of all steps."""
    compiled, found = compiled or step.compile(rows[0]), []
    for batch in rows:
        state, metrics = compiled(state, step.place(batch))
        found.append(metrics)
    return state, jax.device_get(found)


def assert_same(a, b):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def canonical(step, state):
    return jax.device_get(step.canonical.of(state))


def check_replay(small: TrainStep, large: TrainStep, rows: list, params, carried):
    """Checks that a run with `small` halts at PLANTED, and that `large` then continues like a run without a halt."""
    with_large, with_small = (partial(run, step, compiled=step.compile(rows[0])) for step in (large, small))
    expected, curve = with_large(large.init(params, carried), rows)
    assert [int(metrics.halted) for metrics in curve] == [0] * STEPS
    good, _ = with_small(small.init(params, carried), rows[: PLANTED - 1])
    good = canonical(small, good)
    # Like a host that reads the metrics late. The steps after the halted step would fit.
    state, begun = with_small(small.init(params, carried), rows)
    assert [int(metrics.halted) for metrics in begun] == [0] * (PLANTED - 1) + [NEEDED] * (STEPS - PLANTED + 1)
    assert (int(state.step), int(state.skipped)) == (PLANTED - 1, 0)
    assert np.max(state.carried["overflow"]) == NEEDED
    state = small.resumed(state)
    assert_same(canonical(small, state), good)
    state, rest = with_large(state, rows[int(state.step) :])
    assert_same([metrics.loss for metrics in (*begun[: PLANTED - 1], *rest)], [metrics.loss for metrics in curve])
    assert_same(canonical(large, state), canonical(large, expected))


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [
        ("one device", 1),
        ("data 4", 2),
        pytest.param("fsdp 4", 1, marks=pytest.mark.once),
        ("data 2 x fsdp 2", 2),
    ],
)
def test_a_halted_step_changes_nothing_until_it_is_replayed(name, num_microbatches):
    small, large = (step_of(name, capacity, num_microbatches) for capacity in (SMALL, LARGE))
    check_replay(small, large, batches(), new_params(), CARRIED)


def layer(params, x, carried, *, capacity):
    return pipelined.layer(params, x), counted(carried, NEEDED * jnp.sum(jnp.abs(x[:, 0]) > 50, dtype=jnp.int32), capacity)


def model(capacity: int) -> PipelineModel:
    layers = range(pipelined.LAYERS)
    return replace(
        pipelined.MODEL,
        layer=partial(layer, capacity=capacity),
        split_carried=lambda carried: [jax.tree.map(lambda leaf, i=i: leaf[i], carried) for i in layers],
        join_carried=lambda each: jax.tree.map(lambda *leaves: jnp.stack(leaves), *each),
    )


@pytest.mark.parametrize(
    ("schedule", "axes", "engine"),
    [
        ("aligned", {"pipe": 2}, "program"),
        pytest.param("1f1b", {"data": 2, "pipe": 2}, "dispatch", marks=pytest.mark.once),
    ],
)
def test_a_layer_of_a_pipeline_halts_all_ranks(schedule, axes, engine):
    mesh, count = jax.make_mesh(tuple(axes.values()), tuple(axes)), pipelined.MICROBATCHES
    order = generate(schedule, pp=2, microbatches=count)
    rows = []
    for batch in batches():
        x = batch["x"][:, :2].copy()
        x[-1] *= np.where(batch["needs"][-1], 1e4, 1)
        rows.append({"x": x, "y": np.tile(batch["y"][:, :1], 4)})
    carried = jax.tree.map(lambda leaf: jnp.stack([leaf] * pipelined.LAYERS), CARRIED)
    given = {"carried": carried, "reductions": REDUCTIONS, "num_microbatches": count}
    transform, where = elementwise(optax.adam(1e-2)), Pipelined(mesh, pipelined.shapes(), order, engine=engine)
    small, large = (train_step(model(capacity), transform, where, **given) for capacity in (SMALL, LARGE))
    check_replay(small, large, rows, pipelined.new_params, carried)


@pytest.mark.once
def test_a_halted_step_does_not_change_amax_histories():
    def counting(params, batch, key, carried):
        return Loss(precision.loss(params, batch, key), carried=counted(carried, batch["needs"][0], SMALL))

    rows = [precision.BATCH | {"needs": np.full(precision.ROWS, needs, np.int32)} for needs in (0, NEEDED)]
    given = {"carried": CARRIED, "reductions": REDUCTIONS, "fp8": precision.DELAYED, "batch": rows[0]}
    step = train_step(counting, optax.sgd(0.1), precision.strategy("dp"), **given)
    good, _ = run(step, step.init(precision.PARAMS, CARRIED), rows[:1])
    state, _ = run(step, step.init(precision.PARAMS, CARRIED), [rows[0], rows[1], rows[0]])
    assert int(state.carried["overflow"]) == NEEDED
    assert_same(canonical(step, step.resumed(state)), canonical(step, good))


def test_a_halted_step_does_not_count_as_skipped():
    step, rows = step_of("one device", SMALL), batches()[PLANTED - 1]
    state, _ = run(step, step.init(new_params(), CARRIED), [rows | {"y": np.full_like(rows["y"], np.nan)}])
    assert (int(state.step), int(state.skipped), int(state.carried["overflow"])) == (0, 0, NEEDED)


def test_resuming_resets_the_halt_flag_in_place():
    step, rows = step_of("data 4", SMALL), batches()[PLANTED - 1]
    state, _ = run(step, step.init(new_params(), CARRIED), [rows])
    flag, other = state.carried["overflow"], state.carried["seen"]
    places = [shard.data.unsafe_buffer_pointer() for shard in flag.addressable_shards]
    after = step.resumed(state)
    assert flag.is_deleted()
    assert [shard.data.unsafe_buffer_pointer() for shard in after.carried["overflow"].addressable_shards] == places
    assert after.carried["seen"] is other


def test_a_step_without_a_halt_reduction_has_no_halting_code():
    """Counts one select per carried array, plus one in the loss, and no additional output."""
    given = {"carried": CARRIED, "reductions": {"overflow": "max", "seen": "sum"}}
    step = train_step(partial(loss, capacity=LARGE), optax.sgd(0.1), strategy("one device"), **given)
    lowered = step.lower(batches()[0])
    metrics = lowered.out_info[1]
    assert metrics.halted is None
    assert len(jax.tree.leaves(metrics)) == 3
    without = train_step(lambda *args: errors(args[0], args[1]).sum(), optax.sgd(0.1), strategy("one device"))
    own = lowered.as_text().count("stablehlo.select")
    others = without.lower(batches()[0]).as_text().count("stablehlo.select")
    assert own - others == len(CARRIED) + 1  # one is in the loss


@pytest.mark.parametrize("reductions", ["halt", {"overflow": "halt", "seen": "halt"}], ids=str)
def test_a_halt_reduction_needs_integers(reductions):
    with pytest.raises(ConfigError, match=r"is halt for float32.*must be .* for this dtype") as error:
        train_step(loss, optax.sgd(0.1), strategy("one device"), carried=CARRIED, reductions=reductions)
    assert error.value.field == "reductions"
