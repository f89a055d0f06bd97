"""SwiGLU of rows that have a weight each, as the experts of a mixture compute it (Shazeer, arXiv:2002.05202).

XLA reads everything twice for the gradients, once for the sum over columns that a weight's is, and once for the others. One
kernel makes both: for [32768, 2 x 2048] in bfloat16 it moves 671 MB, where XLA moves 1,074.
"""

# R rows, F hidden

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels import rows as of_rows
from jgraph.kernels.rows import ROWS, WIDTH, by_row, load

_COLUMNS = 512
"""At most so many at a time: of each array, a thread has 16 of them in registers."""


def swiglu(both: Array, weight: Array | float = 1.0) -> Array:
    """Returns silu(gate) times the other half times a weight, in float32 and then rounded to the dtype that came.

    Args:
        both: [..., 2F], the gate's columns before the others.
        weight: a number, or an array that broadcasts with the result.
    """
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up * weight).astype(both.dtype)


def weighted_swiglu(both_RF2: Array, weights_R: Array, *, implementation: str = "auto", interpret: bool = False) -> Array:
    """Returns `swiglu` of rows with a weight each; differentiable by both.

    Args:
        both_RF2: bfloat16 or float32.
        weights_R: float32.
        implementation: of the gradients: `mosaic` (Hopper, Blackwell; jax 0.11 or newer; bfloat16, R a multiple of 4, F of
            128), `xla` (anywhere), or `auto`, which takes the first of them that can.
        interpret: runs a kernel's body on the CPU, for tests.

    Raises:
        ConfigError: there is no such implementation.
        ShapeError: the shapes disagree, or `mosaic` cannot take them.
    """
    check_choice("implementation", implementation, ("auto", "mosaic", "xla"))
    if both_RF2.ndim != 2 or both_RF2.shape[1] % 2 or weights_R.shape != both_RF2.shape[:1]:
        raise ShapeError(f"`weights_R` is {weights_R.shape}: must be (R,) for `both_RF2` {both_RF2.shape}", field="weights_R")
    chosen = choose(both_RF2.shape, both_RF2.dtype) if implementation == "auto" else implementation
    if chosen == "xla":
        return swiglu(both_RF2, weights_R[:, None])
    if not _fits(both_RF2.shape, both_RF2.dtype):
        allowed = f"bfloat16, rows a multiple of {ROWS}, half its columns one of {WIDTH}"
        raise ShapeError(f"`both_RF2` is {both_RF2.dtype}{list(both_RF2.shape)}: must be {allowed}; take xla", field="both_RF2")
    return _mosaic(both_RF2, weights_R, interpret)


def choose(shape: tuple[int, ...], dtype: Any) -> str:
    """Returns the implementation for an array on the device that is compiled for."""
    return "mosaic" if of_rows.has_kernels() and _fits(shape, dtype) else "xla"


def _fits(shape: tuple[int, ...], dtype: Any) -> bool:
    return dtype == jnp.bfloat16 and shape[0] % ROWS == 0 and shape[1] % (2 * WIDTH) == 0 and 0 not in shape


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _mosaic(both_RF2: Array, weights_R: Array, interpret: bool) -> Array:
    return swiglu(both_RF2, weights_R[:, None])


def _forward(both_RF2: Array, weights_R: Array, interpret: bool) -> tuple[Array, tuple[Array, Array]]:
    return _mosaic(both_RF2, weights_R, interpret), (both_RF2, weights_R)


def _backward(interpret: bool, residuals: tuple[Array, Array], dy_RF: Array) -> tuple[Array, Array]:
    return _jgraph_swiglu_backward(*residuals, dy_RF, interpret)


_mosaic.defvjp(_forward, _backward)


# One function of the program for all layers: jax 0.11 gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=3)
def _jgraph_swiglu_backward(both_RF2: Array, weights_R: Array, dy_RF: Array, interpret: bool) -> tuple[Array, Array]:
    """Returns the gradients of rows and weights."""
    R, F = dy_RF.shape
    width = max(width for width in range(WIDTH, min(_COLUMNS, F) + 1, WIDTH) if F % width == 0)
    plgpu = of_rows.plgpu()

    def kernel(both: Any, weights: Any, dy: Any, dboth: Any, dweights: Any) -> None:
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        weight_R = plgpu.load(weights.at[rows], layout=of_rows.layout().reduce(1), optimized=False)
        sums: Any = 0.0
        for first in range(0, F, width):
            gate_at, up_at = pl.ds(first, width), pl.ds(F + first, width)
            gate, up, gradient = load(both, rows, gate_at), load(both, rows, up_at), load(dy, rows, gate_at)
            share = 1 / (1 + jnp.exp(-gate))
            silu = gate * share
            sums += jnp.sum(gradient * silu * up, axis=1)
            gradient = gradient * by_row(weight_R, gradient.shape)
            dboth[rows, up_at] = (gradient * silu).astype(dboth.dtype)
            dboth[rows, gate_at] = (gradient * up * (share + silu * (1 - share))).astype(dboth.dtype)
        dweights[rows] = by_row(sums, (ROWS, WIDTH))

    # jax 0.11 does not write a number a row, so there are as many as a warp writes at once.
    outs = jax.ShapeDtypeStruct(both_RF2.shape, both_RF2.dtype), jax.ShapeDtypeStruct((R, WIDTH), jnp.float32)
    dboth_RF2, dweights = of_rows.call(kernel, outs, R // ROWS, interpret)(both_RF2, weights_R, dy_RF)
    return dboth_RF2, dweights[:, 0]
