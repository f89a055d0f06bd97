"""Tests that a loss that reduces over `jgraph.BATCH_AXES` has the same value on every layout."""

from dataclasses import replace
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jgraph
from jgraph import BATCH_AXES, CallableError, ConfigError
from jgraph.schedule import generate
from tests.pipeline import test_pipelined_step as plain

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.standard_normal((16, 4), np.float32), "y": RNG.standard_normal((16, 1), np.float32)}
LAYOUTS = {"one device": {}, "data 4": {"data": 4}, "fsdp 4": {"fsdp": 4}, "data 2 x fsdp 2": {"data": 2, "fsdp": 2}}


class Normed(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)

    def loss(self, batch):
        return jnp.mean((self.down(nnx.relu(self.norm(self.up(batch["x"])))) - batch["y"]) ** 2)


class LinenNormed(nn.Module):
    axis_name: tuple | str | None

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))

    def loss(self, batch, train):
        return jnp.mean((self(batch["x"], train) - batch["y"]) ** 2)


MODELS = {
    "nnx": lambda axis_name: jgraph.functional(lambda: Normed(axis_name, nnx.Rngs(0))),
    "linen": lambda axis_name: jgraph.functional(lambda: LinenNormed(axis_name), BATCH),
}


def step_of(layout, model, **choices):
    def loss(params, batch, key, carried):
        value, after = model.loss(params, batch, key, carried)
        return jgraph.Loss(value, carried=after)

    sizes = LAYOUTS[layout]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes)) if sizes else None
    strategy = jgraph.FullySharded if "fsdp" in sizes else jgraph.Replicated
    return jgraph.train_step(loss, optax.sgd(0.1), strategy(mesh, model.shapes), carried=model.carried, **choices)


def trained(layout, model, **choices):
    """Runs two steps. Returns their losses and gradient norms, the parameters and the running statistics."""
    step = step_of(layout, model, **choices)
    run, state, metrics = step.compile(BATCH), step.init(*jax.jit(model.init)()), []
    for _ in range(2):
        state, found = run(state, step.place(BATCH))
        metrics.append((float(found.loss), float(found.grad_norm)))
    state = jax.device_get(step.canonical.of(state))
    return metrics, state.params, state.carried


def assert_same(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@cache
def on_one_device(kind):
    return trained("one device", MODELS[kind](BATCH_AXES))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("nnx", "data 4"),
        pytest.param("nnx", "fsdp 4", marks=pytest.mark.long),
        ("nnx", "data 2 x fsdp 2"),
        pytest.param("linen", "fsdp 4", marks=pytest.mark.long),
    ],
)
def test_a_batch_norm_over_the_batch_axes_trains_the_same_on_every_layout(kind, layout):
    assert_same(trained(layout, MODELS[kind](BATCH_AXES)), on_one_device(kind))


def test_a_batch_norm_over_the_batch_axes_equals_a_plain_batch_norm_on_one_device():
    assert_same(on_one_device("nnx"), trained("one device", MODELS["nnx"](None)))


@pytest.mark.long
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_a_batch_norm_normalizes_over_the_rows_of_each_device_by_default(axis_name):
    model = MODELS["nnx"](axis_name)
    params, carried = model.init()
    parts = [jax.tree.map(lambda leaf, i=i: leaf[4 * i : 4 * i + 4], BATCH) for i in range(4)]
    whole, *each = (float(model.loss(params, rows, jax.random.key(0), carried)[0]) for rows in (BATCH, *parts))
    (first, _), _ = trained("fsdp 4", model)[0]
    assert first == pytest.approx(np.mean(each), rel=1e-6)
    assert abs(first - whole) > 1e-2


