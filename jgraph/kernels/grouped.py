"""Products of groups of rows with a matrix each: the linear layers of a mixture of experts."""

# M rows, sorted by group; G groups, K summed over, N columns

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

CALLS = DOT, DGRAD, WGRAD = "_jgraph_grouped_dot", "_jgraph_grouped_dgrad", "_jgraph_grouped_wgrad"
"""Names of the jitted functions, by which a product and its two gradients are found in a trace."""

ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
"""Of a grouped product as a `ragged_dot_general`; then that of its dgrad and its wgrad."""
TURNED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Multiplies the rows of each group with the group's matrix; sums in float32, the result in x's dtype.

    Differentiable by rows and weights.

    Args:
        x_MK: bfloat16 or float32; the rows of group 0 come first, then those of group 1.
        weights_GKN: one matrix a group, of x's dtype.
        sizes_G: int32, rows of each group; they may be zero. Rows beyond their sum give zeros.
    """
    return _dot(x_MK, weights_GKN, sizes_G)


def grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Multiplies the rows of dy with their group's transposed matrix: the gradient of the rows of `grouped_dot`."""
    return _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G)


def grouped_wgrad(x_MK: Array, dy_MN: Array, sizes_G: Array, *, dtype: DTypeLike, add_GKN: Array | None = None) -> Array:
    """Multiplies the transposed rows of each group with its rows of dy: the gradients of the weights of `grouped_dot`.

    Args:
        x_MK: bfloat16 or float32. Rows beyond the sum of the sizes do not count.
        dy_MN: of x's dtype.
        sizes_G: int32, rows of each group; empty ones give zeros.
        dtype: of the result; float32 with `add_GKN`.
        add_GKN: float32, what the result is added onto.
    """
    return _jgraph_grouped_wgrad(x_MK, dy_MN, sizes_G, add_GKN, jnp.dtype(dtype))


@jax.custom_vjp
def _dot(x_MK: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G)


def _dot_forward(x_MK: Array, weights_GKN: Array, sizes_G: Array) -> tuple[Array, Any]:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G), (x_MK, weights_GKN, sizes_G)


def _dot_backward(kept: tuple[Array, ...], dy_MN: Array) -> tuple[Any, ...]:
    x_MK, weights_GKN, sizes_G = kept
    dw_GKN = grouped_wgrad(x_MK, dy_MN, sizes_G, dtype=weights_GKN.dtype)
    return grouped_dgrad(dy_MN, weights_GKN, sizes_G), dw_GKN, None


_dot.defvjp(_dot_forward, _dot_backward)


@jax.jit
def _jgraph_grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    return lax.ragged_dot_general(x_MK, weights_GKN, sizes_G, ROWS, preferred_element_type=jnp.float32).astype(x_MK.dtype)


@jax.jit
def _jgraph_grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    return lax.ragged_dot_general(dy_MN, weights_GKN, sizes_G, TURNED, preferred_element_type=jnp.float32).astype(dy_MN.dtype)


@partial(jax.jit, static_argnames="dtype")
def _jgraph_grouped_wgrad(x_MK: Array, dy_MN: Array, sizes_G: Array, add_GKN: Array | None, dtype: jnp.dtype) -> Array:
    dw_GKN = lax.ragged_dot_general(x_MK, dy_MN, sizes_G, SUMMED, preferred_element_type=jnp.float32)
    return dw_GKN.astype(dtype) if add_GKN is None else add_GKN + dw_GKN
