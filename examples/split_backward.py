"""Splits a backward pass: computes input gradients first, and weight gradients later.

python examples/split_backward.py
"""

import jax
import jax.numpy as jnp
from flax import nnx

import jgraph

layer = nnx.Sequential(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(256, 64, rngs=nnx.Rngs(1)))
graphdef, params = nnx.split(layer, nnx.Param)


def stage(params, x):
    return x + nnx.merge(graphdef, params)(x)


split = jgraph.split_backward(stage)
main_grad = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
delayed = []
for i in range(4):
    x = jax.random.normal(jax.random.key(i), (8, 64))
    y, residuals = split.forward(params, x)
    dx, early, stash = split.dgrad(params, residuals, 2 * y)  # loss sum(y**2); `early` has the bias gradients
    delayed.append((early, residuals, stash))
    print(f"microbatch {i}: |dx| {float(jnp.linalg.norm(dx)):.3f}, weight gradient delayed")
for early, residuals, stash in delayed:
    main_grad = split.accumulate(main_grad, params, residuals, stash)
    main_grad = jax.tree.map(lambda total, g: total if g is None else total + g, main_grad, early)


def total_loss(params):
    return sum(jnp.sum(stage(params, jax.random.normal(jax.random.key(i), (8, 64))) ** 2) for i in range(4))


worst = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), main_grad, jax.grad(total_loss)(params))
print("largest difference from jax.grad:", float(max(jax.tree.leaves(worst))))
