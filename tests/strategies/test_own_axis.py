"""Tests that a strategy with a custom mesh axis trains like the strategies of the library."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jgraph
from tests.strategies import partitioned

PARAMS = {"up": jnp.linspace(-1, 1, 32).reshape(4, 8), "down": jnp.linspace(-1, 1, 16).reshape(8, 2), "bias": jnp.zeros(3)}
BATCH = {"x": np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4), "y": np.ones((4, 2), np.float32)}


def loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    return jnp.mean((hidden - batch["y"]) ** 2) + jnp.sum(params["bias"] ** 2)


def trained(strategy, transform, steps=3):
    step = jgraph.train_step(loss, transform, strategy, num_microbatches=2, clip_norm=1.0)
    run, state, losses = step.compile(BATCH), step.init(PARAMS), []
    for _ in range(steps):
        state, metrics = run(state, step.place(BATCH))
        losses.append(float(metrics.loss))
    return losses, step.canonical.of(state)


@pytest.mark.parametrize("transform", [optax.adam(0.1), jgraph.elementwise(optax.adam(0.1))], ids=["tree", "elementwise"])
def test_parameters_sharded_over_a_custom_axis_train_as_on_one_device(transform):
    mesh = Mesh(np.array(jax.devices()[:2]), (partitioned.AXIS,))
    strategy = partitioned.Partitioned(mesh, PARAMS)
    losses, state = trained(strategy, transform)
    expected, other = trained(jgraph.Replicated(None, PARAMS), transform)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.params, other.params)
    bound = jgraph.train_step(loss, transform, strategy).bound
    assert bound.layout.params["up"].spec == jax.sharding.PartitionSpec(None, "toy")


def test_the_library_does_not_know_the_custom_axis():
    sources = Path(jgraph.__file__).parent.rglob("*.py")
    assert not [path for path in sources if f'"{partitioned.AXIS}"' in path.read_text()]


def test_a_strategy_without_reports_of_its_own_predicts_no_memory_and_logs_nothing():
    strategy = partitioned.Partitioned(Mesh(np.array(jax.devices()[:2]), (partitioned.AXIS,)), PARAMS)
    reports = jgraph.train_step(loss, optax.sgd(0.1), strategy, num_microbatches=2).bound.reports
    assert reports.predict_memory(BATCH) == ({}, "some")
    assert reports.describe(BATCH, None, [], None) == []
