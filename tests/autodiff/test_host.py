"""Traces evaluated by NumPy: the numbers are those of jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jgraph.autodiff.host import evaluate

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
N = np.array([-7, -2, 0, 3, 8], np.int32)


def branches(x):
    return lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x * 2, x)


FUNCTIONS = {
    "arithmetic": (lambda x: (x + 1) * x - x / 3 + x**3 + lax.rsqrt(x * x + 1) - jnp.sqrt(abs(x)), X),
    "functions": (lambda x: jnp.exp(x) + jnp.tanh(x) + jnp.log1p(abs(x)) + jnp.sign(x) * jnp.cos(x), X),
    "comparisons": (lambda x: jnp.where((x > 0) & (x <= 1) | ~jnp.isfinite(x), jnp.maximum(x, 0.5), -x), X),
    "reductions": (lambda x: (jnp.sum(x, 1), jnp.max(x), jnp.all(x > -3, 0), jnp.any(x > 1)), X),
    "shapes": (lambda x: jnp.concatenate([x.ravel(), jnp.broadcast_to(x[:1, :1], (2, 3)).ravel()]), X),
    "integers": (lambda n: (lax.div(n, jnp.int32(3)), lax.rem(n, jnp.int32(3)), n * n, abs(n), n // 3), N),
    "dtypes": (lambda x: (x.astype(jnp.bfloat16) * 3).astype(jnp.int32) + x.astype(bool), X),
    "branches": (branches, X),
    "a function with its own gradient": (jax.nn.relu, X),
    "clipping": (lambda x: jnp.clip(x, -0.5, 1), X),
    "matmuls and loops, which are compiled": (lambda x: lax.fori_loop(0, 3, lambda i, y: y @ (x.T @ x) / 10, x), X),
    "random keys": (lambda n: jax.random.normal(jax.random.fold_in(jax.random.key(1), n[0])), N),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_trace_is_evaluated_to_the_numbers_of_jax(name):
    function, x = FUNCTIONS[name]
    expected = jax.tree.leaves(function(jnp.asarray(x)))
    found = evaluate(jax.make_jaxpr(function)(x), [x])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-6)
        assert a.dtype == b.dtype
