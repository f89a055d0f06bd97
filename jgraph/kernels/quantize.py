"""Cast to FP8, transpose and take the largest magnitude, in one pass over the array.

An FP8 product of Hopper contracts both operands over their last axis, so forward and backward read an array and its transpose.
By bytes one pass over bfloat16 reads 2 and writes 1 + 1 an element: 0.125 ms for 16384 x 8192 on an H200.
"""

# M rows, N columns, H pairs of rows

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels.elementwise import IDENTITY, Computed, Elementwise
from jgraph.kernels._target import target

Want = Literal["both", "rows", "columns", "amax"]
_WRITTEN = {"both": ("rows", "columns"), "rows": ("rows",), "columns": ("columns",), "amax": ()}
_ALIGNED = 16
"""Rows and columns are multiples of it: so the copy engine wants its rows of bytes, and so FP8 products want their sizes."""


class Quantized(NamedTuple):
    """An array in FP8, multiplied by a scale first.

    Attributes:
        rows: the array, M x N; None if it was not asked for.
        columns: its transpose, N x M; None if it was not asked for.
        amax: float32, the largest magnitude before it was scaled; NaN if there is a NaN.
    """

    rows: Array | None
    columns: Array | None
    amax: Array


class Slot(NamedTuple):
    """A place in pools of arrays, known at run time.

    Attributes:
        rows: FP8 [S, M, N]; None where rows are not wanted.
        columns: FP8 [S, N, M]; None where columns are not wanted.
        number: int32 scalar in [0, S), which slot.
    """

    rows: Array | None
    columns: Array | None
    number: Array


def cast_transpose(
    x_MN: Array | Computed,
    inverse_scale: Array,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    want: Want = "both",
    into: Slot | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> Quantized:
    """Multiplies an array by a scale, clips it to what `dtype` can hold, rounds to nearest even, and transposes the result.

    Every implementation gives the same bits, except that of a NaN only this is said, that it stays one.

    Args:
        x_MN: bfloat16 or float32; both sizes are multiples of 16. Of a `Computed` so are its inputs; it is computed in float32
            and never written, and rounded as its operations are.
        inverse_scale: float32 scalar to multiply by.
        dtype: float8_e4m3fn or float8_e5m2.
        want: what of the result is read: `both`, `rows`, `columns`, or no more than the `amax`.
        into: where to write; the result then has the pools. In a jitted function that donates them nothing is copied.
        implementation: `mosaic` (Hopper, Blackwell; jax 0.11 or newer; M a multiple of 128, N of 64), `xla` (anywhere), or
            `auto`, which takes the first of them that can.
        interpret: runs a kernel's body on the CPU, for tests.

    Raises:
        ConfigError: there is no such dtype, `want` or implementation.
        ShapeError: `x_MN` or `inverse_scale` has a shape or dtype that is not allowed.
    """
    fn, inputs = x_MN if isinstance(x_MN, Computed) else (IDENTITY, (x_MN,))
    check_choice("dtype", jnp.dtype(dtype).name, ("float8_e4m3fn", "float8_e5m2"))
    check_choice("want", want, get_args(Want))
    check_choice("implementation", implementation, ("auto", *_IMPLEMENTATIONS))
    shape = _shape(inputs)
    for x in inputs:
        broadcast = len(inputs) > 1 and x.ndim == 2 and x.shape in ((shape[0], 1), (1, shape[1]))
        if not broadcast and (x.shape != shape or len(shape) != 2 or any(size % _ALIGNED or not size for size in shape)):
            raise ShapeError(f"`x_MN` is {x.shape}: must have two sizes, multiples of {_ALIGNED}; pad it", field="x_MN")
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            raise ShapeError(f"`x_MN` is {x.dtype}: must be bfloat16 or float32", field="x_MN")
    if inverse_scale.shape != () or inverse_scale.dtype != jnp.float32:
        message = f"`inverse_scale` is {inverse_scale.dtype}{list(inverse_scale.shape)}: must be a float32 scalar"
        raise ShapeError(message, field="inverse_scale")
    if into is not None:
        _check_slot(into, shape, jnp.dtype(dtype), want)
    chosen = choose(shape) if implementation == "auto" else implementation
    if chosen == "mosaic" and not _fits_tiles(shape):
        allowed = f"multiples of {2 * _PAIRS} x {_WIDTH}"
        message = f"`x_MN` is {shape}: must be {allowed} for `implementation` mosaic; pad it, or take auto"
        raise ShapeError(message, field="x_MN")
    return _JITTED[want](inputs, inverse_scale, fn, jnp.dtype(dtype), chosen, interpret, into)


def _check_slot(into: Slot, shape: tuple[int, ...], dtype: jnp.dtype, want: Want) -> None:
    shapes = {"rows": shape, "columns": shape[::-1]}
    for name in shapes:
        pool, wanted = getattr(into, name), name in _WRITTEN[want]
        if not wanted if pool is None else wanted and pool.shape[1:] == shapes[name] and pool.dtype == dtype:
            continue
        found = "None" if pool is None else f"{pool.dtype}{list(pool.shape)}"
        must = f"{dtype.name} of shape (S, {shapes[name][0]}, {shapes[name][1]})" if wanted else "None"
        raise ShapeError(f"`into.{name}` is {found}: must be {must} for `want` {want}", field="into")
    if into.number.shape != () or into.number.dtype != jnp.int32:
        message = f"`into.number` is {into.number.dtype}{list(into.number.shape)}: must be an int32 scalar"
        raise ShapeError(message, field="into")


_NAMES: dict[Want, str] = {want: f"_jgraph_quantize_{want}" for want in get_args(Want)}
CALLS: dict[str, Want] = {**{name: want for want, name in _NAMES.items()}, "_jgraph_amax": "amax"}
"""Names of the jitted functions, by which their calls are found in a trace, and what is wanted of each."""


def _jitted(name: str, want: Want) -> Callable[..., Quantized]:
    """Returns one function of the program for all calls: jax 0.11 gives every call of a kernel a name of its own, and compiles
    each for a second."""

    def run(
        inputs: tuple[Array, ...],
        inverse_scale: Array,
        fn: Elementwise,
        dtype: jnp.dtype,
        implementation: str,
        interpret: bool,
        into: Slot | None,
    ) -> Quantized:
        return _IMPLEMENTATIONS[implementation](fn, inputs, inverse_scale, dtype, want, interpret, into)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run, static_argnums=(2, 3, 4, 5))


