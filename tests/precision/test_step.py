"""A step with FP8 matmuls agrees between strategies, quantizes weights once, and keeps the history in a skipped step."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jgraph
from jgraph import FP8Config
from jgraph.errors import ConfigError

D, F, ROWS = 48, 80, 128
KEY = jax.random.key(0)
PARAMS = {"blocks": [{"up": 0.2 * jax.random.normal(KEY, (D, F)), "down": 0.2 * jax.random.normal(KEY, (F, D))}]}
BATCH = {"x": jax.random.normal(KEY, (ROWS, D)), "y": jax.random.normal(jax.random.key(1), (ROWS, D))}
DELAYED = FP8Config(recipe="delayed", history=3)
ADAMW, SGD = jgraph.elementwise(optax.adamw(1e-2)), jgraph.elementwise(optax.sgd(1e-2))


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


def make_step(name, config=DELAYED, microbatches=1, loss=loss, transform=ADAMW, **options):
    return jgraph.train_step(
        loss,
        transform,
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


@pytest.mark.parametrize("config", [pytest.param(FP8Config(), marks=pytest.mark.once), DELAYED], ids=["current", "delayed"])
def test_losses_decrease_as_in_bfloat16(config):
    losses, _ = trained(make_step("one", config), 8)
    plain, _ = trained(jgraph.train_step(loss, ADAMW, strategy("one")), 8)
    assert losses[0] != plain[0]
    np.testing.assert_allclose(losses, plain, rtol=0.02)


def in_blocks(params, batch, key):
    """Computes `loss` with a hidden layer of 64, because MXFP8 needs multiples of 32."""
    shorter = [{"up": layer["up"][:32, :64], "down": layer["down"][:64, :32]} for layer in params["blocks"]]
    return loss({"blocks": shorter}, {name: rows[:, :32] for name, rows in batch.items()}, key)


@pytest.mark.long
def test_an_mxfp8_step_trains_as_in_bfloat16_and_is_equal_on_every_strategy():
    config = FP8Config(recipe="mxfp8")
    losses, state = trained(make_step("one", config, loss=in_blocks), 8)
    plain, _ = trained(jgraph.train_step(in_blocks, ADAMW, strategy("one")), 8)
    assert losses[0] != plain[0]
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, plain, rtol=0.02)
    assert state.observed == {}
    expected, _ = trained(make_step("one", config, loss=in_blocks, transform=SGD))
    for name, microbatches in (("one", 2), ("dp", 1), ("fsdp", 1)):
        found, _ = trained(make_step(name, config, microbatches, loss=in_blocks, transform=SGD))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def in_float32(params, batch, key):
    x = batch["x"]
    for layer in params["blocks"]:
        x = jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(jnp.square(x - batch["y"]))


@cache
def one_device():
    return trained(make_step("one", loss=in_float32, transform=SGD))[1].observed.window


@pytest.mark.parametrize(
    ("name", "microbatches", "options"),
    [
        ("dp", 1, {}),
        pytest.param("dp", 2, {}, marks=pytest.mark.once),
        ("fsdp", 1, {}),
        pytest.param("fsdp", 1, {"gather_per": "pass"}, marks=pytest.mark.once),
        ("fsdp", 2, {"compute_dtype": jnp.bfloat16}),
    ],
)
def test_amax_histories_are_equal_on_every_strategy(name, microbatches, options):
    found = trained(make_step(name, microbatches=microbatches, loss=in_float32, transform=SGD, **options))[1].observed.window
    np.testing.assert_allclose(found, one_device(), rtol=1e-6)


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.once), True], ids=["mean", "sum"])
def test_amax_histories_of_a_loss_object_do_not_depend_on_devices_and_microbatches(weighted):
    def of_rows(params, batch, key):
        mean, rows = loss(params, batch, key), len(batch["x"])
        return jgraph.Loss(rows * mean, rows) if weighted else jgraph.Loss(mean, aux={"mean": mean})

    expected = trained(make_step("one", loss=of_rows), 1)[1].observed.window
    found = trained(make_step("dp", microbatches=2, loss=of_rows), 1)[1].observed.window
    np.testing.assert_allclose(found, expected, rtol=1e-2)


class Experts(nnx.Module):
    """A model with one MoE layer."""

    def __init__(self, rngs):
        config = jgraph.MoEConfig(num_experts=4, balance_loss=0.1, z_loss=0.01, capacity=4.0)
        self.moe = jgraph.MoE(D, 32, config, rngs=rngs, kernel_init=nnx.initializers.normal(0.2))

    def loss(self, batch):
        return jnp.mean(jnp.square(self.moe(batch["x"][:, None]) - batch["y"][:, None]))


@pytest.mark.long
@pytest.mark.once
def test_amax_histories_of_sharded_experts_equal_one_device():
    model = jgraph.functional(lambda: Experts(nnx.Rngs(0)))

    def loss(params, batch, key, carried):
        value, after = model.loss(params, batch, key, carried)
        return jgraph.Loss(value, carried=after)

    def window(strategy):
        state = {"carried": model.carried, "reductions": model.reductions}
        config = FP8Config(recipe="delayed", format="e4m3", history=2)
        step = jgraph.train_step(loss, SGD, strategy, fp8=config, batch=BATCH, **state)
        return norms(step, step.init(*model.init()), [BATCH] * 2)[1].observed.window

    spread = jgraph.FullySharded(mesh(data=2, fsdp=4), model.shapes, experts=2)
    np.testing.assert_allclose(window(spread), window(jgraph.Replicated(None, model.shapes)), rtol=1e-6)


def norms(step, state, batches):
    """Runs one step per batch. Returns the gradient norms and the final state."""
    run, found = step.compile(BATCH), []
    for batch in batches:
        state, metrics = run(state, step.place(batch))
        found.append(float(metrics.grad_norm))
    return found, state


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Saves a run on one device three steps after an outlier. Returns its checkpoints and the gradient norms that follow."""
    directory, outlier = tmp_path_factory.mktemp("interrupted"), BATCH | {"y": BATCH["y"].at[5, 5].set(1e10)}
    step = make_step("one", FP8Config(recipe="delayed"), loss=in_float32, transform=SGD)
    before, state = norms(step, step.init(PARAMS), [BATCH, outlier, BATCH, BATCH, BATCH])
    assert abs(before[-1] / before[0] - 1) > 0.02  # the outlier coarsens the gradients of later steps
    checkpoints = jgraph.Checkpoints(directory, keep=1)
    checkpoints.save(5, step.canonical.of(state))
    checkpoints.close()
    return directory, norms(step, state, [BATCH] * 3)[0]


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


