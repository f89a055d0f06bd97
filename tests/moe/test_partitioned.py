"""Tests mixtures of experts with hidden units split over the axis `tensor`, and tokens over the axis `context`."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph
from jgraph.errors import ConfigError
from jgraph.moe.statistics import statistics
from jgraph.step import train_step
from jgraph.strategies import FullySharded, Replicated, TensorParallel

# D model, F hidden, E experts, T tokens of a row
D, F, E, T, ROWS = 16, 32, 4, 8, 8
SIGMOID = jgraph.MoEConfig(
    num_experts=E,
    router="sigmoid",
    shared_experts=1,
    balance_loss=0.5,
    z_loss=0.1,
    bias_rate=0.1,  # the next step reads the bias, so wrong counts change the losses
    capacity=4.0,
)
SOFTMAX = replace(SIGMOID, router="softmax-topk", shared_experts=0, d_ff=12)


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.mlp = jgraph.MoE(D, F, config, rngs=rngs, kernel_init=nnx.initializers.normal(0.3))


class Stack(nnx.Module):
    """A residual MoE layer after a matrix, which reads the gradient of its input."""

    def __init__(self, config):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.blocks = nnx.List([Layer(config, rngs)])

    def loss(self, batch):
        x = self.linear(batch["x"])
        for block in self.blocks:
            x = x + block.mlp(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3))
        return jnp.mean((x - batch["y"]) ** 2)


def batch_of(length):
    rng = np.random.default_rng(1)
    # Rows and tokens have different magnitudes, so that the parts of a mean differ.
    scales = np.linspace(0.5, 2, ROWS)[:, None, None] * np.linspace(0.5, 2, length)[:, None]
    return {name: (rng.standard_normal((ROWS, length, D)) * scales).astype("f") for name in "xy"}


def step_of(config, axes, length=T, microbatches=1, fp8=None, **choices):
    model = jgraph.functional(lambda: Stack(config))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes)) if axes else None
    strategy = FullySharded(mesh, model.shapes, **choices) if "fsdp" in axes else Replicated(mesh, model.shapes)
    if "tensor" in axes:
        strategy = TensorParallel(strategy)

    def loss(params, batch, key, carried):
        value, after = model.loss(params, batch, key, carried)
        return jgraph.Loss(value, carried=after)

    adamw = jgraph.elementwise(lambda mask: optax.adamw(1e-2, eps=1e-2))
    given = {"carried": model.carried, "reductions": model.reductions, "num_microbatches": microbatches}
    step = train_step(loss, adamw, strategy, fp8=fp8, batch=batch_of(length) if fp8 else None, **given)
    return step, model


def trained(config, axes, length=T, **choices):
    """Returns the losses of five steps, and the state after them."""
    step, model = step_of(config, axes, length, **choices)
    state, batch = step.init(*jax.jit(model.init)()), step.place(batch_of(length))
    run, losses = step.compile(batch), []
    for _ in range(5):
        state, metrics = run(state, batch)
        losses.append(float(metrics.loss))
    return losses, jax.device_get(step.canonical.of(state))


one_device = cache(lambda config, length, microbatches: trained(config, {}, length, microbatches=microbatches))

TENSOR, CONTEXT = {"data": 1, "tensor": 2}, {"data": 1, "context": 2}
TENSOR_FSDP, CONTEXT_FSDP = {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}
CASES = {
    "tensor": (SOFTMAX, TENSOR, T, {}),
    # One sequence of an odd length: devices share neither sequences nor tokens.
    "tensor, odd length": (SIGMOID, TENSOR, 7, {"microbatches": ROWS}),
    "context": (SIGMOID, CONTEXT, T, {}),
    "tensor, fsdp": (SIGMOID, TENSOR_FSDP, T, {}),
    "context, fsdp": (SOFTMAX, CONTEXT_FSDP, T, {}),
    "tensor, fsdp, experts over 2": (SIGMOID, TENSOR_FSDP, T, {"experts": 2}),
    "context, fsdp, experts over 2": (SIGMOID, CONTEXT_FSDP, T, {"experts": 2}),
    "data, context, tensor": (SOFTMAX, {"data": 2, "context": 2, "tensor": 2}, T, {"microbatches": 2}),
}


EVERY_VERSION = ("tensor", "context", "tensor, fsdp", "context, fsdp")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in EVERY_VERSION else [pytest.mark.once]) for case in CASES]
)
def test_five_steps_on_partitioned_axes_equal_one_device(case):
    config, axes, length, choices = CASES[case]
    losses, state = trained(config, axes, length, **choices)
    expected, one = one_device(config, length, choices.get("microbatches", 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    found, wanted = statistics(state.carried), statistics(one.carried)
    assert found.keys() == wanted.keys() == {"blocks/0/mlp"}
    for layer in wanted:
        for name in wanted[layer]:
            np.testing.assert_allclose(found[layer][name], wanted[layer][name], rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("axes", [TENSOR_FSDP, CONTEXT_FSDP], ids=["tensor", "context"])
def test_dropped_rows_are_counted_once_per_token(axes):
    config = replace(SIGMOID, capacity=0.1, overflow="drop", bias_rate=0.0, num_experts=2, balance_loss=0.0)
    _, state = trained(config, axes, experts=2)
    # With as many experts as experts per token, a device has a row of every token for both devices, and sends 8 rows to each.
    shards = 2 * axes.get("context", 1)
    tokens = ROWS * T // shards
    for layer in statistics(state.carried).values():
        assert layer["dropped"] == shards * 2 * (tokens - 8)


@pytest.mark.long
@pytest.mark.once
def test_a_step_halts_if_any_device_of_a_sequence_exceeds_the_capacity():
    config = replace(SIGMOID, capacity=0.1, num_experts=2)
    step, model = step_of(config, CONTEXT_FSDP, experts=2)
    state, batch = step.init(*jax.jit(model.init)()), step.place(batch_of(T))
    _, metrics = step.compile(batch)(state, batch)
    assert metrics.halted == ROWS * T // 4


def test_hidden_units_that_the_devices_cannot_share_are_refused():
    with pytest.raises(ConfigError, match=r"`tensor` is 2: must divide the length 7 of blocks/0/mlp/down_EFD") as e:
        step_of(replace(SIGMOID, d_ff=7), TENSOR)
    assert e.value.field == "tensor"


def test_experts_in_fp8_are_refused_on_partitioned_axes():
    step, _ = step_of(SIGMOID, TENSOR, fp8=jgraph.FP8Config(emulate=True, format="e4m3"))
    with pytest.raises(ConfigError, match=r"blocks/0/mlp/down_EFD is multiplied under .*: add .* to `fp8.keep`") as e:
        step.compile(step.place(batch_of(T)))
    assert e.value.field == "fp8.keep"
