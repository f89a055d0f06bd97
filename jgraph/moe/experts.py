"""The experts: SwiGLU MLPs, each over its own rows."""

# R rows in the order of their experts, E experts, D model, F hidden

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.kernels.grouped import grouped_dot


def experts(x_RD: Array, weights_R: Array, up_EDF2: Array, down_EFD: Array, sizes_E: Array) -> Array:
    """Returns what each row's expert makes of it, times the row's weight.

    The weight is multiplied where the hidden rows are made: a gradient that begins there needs no result of an expert.

    Args:
        x_RD: rows, those of expert 0 first.
        weights_R: float32.
        up_EDF2: first matrices, the gate's columns before the others; of x's dtype.
        down_EFD: second matrices.
        sizes_E: int32, rows of each expert.
    """
    return grouped_dot(swiglu(grouped_dot(x_RD, up_EDF2, sizes_E), weights_R[:, None]), down_EFD, sizes_E)


def shared(x_ND: Array, up_DF2: Array, down_FD: Array) -> Array:
    """Returns what the experts make of every row that all tokens pass, as one MLP."""
    return swiglu(x_ND @ up_DF2) @ down_FD


def swiglu(both: Array, weight: Array | float = 1.0) -> Array:
    """Returns silu(gate) times the other half times a weight, in float32 and then rounded to the dtype that came."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up * weight).astype(both.dtype)
