"""A chain of small callables and two reference runs for orders.

`reference` applies jax.vjp to every callable and microbatch in turn. `single_calls` does the same with graphed callables. It
uses the same executables as an order, so the results of an order must equal it bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgraph

D, H, B = 4, 8, 3


def stage(params, x):
    """A residual block with two delayed matmuls and a bias, which is not delayed."""
    return x + jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def make_params(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)  # NumPy, so that collecting the tests compiles no program
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
    """Returns jitted forward and backward functions of `fn`."""
    return jax.jit(lambda params, x: jax.vjp(fn, params, x)), jax.jit(lambda vjp, dy: vjp(dy))


_LOSS = jax.jit(jax.value_and_grad(loss_fn))


def reference(fns, params, xs, loss_args):
    """Returns the losses, the outputs and the gradients summed over microbatches, computed by jax.vjp."""
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


def single_calls(graphed, params, xs, loss_args):
    """Returns the same as `reference`, computed by single calls. The gradients have the types that `run` returns."""
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
    """Returns a copy of a `Borrowed` gradient, because main_grad is already a sum."""
    return gradient.copy() if isinstance(gradient, jgraph.Borrowed) else total + gradient


def sgd(params, grads):
    return tuple(jax.tree.map(lambda p, g: p - 0.05 * g.astype(p.dtype), p, g) for p, g in zip(params, grads, strict=True))


UPDATE = jax.jit(sgd)


def assert_same_bits(one, other):
    """Checks that all leaves are equal bit for bit. Reads handles as arrays."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(one, other):
    """Checks that all leaves are equal up to the rounding of float32 sums."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6, atol=2e-6 * float(np.abs(np.asarray(b)).max()))


def build(count, **kwargs):
    fns, params = make_chain(count)
    return jgraph.make_graphed_callables(fns, params, sample(count), **kwargs), params
