"""Tests `Traced`: a function runs with other matmuls, and the weights of its matmuls are computed from parameters alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.autodiff.traced import MISSING, Traced
from tests.autodiff.stages import normal

# L layers, D model
L, D = 3, 8


def layers(params, x):
    """Returns x after one matmul per layer in a scan, and a last matmul outside of it."""
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None), x, params["layers"])
    return {"y": x @ params["last"].T}


PARAMS = {"last": normal(1, D, D), "layers": normal(2, L, D, D).astype(jnp.bfloat16)}
X = normal(3, 4, D)


def scaled(site, x, w, extra, factor):
    return site.run(x, w, extra) * factor


@pytest.mark.parametrize("jit", [False, True])
def test_the_arguments_of_a_matmul_in_a_scan_have_a_row_for_each_iteration(jit):
    def run(params, x, factors):
        return Traced.from_function(layers, params, x).run(scaled, [factors, None], params, x)[0]

    factors = jnp.array([1.0, -2.0, 0.5])  # Exact in bfloat16.
    found = (jax.jit(run) if jit else run)(PARAMS, X, factors)
    expected = layers({**PARAMS, "layers": PARAMS["layers"] * factors[:, None, None].astype(jnp.bfloat16)}, X)
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("keep_dtype", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
def test_weights_have_an_axis_for_each_scan_and_skip_casts_if_asked(keep_dtype, dtype):
    traced = Traced.from_function(layers, PARAMS, X)
    stacked, last = traced.weights(jax.tree.leaves(PARAMS), keep_dtype=keep_dtype)
    assert stacked.dtype == dtype
    np.testing.assert_array_equal(stacked.astype(jnp.bfloat16), PARAMS["layers"])
    np.testing.assert_array_equal(last, PARAMS["last"].T)


def test_the_weights_of_missing_parameters_are_missing():
    traced, (last, stacked) = Traced.from_function(layers, PARAMS, X), jax.tree.leaves(PARAMS)
    assert traced.weights([last, MISSING], keep_dtype=True)[0] is MISSING
    assert traced.weights([MISSING, stacked], keep_dtype=True)[1] is MISSING


def test_a_traced_array_that_the_function_closes_over_is_data():
    def run(factor):
        traced = Traced.from_function(lambda w, x: x @ (w * factor), PARAMS["last"], X)
        assert (traced.sites, traced.stray) == ((), {0: "mul"})
        return traced.run(scaled, [], PARAMS["last"], X)[0]

    np.testing.assert_allclose(jax.jit(run)(3.0), X @ (PARAMS["last"] * 3.0), rtol=1e-5, atol=1e-5)
