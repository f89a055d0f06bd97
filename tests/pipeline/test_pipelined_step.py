"""A pipeline step with a model of three functions equals a step on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError
from jgraph.pipeline import Pipelined, PipelineModel
from jgraph.schedule import generate
from jgraph.step import elementwise, train_step
from jgraph.strategies import Replicated

LAYERS, WIDTH, MICROBATCHES = 5, 8, 4


def new_params():
    rng = np.random.default_rng(0)
    layers = [{"kernel": 0.3 * rng.standard_normal((WIDTH, WIDTH), np.float32)} for _ in range(LAYERS)]
    return {"embed": rng.standard_normal((2, WIDTH), np.float32), "layers": layers, "head": np.ones((WIDTH, 4), np.float32)}


def embed(outer, batch):
    return batch["x"] @ outer["embed"]


def layer(params, x):
    return x + jnp.tanh(x @ params["kernel"])


def head(outer, x, batch):
    return jnp.mean((x @ outer["head"] - batch["y"]) ** 2)


MODEL = PipelineModel(
    embed,
    layer,
    head,
    split=lambda params: ({"embed": params["embed"], "head": params["head"]}, params["layers"]),
    join=lambda outer, layers: outer | {"layers": layers},
)


def whole(params, batch, key):
    x = embed(params, batch)
    for own in params["layers"]:
        x = layer(own, x)
    return head(params, x, batch)


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((16, 2), np.float32), "y": rng.standard_normal((16, 4), np.float32)}


def shapes():
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, new_params()))


def trained(step, batch):
    """Runs three steps. Returns the parameters in the model's own tree, and the last metrics."""
    run, state = step.compile(batch), step.init(new_params)
    for _ in range(3):
        state, metrics = run(state, step.place(batch))
    return step.canonical.of(state).params, metrics


# Muon sees the model's own tree, although the layers are stacked by rank.
TRANSFORMS = {"adam": elementwise(optax.adam(1e-2)), "muon": optax.contrib.muon(1e-2)}
FOUR, DATA, FSDP = {"pipe": 4}, {"data": 2, "pipe": 2}, {"pipe": 2, "fsdp": 2}


@pytest.fixture(scope="module")
def expected():
    rows = {}

    def expected(transform, batch):
        if transform not in rows:
            step = train_step(whole, TRANSFORMS[transform], Replicated(None, shapes()), clip_norm=1.0)
            rows[transform] = trained(step, batch)
        return rows[transform]

    return expected


@pytest.mark.parametrize(
    ("axes", "schedule", "engine", "transform"),
    [
        # Every axis and every engine with both transforms.
        pytest.param(FOUR, "zb-h1", "program", "muon", marks=[pytest.mark.long, pytest.mark.once]),
        (DATA, "aligned", "program", "adam"),
        pytest.param(FSDP, "1f1b", "program", "adam", marks=pytest.mark.long),
        pytest.param(FSDP, "1f1b", "program", "muon", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param(FOUR, "zb-h1", "dispatch", "adam", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param({"pipe": 2, "data": 2}, "1f1b", "dispatch", "muon", marks=pytest.mark.long),
    ],
)
def test_the_steps_of_a_pipeline_equal_one_device(axes, schedule, engine, transform, expected, batch):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    order = generate(schedule, pp=mesh.shape["pipe"], microbatches=MICROBATCHES)
    strategy = Pipelined(mesh, shapes(), order, engine=engine)
    step = train_step(MODEL, TRANSFORMS[transform], strategy, num_microbatches=MICROBATCHES, clip_norm=1.0)
    params, metrics = trained(step, batch)
    expected_params, expected_metrics = expected(transform, batch)
    assert metrics.loss == pytest.approx(float(expected_metrics.loss), rel=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_arguments_unsupported_in_a_pipeline_are_refused_by_name():
    schedule = generate("1f1b", pp=2, microbatches=MICROBATCHES)
    strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), shapes(), schedule)
    refused = {
        "loss": {"loss": whole, "num_microbatches": MICROBATCHES},
        "num_microbatches": {"loss": MODEL, "num_microbatches": 2},
        "grads_dtype": {"loss": MODEL, "num_microbatches": MICROBATCHES, "grads_dtype": jnp.bfloat16},
        "carried": {"loss": MODEL, "num_microbatches": MICROBATCHES, "carried": {"a": jnp.zeros(())}},
    }
    for field, arguments in refused.items():
        with pytest.raises(ConfigError) as error:
            train_step(transform=optax.sgd(0.1), strategy=strategy, **arguments)
        assert error.value.field == field


@pytest.mark.long
def test_replicas_of_the_dispatch_engine_draw_different_random_numbers():
    def layer(params, x, key, carried):
        drawn = jax.random.uniform(key)
        return x @ params["kernel"], {"largest": drawn, "least": -drawn}

    model = replace(
        MODEL,
        layer=layer,
        takes_key=True,
        split_carried=lambda carried: [jax.tree.map(lambda leaf, i=i: leaf[i], carried) for i in range(LAYERS)],
        join_carried=lambda layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
    )
    carried = {"largest": jnp.zeros(LAYERS), "least": jnp.zeros(LAYERS)}
    order = generate("gpipe", pp=1, microbatches=1)
    strategy = Pipelined(jax.make_mesh((2, 1), ("data", "pipe")), shapes(), order, engine="dispatch")
    step = train_step(model, optax.sgd(0.1), strategy, carried=carried, reductions="max")
    rows = {"x": np.ones((2, 2), np.float32), "y": np.ones((2, 4), np.float32)}
    state, _ = step.compile(rows)(step.init(new_params, carried), step.place(rows))
    assert np.all(state.carried["largest"] > -state.carried["least"])


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "aligned"])
def test_parameters_in_bfloat16_train_with_every_runtime(schedule, batch):
    strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), shapes(), generate(schedule, pp=2, microbatches=4))
    choices = {"num_microbatches": 4, "params_dtype": jnp.bfloat16}
    found, metrics = trained(train_step(MODEL, optax.sgd(1e-2), strategy, **choices), batch)
    expected, on_one = trained(train_step(whole, optax.sgd(1e-2), Replicated(None, shapes()), **choices), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(metrics.loss, on_one.loss, rtol=1e-2)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=2e-2)


@pytest.mark.long
def test_a_pipeline_can_freeze_all_its_layers(batch):
    strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), shapes(), generate("aligned", pp=2, microbatches=4))
    step = train_step(MODEL, elementwise(optax.adam(1e-2)), strategy, num_microbatches=4, freeze=("layers/*",))
    found, start = trained(step, batch)[0], new_params()
    jax.tree.map(np.testing.assert_array_equal, found["layers"], start["layers"])
    assert not np.array_equal(found["head"], start["head"])
