"""Rotary embeddings: encode positions by rotating pairs of dimensions of a head (Su et al., "RoFormer", arXiv:2104.09864)."""

# B batch, T sequence, H heads, K head size

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jax import Array

from jgraph.kernels import rotary as kernels

Rotary: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Scaling:
    """Lowers rotary frequencies for sequences that are longer than in pretraining, as in Llama 3.1.

    A frequency of f radians per token makes f * length / (2 * pi) turns over `length` tokens.

    Attributes:
        factor: Divisor of low frequencies.
        low: Frequencies with at most this number of turns over `length` tokens are low.
        high: Frequencies with at least this number of turns are not changed. In between, the inverse of the divisor is linear
            in the number of turns.
        length: Sequence length of pretraining, in tokens.
    """

    factor: float
    low: float
    high: float
    length: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Returns a scaled copy of frequencies, an array of any shape in radians per token."""
        turns = self.length * frequencies / (2 * np.pi)
        share = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (share + (1 - share) / self.factor)


def rotary(length: int, head_size: int, theta: float, scaling: Scaling | None = None) -> Rotary:
    """Computes the rotary tables for `rotate`. The angle of pair i is position * theta**(-2i/K), for a head of K elements.

    The tables are NumPy arrays, so that they are constants of the program. JAX arrays would be computed in every step.

    Args:
        length: T, the number of tokens of a sequence. Positions are 0 to T - 1.
        head_size: K, the size of a head; even.
        theta: Base of the frequencies.
        scaling: Lowers the frequencies; None does not change them.

    Returns:
        Two arrays, float32 [T, 1, K], computed in float64: the cosines of all angles, repeated for both halves of a head; and
        the sines, negative in the first half.
    """
    frequencies = theta ** (-np.arange(0, head_size, 2) / head_size)
    angles_TK = np.arange(length)[:, None] * (scaling(frequencies) if scaling else frequencies)
    cos_TK, sin_TK = np.cos(angles_TK), np.sin(angles_TK)
    tables = np.concatenate([cos_TK, cos_TK], -1), np.concatenate([-sin_TK, sin_TK], -1)
    cos_T1K, sin_T1K = (table[:, None].astype(np.float32) for table in tables)
    return cos_T1K, sin_T1K


def halves(rotary_T1K: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Extracts the cosines and sines of the pairs from the tables of `rotary`.

    Args:
        rotary_T1K: Cosines and signed sines, float32 [T, 1, K].

    Returns:
        Two views, float32 [T, K/2]: the cosines, and the sines without the negative sign.
    """
    cos_T1K, sin_T1K = rotary_T1K
    pairs = cos_T1K.shape[-1] // 2
    return cos_T1K[:, 0, :pairs], sin_T1K[:, 0, pairs:]


def rotate(x_BTHK: Array, rotary_T1K: Rotary) -> Array:
    """Rotates the pairs (i, i + K/2) of each head in float32.

    Args:
        x_BTHK: Queries or keys, [..., H, K] for H heads of size K; any leading axes, and any floating dtype.
        rotary_T1K: The cosines and signed sines of `rotary`, or rows of them. They must broadcast to `x_BTHK`: [T, 1, K] if the
            axis before the heads is the position.

    Returns:
        A new array in the shape and dtype of `x_BTHK`.
    """
    return kernels.rotate(x_BTHK, *rotary_T1K)
