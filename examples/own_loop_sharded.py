"""A custom training loop with fully sharded state, and a checkpoint that is restored on fewer devices.

JAX_NUM_CPU_DEVICES=4 python examples/own_loop_sharded.py
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph

shapes = {"up": jax.ShapeDtypeStruct((2, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 1), jnp.float32)}


def make_params():
    return {"up": jax.random.normal(jax.random.key(0), (2, 64)), "down": jnp.zeros((64, 1))}


def loss(params, batch, key):
    """Returns a weighted sum and its weight. Rows of weight 0 are padding, so a mean of device means would be wrong."""
    error = jax.nn.relu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]
    total = jnp.sum(batch["weight"] * error[:, 0] ** 2)
    return jgraph.Loss(total, jnp.sum(batch["weight"]), {"error": jnp.sum(batch["weight"] * jnp.abs(error[:, 0]))})


def batch_of(rng):
    x = rng.standard_normal((256, 2), np.float32)
    return {"x": x, "y": x[:, :1] * x[:, 1:], "weight": (rng.random(256) < 0.7).astype(np.float32)}


def step_on(devices):
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices)
    # Muon needs whole matrices, so small parameters do not share an array.
    return jgraph.train_step(loss, optax.contrib.muon(1e-2), jgraph.FullySharded(mesh, shapes), clip_norm=1.0)


def train(step, state, steps):
    rng = np.random.default_rng(0)
    run = step.compile(batch_of(rng))
    for i in range(steps):
        state, metrics = run(state, step.place(batch_of(rng)))
        if i in (0, steps - 1):
            print(f"{step}: loss {float(metrics.loss):.4f}, mean error {float(metrics.aux['error']):.4f}")
    return state


step = step_on(jax.devices())
state = train(step, step.init(make_params), 100)
with tempfile.TemporaryDirectory() as directory:
    checkpoints = jgraph.Checkpoints(Path(directory), keep=1)
    checkpoints.save(100, step.canonical.of(state))
    checkpoints.wait()
    other = step_on(jax.devices()[: max(1, jax.device_count() // 2)])
    done, canonical = checkpoints.restore_latest(other.canonical.shapes())
    checkpoints.close()
train(other, other.canonical.back(canonical), 100)