_JITTED: dict[Want, Callable[..., Quantized]] = {want: _jitted(name, want) for want, name in _NAMES.items()}


def choose(shape: tuple[int, ...]) -> str:
    """Returns the implementation for an array on the device that is compiled for."""
    return "mosaic" if has_kernel() and _fits_tiles(shape) else "xla"


def has_kernel() -> bool:
    """Returns if the device that is compiled for has a kernel."""
    device = target()
    # Mosaic of jax 0.10 finds no way to store these tiles.
    return device is not None and device.has_fp8 and device.capability >= (9, 0) and jax.__version_info__ >= (0, 11)


def bytes_moved(x_MN: Any, want: Want = "both") -> int:
    """Returns how many bytes one pass over an array must read and write."""
    return x_MN.size * (x_MN.dtype.itemsize + len(_WRITTEN[want]))


def cast(x: Array, inverse_scale: Array, dtype: DTypeLike) -> Array:
    """Returns what `cast_transpose` has as rows, of an array of any shape, by XLA."""
    # Without the barrier XLA takes this conversion and the one back for one of excess precision, and leaves both out.
    return lax.optimization_barrier(_quantize(x, inverse_scale, jnp.dtype(dtype)))


def _quantize(x: Array, inverse_scale: Array, dtype: jnp.dtype) -> Array:
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * inverse_scale, -top, top).astype(dtype)


