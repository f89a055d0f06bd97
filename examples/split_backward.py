"""A backward pass in two parts, by hand: gradients of inputs now, those of weights when there is time.

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
waiting = []
for i in range(4):
    x = jax.random.normal(jax.random.key(i), (8, 64))
    y, residuals = split.forward(params, x)
    dx, early, stash = split.dgrad(params, residuals, 2 * y)  # of the loss sum(y**2); early: the biases
    waiting.append((early, residuals, stash))
    print(f"microbatch {i}: |dx| {float(jnp.linalg.norm(dx)):.3f}, a weight gradient waits")
for early, residuals, stash in waiting:
    main_grad = split.accumulate(main_grad, params, residuals, stash)
    main_grad = jax.tree.map(lambda total, g: total if g is None else total + g, main_grad, early)


def whole(params):
    return sum(jnp.sum(stage(params, jax.random.normal(jax.random.key(i), (8, 64))) ** 2) for i in range(4))


worst = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), main_grad, jax.grad(whole)(params))
print("largest difference from jax.grad:", float(max(jax.tree.leaves(worst))))
