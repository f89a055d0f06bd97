"""The experts: SwiGLU MLPs, each over its own rows."""

# R rows in the order of their experts, E experts, D model, F hidden

from jax import Array

from jgraph.kernels.grouped import grouped_dot
from jgraph.kernels.swiglu import swiglu, weighted_swiglu


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
    return grouped_dot(weighted_swiglu(grouped_dot(x_RD, up_EDF2, sizes_E), weights_R), down_EFD, sizes_E)


def shared(x_ND: Array, up_DF2: Array, down_FD: Array) -> Array:
    """Returns what the experts make of every row that all tokens pass, as one MLP."""
    return swiglu(x_ND @ up_DF2) @ down_FD
