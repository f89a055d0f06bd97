"""Matrix-vector product for linear layers of one token, fused with the preceding norm and a following activation or sum.

Such a layer is bound by reading its weights. XLA adds two kernels for a norm and one for an activation or a sum. Each takes as
long as reading several megabytes. Here, each warp multiplies a row of the matrix. It loads weights from device memory into
registers, several pieces ahead of their use, and starts before its block normalizes the vector. Copies into a ring buffer in
shared memory take longer (notes/develop/measurements/inference.md).
"""

# D input features (contracted), F output features, R rows of a block, W columns of a piece

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.kernels import _rows
from jgraph.kernels._check import require
from jgraph.kernels._mosaic import Ref, has_mosaic, plgpu, store
from jgraph.kernels._rows import ROWS, WIDTH

_PIECE = 1024
"""Maximum bytes of a row that a warp loads as one piece."""
_AHEAD = 8
"""Maximum number of pieces of a warp in flight: 64 registers per thread."""

Activation = Callable[..., Array]


def matvec(
    x_D: Array,  # bfloat16 or float32
    weights_FD: Array,  # bfloat16 or float32; may have another dtype than `x_D`
    *,
    scale_D: Array | None = None,  # of the norm, which is rounded to the dtype of `x_D`; None skips the norm
    epsilon: float = 0.0,
    activation: Activation | None = None,  # elementwise, of `parts` float32 arrays; None is the identity, for one part
    parts: int = 1,  # number of equal parts of the F rows. The product of x with each is one argument of `activation`
    add_F: Array | None = None,  # [F / parts] in `dtype`, added after the result is rounded to `dtype`
    dtype: DTypeLike | None = None,  # of the result; None for the dtype of `x_D`
) -> Array:
    """Computes `activation(weights @ rms_norm(x)) + add` [F / parts] for one token. For inference: has no gradient rule."""
    must = f"[F, D] for `x_D` {list(x_D.shape)}, with F a multiple of {parts * ROWS} and D of {WIDTH}"
    require(_fits(x_D, weights_FD, parts), "weights_FD", weights_FD, must)
    return _jgraph_matvec(x_D, weights_FD, scale_D, add_F, epsilon, activation, parts, jnp.dtype(dtype or x_D.dtype))


def has_matvec(x_D: Array, weights_FD: Array, parts: int = 1) -> bool:
    """True if the target device runs the kernel, and it supports the shapes. Does not check dtypes."""
    return has_mosaic() and _fits(x_D, weights_FD, parts)


def _fits(x_D: Array, weights_FD: Array, parts: int) -> bool:
    F, D = weights_FD.shape
    return x_D.shape == (D,) and F % (parts * ROWS) == 0 and D % WIDTH == 0 and weights_FD.size > 0


# A jitted function, because jax names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _jgraph_matvec(
    x_D: Array,
    weights_FD: Array,
    scale_D: Array | None,
    add_F: Array | None,
    epsilon: float,
    activation: Activation | None,
    parts: int,
    dtype: jnp.dtype,
) -> Array:
    gpu = plgpu()
    F, D = weights_FD.shape[0] // parts, weights_FD.shape[1]
    size = weights_FD.dtype.itemsize
    # Loads of 16 bytes per thread if they divide a row.
    layout = _rows.layout(next(columns for columns in (16 // size, 4) if D % (32 * columns) == 0))
    W = _PIECE // size
    pieces: list[Any] = [pl.ds(start, min(W, D - start)) for start in range(0, D, W)]
    inputs: dict[str, Array] = {"x": x_D, "weights": weights_FD.reshape(parts, F, D)}
    inputs |= {name: array for name, array in (("scale", scale_D), ("add", add_F)) if array is not None}

    def kernel(*refs: Ref) -> None:
        named = dict(zip(inputs, refs, strict=False))
        out, *normed = refs[len(inputs) :]
        rows = pl.ds(lax.axis_index("i") * ROWS, ROWS)
        loads = (
            gpu.load(named["weights"].at[part, rows, columns], layout=layout, optimized=False)
            for part, columns in itertools.product(range(parts), pieces)
        )
        # Loaded before the norm is computed, to hide the latency of the loads.
        ahead = list(itertools.islice(loads, _AHEAD))
        if normed:
            _norm(named["x"], named["scale"], epsilon, normed[0])
        x = normed[0] if normed else named["x"]

        def product(columns: pl.Slice) -> Array:
            """Multiplies the next piece of weights by x. Loads another piece."""
            x_W = gpu.load(x.at[columns], layout=layout.reduce(0), optimized=False).astype(jnp.float32)
            x_RW = gpu.layout_cast(lax.broadcast_in_dim(x_W, (ROWS, columns.size), (1,)), layout)
            result = ahead.pop(0).astype(jnp.float32) * x_RW
            ahead.extend(itertools.islice(loads, 1))
            return result

        def row_sums() -> Array:
            # A sum over columns communicates between threads, so pieces of the same width are added before the sum.
            by_width: dict[int, Any] = {}
            for columns in pieces:
                by_width[columns.size] = by_width.get(columns.size, 0.0) + product(columns)
            return functools.reduce(jnp.add, [jnp.sum(total, axis=1) for total in by_width.values()])

        sums = [row_sums() for _ in range(parts)]
        y = (activation(*sums) if activation else sums[0]).astype(dtype)
        if "add" in named:
            y += gpu.load(named["add"].at[rows], layout=layout.reduce(1), optimized=False)
        store(out.at[rows], y)

    scratch = () if scale_D is None else (gpu.SMEM((D,), x_D.dtype),)
    (y_F,) = _rows.call(kernel, [jax.ShapeDtypeStruct((F,), dtype)], F // ROWS, scratch)(*inputs.values())
    return y_F


def _norm(x: Ref, scale: Ref, epsilon: float, out: Ref) -> None:
    """Stores the RMSNorm of the vector at the reference `x` in shared memory, inside of a kernel."""
    (D,) = x.shape
    # All threads share the vector. 4 float32 are 16 bytes, the maximum of a load in jax 0.12.
    layout = plgpu().Layout.WG_STRIDED((D,), next(columns for columns in (4, 2, 1) if D % (128 * columns) == 0))
    x_D, scale_D = (plgpu().load(ref, layout=layout, optimized=False).astype(jnp.float32) for ref in (x, scale))
    root = lax.rsqrt(jnp.sum(x_D * x_D) * (1 / D) + epsilon)
    out[...] = (x_D * (root * scale_D)).astype(out.dtype)
    plgpu().commit_smem()
