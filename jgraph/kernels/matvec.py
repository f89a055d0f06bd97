"""A matrix times one vector, fused with the norm before it and the activation or sum after it: linear layers of one token.

Such a layer is bound by reading its weights. XLA adds two kernels for a norm and one for an activation or a sum, and each takes
as long as reading some megabytes. Here a warpgroup streams rows of the matrix into a ring in shared memory, and starts before
the norm is computed.
"""

# D summed over, F rows; P parts of the rows that an activation joins

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.errors import ShapeError
from jgraph.kernels._mosaic import has_mosaic, plgpu
from jgraph.kernels._rows import ROWS, WIDTH, by_column, by_row, call, laid_out, load, load_columns, load_rows

_TILE, _LINES = 4 * ROWS, 4
"""Rows of a tile, four per warp, and most lines of `WIDTH` columns in a copy."""
_PIECE = 8 * WIDTH
"""Columns that are processed at once."""
_RING = 64 * 1024
"""Bytes of the ring, so that a multiprocessor holds three blocks."""
_BLOCKS = 3 * 132
"""Blocks that an H200 holds at once."""

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
    interpret: bool = False,
) -> Array:
    """Computes `activation(weights @ rms_norm(x)) + add` for one token; sums in float32.

    Args:
        x_D: bfloat16 or float32.
        weights_FD: Weights with contiguous rows, bfloat16 or float32.
        scale_D: Scale of the RMSNorm; None skips the norm. The norm is rounded to the dtype of `x_D`.
        epsilon: Added to the mean square of `x_D`.
        activation: Elementwise function of `parts` float32 arrays; None for the identity.
        parts: Number of equal parts of the rows, which become the arguments of `activation`.
        add_F: Added to the rounded result; None adds nothing.
        dtype: Dtype of the result; None for the dtype of `x_D`.
        interpret: Runs the kernel in Pallas' interpreter on the CPU, for tests.

    Returns:
        [F / parts].

    Raises:
        ShapeError: If `fits` is false.
    """
    if not fits(x_D, weights_FD, parts):
        found = f"{list(weights_FD.shape)} for `x_D` {list(x_D.shape)}"
        must = f"[F, D] for [D], with F a multiple of {parts * _TILE} and D of {WIDTH}"
        raise ShapeError(f"`weights_FD` is {found}: must be {must}", field="weights_FD")
    how = (epsilon, activation, parts, jnp.dtype(dtype or x_D.dtype), interpret)
    return _jgraph_matvec(x_D, weights_FD, scale_D, add_F, *how)


def fits(x_D: jax.ShapeDtypeStruct | Array, weights_FD: jax.ShapeDtypeStruct | Array, parts: int = 1) -> bool:
    """True if the kernel supports these shapes."""
    F, D = weights_FD.shape
    return x_D.shape == (D,) and F % (parts * _TILE) == 0 and D % WIDTH == 0


def choose(x_D: Array, weights_FD: Array, parts: int = 1) -> str:
    """Returns `mosaic` if the target device has the kernel (Hopper or Blackwell, jax 0.11) and it fits, else `xla`."""
    return "mosaic" if has_mosaic() and fits(x_D, weights_FD, parts) else "xla"


