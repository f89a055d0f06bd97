"""Device checks, shared memory layouts and tensor core products of the Mosaic GPU kernels."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.device import Device, find
from jgraph.mesh import is_whole, on_cpu, target_device

SLAB = 64
"""Rows of a warpgroup's matmul instruction (wgmma)."""
LINE = 128
"""Bytes in one line of swizzled shared memory."""

Ref: TypeAlias = jax.Ref
"""A reference inside of a kernel: to an array in memory, to an accumulator or to barriers, or a part of one, by `at`."""
Slice: TypeAlias = slice | pl.Slice
"""A range of indices, from `pl.ds`. Its start may be computed in the kernel."""


def plgpu() -> ModuleType:  # not imported at the top: jax 0.10, which the type checker uses, exports fewer names
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def target() -> Device | None:
    """Returns the properties of the device that the program is compiled for, or None if `jgraph.device` does not list it."""
    return find(target_device().device_kind)


def has_mosaic() -> bool:
    """True if the target device runs Mosaic kernels that need no wgmma: Hopper or Blackwell, with jax 0.11 or newer."""
    device = target()
    # XLA would gather the arguments of a kernel in a function that it partitions.
    return is_whole() and device is not None and device.capability >= (9, 0) and jax.__version_info__ >= (0, 11)


def has_wgmma() -> bool:
    """True if the target device runs kernels with wgmma, Hopper's matmul instruction."""
    device = target()
    return has_mosaic() and device is not None and device.capability == (9, 0)


def shared(shape: tuple[int, ...], dtype: DTypeLike, columns: int | None = None) -> pl.MemoryRef:
    """Returns the type of a scratch array in shared memory that the tensor cores can read: tiled and swizzled."""
    size = jnp.dtype(dtype).itemsize
    # A tile has 8 rows, and by default as many columns as fit into a line.
    columns = LINE // size if columns is None else columns
    layout = plgpu().TilingTransform((8, columns)), plgpu().SwizzleTransform(size * columns)
    return plgpu().SMEM(shape, dtype, transforms=layout)


def kernel(
    body: Callable[..., None],  # of references to inputs, results and scratch arrays; called while the kernel is traced
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    semantics: Literal["Lane", "Warpgroup"] = "Warpgroup",  # executes an operation of the body: a thread or 128 of them
    **options: Any,  # of `jax.experimental.pallas.mosaic_gpu.kernel`
) -> Callable[..., Sequence[Array]]:
    """Returns the function that runs a Mosaic GPU kernel. On a CPU, it runs the kernel in Pallas' interpreter."""
    gpu = plgpu()
    # Roots and exponentials are accurate to 2 float32 ulp.
    params = gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics[semantics])
    interpret = gpu.InterpretGPUParams() if on_cpu() else None
    return gpu.kernel(body, out_type=tuple(outs), compiler_params=params, interpret=interpret, **options)


def store(ref: Ref, values: Array) -> None:
    """Stores an array of any register layout, inside of a kernel."""
    if hasattr(plgpu(), "store"):  # jax 0.12, where an assignment refuses stores of less than 128 bytes
        plgpu().store(ref, values, optimized=False)
    else:
        ref[...] = values


def transposed(ref: Ref) -> Ref:
    return ref.T  # pyright: ignore[reportAttributeAccessIssue]  # jax's class lacks a method that its traced references have


def products(*sums: Sequence[tuple[Ref, Ref]]) -> Sequence[Array]:
    """Returns the sum of a @ b over the pairs of each argument, float32 in registers. Operands are in shared memory."""

    def run(*accs: Ref) -> list[Array]:
        # All matmuls are issued before the first wait.
        for acc, pairs in zip(accs, sums, strict=True):
            for a, b in pairs:
                plgpu().wgmma(acc, a, b)
        return [acc[...] for acc in accs]

    return pl.run_scoped(run, *(plgpu().ACC((a.shape[0], b.shape[1]), jnp.float32) for (a, b), *_ in sums))


def add_product(accumulator: Array, a: Array, b: Ref) -> Array:
    """Computes accumulator + a @ b on the tensor cores in float32, inside of a kernel. `a` and `b` are bfloat16."""
    if on_cpu():  # Pallas' interpreter supports neither run_state nor operands in registers
        return accumulator + lax.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda acc: plgpu().wgmma(acc, a, b))(plgpu().ACC.init(accumulator))
