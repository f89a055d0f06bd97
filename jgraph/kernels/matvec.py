"""Matrix-vector product for linear layers of one token, fused with the preceding norm and a following activation or sum.

Such a layer is bound by reading its weights. XLA adds two kernels for a norm and one for an activation or a sum. Each takes as
long as reading several megabytes. Here, blocks of threads share the rows of the matrix. A block normalizes the vector once for
all of its tiles of rows, and loads the next tile while it sums the current one.

The kernel uses Pallas' deprecated Triton backend. Three versions for Mosaic GPU, which copy rows into a ring buffer in shared
memory, took 9 to 36% longer.
"""

# D input features (contracted), F output features in tiles of R, W columns per piece

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jgraph.kernels._check import require
from jgraph.kernels._mosaic import on_cpu

_ROWS, _COLUMNS, _WARPS = 4, 2048, 4
"""Maximum rows of a tile, maximum columns of a piece, and warps of a block."""
_BLOCKS, _TURNS = 6 * 132, 32
"""Number of blocks that an H200 runs concurrently, and the maximum number of tiles per block."""
_LOOPED, _ALONE = 4096, 6 * 4096
"""Maximum elements of a tile: in a block of several tiles, which holds two of them in registers, and in a block of one tile."""
_COLUMNS_MULTIPLE = 16

Activation = Callable[..., Array]


def matvec(
    x_D: Array,
    weights_FD: Array,
    *,
    scale_D: Array | None = None,
    epsilon: float = 0.0,
    activation: Activation | None = None,
    parts: int = 1,
    add_F: Array | None = None,
    dtype: DTypeLike | None = None,
) -> Array:
    """Computes `activation(weights @ rms_norm(x)) + add` for one token, in a Triton kernel. Accumulates in float32.

    Runs on an NVIDIA GPU, or in Pallas' interpreter on a CPU. For inference: has no gradient rule.

    Args:
        x_D: Hidden state of the token, [D], bfloat16 or float32.
        weights_FD: Weights [F, D], bfloat16 or float32; may have another dtype than `x_D`. Each output feature is a row.
        scale_D: Scale of the RMSNorm, [D], bfloat16 or float32; None skips the norm. The norm is rounded to the dtype of `x_D`.
        epsilon: Added to the mean square of `x_D` in the norm; unused without `scale_D`.
        activation: Elementwise function. It is called while the kernel is traced, with `parts` float32 arrays, and returns
            their result, one array of the same shape. None for the identity, which needs `parts` 1.
        parts: Number of equal parts of the F rows. The product of x with each part is one argument of `activation`, in order.
        add_F: Array [F / parts] in `dtype`, added after the result is rounded to `dtype`; None adds nothing.
        dtype: Dtype of the result, a floating dtype; None for the dtype of `x_D`.

    Returns:
        [F / parts] in `dtype`.

    Raises:
        ShapeError: If `x_D` is not [D], F is not a multiple of 4 * `parts`, or D is not a multiple of 16.
    """
    must = f"[F, D] for `x_D` {list(x_D.shape)}, with F a multiple of {parts * _ROWS} and D of {_COLUMNS_MULTIPLE}"
    require(fits(x_D, weights_FD, parts), "weights_FD", weights_FD, must)
    return _jgraph_matvec(x_D, weights_FD, scale_D, add_F, epsilon, activation, parts, jnp.dtype(dtype or x_D.dtype))


def fits(x_D: Array, weights_FD: Array, parts: int = 1) -> bool:
    """Checks the shapes of the arguments of `matvec`. Does not check dtypes or the device.

    Args:
        x_D: Hidden state of the token.
        weights_FD: Weights [F, D]; only the shape is read.
        parts: Number of equal parts of the F rows of the weights.

    Returns:
        True if `x_D` has the shape [D], F is a multiple of 4 * `parts`, and D is a multiple of 16.
    """
    F, D = weights_FD.shape
    return x_D.shape == (D,) and F % (parts * _ROWS) == 0 and D % _COLUMNS_MULTIPLE == 0


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
    F, D = weights_FD.shape[0] // parts, weights_FD.shape[1]
    W = min(_COLUMNS, pl.next_power_of_2(D))
    pieces = range(0, D, W)
    R = _tile_rows(F, parts * W * len(pieces))
    turns = min(pl.cdiv(F // R, _BLOCKS), _TURNS)
    blocks = pl.cdiv(F // R, turns)
    inputs: dict[str, Array] = {"x": x_D, "weights": weights_FD.reshape(parts, F, D)}
    inputs |= {name: array for name, array in (("scale", scale_D), ("add", add_F)) if array is not None}

    def load(ref: Any, shape: tuple[int, ...], *conditions: Array | None) -> Array:
        """Loads the elements for which all conditions hold, and zeros in place of the others. None always holds."""
        given = [jnp.broadcast_to(condition, shape) for condition in conditions if condition is not None]
        return triton.load(ref, mask=functools.reduce(jnp.logical_and, given), other=0) if given else triton.load(ref)

    def kernel(*refs: Any) -> None:
        named, out = dict(zip(inputs, refs[:-1], strict=True)), refs[-1]
        # Only a piece or tile that extends beyond the end has a condition, because an unconditional load is faster.
        columns = [(start + jnp.arange(W), start + jnp.arange(W) < D if start + W > D else None) for start in pieces]

        def vector(name: str) -> list[Array]:
            return [load(named[name].at[place], (W,), inside).astype(jnp.float32) for place, inside in columns]

        def rows_of(turn: int) -> tuple[Array, Array | None]:
            rows = (turn * blocks + pl.program_id(0)) * R + jnp.arange(R)
            return rows, rows < F if (turn + 1) * blocks * R > F else None

        def tile(turn: int) -> list[list[Array]]:
            rows, row_inside = rows_of(turn)
            below = None if row_inside is None else row_inside[:, None]

            def piece(part: int, place: Array, inside: Array | None) -> Array:
                return load(named["weights"].at[part, rows[:, None], place[None]], (R, W), below, inside)

            return [[piece(part, *place) for place in columns] for part in range(parts)]

        # Loaded before the norm is computed, to hide the latency of the load.
        next_tile = tile(0)
        xs = vector("x")
        if "scale" in named:
            root = jax.lax.rsqrt(sum(jnp.sum(jnp.square(x)) for x in xs) / D + epsilon)
            normed = [x * (root * scale) for x, scale in zip(xs, vector("scale"), strict=True)]
            xs = [x.astype(x_D.dtype).astype(jnp.float32) for x in normed]
        for turn in range(turns):
            current, next_tile = next_tile, tile(turn + 1) if turn + 1 < turns else []
            # A sum over columns synchronizes the warps, so the pieces are added before the sum.
            products = [sum(w.astype(jnp.float32) * x[None] for w, x in zip(part, xs, strict=True)) for part in current]
            sums = [jnp.sum(product, axis=1) for product in products]
            y = (activation(*sums) if activation else sums[0]).astype(dtype)
            rows, inside = rows_of(turn)
            if "add" in named:
                y += load(named["add"].at[rows], (R,), inside)
            triton.store(out.at[rows], y, mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(blocks,),
        out_shape=jax.ShapeDtypeStruct((F,), dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=on_cpu(),
    )(*inputs.values())


def _tile_rows(F: int, row_size: int) -> int:
    """Returns the number of rows of a tile. A row has `row_size` elements in all parts together."""
    for rows in (_ROWS, _ROWS // 2):
        if rows * row_size <= (_ALONE if F // rows <= _BLOCKS else _LOOPED):
            return rows
    return 1
