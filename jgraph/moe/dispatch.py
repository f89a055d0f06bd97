"""Tokens to the experts and back, and none is dropped: rows in the order of their experts, by a stable sort.

Moving out and moving back are each other's gradient, so neither scatters: rows are gathered by a permutation or by its inverse,
and a token's copies are added in float32.
"""

# N tokens, K copies of each, R = N * K rows

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Order(NamedTuple):
    """A permutation of rows.

    Attributes:
        of_R: int32, where each row comes from: copy k of a token is token * K + k.
        inverse_R: int32, where each copy went.
    """

    of_R: Array
    inverse_R: Array


def order_of(experts_NK: Array) -> Order:
    """Returns the order in which the copies for expert 0 come first, then those for expert 1; within one, by token."""
    of_R = jnp.argsort(experts_NK.reshape(-1), stable=True).astype(jnp.int32)
    places_R = jnp.arange(len(of_R), dtype=jnp.int32)
    return Order(of_R, jnp.zeros_like(of_R).at[of_R].set(places_R, unique_indices=True, mode="promise_in_bounds"))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatched(x: Array, order: Order, copies: int) -> Array:
    """Returns rows in an order, each of x [N, ...] as often as it has copies."""
    return _rows(x, order.of_R // copies)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combined(y: Array, order: Order, copies: int) -> Array:
    """Returns for each token the sum of its rows of y [R, ...], added in float32."""
    places_NK = order.inverse_R.reshape(-1, copies)
    # Not a sum over an axis: so many look-ups and additions are one kernel.
    total = _rows(y, places_NK[:, 0]).astype(jnp.float32)
    for k in range(1, copies):
        total += _rows(y, places_NK[:, k]).astype(jnp.float32)
    return total.astype(y.dtype)


def _dispatched_backward(copies: int, order: Order, dy: Array) -> tuple[Any, ...]:
    return combined(dy, order, copies), None


def _combined_backward(copies: int, order: Order, dy: Array) -> tuple[Any, ...]:
    return dispatched(dy, order, copies), None


dispatched.defvjp(lambda x, order, copies: (dispatched(x, order, copies), order), _dispatched_backward)
combined.defvjp(lambda y, order, copies: (combined(y, order, copies), order), _combined_backward)


def _rows(x: Array, places: Array) -> Array:
    return x.at[places].get(mode="promise_in_bounds")