@pytest.mark.once
@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [
        (jgraph.Replicated(mesh(data=8), PARAMS), 1),
        pytest.param(jgraph.FullySharded(mesh(data=2, fsdp=4), PARAMS), 1, marks=pytest.mark.long),
        pytest.param(jgraph.Replicated(mesh(data=2), PARAMS), 4, marks=pytest.mark.long),
    ],
    ids=["data=8", "data=2 fsdp=4", "data=2, 4 microbatches"],
)
def test_a_run_resumes_on_other_devices_with_the_same_gradient_norms(interrupted, strategy, microbatches):
    directory, expected = interrupted
    config = FP8Config(recipe="delayed")
    step = jgraph.train_step(in_float32, SGD, strategy, num_microbatches=microbatches, fp8=config, batch=BATCH)
    checkpoints = jgraph.Checkpoints(directory, keep=1)
    _, state = checkpoints.restore_latest(step.canonical.shapes())
    checkpoints.close()
    found, _ = norms(step, step.canonical.back(state), [BATCH] * 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "microbatches"), [("fsdp", 2), *(pytest.param(*case, marks=pytest.mark.once) for case in (("one", 4), ("dp", 2)))]
)
def test_the_amax_of_a_step_is_the_maximum_over_microbatches_and_devices(name, microbatches):
    step = make_step(name, microbatches=microbatches)
    run, state = step.compile(BATCH), step.init(PARAMS)
    for first, last in ((30, -50), (-60, 40)):
        state, _ = run(state, step.place(BATCH | {"x": BATCH["x"].at[0, 0].set(first).at[-1, 0].set(last)}))
    assert state.observed.window[:2, 0, 0].tolist() == [60, 50]


def test_a_skipped_step_does_not_change_the_amax_history():
    step = make_step("one")
    run, state = step.compile(BATCH), step.init(PARAMS)
    state, _ = run(state, BATCH)
    before = jax.tree.map(np.array, state.carried)
    state, metrics = run(state, BATCH | {"x": BATCH["x"].at[3, 3].set(jnp.inf)})
    assert not np.isfinite(metrics.loss)
    assert int(state.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state.carried))


def quantizations(step):
    """Counts the FP8 casts of arrays with the shape of a weight in the lowered step."""
    text = step.lower(BATCH).as_text()
    shapes = rf"tensor<(?:{D}x{F}|{F}x{D})x"
    return len(re.findall(rf"stablehlo.convert .*\({shapes}f32>\) -> {shapes}f8E4M3FN>", text))


@pytest.mark.parametrize("name", ["one", "dp"])
def test_weights_are_quantized_once_per_step(name):
    assert quantizations(make_step(name)) == 2
    assert quantizations(make_step(name, microbatches=4)) == 2


@pytest.mark.long
def test_sharded_weights_are_gathered_in_fp8():
    text = make_step("fsdp", FP8Config(), compute_dtype=jnp.bfloat16).compile(BATCH).as_text()
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-gather", text)
    assert sorted(gathered) == [f"u8[{D},{F}]", f"u8[{F},{D}]"]


def test_an_fp8_loss_may_have_carried_state():
    def counting(params, batch, key, carried):
        return jgraph.Loss(loss(params, batch, key), carried={"seen": carried["seen"] + 1})

    step = jgraph.train_step(
        counting, optax.sgd(0.1), strategy("one"), carried={"seen": jnp.zeros(())}, fp8=DELAYED, batch=BATCH
    )
    run, state = step.compile(BATCH), step.init(PARAMS, {"seen": jnp.zeros(())})
    state, _ = run(state, BATCH)
    assert float(state.carried["seen"]) == 1
    assert float(state.observed.window[0, 0, 0]) > 0


def test_an_fp8_step_requires_a_batch():
    with pytest.raises(ConfigError) as error:
        jgraph.train_step(loss, optax.sgd(0.1), strategy("one"), fp8=DELAYED)
    assert error.value.field == "batch"


@pytest.mark.parametrize(
    ("other", "field"), [(lambda params, batch, key: jnp.sum(params["blocks"][0]["up"]), "loss"), ("no function", "loss")]
)
def test_an_fp8_step_without_an_fp8_matmul_names_the_loss_argument(other, field):
    with pytest.raises(ConfigError) as error:
        make_step("one", loss=other)
    assert error.value.field == field
