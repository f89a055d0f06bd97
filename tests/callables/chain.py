"""A chain of small callables, and plain runs that every order must equal.

`plain` is jax.vjp, callable by callable, microbatch by microbatch. `one_by_one` is the same with graphed callables: the same
executables in the plainest order, so that what an order gives must be the same bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgraph

D, H, B = 4, 8, 3


def stage(params, x):
    """A weight that is delayed, one that is not (the bias), a residual connection."""
    return x + jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def make_params(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)  # no program to compile where tests are only collected
    shapes = {"w": (D, H), "b": (H,), "v": (H, D)}
    return {name: jnp.asarray(0.5 * rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def make_chain(count):
    return (stage,) * count, tuple(map(make_params, range(count)))


def sample(count):
    return ((jax.ShapeDtypeStruct((B, D), jnp.float32),),) * count


def batches(count, seed=100):
    xs = [jax.random.normal(jax.random.key(seed + m), (B, D)) for m in range(count)]
    return xs, [(jax.random.normal(jax.random.key(seed + 50 + m), (B, D)),) for m in range(count)]


def loss_fn(y, target):
    return jnp.sum(jnp.square(y - target))


@functools.cache
def _jitted(fn):
    """Forward and backward of a callable, each a program of its own."""
    return jax.jit(lambda params, x: jax.vjp(fn, params, x)), jax.jit(lambda vjp, dy: vjp(dy))


_LOSS = jax.jit(jax.value_and_grad(loss_fn))


def plain(fns, params, xs, loss_args):
    """Losses, outputs, and gradients summed over the microbatches in their order."""
    losses, outputs, sums = [], [], [jax.tree.map(jnp.zeros_like, p) for p in params]
    for x, args in zip(xs, loss_args, strict=True):
        vjps, y = [], x
        for fn, p in zip(fns, params, strict=True):
            y, vjp = _jitted(fn)[0](p, y)
            vjps.append(vjp)
        loss, dy = _LOSS(y, *args)
        for i in reversed(range(len(fns))):
            gradient, dy = _jitted(fns[i])[1](vjps[i], dy)
            sums[i] = jax.tree.map(jnp.add, sums[i], gradient)
        losses.append(loss)
        outputs.append(y)
    return losses, outputs, sums


def one_by_one(graphed, params, xs, loss_args):
    """As `plain`, with single calls; gradients as `run` gives them."""
    losses, outputs, sums = [], [], [jax.tree.map(jnp.zeros_like, p) for p in params]
    graphed.zero_grads()
    for x, args in zip(xs, loss_args, strict=True):
        y = x
        for g, p in zip(graphed, params, strict=True):
            y = g(p, y)
        value = jax.tree.map(jnp.copy, y)
        loss, dy = _LOSS(value, *args)
        for i in reversed(range(len(graphed))):
            gradient, dy = graphed[i].backward(dy)
            sums[i] = jax.tree.map(_add, sums[i], gradient, is_leaf=lambda leaf: isinstance(leaf, jgraph.Borrowed))
        losses.append(loss)
        outputs.append(value)
    return losses, outputs, sums


def _add(total, gradient):
    """What main_grad holds is a sum already."""
    return gradient.copy() if isinstance(gradient, jgraph.Borrowed) else total + gradient


def sgd(params, grads):
    return tuple(jax.tree.map(lambda p, g: p - 0.05 * g.astype(p.dtype), p, g) for p, g in zip(params, grads, strict=True))


UPDATE = jax.jit(sgd)


def assert_same_bits(one, other):
    """Equal structure once handles are arrays, and equal bits."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(one, other):
    """Equal to the rounding of float32 sums."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=2e-6 * float(np.abs(np.asarray(b)).max()))


def build(count, **kwargs):
    fns, params = make_chain(count)
    return jgraph.make_graphed_callables(fns, params, sample(count), **kwargs), params
