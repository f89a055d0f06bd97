"""Rotary embeddings: encode positions by rotating pairs of dimensions of a head (Su et al., "RoFormer", arXiv:2104.09864)."""

# B batch, T sequence, H heads, K head size

import functools
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jax import Array

from jgraph.kernels import rotary as kernels

Rotary: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Scaling:
    """Lowers rotary frequencies for sequences that are longer than in pretraining, as in Llama 3.1."""

    # A frequency of f radians per token makes f * length / (2 * pi) turns over `length` tokens.
    factor: float  # divisor of low frequencies
    low: float  # frequencies with at most this number of turns are low
    high: float  # frequencies with at least this number of turns do not change
    length: int  # tokens per sequence in pretraining

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.length * frequencies / (2 * np.pi)
        share = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        # Between `low` and `high`, the inverse of the divisor is linear in the number of turns.
        return frequencies * (share + (1 - share) / self.factor)


# The tables are NumPy arrays, which are constants of the program: JAX arrays would be computed in every step. They are cached,
# because a program has a constant for each NumPy array. One for each layer made the program of GPT 1.3B ten times as large.
@functools.lru_cache(8)
def pairs(length: int, head_size: int, theta: float, scaling: Scaling | None = None) -> Rotary:
    """Computes the cosines and sines of the pairs of positions 0 to `length` - 1: float32 [T, K/2]."""
    # The angle of pair i is position * theta**(-2i/K), in float64.
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    angles_TP = np.arange(length)[:, None] * (scaling(frequencies) if scaling else frequencies)
    return np.cos(angles_TP).astype(np.float32), np.sin(angles_TP).astype(np.float32)


@functools.lru_cache(8)
def rotary(length: int, head_size: int, theta: float, scaling: Scaling | None = None) -> Rotary:
    """Computes the cosines and signed sines of positions 0 to `length` - 1, for `rotate`: float32 [T, 1, K]."""
    cos_TP, sin_TP = pairs(length, head_size, theta, scaling)
    # The cosines are repeated for both halves of a head, and the sines are negative in the first half.
    return np.concatenate([cos_TP, cos_TP], -1)[:, None], np.concatenate([-sin_TP, sin_TP], -1)[:, None]


def halves(rotary_T1K: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Returns views of the cosines and sines of the pairs [T, K/2], from the tables of `rotary`."""
    cos_T1K, sin_T1K = rotary_T1K
    pairs = cos_T1K.shape[-1] // 2
    return cos_T1K[:, 0, :pairs], sin_T1K[:, 0, pairs:]


def rotate(x_BTHK: Array, rotary_T1K: Rotary) -> Array:
    """Rotates the pairs (i, i + K/2) of each head [..., H, K] in float32. The tables broadcast to `x_BTHK`."""
    return kernels.rotate(x_BTHK, *rotary_T1K)