@pytest.mark.long
def test_fp8_finds_matmuls_in_a_model_that_reduces_over_the_batch_axes():
    def train_in_fp8(layout, axis_name):
        model = jgraph.functional(lambda: Wide(axis_name, nnx.Rngs(0)))
        step = step_of(layout, model, fp8=jgraph.FP8Config(recipe="delayed", emulate=True), batch=WIDE)
        run, state = step.compile(WIDE), step.init(*model.init())
        before = jax.tree.map(np.asarray, state.observed)
        state, metrics = run(state, step.place(WIDE))
        return jax.tree.map(np.shape, before), float(metrics.loss)

    (expected, _), (one, loss), (four, other) = (
        train_in_fp8(*case) for case in (("one device", None), ("one device", BATCH_AXES), ("data 4", BATCH_AXES))
    )
    assert one == four == expected
    assert other == pytest.approx(loss, rel=0.05)


class Wide(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.first, self.last = (nnx.Linear(32, 32, use_bias=False, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(32, axis_name=axis_name, rngs=rngs)

    def loss(self, x):
        return jnp.mean((self.last(self.norm(self.first(x))) - x) ** 2)


WIDE = np.random.default_rng(0).standard_normal((64, 32), np.float32)


def test_grouped_matmuls_have_gradients_if_the_loss_reduces_over_a_missing_axis():
    def loss(reduce, params, batch, key):
        return reduce(jnp.mean(jgraph.grouped_dot(batch, params["w"], jnp.array([6, 10])) ** 2))

    params = {"w": RNG.standard_normal((2, 4, 3), np.float32)}
    reducing, plain = (
        jgraph.train_step(partial(loss, reduce), optax.sgd(0.1), jgraph.Replicated(None, params))
        for reduce in (lambda x: lax.pmean(x, BATCH_AXES), lambda x: x)
    )
    found, expected = (step.compile(BATCH["x"])(step.init(params), BATCH["x"])[0] for step in (reducing, plain))
    assert_same(found.params, expected.params)


# --- Pipelines ---

CARRIED = {"mean": jnp.zeros((plain.LAYERS, plain.WIDTH))}


def batch_mean(x):
    return lax.pmean(jnp.mean(x, 0), BATCH_AXES)


def layer(params, x, carried):
    mean = batch_mean(x)
    y = plain.layer(params, x - mean)
    return y, {"mean": 0.9 * carried["mean"] + 0.1 * mean}


def head(outer, x, batch):
    return plain.head(outer, x / (1 + batch_mean(x**2)), batch)


MODEL = replace(
    plain.MODEL,
    embed=lambda outer, batch: plain.embed(outer, batch) * batch_mean(batch["x"])[0],
    layer=layer,
    head=head,
    split_carried=lambda carried: [{"mean": row} for row in carried["mean"]],
    join_carried=lambda layers: {"mean": jnp.stack([own["mean"] for own in layers])},
)


def sequential_loss(params, batch, key, carried):
    x, after = MODEL.embed(params, batch), []
    for own, state in zip(params["layers"], MODEL.split_carried(carried), strict=True):
        x, state = MODEL.layer(own, x, state)
        after.append(state)
    return jgraph.Loss(MODEL.head(params, x, batch), carried=MODEL.join_carried(after))


def rows():
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((16, 2), np.float32), "y": rng.standard_normal((16, 4), np.float32)}


def pipelined(schedule, sizes, **choices):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    order = generate(schedule, pp=sizes["pipe"], microbatches=plain.MICROBATCHES)
    strategy = jgraph.Pipelined(mesh, plain.shapes(), order, **choices)
    return jgraph.train_step(MODEL, optax.sgd(0.1), strategy, num_microbatches=plain.MICROBATCHES, carried=CARRIED)


def run_twice(step):
    batch = rows()
    run, state, losses = step.compile(batch), step.init(plain.new_params, CARRIED), []
    for _ in range(2):
        state, metrics = run(state, step.place(batch))
        losses.append(float(metrics.loss))
    state = jax.device_get(step.canonical.of(state))
    return losses, state.params, state.carried


@pytest.fixture(scope="module")
def sequential():
    strategy = jgraph.Replicated(None, plain.shapes())
    choices = {"num_microbatches": plain.MICROBATCHES, "carried": CARRIED}
    return run_twice(jgraph.train_step(sequential_loss, optax.sgd(0.1), strategy, **choices))


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "sizes", "choices"),
    [
        ("zb-h1", {"data": 2, "pipe": 2}, {}),
        ("aligned", {"pipe": 2, "fsdp": 2}, {"remat": "layer"}),
        ("1f1b", {"pipe": 2}, {"engine": "dispatch"}),
    ],
    ids=["data", "fsdp", "dispatch"],
)
def test_pipeline_stages_reduce_over_the_batch_axes(schedule, sizes, choices, sequential):
    assert_same(run_twice(pipelined(schedule, sizes, **choices)), sequential)


