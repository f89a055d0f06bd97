"""Rotary embeddings: positions as rotations of a head's pairs (Su et al., "RoFormer", arXiv:2104.09864)."""

# B batch, T sequence, H heads, K head size

from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

Rotary: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Scaling:
    """Says which frequencies are lowered, so that sequences may be longer than those that a model was first trained on.

    As Llama 3.1 does: a frequency that turns `low` times or less over `length` tokens is divided by `factor`, one that turns
    `high` times or more stays as it is, and between the two the divisor's inverse goes linearly with the turns.
    """

    factor: float
    low: float
    high: float
    length: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns frequencies, in radians a token, as they are used."""
        turns = self.length * frequencies / (2 * np.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotary(length: int, head_size: int, theta: float, scaling: Scaling | None = None) -> Rotary:
    """Returns float32 cosines and signed sines (T, 1, K) of position times theta**(-2i/K), for `rotate`; i counts pairs.

    Constants of the program, made here in float64: computed in it, they would be computed at every step.
    """
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    angles_TK = np.arange(length)[:, None] * (scaling(frequencies) if scaling else frequencies)
    cos_TK, sin_TK = np.cos(angles_TK), np.sin(angles_TK)
    tables = np.concatenate([cos_TK, cos_TK], -1), np.concatenate([-sin_TK, sin_TK], -1)
    cos_T1K, sin_T1K = (table[:, None].astype(np.float32) for table in tables)
    return cos_T1K, sin_T1K


def halves(rotary_T1K: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines (T, K/2) of the pairs, from the tables of `rotary`."""
    cos_T1K, sin_T1K = rotary_T1K
    pairs = cos_T1K.shape[-1] // 2
    return cos_T1K[:, 0, :pairs], sin_T1K[:, 0, pairs:]


def rotate(x_BTHK: Array, rotary_T1K: Rotary) -> Array:
    """Rotates the pairs (i, i + K/2) of each head, in float32, back in the input's dtype."""
    cos_T1K, sin_T1K = rotary_T1K
    x32 = x_BTHK.astype(jnp.float32)
    return (x32 * cos_T1K + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin_T1K).astype(x_BTHK.dtype)
