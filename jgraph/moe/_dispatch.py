"""Moves the rows of tokens into the order of their experts and back.

Each direction is the gradient of the other, so neither needs a scatter: rows are gathered by a permutation or its inverse, and
the copies of a token are added in float32. Unused rows of a buffer are holes, which read as zeros.
"""

# N tokens, K copies per token, R = N * K rows, S rows of a buffer, E experts; B blocks of T tokens; I intervals

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

# Tokens per block of a count. Sums of up to 256 ones are exact in bfloat16.
_BLOCK = 128

Holes: TypeAlias = Literal["none", "zeros"]
"""`none` promises that a `RowOrder` has no holes and no copies without a row: indices are not checked. `zeros` allows both."""


class RowOrder(NamedTuple):
    """A permutation of rows, or an assignment of rows to a buffer with holes. Copy k of a token has the index token * K + k."""

    source: Array  # int32 [S], the copy in each row of the buffer; R for a hole
    inverse: Array  # int32 [R], the row of each copy; S for a copy without a row


def order_of(experts_NK: Array, counts_E: Array) -> RowOrder:
    """Returns the order of the copies by expert, and by token within an expert: a permutation, S = R.

    Counts instead of sorting, because XLA sorts on GPUs with a library call that a command buffer cannot contain.
    """
    is_NKE = experts_NK[..., None] == jnp.arange(counts_E.size, dtype=experts_NK.dtype)
    places_NE = jnp.cumsum(counts_E) - counts_E + _count_before(jnp.any(is_NKE, 1))
    inverse_R = jnp.sum(jnp.where(is_NKE, places_NE[:, None], 0), -1).reshape(-1)
    copies_R = jnp.arange(inverse_R.size, dtype=jnp.int32)
    source_R = jnp.zeros_like(copies_R).at[inverse_R].set(copies_R, unique_indices=True, mode="promise_in_bounds")
    return RowOrder(source_R, inverse_R)


def _count_before(goes_NE: Array) -> Array:
    """Counts the earlier tokens of each expert for each token, int32 [N, E], by matmuls with triangular matrices of ones.

    A cumulative sum along N would need a kernel for every power of two.
    """
    N, E = goes_NE.shape
    goes_BTE = jnp.pad(goes_NE, ((0, -N % _BLOCK), (0, 0))).reshape(-1, _BLOCK, E).astype(jnp.bfloat16)
    sums_BE = jnp.sum(goes_BTE, 1)
    # The sums are exact: of a block in bfloat16, of several blocks in float32.
    within_BTE = jnp.einsum("st,bte->bse", _triangle(_BLOCK), goes_BTE, preferred_element_type=jnp.float32)
    blocks_BE = jnp.einsum("cb,be->ce", _triangle(len(sums_BE)), sums_BE, preferred_element_type=jnp.float32)
    return (within_BTE + blocks_BE[:, None]).reshape(-1, E)[:N].astype(jnp.int32)


def _triangle(size: int) -> Array:
    return jnp.tri(size, k=-1, dtype=jnp.bfloat16)


def moved(positions: Array, source_I: Array, target_I: Array, lengths_I: Array, hole: int) -> Array:
    """Maps positions when intervals, which do not overlap, move from `source_I` to `target_I`. Others become `hole`."""
    # All are int32. Intervals may be empty.
    offset = positions[..., None] - source_I
    is_inside = (offset >= 0) & (offset < lengths_I)
    return jnp.where(jnp.any(is_inside, -1), jnp.sum(jnp.where(is_inside, offset + target_I, 0), -1), hole)


def _dispatched(x: Array, order: RowOrder, copies: int, holes: Holes = "none") -> Array:
    """Copies the rows of x [N, ...] into the order of a buffer [S, ...]. `copies` is K."""
    return _rows(x, order.source // copies, holes)


def _combined(y: Array, order: RowOrder, copies: int, holes: Holes = "none") -> Array:
    """Adds the copies of each token in y [S, ...] in float32, and returns [N, ...]. Copies without a row count as zeros."""
    places_NK = order.inverse.reshape(-1, copies)
    # XLA fuses these gathers and additions into one kernel, unlike a sum over an axis.
    total = _rows(y, places_NK[:, 0], holes).astype(jnp.float32)
    for k in range(1, copies):
        total += _rows(y, places_NK[:, k], holes).astype(jnp.float32)
    return total.astype(y.dtype)


dispatched = jax.custom_vjp(_dispatched, nondiff_argnums=(2, 3))
combined = jax.custom_vjp(_combined, nondiff_argnums=(2, 3))
dispatched.defvjp(
    lambda x, order, copies, holes: (dispatched(x, order, copies, holes), order),
    lambda copies, holes, order, dy: (combined(dy, order, copies, holes), None),
)
combined.defvjp(
    lambda y, order, copies, holes: (combined(y, order, copies, holes), order),
    lambda copies, holes, order, dy: (dispatched(dy, order, copies, holes), None),
)


def _rows(x: Array, places: Array, holes: Holes) -> Array:
    if holes == "none":
        return x.at[places].get(mode="promise_in_bounds")
    return x.at[places].get(mode="fill", fill_value=0)