def _by_pieces(columns: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Calls `body(columns, carry)` for pieces of columns. A loop, because unrolled code takes registers of other blocks."""
    whole, rest = divmod(columns, _PIECE)
    carry = lax.fori_loop(0, whole, lambda i, carry: body(pl.ds(i * _PIECE, _PIECE), carry), carry)
    return body(pl.ds(whole * _PIECE, rest), carry) if rest else carry


# A jitted function, because jax names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _jgraph_matvec(
    x_D: Array,
    weights_FD: Array,
    scale_D: Array | None,
    add_F: Array | None,
    epsilon: float,
    activation: Activation | None,
    parts: int,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    gpu, (F, D) = plgpu(), (weights_FD.shape[0] // parts, weights_FD.shape[1])
    lines = max(lines for lines in range(1, _LINES + 1) if D // WIDTH % lines == 0)
    copies = D // WIDTH // lines
    tiles, blocks = F // _TILE, min(F // _TILE, _BLOCKS)
    stages = max(2, _RING // (_TILE * lines * WIDTH * weights_FD.dtype.itemsize))
    optional = [array for array in (scale_D, add_F) if array is not None]

    def kernel(x: Any, weights: Any, *refs: Any, ring: Any, xs: Any, sums: Any, full: Any, empty: Any) -> None:
        given, out = list(refs[:-1]), refs[-1]
        scale = given.pop(0) if scale_D is not None else None
        add = given.pop(0) if add_F is not None else None
        i, wg = lax.axis_index("i"), lax.axis_index("wg")
        turns = lax.div(tiles - 1 - i, jnp.int32(blocks)) + 1

        def slot_of(turn: Any, part: int, copy: Any) -> tuple[Any, Any]:
            number = (turn * parts + part) * copies + copy
            return number, lax.rem(number, jnp.int32(stages))

        @pl.when(wg == 1)
        def stream() -> None:
            def tile(turn: Any, _: None) -> None:
                rows = pl.ds((turn * blocks + i) * _TILE, _TILE)
                for part in range(parts):

                    def copy(number: Any, _: None, part: int = part) -> None:
                        before, slot = slot_of(turn, part, number)
                        pl.when(before >= stages)(lambda: gpu.barrier_wait(empty.at[slot]))
                        source = weights.at[part, rows, pl.ds(number * lines, lines)]
                        gpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])

                    lax.fori_loop(jnp.int32(0), copies, copy, None)

            lax.fori_loop(jnp.int32(0), turns, tile, None)
            # A warpgroup must observe every phase of its barriers.
            total = turns * (parts * copies)
            first = jnp.maximum(total - stages, 0)
            lax.fori_loop(first, total, lambda k, _: gpu.barrier_wait(empty.at[lax.rem(k, jnp.int32(stages))]), None)

        @pl.when(wg == 0)
        def multiply() -> None:
            def square(place: Any, total: Any) -> Any:
                return total + jnp.sum(jnp.square(load_columns(x.at[place])))

            root = None if scale is None else lax.rsqrt(_by_pieces(D, square, jnp.float32(0)) * (1 / D) + epsilon)

            def prepare(place: Any, _: None) -> None:
                values = load_columns(x.at[place])
                values = values if scale is None else values * (root * load_columns(scale.at[place]))
                xs[place] = values.astype(xs.dtype)

            _by_pieces(D, prepare, None)
            gpu.commit_smem()

            def tile(turn: Any, _: None) -> None:
                first = (turn * blocks + i) * _TILE
                added = None if add is None else load_rows(add.at[pl.ds(first, _TILE)])
                found = []
                for part in range(parts):

                    def copy(number: Any, total: Any, part: int = part) -> Any:
                        _, slot = slot_of(turn, part, number)
                        gpu.barrier_wait(full.at[slot])
                        for line in range(lines):
                            columns = pl.ds((number * lines + line) * WIDTH, WIDTH)
                            total += load(ring, slot, slice(None), line) * by_column(load_columns(xs.at[columns]), _TILE)
                        gpu.barrier_arrive(empty.at[slot])
                        return total

                    zeros = laid_out(jnp.zeros((_TILE, WIDTH), jnp.float32))
                    total = lax.fori_loop(jnp.int32(0), copies, copy, zeros)
                    found.append(by_row(jnp.sum(total, axis=1), WIDTH))
                y = (activation(*found) if activation else found[0]).astype(dtype)
                if added is not None:
                    y += by_row(added.astype(dtype), WIDTH)
                # Turns alternate between two buffers, so that one barrier a turn is enough.
                mine = sums.at[lax.rem(turn, jnp.int32(2))]
                mine[...] = y.astype(jnp.float32)
                gpu.commit_smem()
                for row in range(_TILE):
                    out[first + row] = mine[row, 0].astype(dtype)

            lax.fori_loop(jnp.int32(0), turns, tile, None)

    scratch = {
        "ring": gpu.SMEM((stages, _TILE, lines, WIDTH), weights_FD.dtype),
        "xs": gpu.SMEM((D,), x_D.dtype),
        "sums": gpu.SMEM((2, _TILE, WIDTH), jnp.float32),
        "full": gpu.Barrier(num_arrivals=1, num_barriers=stages),
        "empty": gpu.Barrier(num_arrivals=1, num_barriers=stages),
    }
    outs = [jax.ShapeDtypeStruct((F,), dtype)]
    run = call(kernel, outs, blocks, interpret, scratch, num_threads=2, thread_name="wg")
    return run(x_D, weights_FD.reshape(parts, F, D // WIDTH, WIDTH), *optional)[0]
