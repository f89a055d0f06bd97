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
"""Rows of a warpgroup's matmul instruction (wgmma)."""
LINE = 128
"""Bytes in one line of swizzled shared memory."""


def plgpu() -> Any:  # Typed as Any: jax 0.10, which the type checker uses, exports fewer names of this module
    """Returns the module `jax.experimental.pallas.mosaic_gpu`."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def _device() -> Any:
    """Returns the abstract device of the current mesh, or JAX's first device if there is none."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def target() -> Device | None:
    """Returns the properties of the device that the program is compiled for, or None if `jgraph.device` does not list it."""
    return find(_device().device_kind)


def on_cpu() -> bool:
    """True if the target device is a CPU. Pallas' interpreter then runs the kernels, for tests."""
    return _device().platform == "cpu"


def has_mosaic() -> bool:
    """True if the target device runs Mosaic kernels that need no wgmma: Hopper or Blackwell, with jax 0.11 or newer."""
    device = target()
    return device is not None and device.capability >= (9, 0) and jax.__version_info__ >= (0, 11)


def has_wgmma() -> bool:
    """True if the target device runs kernels with wgmma, Hopper's matmul instruction."""
    device = target()
    return has_mosaic() and device is not None and device.capability == (9, 0)


def shared(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> Any:
    """Returns the type of a scratch array in shared memory that the tensor cores can read.

    Its tiles have 8 rows and `columns` columns. None stands for one line of `LINE` bytes.
    """
    size = jnp.dtype(dtype).itemsize
    columns = LINE // size if columns is None else columns
    layout = plgpu().TilingTransform((8, columns)), plgpu().SwizzleTransform(size * columns)
    return plgpu().SMEM(shape, dtype, transforms=layout)


def kernel(body: Callable[..., None], *, semantics: Literal["Lane", "Warpgroup"] = "Warpgroup", **options: Any) -> Any:
    """Returns `plgpu.kernel(body, **options)`, with roots and exponentials accurate to 2 float32 ulp.

    On a CPU, the kernel runs in Pallas' interpreter.
    """
    gpu = plgpu()
    params = gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics[semantics])
    return gpu.kernel(body, compiler_params=params, interpret=gpu.InterpretGPUParams() if on_cpu() else None, **options)


def products(*sums: Sequence[tuple[Any, Any]]) -> Sequence[Any]:
    """Computes one float32 array per argument: the sum of a @ b over its pairs (a, b) of arrays in shared memory.

    Issues all matmuls before the first wait.
    """

    def run(*accs: Any) -> list[Any]:
        for acc, pairs in zip(accs, sums, strict=True):
            for a, b in pairs:
                plgpu().wgmma(acc, a, b)
        return [acc[...] for acc in accs]

    return pl.run_scoped(run, *(plgpu().ACC((a.shape[0], b.shape[1]), jnp.float32) for (a, b), *_ in sums))


def add_product(accumulator: Any, a: Any, b: Any) -> Any:
    """Computes accumulator + a @ b in float32, with `a` in registers and `b` in shared memory."""
    if on_cpu():  # Pallas' interpreter supports neither run_state nor operands in registers
        return accumulator + lax.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu().wgmma(acc, a, b))(plgpu().ACC.init(accumulator))
