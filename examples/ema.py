"""An exponential moving average (EMA) of the parameters, as a part of the optimizer, and its held-out error.

python examples/ema.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph


class EMAState(NamedTuple):
    """The average, in a tree like the parameters."""

    average: Any


def ema_of_params(decay):
    """Makes an optax transform that keeps updates as they are. It must be the last one of `optax.chain`."""

    def update(updates, state, params):
        # In float32, even if the parameters of the step are in bfloat16.
        after = optax.apply_updates(params, updates)
        return updates, EMAState(optax.incremental_update(after, state.average, step_size=1 - decay))

    return optax.GradientTransformation(EMAState, update)


def make_params():
    return {"up": jax.random.normal(jax.random.key(0), (2, 64)), "bias": jnp.zeros(64), "down": jnp.zeros((64, 1))}


def loss(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def batch_of(rng, rows=32, noise=1.0):
    x = rng.standard_normal((rows, 2), np.float32)
    return {"x": x, "y": x[:, :1] * x[:, 1:] + noise * rng.standard_normal((rows, 1), np.float32)}


def train(steps, strategy, decay=0.98):
    """Returns the parameters and their average after `steps` updates on noisy labels."""
    rng = np.random.default_rng(0)
    step = jgraph.train_step(loss, optax.chain(optax.adam(3e-2), ema_of_params(decay)), strategy)
    run, state = step.compile(batch_of(rng)), step.init(make_params)
    heldout = batch_of(np.random.default_rng(1), rows=1024, noise=0.0)
    for i in range(steps):
        state, _ = run(state, step.place(batch_of(rng)))
        if i % 100 == 99:
            params, average = both(step, state)
            print(f"step {i + 1}: error {loss(params, heldout, None):.4f}, of the average {loss(average, heldout, None):.4f}")
    return both(step, state)


def both(step, state):
    canonical = step.canonical.of(state)  # in the model's own tree
    return canonical.params, canonical.opt_state[-1].average


if __name__ == "__main__":
    train(500, jgraph.Replicated(None, jax.eval_shape(make_params)))
