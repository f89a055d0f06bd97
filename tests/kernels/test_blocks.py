"""MXFP8 quantization and matmuls: values, scales, and a reference in PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.kernels.blocks import Blocks, block_dot, quantize_blocks

M, N, K = 48, 64, 96


def normal(i, *shape, dtype=jnp.float32):
    """Returns an array with magnitudes from 2**-20 to 2**20 in different blocks."""
    rng = np.random.default_rng(i)
    blocks = rng.standard_normal((*shape[:-1], shape[-1] // 32, 32)) * 2.0 ** rng.integers(
        -20, 20, (*shape[:-1], shape[-1] // 32, 1)
    )
    return jnp.asarray(blocks.reshape(shape), dtype)


def values(x: Blocks):
    return np.asarray(x.elements, np.float64) * np.repeat(np.asarray(x.scales, np.float64), 32, axis=1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_block_has_the_smallest_scale_that_does_not_clip(dtype):
    x = normal(0, M, K, dtype=dtype)
    found = jax.jit(quantize_blocks)(x)
    assert (found.elements.dtype, found.scales.dtype) == (jnp.float8_e4m3fn, jnp.float8_e8m0fnu)
    largest = np.abs(np.asarray(x, np.float64)).reshape(M, K // 32, 32).max(2) / np.asarray(found.scales, np.float64)
    assert largest.max() <= 448
    assert largest.min() > 224
    # E4M3 has four significant bits, and subnormal numbers below 2**-6.
    spacing = np.repeat(np.asarray(found.scales, np.float64), 32, axis=1) * 2.0**-10
    exact = np.asarray(x, np.float64)
    np.testing.assert_array_less(np.abs(values(found) - exact), np.maximum(np.abs(exact) * 2.0**-4, spacing) * 1.001)


def test_an_amax_that_is_a_multiple_of_448_is_represented_exactly():
    x = jnp.zeros((1, 32)).at[0, 3].set(448 * 2.0**-9)
    found = quantize_blocks(x)
    assert (float(found.elements[0, 3]), float(found.scales[0, 0])) == (448, 2.0**-9)


def test_zero_blocks_and_tiny_blocks_stay_finite():
    x = jnp.zeros((2, 32)).at[1].set(2.0**-126)
    assert np.isfinite(values(quantize_blocks(x))).all()


@pytest.mark.parametrize("value", [jnp.inf, -jnp.inf, jnp.nan])
def test_a_block_that_is_not_finite_makes_its_row_of_a_product_nan(value):
    a, b = quantize_blocks(normal(0, M, K).at[5, 40].set(value)), quantize_blocks(normal(1, N, K))
    is_nan = np.isnan(np.asarray(jax.jit(block_dot, static_argnums=2)(a, b, jnp.float32)))
    assert is_nan[5].all()
    assert not np.delete(is_nan, 5, axis=0).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_of_blocks_equals_the_product_of_their_values(dtype):
    a, b = quantize_blocks(normal(0, M, K)), quantize_blocks(normal(1, N, K))
    found = np.asarray(jax.jit(block_dot, static_argnums=2)(a, b, dtype), np.float64)
    exact, magnitude = values(a) @ values(b).T, np.abs(values(a)) @ np.abs(values(b)).T
    rounding = 2.0**-8 * np.abs(exact) if dtype == jnp.bfloat16 else 0
    np.testing.assert_array_less(np.abs(found - exact), rounding + 2.0**-20 * magnitude)


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_elements_and_scales_equal_torchao_bit_for_bit(dtype):
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = normal(0, M, K).astype(dtype)
    given = torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, dtype))
    scales, elements = mx.to_mx(given, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    found = quantize_blocks(x)
    for ours, theirs in ((found.scales, scales), (found.elements, elements)):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), theirs.view(torch.uint8).numpy())
