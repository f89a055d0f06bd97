"""A custom training loop for an Equinox model, with dropout and state sharded over all devices. Needs `pip install equinox`.

JAX_NUM_CPU_DEVICES=4 python examples/equinox_loop.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph


class Model(eqx.Module):
    """Two hidden layers, each with dropout."""

    layers: list[eqx.nn.Linear]
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, rate, key):
        keys = jax.random.split(key, 3)
        sizes = [(2, 64), (64, 64), (64, 1)]
        self.layers = [eqx.nn.Linear(*size, key=key) for size, key in zip(sizes, keys, strict=True)]
        self.norm = eqx.nn.LayerNorm(64)
        self.dropout = eqx.nn.Dropout(rate)

    def __call__(self, x, key=None):
        keys = [None, None] if key is None else jax.random.split(key)
        for layer, own in zip(self.layers[:-1], keys, strict=True):
            x = self.dropout(self.norm(jax.nn.gelu(layer(x))), key=own)
        return self.layers[-1](x)


def mean_loss(model, batch, key):
    keys = jax.random.split(key, len(batch["x"]))
    return jnp.mean((jax.vmap(model)(batch["x"], keys) - batch["y"]) ** 2)


def batches(rows=256):
    rng = np.random.default_rng(0)
    while True:
        x = rng.standard_normal((rows, 2), np.float32)
        yield {"x": x, "y": x[:, :1] * x[:, 1:]}


def train(model, steps, strategy_of):
    """Returns the model after `steps` updates. `strategy_of` makes a strategy of the tree of parameters."""
    # The floating arrays are the parameters. Functions, sizes and rates stay outside the state.
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, key):
        return mean_loss(eqx.combine(params, static), batch, key)

    step = jgraph.train_step(loss, optax.adamw(3e-3), strategy_of(params), num_microbatches=2)
    data = batches()
    run, state = step.compile(next(data)), step.init(params)
    print(step, run, sep="\n")
    for i, batch in zip(range(steps), data, strict=False):
        state, metrics = run(state, step.place(batch))
        if i % 100 == 0:
            print(f"step {i}: loss {metrics.loss:.4f}")
    return eqx.combine(step.canonical.of(state).params, static)


if __name__ == "__main__":
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    trained = train(Model(0.05, jax.random.key(0)), 301, lambda params: jgraph.FullySharded(mesh, params))
    print("0.5 * 2 =", eqx.nn.inference_mode(trained)(jnp.array([0.5, 2.0])))
