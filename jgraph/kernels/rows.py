"""Kernels over rows of which each warp has one: how an array lies over the threads, and how such a kernel is called."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.kernels._target import target

ROWS = 4
"""Of a block: a row is a warp's, so that sums over it need no shared memory."""
WIDTH = 128
"""Numbers that a warp loads at once: four a thread, 16 bytes of float32, which is as much as jax 0.12 allows."""


def has_kernels() -> bool:
    """Tells whether the device that is compiled for runs such kernels: Hopper or Blackwell, with jax 0.11 or newer."""
    device = target()
    return device is not None and device.capability >= (9, 0) and jax.__version_info__ >= (0, 11)


def call(
    kernel: Callable[..., None], outs: Sequence[jax.ShapeDtypeStruct], blocks: int, interpret: bool, scratch: Any = ()
) -> Any:
    """Returns the function that runs a kernel of so many blocks of a warpgroup, along the grid axis `i`."""
    return plgpu().kernel(
        kernel,
        out_type=tuple(outs),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("i",),
        # Of roots and exponentials: 2 units in the last place of float32.
        compiler_params=plgpu().CompilerParams(approx_math=True, lowering_semantics=plgpu().LoweringSemantics.Lane),
        interpret=plgpu().InterpretGPUParams() if interpret else None,
    )


def plgpu() -> Any:  # jax 0.10 has less of it, by which a type checker judges
    """Returns Pallas' module for Mosaic."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def layout() -> Any:
    """Returns how rows lie over a warpgroup's threads: each a warp's, four numbers side by side a thread."""
    from jax.experimental.mosaic.gpu import fragmented_array

    tiling = fragmented_array.Tiling(((ROWS, WIDTH), (WIDTH // 32,)))
    return plgpu().Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref: Any, *at: Any) -> Array:
    """Loads some rows, or some columns of them, as float32."""
    return laid_out(plgpu().load(ref.at[at], layout=layout(), optimized=False).astype(jnp.float32))


def laid_out(values: Array) -> Array:
    """Returns values in the layout."""
    return plgpu().layout_cast(values, layout())


def by_row(numbers: Array, shape: tuple[int, ...]) -> Array:
    """Returns a number a row, for every column of an array of that shape."""
    return laid_out(lax.broadcast_in_dim(plgpu().layout_cast(numbers, layout().reduce(1)), shape, (0,)))
