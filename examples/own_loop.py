"""A custom training loop around one captured step, on one device.

python examples/own_loop.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph

params = {"up": jax.random.normal(jax.random.key(0), (2, 64)), "down": jnp.zeros((64, 1))}


def loss(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batches(seed: int = 0):
    rng = np.random.default_rng(seed)
    while True:
        x = rng.standard_normal((256, 2), np.float32)
        yield {"x": x, "y": x[:, :1] * x[:, 1:]}


# AdamW is elementwise, so small parameters share an array. This needs fewer kernels.
step = jgraph.train_step(loss, optax.adamw(1e-2), jgraph.Replicated(None, params), num_microbatches=4, clip_norm=1.0)
data = batches()
run = step.compile(next(data))  # checks that the state is updated in place
state = step.init(params)
print(step, run, sep="\n")
for i, batch in zip(range(301), data, strict=False):
    state, metrics = run(state, step.place(batch))
    if i % 100 == 0:
        print(f"step {i}: loss {float(metrics.loss):.4f}, gradient {float(metrics.grad_norm):.4f}")
print("parameters:", jax.tree.map(jnp.shape, step.canonical.of(state).params))
