"""Layouts, loads and launches for Mosaic kernels that assign one row to each warp."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels._mosaic import Ref, Slice, kernel, plgpu

ROWS = 4
"""Rows per block of threads. Each warp owns one row, so that a sum over a row needs no shared memory."""
WIDTH = 128
"""Columns that a warp loads at once: four float32 (16 bytes) per thread, the maximum in jax 0.12."""


def call(
    body: Callable[..., None], outs: Sequence[jax.ShapeDtypeStruct], blocks: int, scratch: Sequence[pl.MemoryRef] = ()
) -> Callable[..., Sequence[Array]]:
    """Returns the function that runs a kernel on `blocks` blocks of threads along the grid axis `i`."""
    return kernel(body, outs, semantics="Lane", scratch_types=scratch, grid=(blocks,), grid_names=("i",))


def layout(columns: int = WIDTH // 32) -> Any:  # jax does not export the class
    """Returns the register layout of `ROWS` rows: one row per warp, `columns` adjacent columns per thread."""
    from jax.experimental.mosaic.gpu import fragmented_array

    tiling = fragmented_array.Tiling(((ROWS, 32 * columns), (columns,)))
    return plgpu().Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load_block(ref: Ref, *at: Slice) -> Array:
    """Loads `ROWS` rows, and optionally a slice of a multiple of `WIDTH` columns, as float32 in `layout`."""
    return laid_out(plgpu().load(ref.at[at], layout=layout(), optimized=False).astype(jnp.float32))


def load_columns(ref: Ref) -> Array:
    """Loads a vector with one element per column as float32."""
    return plgpu().load(ref, layout=layout().reduce(0), optimized=False).astype(jnp.float32)


def load_rows(ref: Ref) -> Array:
    """Loads a vector with one element for each of `ROWS` rows. Keeps its dtype."""
    return plgpu().load(ref, layout=layout().reduce(1), optimized=False)


def laid_out(values: Array) -> Array:
    return plgpu().layout_cast(values, layout())


def by_row(vector: Array, width: int) -> Array:
    """Broadcasts a vector with one element per row to [ROWS, width] in `layout`. The width is a multiple of `WIDTH`."""
    return laid_out(lax.broadcast_in_dim(plgpu().layout_cast(vector, layout().reduce(1)), (ROWS, width), (0,)))


def by_column(vector: Array) -> Array:
    """Broadcasts a vector with one element per column to [ROWS, columns] in `layout`."""
    return laid_out(lax.broadcast_in_dim(vector, (ROWS, *vector.shape), (1,)))
