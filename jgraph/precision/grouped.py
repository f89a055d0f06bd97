"""A grouped product in FP8, as the experts of a mixture have two each: forward and dgrad, with scales for all groups together.

Wgrad multiplies x and dy as they are, in bfloat16: there FP8 operands would be read along the rows that are summed, where
groups begin and end anywhere.
"""

# M rows of x, K contracted, N columns; G groups

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.autodiff.linear import GROUPED, DelayedProduct
from jgraph.kernels.grouped import grouped_dot_fp8, grouped_wgrad
from jgraph.precision.config import FP8Config
from jgraph.precision.product import Tap, formats, product, quantized, waiting


def multiplied(
    config: FP8Config, site: DelayedProduct, x: Array, w: Array, extra: Sequence[Any], tap: Tap, *, again: bool = False
) -> Array:
    """Computes a product in FP8, grouped or not; `extra` are its other operands, the rest is as of `product`."""
    if site.name == GROUPED:
        return grouped_product(config, site, x, w, extra[0], tap)
    return product(config, site, x, w, tap, again=again)


def grouped_product(config: FP8Config, site: DelayedProduct, x: Array, w: Array, sizes_G: Array, tap: Tap) -> Array:
    """Computes the product in FP8; w gets a gradient, in its dtype, and is not read. x is kept as it is."""
    (G, K, N), (x_dtype, _, dy_dtype), w_dtype = site.w_aval.shape, formats(config), w.dtype
    out = site.eqn.outvars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]

    @jax.custom_vjp
    def run(x: Array, w: Array, sizes_G: Array, tap: Tap) -> Array:
        return forward(x, w, sizes_G, tap)[0]

    def forward(x: Array, w: Array, sizes_G: Array, tap: Tap) -> tuple[Array, Any]:
        rows, _, scale, largest = quantized(x, tap.scales, 0, x_dtype, "rows")
        columns_NGK = tap.weight.columns.reshape(N, G, K)
        y = grouped_dot_fp8(rows, columns_NGK, sizes_G, 1 / scale / tap.weight.scale, order="NGK")
        return y.astype(out), (x, sizes_G, largest, tap._replace(late=None))

    def backward(residuals: Any, dy: Array) -> tuple[Array, Array | None, None, Any]:
        x, sizes_G, largest, tap = residuals
        rows, _, scale, dy_largest = quantized(dy, tap.scales, 2, dy_dtype, "rows")
        rows_GKN = tap.weight.rows.reshape(G, K, N)
        dx = grouped_dot_fp8(rows, rows_GKN, sizes_G, 1 / scale / tap.weight.scale, order="GNK").astype(x.dtype)
        observed = None if tap.amax is None else jnp.stack([largest, tap.weight.amax, dy_largest])
        dw = None if late else grouped_wgrad(x, dy, sizes_G, dtype=w_dtype)
        taps = Tap(None, None, observed, waiting((x, dy)) if late else None)  # pyright: ignore[reportArgumentType]
        return dx, dw, None, taps

    late = tap.late is not None
    run.defvjp(forward, backward)
    return run(x, w, sizes_G, tap)
