"""SwiGLU with a weight per row, for the experts of a mixture of experts (Shazeer, arXiv:2002.05202).

The backward pass needs a sum over columns for the gradient of the weights. XLA therefore reads all arrays twice. This kernel
reads them once: for [32768, 2 x 2048] in bfloat16 it moves 671 MB, and XLA moves 1,074 MB.
"""

# R rows, F hidden

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels import _rows
from jgraph.kernels._check import chosen, require
from jgraph.kernels._mosaic import Ref, has_mosaic
from jgraph.kernels._rows import ROWS, WIDTH, by_row, load_block, load_rows

_COLUMNS = 512
"""Maximum number of columns in one step: a thread holds 16 elements of each array in registers."""


def swiglu(both: Array, weight: Array | float = 1.0) -> Array:
    """Computes silu(gate) * up * weight in float32, with XLA. `both` has the F columns of gate, followed by those of up."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up * weight).astype(both.dtype)


# `implementation` is that of the backward pass. Forward always uses XLA.
def weighted_swiglu(both_RF2: Array, weights_R: Array, *, implementation: str = "auto") -> Array:
    """Computes silu(gate) * up times one weight per row, in float32. Differentiable in both arguments."""
    matches = both_RF2.ndim == 2 and both_RF2.shape[1] % 2 == 0 and weights_R.shape == both_RF2.shape[:1]
    require(matches, "weights_R", weights_R, f"[R] for `both_RF2` [R, 2F], which is {list(both_RF2.shape)}")
    R, columns = both_RF2.shape
    must = f"bfloat16 [R, 2F] with R a multiple of {ROWS} and F of {WIDTH}"
    fits = both_RF2.dtype == jnp.bfloat16 and R % ROWS == 0 and columns % (2 * WIDTH) == 0 and both_RF2.size > 0
    if chosen(implementation, has_mosaic(), fits, "both_RF2", both_RF2, must) == "mosaic":
        return _mosaic(both_RF2, weights_R)
    return swiglu(both_RF2, weights_R[:, None])


# A jitted function, because jax 0.11 names and compiles every call of a kernel separately.
@jax.jit
def _jgraph_swiglu_backward(both_RF2: Array, weights_R: Array, dy_RF: Array) -> tuple[Array, Array]:
    R, F = dy_RF.shape
    width = max(width for width in range(WIDTH, min(_COLUMNS, F) + 1, WIDTH) if F % width == 0)

    def kernel(both: Ref, weights: Ref, dy: Ref, dboth: Ref, dweights: Ref) -> None:
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        weight_R = load_rows(weights.at[rows])
        sums: Any = 0.0
        for first in range(0, F, width):
            gate_at, up_at = pl.ds(first, width), pl.ds(F + first, width)
            gate, up, gradient = load_block(both, rows, gate_at), load_block(both, rows, up_at), load_block(dy, rows, gate_at)
            sigmoid = 1 / (1 + jnp.exp(-gate))
            silu = gate * sigmoid
            sums += jnp.sum(gradient * silu * up, axis=1)
            gradient = gradient * by_row(weight_R, width)
            dboth[rows, up_at] = (gradient * silu).astype(dboth.dtype)
            dboth[rows, gate_at] = (gradient * up * (sigmoid + silu * (1 - sigmoid))).astype(dboth.dtype)
        dweights[rows] = by_row(sums, WIDTH)

    # jax 0.11 cannot store a vector with one element per row, so each warp stores `WIDTH` copies of its element.
    outs = jax.ShapeDtypeStruct(both_RF2.shape, both_RF2.dtype), jax.ShapeDtypeStruct((R, WIDTH), jnp.float32)
    dboth_RF2, dweights = _rows.call(kernel, outs, R // ROWS)(both_RF2, weights_R, dy_RF)
    return dboth_RF2, dweights[:, 0]


@jax.custom_vjp
def _mosaic(both_RF2: Array, weights_R: Array) -> Array:
    return swiglu(both_RF2, weights_R[:, None])


_mosaic.defvjp(lambda *args: (_mosaic(*args), args), lambda args, dy_RF: _jgraph_swiglu_backward(*args, dy_RF))
