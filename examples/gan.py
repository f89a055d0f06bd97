"""A GAN (Goodfellow et al., arXiv:1406.2661): two steps with a loss each alternate over the same parameters.

python examples/gan.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph

OPTIMIZER = optax.adam(3e-3, b1=0.5)


def make_params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {"generator": network(keys[:2], 4, 2), "discriminator": network(keys[2:], 2, 1)}


def network(keys, inputs, outputs, width=64):
    up = jax.random.normal(keys[0], (inputs, width)) * (2 / inputs) ** 0.5
    down = jax.random.normal(keys[1], (width, outputs)) / width**0.5
    return {"up": up, "bias": jnp.zeros(width), "down": down}


def apply(net, x):
    return jax.nn.leaky_relu(x @ net["up"] + net["bias"]) @ net["down"]


def discriminator_loss(params, batch, key):
    real = apply(params["discriminator"], batch["real"])
    fake = apply(params["discriminator"], apply(params["generator"], batch["noise"]))
    return jnp.mean(jax.nn.softplus(-real) + jax.nn.softplus(fake))


def generator_loss(params, batch, key):
    return jnp.mean(jax.nn.softplus(-apply(params["discriminator"], apply(params["generator"], batch["noise"]))))


def batches(rows=128):
    """Yields points around (2, -1) with a standard deviation of 0.5, and noise."""
    rng = np.random.default_rng(0)
    while True:
        real = np.array([2, -1], np.float32) + 0.5 * rng.standard_normal((rows, 2), np.float32)
        yield {"real": real, "noise": rng.standard_normal((rows, 4), np.float32)}


def train(steps, strategy):
    """Returns the parameters after `steps` updates of each network."""
    # With `layout="tree"`, each parameter has its own array, so that both states have the same arrays of parameters.
    of_discriminator = jgraph.train_step(discriminator_loss, OPTIMIZER, strategy, freeze=("generator/*",), layout="tree")
    of_generator = jgraph.train_step(generator_loss, OPTIMIZER, strategy, freeze=("discriminator/*",), layout="tree")
    data = batches()
    batch = next(data)
    update_discriminator, update_generator = of_discriminator.compile(batch), of_generator.compile(batch)
    discriminator, generator = of_discriminator.init(make_params), of_generator.init(make_params)
    for i, batch in zip(range(steps), data, strict=False):
        # Each step donates its state, with the parameters. The other state takes the new ones.
        discriminator = dataclasses.replace(discriminator, params=generator.params)
        discriminator, metrics = update_discriminator(discriminator, of_discriminator.place(batch))
        generator = dataclasses.replace(generator, params=discriminator.params)
        generator, _ = update_generator(generator, of_generator.place(batch))
        if i % 100 == 0:
            made = np.asarray(apply(of_generator.canonical.of(generator).params["generator"], batch["noise"]))
            print(f"step {i}: discriminator {metrics.loss:.3f}, made {made.mean(0).round(2)} +- {made.std(0).round(2)}")
    return of_generator.canonical.of(generator).params


if __name__ == "__main__":
    train(401, jgraph.Replicated(None, jax.eval_shape(make_params)))
