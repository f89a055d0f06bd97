"""Gradients that wait for each other are the same gradients, and come as late as they did."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.backward.joined import joined

PARAMS = {"up": np.full((4, 8), 0.1, "f"), "down": np.full((8, 4), 0.2, "f")}
X = np.linspace(-1, 1, 12, dtype="f").reshape(3, 4)


def plain(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def together(params, x):
    x, up, down = joined(x, params["up"], params["down"])
    return plain({"up": up, "down": down}, x)


def scanned(params, x):
    return jax.lax.scan(lambda x, own: (together(own, x), None), x, jax.tree.map(lambda w: jnp.stack([w] * 2), params))[0]


def test_results_and_gradients_are_those_without_it_and_wait_for_each_other():
    def gradients(fn):
        return jax.vjp(fn, PARAMS, X)[1](jnp.ones_like(X))

    jax.tree.map(
        np.testing.assert_array_equal, (together(PARAMS, X), gradients(together)), (plain(PARAMS, X), gradients(plain))
    )
    (barrier,) = [eqn for eqn in jax.make_jaxpr(lambda: gradients(together))().eqns if "barrier" in eqn.primitive.name]
    assert sorted(v.aval.shape for v in barrier.outvars) == [(3, 4), (4, 8), (8, 4)]


@pytest.mark.parametrize("fn", [together, jax.checkpoint(together), scanned])
def test_the_split_passes_it_over_and_all_weights_may_come_late(fn):
    split = jgraph.split_backward(fn)
    y, residuals = split.forward(PARAMS, X)
    dx, early, stash = split.dgrad(PARAMS, residuals, jnp.ones_like(y))
    assert jax.tree.leaves(early) == []
    found = dx, split.wgrad(PARAMS, residuals, stash)
    dparams, wanted = jax.vjp(fn, PARAMS, X)[1](jnp.ones_like(y))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, (wanted, dparams))
    assert "barrier" not in str(jax.make_jaxpr(split.dgrad)(PARAMS, residuals, jnp.ones_like(y)))
