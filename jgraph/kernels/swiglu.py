"""SwiGLU of rows with a weight each, as the experts of a mixture compute it (Shazeer, arXiv:2002.05202).

For the gradients XLA reads everything twice: once for the gradient of the weights, a sum over columns, and once for the rest.
One kernel computes both: for [32768, 2 x 2048] in bfloat16 it moves 671 MB, XLA 1,074.
"""

# R rows, F hidden

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels import _rows
from jgraph.kernels._check import chosen, require
from jgraph.kernels._mosaic import has_mosaic
from jgraph.kernels._rows import ROWS, WIDTH, by_row, load, load_rows

_COLUMNS = 512
"""Largest number of columns at once: a thread holds 16 of each array in registers."""


def swiglu(both: Array, weight: Array | float = 1.0) -> Array:
    """Computes silu(gate) * up * weight in float32, rounded to the dtype of `both`.

    Args:
        both: [..., 2F], the gate's columns before those of the other half.
        weight: A number, or an array that broadcasts with the result.

    Returns:
        [..., F].
    """
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up * weight).astype(both.dtype)


def weighted_swiglu(both_RF2: Array, weights_R: Array, *, implementation: str = "auto") -> Array:
    """Computes `swiglu` of rows with a weight each. Differentiable in both arguments.

    Args:
        both_RF2: bfloat16 or float32.
        weights_R: float32.
        implementation: For the gradients: `mosaic` (Hopper, Blackwell; jax 0.11 or newer; bfloat16, R a multiple of 4, F of
            128), `xla` (any device), or `auto`, which selects the first supported one.

    Returns:
        [R, F].

    Raises:
        ConfigError: If `implementation` is unknown.
        ShapeError: If the shapes disagree, or `mosaic` does not support them.
    """
    matches = both_RF2.ndim == 2 and both_RF2.shape[1] % 2 == 0 and weights_R.shape == both_RF2.shape[:1]
    require(matches, "weights_R", weights_R, f"(R,) for (R, 2F); `both_RF2` is {both_RF2.shape}")
    (R, columns), must = both_RF2.shape, f"bfloat16, rows a multiple of {ROWS}, half its columns one of {WIDTH}"
    fits = both_RF2.dtype == jnp.bfloat16 and R % ROWS == 0 and columns % (2 * WIDTH) == 0 and both_RF2.size > 0
    if chosen(implementation, has_mosaic(), fits, "both_RF2", both_RF2, must) == "mosaic":
        return _mosaic(both_RF2, weights_R)
    return swiglu(both_RF2, weights_R[:, None])


# A jitted function, because jax 0.11 names and compiles every call of a kernel separately.
@jax.jit
def _jgraph_swiglu_backward(both_RF2: Array, weights_R: Array, dy_RF: Array) -> tuple[Array, Array]:
    """Returns the gradients of rows and weights."""
    R, F = dy_RF.shape
    width = max(width for width in range(WIDTH, min(_COLUMNS, F) + 1, WIDTH) if F % width == 0)

    def kernel(both: Any, weights: Any, dy: Any, dboth: Any, dweights: Any) -> None:
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        weight_R = load_rows(weights.at[rows])
        sums: Any = 0.0
        for first in range(0, F, width):
            gate_at, up_at = pl.ds(first, width), pl.ds(F + first, width)
            gate, up, gradient = load(both, rows, gate_at), load(both, rows, up_at), load(dy, rows, gate_at)
            share = 1 / (1 + jnp.exp(-gate))
            silu = gate * share
            sums += jnp.sum(gradient * silu * up, axis=1)
            gradient = gradient * by_row(weight_R, width)
            dboth[rows, up_at] = (gradient * silu).astype(dboth.dtype)
            dboth[rows, gate_at] = (gradient * up * (share + silu * (1 - share))).astype(dboth.dtype)
        dweights[rows] = by_row(sums, WIDTH)

    # jax 0.11 cannot store one number per row, so a warp stores as many as it writes at once.
    outs = jax.ShapeDtypeStruct(both_RF2.shape, both_RF2.dtype), jax.ShapeDtypeStruct((R, WIDTH), jnp.float32)
    dboth_RF2, dweights = _rows.call(kernel, outs, R // ROWS)(both_RF2, weights_R, dy_RF)
    return dboth_RF2, dweights[:, 0]


@jax.custom_vjp
def _mosaic(both_RF2: Array, weights_R: Array) -> Array:
    return swiglu(both_RF2, weights_R[:, None])


_mosaic.defvjp(lambda *args: (_mosaic(*args), args), lambda args, dy_RF: _jgraph_swiglu_backward(*args, dy_RF))
