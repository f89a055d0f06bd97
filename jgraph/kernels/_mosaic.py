"""Device checks, shared memory layouts and tensor core products of the Mosaic GPU kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.device import Device, find

SLAB = 64
"""Rows that one instruction of a warpgroup multiplies."""
LINE = 128
"""Bytes of a line of shared memory."""


def plgpu() -> Any:  # jax 0.10 exports less of it, and the type checker runs with jax 0.10
    """Returns Pallas' module for Mosaic GPU."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def target() -> Device | None:
    """Returns the target device: the abstract device of the mesh in context, else jax's first. None if it is unknown."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return find((described or jax.devices()[0]).device_kind)


def has_mosaic() -> bool:
    """True if the target device runs Mosaic kernels without tensor cores: Hopper or Blackwell, with jax 0.11 or newer."""
    device = target()
    return device is not None and device.capability >= (9, 0) and jax.__version_info__ >= (0, 11)


def has_wgmma() -> bool:
    """True if the target device runs kernels that use Hopper's tensor core instructions."""
    device = target()
    return has_mosaic() and device is not None and device.capability == (9, 0)


def shared(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> Any:
    """Returns an array in shared memory that tensor cores can read, in tiles of `columns` or of a whole line."""
    size = jnp.dtype(dtype).itemsize
    columns = LINE // size if columns is None else columns
    layout = plgpu().TilingTransform((8, columns)), plgpu().SwizzleTransform(size * columns)
    return plgpu().SMEM(shape, dtype, transforms=layout)


def interpreted(interpret: bool) -> Any:
    """Returns the value of `interpret` for a Mosaic kernel."""
    return plgpu().InterpretGPUParams() if interpret else None


def sum_products(shape: tuple[int, int], add: Callable[[Any, Any], None], count: int) -> Any:
    """Returns the float32 sum of the products that `add(accumulator, i)` issues for each i below `count`."""

    def run(acc: Any) -> Any:
        for i in range(count):
            add(acc, i)
        return acc[...]

    return pl.run_scoped(run, plgpu().ACC(shape, jnp.float32))


def products(pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    """Returns a @ b.T in float32 for pairs of arrays in shared memory. All products are issued before the first wait."""

    def run(*accs: Any) -> list[Any]:
        for acc, (a, b) in zip(accs, pairs, strict=True):
            plgpu().wgmma(acc, a, b.transpose((1, 0)))
        return [acc[...] for acc in accs]

    return pl.run_scoped(run, *(plgpu().ACC((a.shape[0], b.shape[0]), jnp.float32) for a, b in pairs))


def add_product(onto: Any, a: Any, b: Any, interpret: bool) -> Any:
    """Returns onto + a @ b in float32, with `a` in registers and `b` in shared memory."""
    if interpret:  # Pallas' interpreter supports neither run_state nor operands in registers
        return onto + lax.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu().wgmma(acc, a, b))(plgpu().ACC.init(onto))
