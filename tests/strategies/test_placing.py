"""Tests that every layout has the same microbatches, sends no rows between devices and needs a placed batch."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ShapeError
from jgraph.pipeline import Pipelined, PipelineModel
from jgraph.schedule import generate
from jgraph.step import train_step
from jgraph.strategies import FullySharded, Replicated

ROWS, MICROBATCHES, WIDTH, LAYERS = 16, 2, 3, 2
PARAMS = {"layers": [jnp.full((WIDTH, WIDTH), 0.1 + i) for i in range(LAYERS)]}
MODEL = PipelineModel(
    embed=lambda outer, batch: batch.astype(jnp.float32),
    layer=lambda own, x: jnp.tanh(x @ own["w"]),
    head=lambda outer, x, batch: jnp.mean((x - batch) ** 2),
    split=lambda params: ({}, [{"w": w} for w in params["layers"]]),
    join=lambda outer, layers: {"layers": [own["w"] for own in layers]},
)
DATA, SHARDED, PIPED, BY_HOST = "data", "data and fsdp", "pipe, data and fsdp", "pipe and data by the host"


def batch():
    """Returns int8 rows. No other array of the step has this dtype."""
    return np.random.default_rng(0).integers(-9, 9, (ROWS, WIDTH)).astype(np.int8)


def loss(params, batch, key):
    x = batch.astype(jnp.float32)
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch) ** 2)


def step_on(layout):
    def mesh(**axes):
        return jax.make_mesh(tuple(axes.values()), tuple(axes))

    order = generate("1f1b", pp=2, microbatches=MICROBATCHES)
    strategies = {
        "": lambda: Replicated(None, PARAMS),
        DATA: lambda: Replicated(mesh(data=4), PARAMS),
        SHARDED: lambda: FullySharded(mesh(data=2, fsdp=2), PARAMS),
        PIPED: lambda: Pipelined(mesh(pipe=2, data=2, fsdp=2), PARAMS, order),
        BY_HOST: lambda: Pipelined(mesh(pipe=2, data=4), PARAMS, order, engine="dispatch"),
    }
    how = MODEL if "pipe" in layout else loss
    return train_step(how, optax.sgd(0.1), strategies[layout](), num_microbatches=MICROBATCHES)


@cache
def compiled(layout):
    step = step_on(layout)
    return step, step.compile(batch())


LAYOUTS = [DATA, SHARDED, PIPED, BY_HOST]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_data_rank_has_consecutive_rows_of_every_microbatch(layout):
    step, rows = step_on(layout), batch()
    placed = step.place({"x": rows})["x"]
    np.testing.assert_array_equal(np.asarray(placed).reshape(rows.shape), rows)
    parts = {shard.index[1].indices(ROWS // MICROBATCHES)[:2] for shard in placed.addressable_shards}
    assert sorted(parts) == [(first, first + 2) for first in range(0, 8, 2)]
    assert all(shard.data.shape == (MICROBATCHES, 2, WIDTH) for shard in placed.addressable_shards)


@pytest.mark.parametrize("layout", ["", *LAYOUTS])
def test_a_single_process_feeds_all_rows(layout):
    assert step_on(layout).batch_rows(ROWS).tolist() == list(range(ROWS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_microbatches_and_data_ranks_do_not_divide_is_refused(layout):
    step = step_on(layout)
    for call in (lambda: step.batch_rows(12), lambda: step.place(np.zeros((12, WIDTH))), lambda: step.place(np.zeros(()))):
        with pytest.raises(ShapeError, match="must be divisible by num_microbatches 2 x 4 data ranks"):
            call()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_sends_no_row_between_devices(layout):
    _, run = compiled(layout)
    for executable in run.executables:
        collectives = r"^.* = .*(?:all-gather|all-to-all|collective-permute|all-reduce)\S*\(.*$"
        assert not [line for line in re.findall(collectives, executable.as_text(), re.M) if "s8[" in line]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_not_placed_is_refused_and_the_state_is_not_donated(layout):
    step, run = compiled(layout)
    state, rows = step.init(PARAMS), batch()
    placed = step.place(rows)
    with pytest.raises(ShapeError, match=r"int8\[2, 16, 3\]: must be int8\[2, 8, 3\].*`step.compile` again"):
        run(state, step.place(np.concatenate([rows, rows])))
    for wrong in (rows, jnp.asarray(rows)):
        with pytest.raises(ShapeError, match=r"must have shape \[2, 8, 3\].*call `step.place\(batch\)`$"):
            run(state, wrong)
    with pytest.raises(ShapeError, match=r"with another sharding .* call `step.place\(batch\)`$"):
        run(state, jax.device_put(np.asarray(placed), jax.devices()[0]))
    state, metrics = run(state, placed)
    assert np.isfinite(metrics.loss)


def test_a_step_can_be_compiled_from_a_placed_batch():
    step, rows = step_on(DATA), batch()
    placed = step.place(rows)
    _, metrics = step.compile(placed)(step.init(PARAMS), placed)
    one = step_on("")
    _, expected = one.compile(rows)(one.init(PARAMS), rows)
    assert metrics.loss == pytest.approx(float(expected.loss), rel=1e-6)
