"""Device checks, shared memory layouts and tensor core products of the Mosaic GPU kernels."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

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


def _device() -> Any:
    """Returns the abstract device of the mesh in context, else jax's first device."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def target() -> Device | None:
    """Returns the description of the target device. None if it is unknown."""
    return find(_device().device_kind)


def on_cpu() -> bool:
    """True if the target device is a CPU. Pallas' interpreter runs the kernels there, for tests."""
    return _device().platform == "cpu"


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


def kernel(body: Callable[..., None], *, semantics: Literal["Lane", "Warpgroup"] = "Warpgroup", **how: Any) -> Any:
    """Returns `plgpu.kernel(body, **how)`, with roots and exponentials accurate to 2 units in the last place of float32."""
    gpu = plgpu()
    params = gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics[semantics])
    return gpu.kernel(body, compiler_params=params, interpret=gpu.InterpretGPUParams() if on_cpu() else None, **how)


def products(*sums: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
    """Returns for each argument the float32 sum of a @ b over its pairs (a, b) of arrays in shared memory.

    All products are issued before the first wait.
    """

    def run(*accs: Any) -> list[Any]:
        for acc, pairs in zip(accs, sums, strict=True):
            for a, b in pairs:
                plgpu().wgmma(acc, a, b)
        return [acc[...] for acc in accs]

    return pl.run_scoped(run, *(plgpu().ACC((a.shape[0], b.shape[1]), jnp.float32) for (a, b), *_ in sums))


def add_product(onto: Any, a: Any, b: Any) -> Any:
    """Returns onto + a @ b in float32, with `a` in registers and `b` in shared memory."""
    if on_cpu():  # Pallas' interpreter supports neither run_state nor operands in registers
        return onto + lax.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu().wgmma(acc, a, b))(plgpu().ACC.init(onto))
