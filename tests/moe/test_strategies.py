"""Tests that every strategy computes the same gradients, including router losses, and the same statistics."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph
from jgraph.pipeline import Pipelined, PipelineModel
from jgraph.schedule import generate
from jgraph.step import train_step
from jgraph.strategies import FullySharded, Replicated

pytestmark = pytest.mark.long

# D model, F hidden, E experts, K experts of a token, T tokens of a row
D, F, E, T, ROWS = 4, 6, 8, 3, 16
CONFIG = jgraph.MoEConfig(num_experts=E, router="sigmoid", balance_loss=0.1, z_loss=0.01, shared_experts=1, capacity=4.0)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)


class Stack(nnx.Module):
    """A residual network of MoE layers."""

    def __init__(self, layers, rngs):
        init = nnx.initializers.normal(0.7)
        self.layers = nnx.List([jgraph.MoE(D, F, CONFIG, rngs=rngs, kernel_init=init) for _ in range(layers)])
        self.scale = nnx.Param(jnp.ones(D))

    def loss(self, batch):
        x = batch["x"] * self.scale[...]
        for layer in self.layers:
            x = x + layer(normed(x))
        return jnp.mean((x - batch["y"]) ** 2)


@cache
def made(layers):
    """Returns the model, its initial parameters and its initial state."""
    model = jgraph.functional(lambda: Stack(layers, nnx.Rngs(0)))
    return model, *jax.device_get(jax.jit(model.init)())


def pipeline_model():
    graph, _, _ = nnx.split(Stack(1, nnx.Rngs(0)).layers[0], nnx.Param, ...)

    def layer(params, x, carried):
        moe = nnx.merge(graph, params, carried)
        return x + moe(normed(x)), nnx.to_pure_dict(nnx.state(moe, nnx.Not(nnx.Param)))

    return PipelineModel(
        embed=lambda outer, batch: batch["x"] * outer["scale"],
        layer=layer,
        head=lambda outer, x, batch: jnp.mean((x - batch["y"]) ** 2),
        split=lambda params: ({"scale": params["scale"]}, list(params["layers"].values())),
        join=lambda outer, layers: outer | {"layers": dict(enumerate(layers))},
        split_carried=lambda carried: list(carried["layers"].values()),
        join_carried=lambda layers: {"layers": dict(enumerate(layers))},
    )


@cache
def batch():
    rng = np.random.default_rng(1)
    # Rows have different magnitudes, so that the parts of a mean differ.
    return {name: (rng.standard_normal((ROWS, T, D)) * np.linspace(0.5, 2, ROWS)[:, None, None]).astype("f") for name in "xy"}


def plain_loss(params, rows):
    """Returns the loss of a microbatch, including the router's losses, and the tokens of each expert by layer."""
    x, total, counts = rows["x"] * params["scale"], 0.0, []
    for layer in params["layers"].values():
        stream, x = x, normed(x)
        logits = x @ layer["router_DE"]
        scores = jax.nn.sigmoid(logits)
        chosen = jnp.sum(jax.nn.one_hot(jnp.argsort(-scores, axis=-1)[..., : CONFIG.experts_per_token], E), -2)
        weights = chosen * scores / jnp.sum(chosen * scores, -1, keepdims=True)
        gate, up = jnp.split(jnp.einsum("...d,edf->...ef", x, layer["up_EDF2"]), 2, -1)
        y = jnp.einsum("...e,...ef,efd->...d", weights, jax.nn.silu(gate) * up, layer["down_EFD"])
        gate, up = jnp.split(x @ layer["shared_up_DF2"], 2, -1)
        x = stream + y + (jax.nn.silu(gate) * up) @ layer["shared_down_FD"]
        means = [jnp.mean(leaf, (0, 1)) for leaf in (chosen, scores / jnp.sum(scores, -1, keepdims=True))]
        total += CONFIG.balance_loss * E * jnp.sum(means[0] * means[1])
        total += CONFIG.z_loss * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        counts.append(jnp.sum(chosen, (0, 1)))
    return jnp.mean((x - rows["y"]) ** 2) + total, jnp.stack(counts)


@cache
def plain(layers, microbatches):
    """Returns the mean gradient over microbatches of consecutive rows, and the number of tokens of each expert."""

    def mean(params):
        batch_M = jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, T, D), batch())
        found, counts = jax.vmap(plain_loss, (None, 0))(params, batch_M)
        return jnp.mean(found), jnp.sum(counts, 0)

    return jax.device_get(jax.jit(jax.grad(mean, has_aux=True))(made(layers)[1]))


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


