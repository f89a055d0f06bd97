"""Tests that gradients reduced in buckets are correct, and the order of the reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.strategies import _overlap

RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32) for name in ("a", "b", "c", "none", "twice")}


def loss(params, x):
    for name in ("a", "twice", "b", "twice", "c"):
        x = jnp.tanh(x @ params[name])
    return jnp.sum(x), jnp.max(x)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**30])
def test_every_gradient_is_reduced_once_and_the_aux_value_is_returned(monkeypatch, bucket_bytes):
    monkeypatch.setattr(_overlap, "_BUCKET_BYTES", bucket_bytes)
    backward, summed, x = jax.grad(loss, has_aux=True), [], jnp.ones((2, 4))

    def add(name, gradient):
        summed.append(name)
        return 2 * gradient

    sums, largest = jax.jit(lambda *args: _overlap.reduce_in_buckets(backward, args, add, jnp.float32))(PARAMS, x)
    grads, expected_largest = backward(PARAMS, x)
    assert sorted(summed) == sorted(PARAMS)
    assert largest == expected_largest
    for name, gradient in grads.items():
        np.testing.assert_allclose(sums[name], 2 * gradient, rtol=1e-6)


def test_the_backward_pass_waits_for_each_gradient_and_the_previous_reduction(monkeypatch):
    monkeypatch.setattr(_overlap, "_BUCKET_BYTES", 1)
    backward, summed = (
        jax.grad(lambda params, x: (jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"] @ params["c"]), ()), has_aux=True),
        [],
    )

    def add(name, gradient):
        summed.append(name)
        return jnp.sin(gradient)

    params = {name: PARAMS[name] for name in "abc"}
    jaxpr = jax.make_jaxpr(lambda *args: _overlap.reduce_in_buckets(backward, args, add, jnp.float32)[0])(
        params, jnp.ones((2, 4))
    ).jaxpr
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    sums = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "sin"]
    assert summed == ["c", "b", "a"]
    assert [[v in eqn.invars for v in sums] for eqn in barriers] == [[False] * 3, [True, False, False], [False, True, False]]
    # Arrays of shape (2, 4) are the output gradients of the previous layer.
    assert [(2, 4) in [v.aval.shape for v in eqn.invars] for eqn in barriers] == [True, True, False]