def _xla(
    fn: Elementwise,
    inputs: tuple[Array, ...],
    inverse_scale: Array,
    dtype: jnp.dtype,
    want: Want,
    interpret: bool,
    into: Slot | None,
) -> Quantized:
    """The reference. XLA takes two passes over the array: one for the amax, and transposes what is rounded in another."""
    x_MN = fn(*inputs)
    quantized = cast(x_MN, inverse_scale, dtype)
    rows = quantized if "rows" in _WRITTEN[want] else None
    columns = quantized.T if "columns" in _WRITTEN[want] else None
    if into is not None:
        rows, columns = (
            None if new is None else lax.dynamic_update_index_in_dim(pool, new, into.number, 0)
            for pool, new in ((into.rows, rows), (into.columns, columns))
        )
    return Quantized(rows, columns, amax(x_MN))


def amax(x: Array) -> Array:
    """Returns the largest magnitude in float32, NaN if there is a NaN, by XLA."""
    return _jgraph_amax(x)


@jax.jit
def _jgraph_amax(x: Array) -> Array:
    # As integers they have the same order, and a NaN is the largest: XLA's maximum of floats on a CPU may lose one.
    magnitudes = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(magnitudes), jnp.float32)


def _shape(inputs: Sequence[Array]) -> tuple[int, ...]:
    return max((x.shape for x in inputs), key=math.prod)


def _fits_tiles(shape: tuple[int, ...]) -> bool:
    # The copy engine cuts off whole tiles outside of the array, and no part of one.
    return shape[0] % (2 * _PAIRS) == 0 and shape[1] % _WIDTH == 0


_PAIRS, _WIDTH, _TILES = 64, 64, 2
"""A block of threads takes tiles of 64 pairs of rows by 64 columns, two of them side by side.

Of bfloat16 that is 64 KiB of shared memory, so a multiprocessor holds three blocks: while one computes, others load and store.
"""