PAIRS = "fsdp, experts over 4, pairs of microbatches"
SPREAD = "fsdp and data, experts over 2 of 4, resharded"
PIPED = "pipe and fsdp, experts over 2, remat"
ONCE = ("data", "fsdp", SPREAD, "pipe, aligned", PIPED, "pipe, dispatch engine")
CASES = {
    "microbatches": ({}, "", {}),
    "data": ({"data": 4}, "", {}),
    "fsdp": ({"fsdp": 4}, "", {}),
    PAIRS: ({"fsdp": 4}, "", {"experts": 4}),
    SPREAD: ({"data": 2, "fsdp": 4}, "", {"experts": 2, "gather_per": "pass"}),
    "pipe, aligned": ({"pipe": 2}, "aligned", {}),
    PIPED: ({"pipe": 2, "fsdp": 2}, "zb-h1", {"remat": "layer", "experts": 2}),
    "pipe, dispatch engine": ({"pipe": 2}, "1f1b", {"engine": "dispatch"}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.once] if case in ONCE else []) for case in CASES])
def test_every_layout_has_the_same_gradient_including_the_routers_losses(case):
    axes, schedule, choices = CASES[case]
    layers = 3 if "pipe" in axes else 1  # on two stages: the last stage is padded
    microbatches = 4 if case == PAIRS else 2  # two pairs
    model, params, carried = made(layers)

    def loss(params, batch, key, carried):
        value, after = model.loss(params, batch, key, carried)
        return jgraph.Loss(value, carried=after)

    if "pipe" in axes:
        order = generate(schedule, pp=2, microbatches=microbatches)
        loss, strategy = pipeline_model(), Pipelined(mesh(**axes), model.shapes, order, **choices)
    elif "fsdp" in axes:
        strategy = FullySharded(mesh(**axes), model.shapes, **choices)
    else:
        strategy = Replicated(mesh(**axes) if axes else None, model.shapes)
    given = {"carried": model.carried, "reductions": model.reductions, "num_microbatches": microbatches}
    step = train_step(loss, optax.sgd(1.0), strategy, **given)
    run, state = step.compile(batch()), step.init(params, carried)
    state, _ = run(state, step.place(batch()))
    after = jax.device_get(step.canonical.of(state))
    grads = jax.tree.map(np.subtract, params, after.params)
    expected, counts = plain(layers, microbatches)
    for (path, actual), grad in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, grad, rtol=1e-4, atol=2e-6, err_msg=jax.tree_util.keystr(path))
    error = optax.tree.norm(jax.tree.map(np.subtract, grads, expected))
    assert error < 1e-6 * optax.tree.norm(expected)
    for i, own in enumerate(after.carried["layers"].values()):
        np.testing.assert_array_equal(own["tokens_E"], counts[i])


@pytest.mark.parametrize("axis", ["fsdp", "pipe"])
@pytest.mark.parametrize("name", ["router_DE", "up_DF"])
def test_a_router_is_not_rounded_to_the_compute_dtype(axis, name):
    exact = np.float32(1 + 2.0**-12)  # 1 in bfloat16
    params = {"layers": {i: {name: np.full((2, 2), exact)} for i in range(2)}}

    def rounded(own):
        return jnp.mean(jnp.abs(own[name].astype(jnp.float32) - exact))

    model = PipelineModel(
        embed=lambda outer, batch: batch,
        layer=lambda own, x: x + rounded(own),
        head=lambda outer, x, batch: jnp.mean(x),
        split=lambda params: ({}, list(params["layers"].values())),
        join=lambda outer, layers: {"layers": dict(enumerate(layers))},
    )
    shapes = jax.eval_shape(lambda: params)
    if axis == "fsdp":
        strategy = FullySharded(mesh(fsdp=2), shapes, compute_dtype=jnp.bfloat16)

        def loss(params, batch, key):
            return sum(map(rounded, params["layers"].values()))
    else:
        order = generate("1f1b", pp=2, microbatches=2)
        loss, strategy = model, Pipelined(mesh(pipe=2), shapes, order, compute_dtype=jnp.bfloat16)
    step = train_step(loss, optax.sgd(0.0), strategy, num_microbatches=2)
    batch = step.place(np.zeros((4, 2), "f"))
    _, metrics = step.compile(batch)(step.init(params), batch)
    assert (float(metrics.loss) > 0) == (name == "up_DF")
