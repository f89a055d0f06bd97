"""Tests `has_aux`: forward returns aux, and the backward pass does not depend on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.errors import SplitError
from tests.autodiff.stages import D, hidden, mlp_params, normal


def observed(params, x, history):
    """An MLP with an aux value computed by separate matmuls and a separate scan."""
    up = x @ params["up"]
    largest = jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in (x, params["up"], up)])
    seen = (x @ params["probe"]).mean() + (up @ params["down"]).max()
    total, each = jax.lax.scan(lambda total, row: (total + row.sum(), row.max()), 0.0, params["down"])
    aux = {"history": jnp.concatenate([history[3:], largest]), "seen": seen + total, "each": each, "params": params["up"]}
    return x + jax.nn.gelu(up) @ params["down"] + params["bias"], aux


def layers(params, x, history):
    """Two `observed` layers in a scan."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), params)

    def one(x, own):
        return observed(own, x, history)

    return jax.lax.scan(one, x, stacked)


STAGES = {"plain": observed, "jit": jax.jit(observed), "checkpoint": jax.checkpoint(observed), "scan": layers}
PARAMS = mlp_params() | {"probe": normal(7, D, 5)}
HISTORY = normal(8, 6)


def flops(run, *args) -> float:
    return jax.jit(run).lower(*args).compile().cost_analysis()["flops"]


def kept(spec):
    pools = (spec.residuals.dgrad, spec.residuals.wgrad, spec.stash.arrays)
    return [sorted((leaf.shape, str(leaf.dtype)) for leaf in pool) for pool in pools]


@pytest.mark.once
@pytest.mark.parametrize("name", STAGES)
def test_aux_adds_no_flops_and_no_residual_bytes(name):
    stage, x = STAGES[name], hidden()
    with_aux = jgraph.split_backward(stage, has_aux=True)
    without = jgraph.split_backward(lambda *args: stage(*args)[0])
    one, other = (split.spec(PARAMS, x, HISTORY) for split in (with_aux, without))
    assert one.delayed == other.delayed
    assert "up" in one.delayed
    assert kept(one) == kept(other)
    for part, pool in (("dgrad", lambda spec: (spec.residuals, spec.y)), ("wgrad", lambda spec: (spec.residuals, spec.stash))):
        costs = [flops(getattr(split, part), PARAMS, *pool(spec)) for split, spec in ((with_aux, one), (without, other))]
        assert costs[0] == costs[1], part
    smallest_product = 2 * x.size * PARAMS["probe"].shape[1]
    assert flops(with_aux.forward, PARAMS, x, HISTORY) - flops(stage, PARAMS, x, HISTORY) < smallest_product


@pytest.mark.parametrize("name", STAGES)
def test_aux_and_gradients_equal_those_of_vjp(name):
    stage, x = STAGES[name], hidden()
    split = jgraph.split_backward(stage, has_aux=True)
    y, residuals, aux = split.forward(PARAMS, x, HISTORY)
    dx, early, stash = split.dgrad(PARAMS, residuals, y)
    grads = split.merge(early, split.wgrad(PARAMS, residuals, stash))
    expected, pull_back, expected_aux = jax.vjp(lambda params, x: stage(params, x, HISTORY), PARAMS, x, has_aux=True)
    for a, b in zip(
        jax.tree.leaves((y, aux, grads, dx)), jax.tree.leaves((expected, expected_aux, *pull_back(expected))), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_has_aux_needs_a_stage_that_returns_a_pair():
    with pytest.raises(SplitError) as error:
        jgraph.split_backward(lambda params, x: x, has_aux=True).forward({}, hidden())
    assert error.value.field == "has_aux"
