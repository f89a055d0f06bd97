"""Rotary embeddings: positions as rotations of a head's pairs (Su et al., "RoFormer", arXiv:2104.09864)."""

# B batch, T sequence, H heads, K head size

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

Rotary: TypeAlias = tuple[np.ndarray, np.ndarray]


def rotary(length: int, head_size: int, theta: float) -> Rotary:
    """Returns float32 cosines and signed sines (T, 1, K) of position times theta**(-2i/K), for `rotate`; i counts pairs.

    Constants of the program, made here in float64: computed in it, they would be computed at every step.
    """
    angles_TK = np.arange(length)[:, None] * theta ** (-np.arange(0, head_size, 2) / head_size)
    cos_TK, sin_TK = np.cos(angles_TK), np.sin(angles_TK)
    tables = np.concatenate([cos_TK, cos_TK], -1), np.concatenate([-sin_TK, sin_TK], -1)
    cos_T1K, sin_T1K = (table[:, None].astype(np.float32) for table in tables)
    return cos_T1K, sin_T1K


def rotate(x_BTHK: Array, rotary_T1K: Rotary) -> Array:
    """Rotates the pairs (i, i + K/2) of each head, in float32, back in the input's dtype."""
    cos_T1K, sin_T1K = rotary_T1K
    x32 = x_BTHK.astype(jnp.float32)
    return (x32 * cos_T1K + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin_T1K).astype(x_BTHK.dtype)
