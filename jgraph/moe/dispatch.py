"""Tokens to the experts and back: rows in the order of their experts.

Moving out and moving back are each other's gradient, so neither scatters: rows are gathered by a permutation or by its inverse,
and a token's copies are added in float32. Where rows lie in buffers that are not full, both have holes, which are zeros.
"""

# N tokens, K copies of each, R = N * K rows, E experts; B blocks of T tokens

from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

_BLOCK = 128
"""Tokens that are counted at once; up to 256, sums of ones are exact in bfloat16."""


Holes: TypeAlias = Literal["none", "zeros"]


class Order(NamedTuple):
    """A permutation of rows, or places of which some are holes.

    Attributes:
        source: int32 [S], where each row comes from: copy k of a token is token * K + k. Of a hole, R.
        inverse: int32 [R], where each copy went. Of one that went nowhere, S.
    """

    source: Array
    inverse: Array


def order_of(experts_NK: Array, counts_E: Array) -> Order:
    """Returns the order in which the copies for expert 0 come first, then those for expert 1; within one, by token.

    It counts, and does not sort: XLA sorts on GPUs by a library call that no command buffer can hold.

    Args:
        experts_NK: of each token, all different.
        counts_E: int32, tokens of each expert.
    """
    is_NKE = experts_NK[..., None] == jnp.arange(counts_E.size, dtype=experts_NK.dtype)
    places_NE = jnp.cumsum(counts_E) - counts_E + _before(jnp.any(is_NKE, 1))
    inverse_R = jnp.sum(jnp.where(is_NKE, places_NE[:, None], 0), -1).reshape(-1)
    copies_R = jnp.arange(inverse_R.size, dtype=jnp.int32)
    source_R = jnp.zeros_like(copies_R).at[inverse_R].set(copies_R, unique_indices=True, mode="promise_in_bounds")
    return Order(source_R, inverse_R)


def _before(goes_NE: Array) -> Array:
    """Returns how many of the tokens before each go to an expert, int32 [N, E].

    Products with triangles of ones, exact: a block's sums fit bfloat16, all others float32. A cumulative sum along N would be a
    kernel for every power of two.
    """
    N, E = goes_NE.shape
    goes_BTE = jnp.pad(goes_NE, ((0, -N % _BLOCK), (0, 0))).reshape(-1, _BLOCK, E).astype(jnp.bfloat16)
    sums_BE = jnp.sum(goes_BTE, 1)
    within_BTE = jnp.einsum("st,bte->bse", _earlier(_BLOCK), goes_BTE, preferred_element_type=jnp.float32)
    blocks_BE = jnp.einsum("cb,be->ce", _earlier(len(sums_BE)), sums_BE, preferred_element_type=jnp.float32)
    return (within_BTE + blocks_BE[:, None]).reshape(-1, E)[:N].astype(jnp.int32)


def _earlier(size: int) -> Array:
    return jnp.tri(size, k=-1, dtype=jnp.bfloat16)


def moved(positions: Array, source_I: Array, target_I: Array, lengths_I: Array, hole: int) -> Array:
    """Returns where positions go, int32 of their shape, when intervals are moved; `hole` for one that is in no interval.

    Args:
        positions: int32.
        source_I, target_I: int32, where each interval begins, before and after.
        lengths_I: int32.
    """
    offset = positions[..., None] - source_I
    is_inside = (offset >= 0) & (offset < lengths_I)
    return jnp.where(jnp.any(is_inside, -1), jnp.sum(jnp.where(is_inside, offset + target_I, 0), -1), hole)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dispatched(x: Array, order: Order, copies: int, holes: Holes = "none") -> Array:
    """Returns rows in an order, each of x [N, ...] as often as it has copies; zeros in holes."""
    return _rows(x, order.source // copies, holes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def combined(y: Array, order: Order, copies: int, holes: Holes = "none") -> Array:
    """Returns for each token the sum of its rows of y [S, ...], added in float32; those that went nowhere are left out."""
    places_NK = order.inverse.reshape(-1, copies)
    # Not a sum over an axis: so many look-ups and additions are one kernel.
    total = _rows(y, places_NK[:, 0], holes).astype(jnp.float32)
    for k in range(1, copies):
        total += _rows(y, places_NK[:, k], holes).astype(jnp.float32)
    return total.astype(y.dtype)


def _dispatched_backward(copies: int, holes: Holes, order: Order, dy: Array) -> tuple[Any, ...]:
    return combined(dy, order, copies, holes), None


def _combined_backward(copies: int, holes: Holes, order: Order, dy: Array) -> tuple[Any, ...]:
    return dispatched(dy, order, copies, holes), None


dispatched.defvjp(lambda x, order, copies, holes: (dispatched(x, order, copies, holes), order), _dispatched_backward)
combined.defvjp(lambda y, order, copies, holes: (combined(y, order, copies, holes), order), _combined_backward)


def _rows(x: Array, places: Array, holes: Holes) -> Array:
    if holes == "none":
        return x.at[places].get(mode="promise_in_bounds")
    return x.at[places].get(mode="fill", fill_value=0)
