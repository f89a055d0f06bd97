"""Flax models as pure functions: dropout, running statistics, NNX and Linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph
from jgraph.modules import functional

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 4)), jnp.float32)


class Normed(nnx.Module):
    """Two dropouts and a batch norm."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.first, self.second = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))

    def masks(self, x):
        return self.first(jnp.ones_like(x)), self.second(jnp.ones_like(x))

    def loss(self, x):
        return jnp.mean(self.first(self.norm(self.linear(x))) ** 2)


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)

    def loss(self, x, train):
        return jnp.mean(self(x, train) ** 2)


MODELS = {"nnx": lambda: functional(lambda: Normed(nnx.Rngs(0))), "linen": lambda: functional(LinenNormed, X)}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def test_dropout_depends_on_the_key(model):
    params, carried = model.init()
    first, again, other = (model.loss(params, X, jax.random.key(seed), carried)[0] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_dropouts_of_a_call_use_different_keys():
    model = MODELS["nnx"]()
    first, second = model.call("masks", "train", *model.init(), jax.random.key(0), X)[0]
    assert not jnp.array_equal(first, second)


def test_a_call_returns_new_statistics(model):
    params, carried = model.init()
    _, after = model.loss(params, X, jax.random.key(0), carried)
    assert jax.tree.structure(after) == jax.tree.structure(carried)
    assert all(not jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(carried), strict=True))


def test_a_loss_without_the_carried_state_is_refused(model):
    params, _ = model.init()
    with pytest.raises(jgraph.ConfigError, match=r"`carried` is empty: must have .*mean") as error:
        model.loss(params, X, jax.random.key(0))
    assert error.value.field == "carried"


def test_reductions_are_read_from_variables():
    class Counting(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros((), jnp.int32), reduction="sum")
            self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
            self.inner = nnx.List([nnx.BatchNorm(2, rngs=nnx.Rngs(0))])

    model = jgraph.functional(Counting)
    assert model.reductions == {"count": "sum", "steps": "last", "inner": {0: {"mean": "mean", "var": "mean"}}}
    assert jax.tree.structure(model.reductions) == jax.tree.structure(model.carried)


def test_evaluation_has_no_dropout_and_uses_the_statistics(model):
    params, carried = model.init()
    moved = jax.tree.map(lambda leaf: leaf + 1, carried)
    values = [model.evaluate("loss", params, state, X) for state in (carried, carried, moved)]
    assert values[0] == values[1]
    assert values[0] != values[2]


@pytest.mark.parametrize("strategy", ["replicated", "data parallel", "fully sharded"])
def test_a_step_trains_a_model_with_dropout_and_statistics(model, strategy):
    mesh = {"data parallel": ("data",), "fully sharded": ("fsdp",)}.get(strategy)
    mesh = mesh and jax.make_mesh((2,), mesh, devices=jax.devices()[:2])
    kind = jgraph.FullySharded if strategy == "fully sharded" else jgraph.Replicated

    def loss(params, x, key, carried):
        found, after = model.loss(params, x, key, carried)
        return jgraph.Loss(found, carried=after)

    step = jgraph.train_step(loss, optax.sgd(0.1), kind(mesh, model.shapes), num_microbatches=2, carried=model.carried)
    params, carried = model.init()
    state = step.init(params, carried)
    run, x = step.compile(X), step.place(np.asarray(X))
    losses, before = [], jax.tree.map(np.asarray, state.carried)
    for _ in range(4):
        state, metrics = run(state, x)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0]
    assert all(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, state.carried)), strict=True))


class NoLoss(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


MISTAKES = {
    "a function that makes a number": (lambda: functional(lambda: 3), "make", "`make` returns 3"),
    "a module instead of a function": (lambda: functional(Normed(nnx.Rngs(0))), "make", "`make` is Normed"),
    "a class that takes arguments": (lambda: functional(Normed), "make", "'rngs'"),
    "a number": (lambda: functional(3), "make", "`make` is 3"),
    "a Linen module without a loss": (lambda: functional(NoLoss, X), "make", r"loss\(batch\)"),
    "a Linen module without a batch": (lambda: functional(LinenNormed), "batch", "`batch` is None"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_function_that_returns_no_flax_module_is_refused(mistake):
    call, field, message = MISTAKES[mistake]
    with pytest.raises(jgraph.ConfigError, match=message) as error:
        call()
    assert error.value.field == field
