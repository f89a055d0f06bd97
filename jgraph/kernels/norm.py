"""RMSNorm of a residual stream, fused with the preceding sum. Forward and backward each read their arrays once.

XLA reads the stream twice in each direction: for the mean square and to scale it. It also copies the stream if a matmul
accumulates into it. For [16384, 768] in bfloat16 the kernel moves 101 MB, in 24 us on an H200. XLA moves 151 MB.
"""

# M rows, D model

import functools
import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels import _rows
from jgraph.kernels._check import chosen, require
from jgraph.kernels._mosaic import Ref, has_mosaic, plgpu
from jgraph.kernels._rows import ROWS, WIDTH, by_column, by_row, load_block, load_columns

Forward: TypeAlias = Literal["mosaic", "xla"]
_Kept: TypeAlias = tuple[Array, Array, bool]  # the sum, the scale, and True without an addend

_LARGEST = 2048
"""Maximum D: a warp holds a row of each array in registers."""
_BLOCKS = 512
"""Maximum number of blocks of the backward kernel, four per multiprocessor. Each has a partial gradient of the scale."""


def rms_norm(
    x: Array, scale_D: Array, *, add: Array | None = None, epsilon: float = 1e-6, implementation: str = "auto"
) -> tuple[Array, Array]:
    """Adds `add` to a residual stream and computes the RMSNorm of the sum.

    Equivalent to `x = x + add; y = flax.nnx.RMSNorm(...)(x)`. The norm of a row is
    row / sqrt(mean(row**2) + epsilon) * scale_D, computed in float32. Use the returned sum as the new residual stream: the
    backward kernel then also adds the gradient of the sum. Differentiable in `x`, `scale_D` and `add`.

    Args:
        x: The residual stream [..., D], bfloat16 or float32; a row is the last axis, of width D.
        scale_D: Scale of the norm, [D], float32 or the dtype of `x`.
        add: Array with the shape and dtype of `x`; None adds nothing.
        epsilon: Added to the mean square.
        implementation: `mosaic`, `xla`, `auto` or `backward`. `mosaic` is the Pallas kernel (Hopper or Blackwell; jax 0.11 or
            newer; bfloat16; D a multiple of 128 and at most 2048; a number of rows that is a multiple of 4, and a multiple of
            2048 if it is 2048 or more). `xla` is plain JAX and runs on any device. `auto` selects `mosaic` if the device and
            the arrays permit it, else `xla`. `backward` is like `auto`, with plain JAX in the forward pass: an FP8 matmul that
            reads the norm then computes it in its quantization kernel.

    Returns:
        The pair (sum, norm of the sum), both with the shape and dtype of `x`. Without `add`, the sum is `x`.

    Raises:
        ConfigError: If `implementation` is not one of these names.
        ShapeError: If `scale_D` is not [D], if `add` has another shape or dtype than `x`, or if `implementation` is `mosaic`
            and the kernel does not support the shape or dtype.

    Examples:
        >>> x, y = jgraph.rms_norm(jnp.ones((2, 4)), jnp.ones(4), add=jnp.full((2, 4), 2.0))
        >>> float(x[0, 0]), round(float(y[0, 0]), 3)
        (3.0, 1.0)
    """
    require(x.ndim > 0 and scale_D.shape == x.shape[-1:], "scale_D", scale_D, f"[D] for `x` [..., D], which is {list(x.shape)}")
    if add is not None:
        require(add.shape == x.shape and add.dtype == x.dtype, "add", add, f"{x.dtype}{list(x.shape)} like `x`")
    rows, D = math.prod(x.shape[:-1]), x.shape[-1]
    blocks = min(rows // ROWS, _BLOCKS)
    fits = x.dtype == jnp.bfloat16 and D % WIDTH == 0 and 0 < D <= _LARGEST and blocks > 0 and rows % (ROWS * blocks) == 0
    must = f"bfloat16 [..., D] with a multiple of {ROWS} rows, and D a multiple of {WIDTH} and at most {_LARGEST}"
    only_backward = implementation == "backward"
    name = chosen("auto" if only_backward else implementation, has_mosaic(), fits, "x", x, must)
    if name == "mosaic":
        return _mosaic(x, scale_D, add, epsilon, "xla" if only_backward else "mosaic")
    return _xla(x, scale_D, add, epsilon)


def _xla(x: Array, scale_D: Array, add: Array | None, epsilon: float) -> tuple[Array, Array]:
    x = x if add is None else x + add
    x32 = x.astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return x, (x32 * (root * scale_D)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mosaic(x: Array, scale_D: Array, add: Array | None, epsilon: float, forward: Forward) -> tuple[Array, Array]:
    return _forward(x, scale_D, add, epsilon, forward)[0]


def _forward(
    x: Array, scale_D: Array, add: Array | None, epsilon: float, forward: Forward
) -> tuple[tuple[Array, Array], _Kept]:
    if forward == "xla":
        out = _xla(x, scale_D, add, epsilon)
        return out, (out[0], scale_D, add is None)
    x_MD, scale_1D = x.reshape(-1, x.shape[-1]), scale_D.astype(jnp.float32)
    y_MD, *new = _jgraph_norm(x_MD, scale_1D, None if add is None else add.reshape(x_MD.shape), epsilon)
    x = new[0].reshape(x.shape) if new else x
    return (x, y_MD.reshape(x.shape)), (x, scale_D, add is None)


def _backward(
    epsilon: float, forward: Forward, residuals: _Kept, gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array | None]:
    x, scale_D, is_add_none = residuals
    x_MD, dx_MD, dy_MD = (array.reshape(-1, x.shape[-1]) for array in (x, *gradients))
    dx_MD, parts = _jgraph_norm_backward(x_MD, scale_D.astype(jnp.float32), dx_MD, dy_MD, epsilon)
    dx = dx_MD.reshape(x.shape)
    return dx, jnp.sum(parts, axis=0).astype(scale_D.dtype), None if is_add_none else dx


_mosaic.defvjp(_forward, _backward)


# A jitted function, because jax 0.11 names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnums=3)
def _jgraph_norm(x_MD: Array, scale_D: Array, add_MD: Array | None, epsilon: float) -> Sequence[Array]:
    """Returns the norm, followed by the sum if `add_MD` is not None."""
    M, D = x_MD.shape
    outs = 1 if add_MD is None else 2

    def kernel(scale: Ref, x: Ref, *others: Ref) -> None:
        *add, y = others[:outs]
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        values, scales = load_block(x, rows), by_column(load_columns(scale))
        if add:
            total = (values + load_block(add[0], rows)).astype(x.dtype)
            others[outs][rows] = total
            values = total.astype(jnp.float32)
        y[rows] = (values * by_row(_root(values, epsilon), D) * scales).astype(y.dtype)

    shapes = [jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype)] * outs
    arrays = (x_MD,) if add_MD is None else (x_MD, add_MD)
    return _rows.call(kernel, shapes, M // ROWS)(scale_D, *arrays)


@functools.partial(jax.jit, static_argnums=4)
def _jgraph_norm_backward(x_MD: Array, scale_D: Array, dx_MD: Array, dy_MD: Array, epsilon: float) -> tuple[Array, Array]:
    """Returns the gradient of x [M, D], and the partial gradients of the scale [blocks, D]."""
    M, D = x_MD.shape
    blocks = min(M // ROWS, _BLOCKS)
    steps = M // (ROWS * blocks)

    def kernel(scale: Ref, x: Ref, dx: Ref, dy: Ref, out: Ref, parts: Ref, shared: Ref) -> None:
        i = lax.axis_index("i")

        def step(number: Array, part: Array) -> Array:
            rows = pl.ds((i * steps + number) * ROWS, ROWS)
            # Issue all loads before the first use of a result.
            values, gradient, stream = (load_block(array, rows) for array in (x, dy, dx))
            scaled = gradient * by_column(load_columns(scale))
            root = _root(values, epsilon)
            # The norm removes the component of the gradient in the direction of the row.
            along = jnp.sum(scaled * values, axis=1) * (root * root * root * (1 / D))
            dx_norm = scaled * by_row(root, D) - values * by_row(along, D)
            out[rows] = (dx_norm + stream).astype(out.dtype)
            return part + gradient * values * by_row(root, D)

        shared[...] = lax.fori_loop(0, steps, step, _rows.laid_out(jnp.zeros((ROWS, D), jnp.float32)))
        plgpu().commit_smem()
        parts[i] = functools.reduce(jnp.add, [load_columns(shared.at[row]) for row in range(ROWS)])

    shapes = jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype), jax.ShapeDtypeStruct((blocks, D), jnp.float32)
    shared = (plgpu().SMEM((ROWS, D), jnp.float32),)
    dx_MD, parts = _rows.call(kernel, shapes, blocks, shared)(scale_D, x_MD, dx_MD, dy_MD)
    return dx_MD, parts


def _root(values: Array, epsilon: float) -> Array:
    """Returns 1 / sqrt(mean square + epsilon) of each row."""
    return lax.rsqrt(jnp.sum(values * values, axis=1) * (1 / values.shape[1]) + epsilon)
