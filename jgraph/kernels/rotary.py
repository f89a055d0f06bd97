"""Splits a projection into queries, keys and values, and rotates queries and keys (Su et al., "RoFormer", arXiv:2104.09864).

The gradient is one function. In FP8, the kernel that quantizes the gradient of the projection evaluates it (`RotatedBack`).
"""

# B batch, T sequence, H query heads, G key/value heads, K head size, P = K/2 pairs

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.errors import ShapeError
from jgraph.kernels._check import require
from jgraph.kernels.quantize import RotatedBack

Table: TypeAlias = np.ndarray | Array
"""Cosines or sines, a constant of NumPy or an array."""


# The cosines are repeated for both halves of a head, and the sines are negative in the first half.
def rotate(x_BTHK: Array, cos_T1K: Table, sin_T1K: Table) -> Array:
    """Rotates the pairs (i, i + K/2) of each head in float32."""
    x32 = x_BTHK.astype(jnp.float32)
    return (x32 * cos_T1K + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin_T1K).astype(x_BTHK.dtype)


def rotated_heads(
    qkv_BTHK: Array, cos_TP: Table, sin_TP: Table, *, num_heads: int, num_kv_heads: int
) -> tuple[Array, Array, Array]:
    """Splits heads into rotated queries, rotated keys and values. Differentiable in `qkv_BTHK`."""
    heads = num_heads + 2 * num_kv_heads
    require(qkv_BTHK.ndim == 4 and qkv_BTHK.shape[2] == heads, "qkv_BTHK", qkv_BTHK, f"[B, T, {heads}, K]")
    must = qkv_BTHK.shape[1], qkv_BTHK.shape[3] // 2
    for name, table in (("cos_TP", cos_TP), ("sin_TP", sin_TP)):
        if table.shape != must:
            raise ShapeError(f"`{name}` has the shape {list(table.shape)}: must be {list(must)}", field=name)
    return _rotated_heads(qkv_BTHK, cos_TP, sin_TP, num_heads, num_kv_heads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rotated_heads(qkv_BTHK: Array, cos_TP: Table, sin_TP: Table, num_heads: int, num_kv_heads: int) -> tuple[Array, ...]:
    q_BTHK, k_BTGK, v_BTGK = jnp.split(qkv_BTHK, [num_heads, num_heads + num_kv_heads], axis=2)
    tables = [jnp.concatenate(pair, -1)[:, None] for pair in ((cos_TP, cos_TP), (-sin_TP, sin_TP))]
    return rotate(q_BTHK, *tables), rotate(k_BTGK, *tables), v_BTGK


def _forward(
    qkv_BTHK: Array, cos_TP: Table, sin_TP: Table, num_heads: int, num_kv_heads: int
) -> tuple[tuple[Array, ...], tuple[Table, Table]]:
    return _rotated_heads(qkv_BTHK, cos_TP, sin_TP, num_heads, num_kv_heads), (cos_TP, sin_TP)


def _backward(
    num_heads: int, num_kv_heads: int, tables: tuple[Array, Array], gradients: tuple[Array, ...]
) -> tuple[Array, None, None]:
    B, T, _, K = gradients[0].shape
    parts = [gradient.reshape(B * T, -1) for gradient in gradients]
    return _jgraph_rotary_gradient(*parts, *tables).reshape(B, T, -1, K), None, None


_rotated_heads.defvjp(_forward, _backward)


@jax.jit
def _jgraph_rotary_gradient(dq_MN: Array, dk_MN: Array, dv_MN: Array, cos_TP: Array, sin_TP: Array) -> Array:
    return RotatedBack(dq_MN, dk_MN, dv_MN, cos_TP, sin_TP).array()


GRADIENT = "_jgraph_rotary_gradient"
"""Name of the jitted function of the gradient, which identifies its calls in a trace."""
