"""Quantization to MXFP8 and the matmul of MXFP8 matrices (OCP Microscaling Formats).

A block is 32 consecutive elements of a row. It has one scale, a power of two in 8 bits (E8M0). The contracted axis of a matmul
has the blocks, so a matrix and its transpose are quantized separately.
"""

# M, N rows of the operands; K contracted

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.kernels._mosaic import target

BLOCK = 32
"""Number of elements that share a scale."""


class Blocks(NamedTuple):
    """An MXFP8 matrix. Element (i, k) has the value `elements[i, k] * scales[i, k // 32]`."""

    elements: Array  # float8_e4m3fn [M, K]
    scales: Array  # float8_e8m0fnu [M, K / 32]; NaN for a block with an infinity or a NaN


def quantize_blocks(x_MK: Array) -> Blocks:
    """Quantizes a bfloat16 or float32 matrix along K, a multiple of 32. Not differentiable."""
    M, K = x_MK.shape
    x_MBE = x_MK.astype(jnp.float32).reshape(M, K // BLOCK, BLOCK)
    ratio = jnp.max(jnp.abs(x_MBE), axis=2) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    # The smallest power of two for which the block is in the range of E4M3, as in Transformer Engine. The inverse of the
    # smallest exponent is a finite number. The exponent 255 is a NaN.
    exponent = jnp.clip((bits >> 23) + (bits & 0x7FFFFF != 0), 1, 255)
    scales = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    elements = (x_MBE / scales.astype(jnp.float32)[:, :, None]).astype(jnp.float8_e4m3fn).reshape(M, K)
    # Without the barrier, XLA removes this conversion together with the inverse conversion.
    return Blocks(*lax.optimization_barrier((elements, scales)))


def has_block_dot() -> bool:
    """True if the target device multiplies MXFP8 matrices: Blackwell, compute capability 10.0 or newer."""
    device = target()
    return device is not None and device.has_mxfp8


def block_dot(a: Blocks, b: Blocks, dtype: DTypeLike) -> Array:
    """Multiplies [M, K] and [N, K] to [M, N], bfloat16 or float32. Accumulates in float32. Not differentiable."""
    if has_block_dot():
        operands = a.elements[None], b.elements[None], a.scales[None], b.scales[None]
        return jax.nn.scaled_matmul(*operands, preferred_element_type=dtype)[0]
    # bfloat16 represents the values exactly.
    return lax.dot_general(_values(a), _values(b), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _values(x: Blocks) -> Array:
    M, K = x.elements.shape
    blocks = x.elements.astype(jnp.bfloat16).reshape(M, K // BLOCK, BLOCK)
    return (blocks * x.scales.astype(jnp.bfloat16)[:, :, None]).reshape(M, K)
