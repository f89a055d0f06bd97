"""A step with products in FP8: the same on every strategy, weights quantized once, histories only of steps that count."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jgraph
from jgraph import FP8Config
from jgraph.errors import ConfigError

D, F, ROWS = 48, 80, 128
KEY = jax.random.key(0)
PARAMS = {"blocks": [{"up": 0.2 * jax.random.normal(KEY, (D, F)), "down": 0.2 * jax.random.normal(KEY, (F, D))}]}
BATCH = {"x": jax.random.normal(KEY, (ROWS, D)), "y": jax.random.normal(jax.random.key(1), (ROWS, D))}
DELAYED = FP8Config(recipe="delayed", history=3)


def loss(params, batch, key):
    x = batch["x"].astype(jnp.bfloat16)
    for layer in params["blocks"]:
        x = jnp.tanh(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype)
    return jnp.mean(jnp.square(x.astype(jnp.float32) - batch["y"]))


def strategy(name, **options):
    if name == "one":
        return jgraph.Replicated(None, PARAMS)
    if name == "dp":
        return jgraph.Replicated(Mesh(np.array(jax.devices()[:2]), ("data",)), PARAMS)
    return jgraph.FullySharded(Mesh(np.array(jax.devices()[:2]), ("fsdp",)), PARAMS, **options)


def made(name, config=DELAYED, microbatches=1, loss=loss, **options):
    return jgraph.train_step(
        loss,
        jgraph.elementwise(optax.adamw(1e-2)),
        strategy(name, **options),
        num_microbatches=microbatches,
        fp8=config,
        batch=BATCH,
    )


def trained(step, steps=3, batch=BATCH):
    run, state, losses = step.compile(batch), step.init(PARAMS), []
    for _ in range(steps):
        state, metrics = run(state, step.place(batch))
        losses.append(float(metrics.loss))
    return losses, state


@pytest.mark.parametrize("config", [FP8Config(), DELAYED], ids=["current", "delayed"])
def test_losses_fall_as_they_do_in_bfloat16(config):
    losses, _ = trained(made("one", config), 8)
    plain, _ = trained(jgraph.train_step(loss, jgraph.elementwise(optax.adamw(1e-2)), strategy("one")), 8)
    assert losses[0] != plain[0]
    np.testing.assert_allclose(losses, plain, rtol=0.02)


@cache
def alone(microbatches):
    return trained(made("one", microbatches=microbatches))[1]


@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        ("dp", 1, {}),
        pytest.param("dp", 2, {}, marks=pytest.mark.once),
        ("fsdp", 1, {}),
        pytest.param("fsdp", 1, {"reshard_after_forward": True}, marks=pytest.mark.once),
        ("fsdp", 2, {"compute_dtype": jnp.bfloat16}),
    ],
)
def test_histories_are_the_same_on_every_strategy(name, microbatches, options):
    # As many rows in each product: the numbers that are rounded are the same, in whatever device they are.
    wanted = alone(2 * microbatches).carried.fp8.window
    found = trained(made(name, microbatches=microbatches, **options))[1].carried.fp8.window
    np.testing.assert_array_equal(found[-1], wanted[-1])  # of the first step
    np.testing.assert_allclose(found, wanted, rtol=1e-2)


def test_the_amax_of_a_step_is_the_largest_of_all_microbatches_and_devices():
    x = BATCH["x"].at[0, 0].set(30).at[-1, 0].set(-50)
    for name, microbatches in (("one", 4), ("dp", 2), ("fsdp", 2)):
        state = trained(made(name, microbatches=microbatches), 1, BATCH | {"x": x})[1]
        assert float(state.carried.fp8.window[0, 0, 0]) == 50


def test_a_skipped_step_leaves_the_history_as_it_was():
    step = made("one")
    run, state = step.compile(BATCH), step.init(PARAMS)
    state, _ = run(state, BATCH)
    before = jax.tree.map(np.array, state.carried)
    state, metrics = run(state, BATCH | {"x": BATCH["x"].at[3, 3].set(jnp.inf)})
    assert not np.isfinite(metrics.loss)
    assert int(state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state.carried))


def quantizations(step):
    """Returns how many times the lowered step makes an array of a weight's shape in FP8."""
    text = step.lower(BATCH).as_text()
    shapes = rf"tensor<(?:{D}x{F}|{F}x{D})x"
    return len(re.findall(rf"stablehlo.convert .*\({shapes}f32>\) -> {shapes}f8E4M3FN>", text))


@pytest.mark.parametrize("name", ["one", "dp"])
def test_weights_are_quantized_once_a_step_however_many_microbatches_there_are(name):
    assert quantizations(made(name)) == 2
    assert quantizations(made(name, microbatches=4)) == 2


def test_sharded_weights_are_gathered_as_bytes():
    text = made("fsdp", FP8Config(), compute_dtype=jnp.bfloat16).compile(BATCH).as_text()
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-gather", text)
    assert sorted(gathered) == [f"u8[{D},{F}]", f"u8[{F},{D}]"]


def test_the_loss_may_carry_state_of_its_own():
    def counting(params, batch, key, carried):
        return jgraph.Loss(loss(params, batch, key), carried={"seen": carried["seen"] + 1})

    step = jgraph.train_step(
        counting, optax.sgd(0.1), strategy("one"), carried={"seen": jnp.zeros(())}, fp8=DELAYED, batch=BATCH
    )
    run, state = step.compile(BATCH), step.init(PARAMS, {"seen": jnp.zeros(())})
    state, _ = run(state, BATCH)
    assert float(state.model_state["seen"]) == 1
    assert float(state.carried.fp8.window[0, 0, 0]) > 0


def test_a_step_in_fp8_needs_the_shapes_of_a_batch():
    with pytest.raises(ConfigError) as error:
        jgraph.train_step(loss, optax.sgd(0.1), strategy("one"), fp8=DELAYED)
    assert error.value.field == "batch"


@pytest.mark.parametrize(
    ("other", "field"), [(lambda params, batch, key: jnp.sum(params["blocks"][0]["up"]), "loss"), ("no function", "loss")]
)
def test_a_step_in_fp8_names_its_own_argument_where_nothing_can_be(other, field):
    with pytest.raises(ConfigError) as error:
        made("one", loss=other)
    assert error.value.field == field
