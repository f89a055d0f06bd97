"""Reports CUDA graph capture and buffer donation of a step for an H200, on a machine without one.

python -m jgraph.aot install   # downloads one wheel into a cache
python examples/explain_for_h200.py
"""

import jax
import jax.numpy as jnp

import jgraph


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


weights = [jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)] * 4
x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16)
print(jgraph.explain(step, weights, x, donate_argnums=0, target="h200"))
