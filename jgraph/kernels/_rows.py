"""Layout and call of Mosaic kernels with one row per warp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.kernels._mosaic import kernel, plgpu

ROWS = 4
"""Rows of a block. Each is a warp's, so that sums over a row need no shared memory."""
WIDTH = 128
"""Columns that a warp loads at once: four a thread, 16 bytes of float32, the most that jax 0.12 allows."""


def call(body: Callable[..., None], outs: Sequence[jax.ShapeDtypeStruct], blocks: int, scratch: Any = ()) -> Any:
    """Returns the function that runs a kernel on `blocks` blocks of threads along the grid axis `i`.

    Args:
        body: Body of the kernel.
        outs: Shapes of its results.
        blocks: Size of the grid.
        scratch: Its buffers and barriers.

    Returns:
        A function of the kernel's arguments.
    """
    grid: Any = {"grid": (blocks,), "grid_names": ("i",)}
    return kernel(body, semantics="Lane", out_type=tuple(outs), scratch_types=scratch, **grid)


def layout() -> Any:
    """Returns the layout of rows over the threads of a warpgroup: a row per warp, four adjacent columns per thread."""
    from jax.experimental.mosaic.gpu import fragmented_array

    tiling = fragmented_array.Tiling(((ROWS, WIDTH), (WIDTH // 32,)))
    return plgpu().Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref: Any, *at: Any) -> Array:
    """Loads rows, or some of their columns, as float32."""
    return laid_out(plgpu().load(ref.at[at], layout=layout(), optimized=False).astype(jnp.float32))


def load_columns(ref: Any) -> Array:
    """Loads one number for each column, as float32."""
    return plgpu().load(ref, layout=layout().reduce(0), optimized=False).astype(jnp.float32)


def load_rows(ref: Any) -> Array:
    """Loads one number for each row."""
    return plgpu().load(ref, layout=layout().reduce(1), optimized=False)


def laid_out(values: Array) -> Array:
    """Casts rows to the layout."""
    return plgpu().layout_cast(values, layout())


def by_row(numbers: Array, width: int) -> Array:
    """Broadcasts one number for each row along `width` columns."""
    return laid_out(lax.broadcast_in_dim(plgpu().layout_cast(numbers, layout().reduce(1)), (ROWS, width), (0,)))


def by_column(numbers: Array) -> Array:
    """Broadcasts one number for each column to all rows."""
    return laid_out(lax.broadcast_in_dim(numbers, (ROWS, *numbers.shape), (1,)))
