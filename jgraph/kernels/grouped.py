"""Products of groups of rows with a matrix each: the linear layers of a mixture of experts."""

# M rows, sorted by group; G groups, K summed over, N columns

import jax.numpy as jnp
from jax import Array, lax


def grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Multiplies the rows of each group with the group's matrix; sums in float32, the result in x's dtype.

    Args:
        x_MK: bfloat16 or float32; the rows of group 0 come first, then those of group 1.
        weights_GKN: one matrix a group, of x's dtype.
        sizes_G: int32, rows of each group; they may be zero. Rows beyond their sum give zeros.
    """
    return lax.ragged_dot(x_MK, weights_GKN, sizes_G, preferred_element_type=jnp.float32).astype(x_MK.dtype)
