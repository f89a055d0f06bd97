"""A matrix by one vector, with what comes before and after it: a token's linear layers, which only read their weights.

XLA makes a norm two kernels more, and an activation or a sum one more; each takes as long as reading some megabytes. Here
blocks of threads share the rows of the matrix. A block norms the vector once for all of its tiles of rows, and has the next
tile on its way while it sums one.
"""

# D summed over, F rows, in tiles of R; W columns of a piece; P parts of the rows that an activation joins

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jgraph.errors import ShapeError

_ROWS, _COLUMNS, _WARPS = 4, 2048, 4
"""Most rows of a tile, most columns of a piece, and warps of a block."""
_BLOCKS, _TURNS = 6 * 132, 32
"""Blocks that an H200 holds at once, and most tiles of a block, for which there are more blocks if need be."""
_LOOPED, _ALONE = 4096, 6 * 4096
"""Most numbers of a tile where a block has several, of which two are in registers, and where it has one."""
_LEAST = 16

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
    dtype: Any = None,
    interpret: bool = False,
) -> Array:
    """Returns `activation(weights @ rms_norm(x)) + add`, each as far as it is given; sums in float32.

    Args:
        x_D: bfloat16 or float32.
        weights_FD: rows are contiguous.
        scale_D: of the norm, which divides by the root of `epsilon` more than the mean square; rounded to x's dtype.
        activation: elementwise in float32, of `parts` arrays: the rows of the matrix in that many parts, one after the other.
        add_F: is added to the rounded result.
        dtype: of the result; x's if None.
        interpret: runs the kernel's body on the CPU, for tests.

    Raises:
        ShapeError: `fits` says no.
    """
    if not fits(x_D, weights_FD, parts):
        found = f"{list(weights_FD.shape)} for `x_D` {list(x_D.shape)}"
        must = f"[F, D] for [D], with F a multiple of {parts * _ROWS} and D of {_LEAST}"
        raise ShapeError(f"`weights_FD` is {found}: must be {must}", field="weights_FD")
    how = (epsilon, activation, parts, jnp.dtype(dtype or x_D.dtype), interpret)
    return _jgraph_matvec(x_D, weights_FD, scale_D, add_F, *how)


def fits(x_D: Any, weights_FD: Any, parts: int = 1) -> bool:
    """Returns whether the kernel takes these shapes."""
    F, D = weights_FD.shape
    return x_D.shape == (D,) and F % (parts * _ROWS) == 0 and D % _LEAST == 0


# One function of the program for all calls: jax gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _jgraph_matvec(
    x_D: Array,
    weights_FD: Array,
    scale_D: Array | None,
    add_F: Array | None,
    epsilon: float,
    activation: Activation | None,
    parts: int,
    dtype: Any,
    interpret: bool,
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
        """Reads where all conditions that there are hold, zeros elsewhere."""
        given = [jnp.broadcast_to(condition, shape) for condition in conditions if condition is not None]
        return triton.load(ref, mask=functools.reduce(jnp.logical_and, given), other=0) if given else triton.load(ref)

    def kernel(*refs: Any) -> None:
        named, out = dict(zip(inputs, refs[:-1], strict=True)), refs[-1]
        # Conditions only where a piece or a tile goes beyond the end: a load without any is faster.
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

            return [[piece(part, *of) for of in columns] for part in range(parts)]

        # Under way while the norm is computed.
        ahead = tile(0)
        xs = vector("x")
        if "scale" in named:
            root = jax.lax.rsqrt(sum(jnp.sum(jnp.square(x)) for x in xs) / D + epsilon)
            normed = [x * (root * scale) for x, scale in zip(xs, vector("scale"), strict=True)]
            xs = [x.astype(x_D.dtype).astype(jnp.float32) for x in normed]
        for turn in range(turns):
            here, ahead = ahead, tile(turn + 1) if turn + 1 < turns else []
            # One sum over columns, at which warps wait for each other, for all pieces.
            products = [sum(w.astype(jnp.float32) * x[None] for w, x in zip(part, xs, strict=True)) for part in here]
            sums = [jnp.sum(product, axis=1) for product in products]
            y = (activation(*sums) if activation else sums[0]).astype(dtype)
            rows, inside = rows_of(turn)
            if "add" in named:
                y += load(named["add"].at[rows], (R,), inside)
            triton.store(out.at[rows], y, mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[pl.BlockSpec(array.shape, lambda i, rank=array.ndim: (0,) * rank) for array in inputs.values()],
        out_specs=pl.BlockSpec((F,), lambda i: (0,)),
        out_shape=jax.ShapeDtypeStruct((F,), dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*inputs.values())


def _tile_rows(F: int, numbers: int) -> int:
    """Returns the rows of a tile, of F rows with so many numbers each, in all parts."""
    for rows in (_ROWS, _ROWS // 2):
        if rows * numbers <= (_ALONE if F // rows <= _BLOCKS else _LOOPED):
            return rows
    return 1
