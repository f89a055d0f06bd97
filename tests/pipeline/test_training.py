"""Optimizer steps with the gradients of a pipeline, and gradients of a bfloat16 model."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.pipeline import PipelineModel
from jgraph.schedule import generate
from jgraph.strategies.sharding import FSDPChoices
from tests.pipeline import model

pytestmark = pytest.mark.once

L, M, STEPS = 4, 4, 10
OPTIMIZERS = {"sgd": optax.sgd(0.1, momentum=0.9), "adamw": optax.adamw(1e-2)}


def trained(optimizer: optax.GradientTransformationExtraArgs, params, gradients):
    """Returns the parameters after STEPS steps with different batches."""

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(STEPS):
        params, state = update(params, state, gradients(params, model.batch(M, step)))
    return params


@cache
def trained_on_one_device(optimizer: str):
    def gradients(params, inputs):
        outer, layers = params
        return jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), model.one_device(outer, layers, inputs)[1])

    return jax.device_get(trained(OPTIMIZERS[optimizer], model.params(L), gradients))


@pytest.mark.parametrize(
    ("name", "C", "runtime"),
    [
        pytest.param("aligned", 1, "aligned", marks=pytest.mark.long),
        pytest.param("zb-v", 2, "general", marks=pytest.mark.long),
        ("1f1b", 1, "general"),
    ],
)
def test_weights_after_ten_steps_equal_one_device(name, C, runtime):
    pipe = model.pipeline(generate(name, pp=2, microbatches=M, chunks=C), L, runtime=runtime)
    run = jax.jit(pipe.loss_and_grads)
    start = model.placed(pipe, *model.params(L))
    for optimizer in OPTIMIZERS:
        end = trained(OPTIMIZERS[optimizer], start, lambda params, inputs: run(params, inputs)[1])
        assert_same_weights(pipe.layout.unpack(pipe.arrays(jax.device_get(end))), trained_on_one_device(optimizer))


def assert_same_weights(got, want) -> None:
    for w, before, g in zip(*map(jax.tree.leaves, (want, model.params(L), got)), strict=True):
        # Gradients differ by 1e-7 of the largest gradient. Adam divides each gradient by its magnitude, so small gradients have
        # larger errors: a gradient of 1e-4 of the largest changes its step of 1e-2 by 1e-3 of the step. The largest measured
        # error is 6e-7 of the largest weight.
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max())
        assert np.abs(w - before).max() > 1e-2


LOW = PipelineModel(lambda outer, inputs: model.embed(outer, inputs).astype(jnp.bfloat16), model.layer, model.head)


def cast(tree):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, tree)


@cache
def plain_in_bfloat16():
    """Returns the gradients of one device in bfloat16. They are cast to float32 before the sum."""

    def loss(outer, layers, inputs):
        x = LOW.embed(outer, inputs)
        for p in cast(layers):
            x = model.layer(p, x)
        return model.head(cast(outer), x, inputs)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    each = [gradient(*model.params(L), jax.tree.map(lambda leaf, m=m: leaf[m], model.batch(M))) for m in range(M)]
    return jax.tree.map(lambda *g: np.mean(g, 0), *each)


def distance(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("name", "C"),
    [pytest.param("aligned", 1, marks=pytest.mark.long), pytest.param("zb-v", 2, marks=pytest.mark.long), ("1f1b", 1)],
)
def test_bfloat16_pipelines_have_float32_gradients_as_accurate_as_one_device(name, C):
    pipe = model.pipeline(
        generate(name, pp=2, microbatches=M, chunks=C), L, parts=LOW, fsdp=FSDPChoices(compute_dtype=jnp.bfloat16)
    )
    loss, grads = model.run_pipeline(pipe)
    want_loss, want = model.expected(L, M)
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss, want_loss, rtol=2**-8)
    for g, plain, w in zip(*map(jax.tree.leaves, (grads, plain_in_bfloat16(), want)), strict=True):
        assert g.dtype == np.float32
        # The lower bound checks that the computation was in bfloat16.
        assert 2**-12 < distance(g, w) < 1.25 * distance(plain, w)