def test_the_dispatch_engine_refuses_a_model_that_reduces_over_replicas():
    step = pipelined("1f1b", {"data": 2, "pipe": 2}, engine="dispatch")
    with pytest.raises(ConfigError, match=r"`engine` is dispatch: must be program .*'(data|fsdp)'") as error:
        step.compile(rows())
    assert error.value.field == "engine"


# --- Errors, and calls outside a step ---


@pytest.mark.parametrize("layout", ["one device", "data 4", "data 2 x fsdp 2"])
def test_an_axis_name_other_than_the_batch_axes_is_refused(layout):
    with pytest.raises(ConfigError, match=r"`axis_name` is 'batch': must be 'data' or 'fsdp'") as error:
        step_of(layout, MODELS["nnx"]("batch")).compile(BATCH)
    assert error.value.field == "axis_name"


def test_an_undefined_name_in_a_loss_raises_a_name_error():
    step = jgraph.train_step(lambda *_: missing, optax.sgd(0.1), jgraph.Replicated(None, {"w": jnp.ones(3)}))  # noqa: F821
    with pytest.raises(NameError, match="'missing' is not defined"):
        step.compile(BATCH)


@pytest.mark.parametrize("kind", MODELS)
def test_a_functional_model_can_reduce_over_the_batch_axes_outside_a_step(kind):
    reducing, other = (MODELS[kind](axis_name) for axis_name in (BATCH_AXES, None))
    params, carried = reducing.init()
    assert_same(*(model.loss(params, BATCH, jax.random.key(0), carried) for model in (reducing, other)))
    assert_same(*(model.evaluate("loss", params, carried, BATCH) for model in (reducing, other)))


@pytest.mark.long
def test_a_linen_model_that_reduces_over_the_batch_axes_can_be_initialized_and_evaluated():
    class Averaged(LinenNormed):
        def loss(self, batch, train):
            return lax.pmean(super().loss(batch, train), BATCH_AXES)

    reducing, other = (jgraph.functional(lambda kind=kind: kind(None), BATCH) for kind in (Averaged, LinenNormed))
    assert_same(reducing.evaluate("loss", *reducing.init(), BATCH), other.evaluate("loss", *other.init(), BATCH))


def test_an_index_along_a_missing_batch_axis_is_zero():
    def loss(params, batch, key):
        return jnp.mean(batch @ params["w"]) + jnp.sum(lax.axis_index(BATCH_AXES))

    params, x = {"w": jnp.ones(3)}, np.ones((4, 3), np.float32)
    step = jgraph.train_step(loss, optax.sgd(0.1), jgraph.Replicated(None, params))
    _, metrics = step.compile(x)(step.init(params), x)
    assert float(metrics.loss) == 3.0


def test_a_graphed_callable_that_reduces_over_a_batch_axis_is_refused():
    def normalized(params, x):
        return x @ params - lax.pmean(jnp.mean(x), BATCH_AXES)

    with pytest.raises(CallableError, match="reduces over the mesh axis 'data'"):
        jgraph.make_graphed_callables(normalized, jnp.ones((2, 2)), (jnp.ones((3, 2)),))
