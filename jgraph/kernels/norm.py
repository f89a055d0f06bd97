"""RMSNorm of a residual stream that is added to, one pass forward and one backward.

XLA reads the stream once for its mean square and once to scale it, and backward as often; where a product adds onto it, it is
copied first. For [16384, 768] in bfloat16 a pass forward is 101 MB and one backward too, 24 us each on an H200; compiled for
one, XLA moves 151 MB forward, copies included, and 151 backward.
"""

# M rows, D model

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels import rows as of_rows
from jgraph.kernels.rows import ROWS, WIDTH, by_row, laid_out, layout, load

_LARGEST = 2048
"""A thread has a 32nd of a row in registers, of each array."""
_BLOCKS = 512
"""At most so many blocks go backward, each with a part of the scale's gradient: a wave of four a multiprocessor."""


def rms_norm(
    x: Array,
    scale_D: Array,
    *,
    add: Array | None = None,
    epsilon: float = 1e-6,
    implementation: str = "auto",
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Adds onto a residual stream and norms it: `x + add`, and that over its root mean square, times `scale`.

    As `x = x + add; y = flax.nnx.RMSNorm(...)(x)`. Use the `x` that it returns from then on: its gradient is added by the same
    kernel.

    >>> x, y = jgraph.rms_norm(jnp.ones((2, 4)), jnp.ones(4), add=jnp.full((2, 4), 2.0))
    >>> float(x[0, 0]), round(float(y[0, 0]), 3)
    (3.0, 1.0)

    Args:
        x: [..., D], bfloat16 or float32.
        scale_D: float32, or as x.
        add: as x; None adds nothing.
        epsilon: added to the mean square.
        implementation: `mosaic` (Hopper, Blackwell; jax 0.11 or newer; bfloat16, D a multiple of 128 and at most 2048, rows a
            multiple of 4), `xla` (anywhere), or `auto`, which takes the first of them that can.
        interpret: runs a kernel's body on the CPU, for tests.

    Returns:
        The sum and its norm, both in the dtype of `x`; statistics are float32.

    Raises:
        ConfigError: there is no such implementation.
        ShapeError: the shapes or dtypes disagree, or `mosaic` cannot take them.
    """
    check_choice("implementation", implementation, ("auto", *_IMPLEMENTATIONS))
    if x.ndim < 1 or scale_D.shape != x.shape[-1:]:
        raise ShapeError(f"`scale_D` is {scale_D.shape}: must be the last size of `x`, {x.shape}", field="scale_D")
    if add is not None and (add.shape != x.shape or add.dtype != x.dtype):
        raise ShapeError(f"`add` is {add.dtype}{list(add.shape)}: must be as `x`, {x.dtype}{list(x.shape)}", field="add")
    chosen = choose(x.shape, x.dtype) if implementation == "auto" else implementation
    if chosen == "mosaic" and not _fits(x.shape, x.dtype):
        allowed = f"bfloat16, rows a multiple of {ROWS}, the last size one of {WIDTH} and at most {_LARGEST}"
        raise ShapeError(f"`x` is {x.dtype}{list(x.shape)}: must be {allowed}; take xla", field="x")
    return _IMPLEMENTATIONS[chosen](x, scale_D, add, epsilon, interpret)


def choose(shape: tuple[int, ...], dtype: Any) -> str:
    """Returns the implementation for an array on the device that is compiled for."""
    return "mosaic" if of_rows.has_kernels() and _fits(shape, dtype) else "xla"


def _fits(shape: tuple[int, ...], dtype: Any) -> bool:
    rows, D = _count(shape), shape[-1]
    blocks = min(rows // ROWS, _BLOCKS)
    return dtype == jnp.bfloat16 and D % WIDTH == 0 and 0 < D <= _LARGEST and blocks > 0 and rows % (ROWS * blocks) == 0


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def _xla(x: Array, scale_D: Array, add: Array | None, epsilon: float, interpret: bool) -> tuple[Array, Array]:
    """The reference."""
    x = x if add is None else x + add
    x32 = x.astype(jnp.float32)
    root = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return x, (x32 * (root * scale_D)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mosaic(x: Array, scale_D: Array, add: Array | None, epsilon: float, interpret: bool) -> tuple[Array, Array]:
    return _forward(x, scale_D, add, epsilon, interpret)[0]


def _forward(x: Array, scale_D: Array, add: Array | None, epsilon: float, interpret: bool) -> tuple[Any, Any]:
    x_MD, scale_1D = x.reshape(-1, x.shape[-1]), scale_D.astype(jnp.float32)
    y_MD, *new = _jgraph_norm(x_MD, scale_1D, None if add is None else add.reshape(x_MD.shape), epsilon, interpret)
    x = new[0].reshape(x.shape) if new else x
    return (x, y_MD.reshape(x.shape)), (x, scale_D, add is None)


def _backward(
    epsilon: float, interpret: bool, residuals: Any, gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array | None]:
    x, scale_D, alone = residuals
    x_MD, dx_MD, dy_MD = (array.reshape(-1, x.shape[-1]) for array in (x, *gradients))
    dx_MD, parts = _jgraph_norm_backward(x_MD, scale_D.astype(jnp.float32), dx_MD, dy_MD, epsilon, interpret)
    dx = dx_MD.reshape(x.shape)
    return dx, jnp.sum(parts, axis=0).astype(scale_D.dtype), None if alone else dx


_mosaic.defvjp(_forward, _backward)


# One function of the program for all layers: jax 0.11 gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=(3, 4))
def _jgraph_norm(x_MD: Array, scale_D: Array, add_MD: Array | None, epsilon: float, interpret: bool) -> tuple[Array, ...]:
    M, D = x_MD.shape
    outs = 1 + (add_MD is not None)

    def kernel(scale: Any, x: Any, *others: Any) -> None:
        *add, y = others[:outs]
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        values, wanted = load(x, rows), _by_column(scale, D)
        if add:
            total = (values + load(add[0], rows)).astype(x.dtype)
            others[outs][rows] = total
            values = total.astype(jnp.float32)
        y[rows] = (values * by_row(_root(values, epsilon), values.shape) * wanted).astype(y.dtype)

    shapes = tuple(jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype) for _ in range(outs))
    arrays = (x_MD,) if add_MD is None else (x_MD, add_MD)
    return of_rows.call(kernel, shapes, M // ROWS, interpret)(scale_D, *arrays)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _jgraph_norm_backward(
    x_MD: Array, scale_D: Array, dx_MD: Array, dy_MD: Array, epsilon: float, interpret: bool
) -> tuple[Array, Array]:
    """Returns the gradient of x, and parts of the scale's."""
    M, D = x_MD.shape
    blocks = min(M // ROWS, _BLOCKS)
    steps = M // (ROWS * blocks)
    plgpu = of_rows.plgpu()

    def kernel(scale: Any, x: Any, dx: Any, dy: Any, out: Any, parts: Any, shared: Any) -> None:
        i = lax.axis_index("i")

        def step(number: Any, part: Any) -> Any:
            rows = pl.ds((i * steps + number) * ROWS, ROWS)
            # All that is read, before anything waits for it.
            values, gradient, stream = (load(array, rows) for array in (x, dy, dx))
            scaled = gradient * _by_column(scale, D)
            root = _root(values, epsilon)
            # What of the gradient is along the row, which the norm takes out.
            along = jnp.sum(scaled * values, axis=1) * (root * root * root * (1 / D))
            found = scaled * by_row(root, values.shape) - values * by_row(along, values.shape)
            out[rows] = (found + stream).astype(out.dtype)
            return part + gradient * values * by_row(root, values.shape)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, D), jnp.float32), layout())
        shared[...] = lax.fori_loop(0, steps, step, zeros)
        plgpu.commit_smem()
        columns = [plgpu.load(shared.at[row], layout=layout().reduce(0), optimized=False) for row in range(ROWS)]
        parts[i] = functools.reduce(jnp.add, columns)

    shapes = jax.ShapeDtypeStruct(x_MD.shape, x_MD.dtype), jax.ShapeDtypeStruct((blocks, D), jnp.float32)
    shared = (plgpu.SMEM((ROWS, D), jnp.float32),)
    return of_rows.call(kernel, shapes, blocks, interpret, shared)(scale_D, x_MD, dx_MD, dy_MD)


def _root(values: Array, epsilon: float) -> Array:
    return lax.rsqrt(jnp.sum(values * values, axis=1) * (1 / values.shape[1]) + epsilon)


def _by_column(scale: Any, width: int) -> Array:
    scale_D = of_rows.plgpu().load(scale, layout=layout().reduce(0), optimized=False)
    return laid_out(lax.broadcast_in_dim(scale_D, (ROWS, width), (1,)))


_IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla}