def _mosaic(
    fn: Elementwise,
    inputs: tuple[Array, ...],
    inverse_scale: Array,
    dtype: jnp.dtype,
    want: Want,
    interpret: bool,
    into: Slot | None,
) -> Quantized:
    """Transposes 16-bit pairs, since Hopper has no way to transpose bytes.

    A thread has both rows of a pair, and puts their bytes side by side into one number; the transpose of these numbers is the
    transpose of the bytes. So even and odd rows are loaded as tiles of their own. Where the width is an odd number of tiles,
    the copy engine loads zeros for the tile beside the array, which change no amax, and stores nothing. A function of zeros
    may change it, so then tiles do not come in twos.
    """
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # jax 0.10 has less of it, by which a type checker judges
    (M, N), tiles = _shape(inputs), _TILES if fn == IDENTITY else 1
    WGMMA = plgpu.Layout.WGMMA
    H = M // 2
    grid = (pl.cdiv(H, _PAIRS), pl.cdiv(N, _WIDTH * tiles))
    out_type: dict[str, Any] = {"amax": jax.ShapeDtypeStruct(grid, jnp.float32)}
    scratch: dict[str, Any] = {
        "xs": [plgpu.SMEM((tiles, 2, _PAIRS, _WIDTH), x.dtype) for x in inputs if x.shape == (M, N)],
    }
    scratch["loaded"] = plgpu.Barrier(num_arrivals=2 * len(scratch["xs"]), num_barriers=tiles)
    pools: dict[str, Any] = {}  # references, which are written in place
    if "rows" in _WRITTEN[want]:
        if into is None:
            out_type["rows"] = jax.ShapeDtypeStruct((H, 2, N), dtype)
        else:
            assert into.rows is not None
            pools["rows"] = jax.new_ref(into.rows.reshape(-1, H, 2, N))
        scratch["rows"] = plgpu.SMEM((tiles, 2, _PAIRS, _WIDTH), dtype)
    if "columns" in _WRITTEN[want]:
        if into is None:
            out_type["columns"] = jax.ShapeDtypeStruct((N, H), jnp.uint16)
        else:
            assert into.columns is not None
            pools["columns"] = jax.new_ref(lax.bitcast_convert_type(into.columns.reshape(-1, N, H, 2), jnp.uint16))
        scratch["columns"] = plgpu.SMEM((tiles, _WIDTH, _PAIRS), jnp.uint16)

    def cast_transpose(*refs: Any, xs: Any, loaded: Any, rows: Any = None, columns: Any = None):
        whole, (scale, *others) = refs[: len(inputs)], refs[len(inputs) :]
        slot = () if into is None else (others.pop(0)[0],)
        out = dict(zip((*pools, *out_type), others, strict=True))
        i, j = lax.axis_index("i"), lax.axis_index("j")
        pairs = pl.ds(i * _PAIRS, _PAIRS)

        def width(tile: int) -> Any:
            return pl.ds((j * tiles + tile) * _WIDTH, _WIDTH)

        for tile in range(tiles):
            for x_H2N, x in zip((x for x in whole if x.shape == (H, 2, N)), xs, strict=True):
                for parity in range(2):
                    plgpu.copy_gmem_to_smem(x_H2N.at[pairs, parity, width(tile)], x.at[tile, parity], loaded.at[tile])

        # Before anything waits for the tiles.
        vectors = {
            (which, tile, parity): plgpu.load(x.at[pairs, parity], layout=WGMMA.reduce(1), optimized=False)
            if x.shape == (H, 2)
            else plgpu.load(x.at[width(tile)], layout=WGMMA.reduce(0), optimized=False)
            for which, x in enumerate(whole)
            if x.shape != (H, 2, N)
            for tile in range(tiles)
            for parity in range(2)
        }

        def operands(tile: int, parity: int) -> Iterator[Any]:
            tiled = iter(xs)
            for which, x in enumerate(whole):
                if x.shape == (H, 2, N):
                    found = next(tiled)[tile, parity]
                else:
                    along = (0,) if x.shape == (H, 2) else (1,)
                    found = lax.broadcast_in_dim(vectors[which, tile, parity], (_PAIRS, _WIDTH), along)
                yield plgpu.layout_cast(found, WGMMA)

        factor = scale[0]
        amax = None
        for tile in range(tiles):
            plgpu.barrier_wait(loaded.at[tile])
            halves = []
            for parity in range(2):
                values = fn(*operands(tile, parity))
                largest = jnp.max(jnp.abs(values), axis=1)
                amax = largest if amax is None else jnp.maximum(amax, largest)
                # What is compiled clips by itself.
                quantized = _quantize(values, factor, dtype) if interpret else (values * factor).astype(dtype)
                if rows is not None:
                    rows[tile, parity] = quantized
                halves.append(lax.bitcast_convert_type(quantized, jnp.uint8).astype(jnp.uint16))
            if columns is not None:
                pair = halves[0] | (halves[1] << 8)
                columns.at[tile].T[...] = plgpu.layout_cast(pair, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            if rows is not None:
                for parity in range(2):
                    plgpu.copy_smem_to_gmem(rows.at[tile, parity], out["rows"].at[*slot, pairs, parity, width(tile)])
            if columns is not None:
                plgpu.copy_smem_to_gmem(columns.at[tile], out["columns"].at[*slot, width(tile), pairs])
        assert amax is not None
        # One number a block, and the largest of them after the kernel: nothing to set to zero before it, no atomics in it.
        out["amax"][i, j] = jnp.max(amax)
        plgpu.wait_smem_to_gmem(0)

    def laid_out(x: Array) -> Array:
        return x.reshape(H, 2, N) if x.shape == (M, N) else x.reshape(H, 2) if x.shape == (M, 1) else x.reshape(N)

    found = plgpu.kernel(
        cast_transpose,
        out_type=tuple(out_type.values()),
        scratch_types=scratch,
        grid=grid,
        grid_names=("i", "j"),
        # Of exp: 2 units in the last place of float32.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*map(laid_out, inputs), inverse_scale.reshape(1), *([] if into is None else [into.number.reshape(1)]), *pools.values())
    out = dict(zip(out_type, found, strict=True)) | {name: pool[...] for name, pool in pools.items()}
    lead = () if into is None else (-1,)
    quantized = out["rows"].reshape(*lead, M, N) if "rows" in out else None
    transposed = lax.bitcast_convert_type(out["columns"], dtype).reshape(*lead, N, M) if "columns" in out else None
    return Quantized(quantized, transposed, amax(out["amax"]))


_IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla}
