"""Gradients reduced in buckets: equality with any other order, for every kind of gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.strategies import overlap

RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32) for name in ("a", "b", "c", "none", "twice")}


def loss(params, x):
    for name in ("a", "twice", "b", "twice", "c"):
        x = jnp.tanh(x @ params[name])
    return jnp.sum(x), jnp.max(x)


@pytest.mark.parametrize("enough", [1, 100, 2**30])
def test_every_gradient_is_summed_once_and_the_rest_is_returned(monkeypatch, enough):
    monkeypatch.setattr(overlap, "_BUCKET_BYTES", enough)
    backward, summed, x = jax.grad(loss, has_aux=True), [], jnp.ones((2, 4))

    def add(name, gradient):
        summed.append(name)
        return 2 * gradient

    sums, largest = jax.jit(lambda *args: overlap.reduce_in_buckets(backward, args, add, jnp.float32))(PARAMS, x)
    grads, same = backward(PARAMS, x)
    assert sorted(summed) == sorted(PARAMS)
    assert largest == same
    for name, gradient in grads.items():
        np.testing.assert_allclose(sums[name], 2 * gradient, rtol=1e-6)


def test_what_comes_after_a_gradient_waits_for_it_and_for_the_sum_before(monkeypatch):
    monkeypatch.setattr(overlap, "_BUCKET_BYTES", 1)
    backward, summed = (
        jax.grad(lambda params, x: (jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"] @ params["c"]), ()), has_aux=True),
        [],
    )

    def add(name, gradient):
        summed.append(name)
        return jnp.sin(gradient)

    params = {name: PARAMS[name] for name in "abc"}
    jaxpr = jax.make_jaxpr(lambda *args: overlap.reduce_in_buckets(backward, args, add, jnp.float32)[0])(
        params, jnp.ones((2, 4))
    ).jaxpr
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    sums = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]
    assert summed == ["c", "b", "a"]
    assert [[v in eqn.invars for v in sums] for eqn in barriers] == [[False] * 3, [True, False, False], [False, True, False]]
    # The rows that the layer below is differentiated by.
    assert [(2, 4) in [v.aval.shape for v in eqn.invars] for eqn in barriers] == [True, True, False]
