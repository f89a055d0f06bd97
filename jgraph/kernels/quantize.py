"""Casts an array to FP8, transposes it and computes its largest magnitude (amax), in one pass over the array.

Hopper's FP8 matmuls contract both operands over their last axis, so forward and backward need an array and its transpose. One
pass over bfloat16 reads 2 bytes and writes 1 + 1 bytes per element: 0.125 ms for 16384 x 8192 at the bandwidth of an H200.
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

from jgraph.errors import check_choice
from jgraph.kernels._check import chosen, require, require_scalar
from jgraph.kernels._mosaic import Ref, Slice, has_mosaic, kernel, plgpu
from jgraph.kernels.elementwise import IDENTITY, Computed, Elementwise
from jgraph.mesh import on_cpu

Want = Literal["both", "rows", "columns", "amax"]
_WRITTEN = {"both": ("rows", "columns"), "rows": ("rows",), "columns": ("columns",), "amax": ()}
_ALIGNED = 16
"""The copy engine and FP8 matmuls require multiples of 16 rows and columns."""


class RotatedBack(NamedTuple):
    """The gradient [M, (H + 2G) K] of a projection to queries, keys and values, which `cast_transpose` computes."""

    # The gradients of H query and G key heads of size K, rotated back to their values before the rotary embedding, and the
    # gradients of G value heads.
    dq: Array  # of the rotated queries, bfloat16 or float32 [M, H K]. A row is a token
    dk: Array  # of the rotated keys, [M, G K]
    dv: Array  # of the values, [M, G K]
    cos: Array  # of the angles of T positions and P = K/2 pairs, [T, P]. Row m has the position m modulo T
    sin: Array

    @property
    def head_size(self) -> int:
        return 2 * self.cos.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.dq.shape[0], sum(part.shape[1] for part in self[:3])

    def array(self) -> Array:
        """Computes the array in plain JAX, in the dtype of `dq`."""
        M, T, K = self.shape[0], self.cos.shape[0], self.head_size
        cos_T1P, sin_T1P = (table.astype(jnp.float32)[:, None] for table in (self.cos, self.sin))

        def back(dy_MN: Array) -> Array:
            dy_BTHK = dy_MN.reshape(M // T, T, -1, K).astype(jnp.float32)
            first, second = jnp.split(dy_BTHK, 2, axis=-1)
            rotated = first * cos_T1P + second * sin_T1P, second * cos_T1P - first * sin_T1P
            return jnp.concatenate(rotated, axis=-1).astype(dy_MN.dtype).reshape(dy_MN.shape)

        return jnp.concatenate([back(self.dq), back(self.dk), self.dv], axis=1)


class Quantized(NamedTuple):
    """A scaled matrix in FP8, the result of `cast_transpose`. The argument `want` selects `rows` and `columns`."""

    rows: Array | None  # FP8 [M, N]
    columns: Array | None  # FP8 [N, M], the transpose of `rows`
    amax: Array  # float32 scalar, largest magnitude before scaling; NaN if the array has a NaN


def cast_transpose(
    x_MN: Array | Computed | RotatedBack,  # of bfloat16 or float32. The kernel does not write the array of a function
    inverse_scale: Array,  # float32 scalar. The array is multiplied by it
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    want: Want = "both",
    implementation: str = "auto",
) -> Quantized:
    """Scales an array, clips it to the range of `dtype`, rounds it to nearest even, and transposes the result."""
    # Not differentiable. All implementations return the same bits for an array, except for the payload of a NaN.
    check_choice("dtype", jnp.dtype(dtype).name, ("float8_e4m3fn", "float8_e5m2"))
    check_choice("want", want, get_args(Want))
    if isinstance(x_MN, RotatedBack):
        name = chosen(implementation, has_kernel(), can_rotate(x_MN), "x_MN", x_MN.dq, "rows of T, a multiple of 128")
        return _JITTED[want](tuple(x_MN), inverse_scale, None, jnp.dtype(dtype), name)
    x = x_MN if isinstance(x_MN, Computed) else Computed(IDENTITY, (x_MN,))
    shape = _shape(x.inputs)
    aligned = len(shape) == 2 and all(size and size % _ALIGNED == 0 for size in shape)
    for part in x.inputs:
        broadcast = x.fn.inputs > 1 and part.ndim == 2 and part.shape in ((shape[0], 1), (1, shape[1]))
        whole = aligned and part.shape == shape
        require(broadcast or whole, "x_MN", part, f"[M, N] with M and N multiples of {_ALIGNED}; pad it")
        require(part.dtype in (jnp.bfloat16, jnp.float32), "x_MN", part, "bfloat16 or float32")
    require_scalar("inverse_scale", inverse_scale)
    must = f"[M, N] with multiples of {2 * _PAIRS} x {_WIDTH}"
    name = chosen(implementation, has_kernel(), _fits_tiles(shape), "x_MN", x.inputs[0], must)
    return _JITTED[want](x.inputs, inverse_scale, x.fn, jnp.dtype(dtype), name)


_NAMES: dict[Want, str] = {want: f"_jgraph_quantize_{want}" for want in get_args(Want)}
CALLS: dict[str, Want] = {**{name: want for want, name in _NAMES.items()}, "_jgraph_amax": "amax"}
"""Maps the names of the jitted functions, which identify their calls in a trace, to the results that they compute."""


def _jitted(name: str, want: Want) -> Callable[..., Quantized]:
    """Returns a jitted function. Without jit, jax 0.11 names and compiles every call of a kernel separately, a second each."""

    def run(inputs: tuple[Array, ...], inverse_scale: Array, fn: Elementwise | None, dtype: jnp.dtype, name: str) -> Quantized:
        x = RotatedBack(*inputs) if fn is None else Computed(fn, inputs)
        return (_mosaic if name == "mosaic" else _xla)(x, inverse_scale, dtype, want)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run, static_argnums=(2, 3, 4))


_JITTED: dict[Want, Callable[..., Quantized]] = {want: _jitted(name, want) for want, name in _NAMES.items()}


def choose(shape: tuple[int, ...]) -> str:
    """Returns the implementation that `cast_transpose` selects for `auto` and an array of this shape."""
    return "mosaic" if has_kernel() and _fits_tiles(shape) else "xla"


def can_rotate(x: RotatedBack) -> bool:
    """True if the kernel supports the sizes: T, which divides M, is a multiple of 128, and K of 64."""
    return x.shape[0] % x.cos.shape[0] == 0 and x.cos.shape[0] % (2 * _PAIRS) == 0 and x.head_size % _WIDTH == 0


def has_kernel() -> bool:
    """True if the target device runs the kernel of `cast_transpose`: Hopper or Blackwell, with jax 0.11 or newer."""
    # The Mosaic GPU of jax 0.10 cannot store the tiles of the kernel.
    return has_mosaic()


def cast(x: Array, inverse_scale: Array, dtype: DTypeLike) -> Array:
    """Casts an array of any shape to FP8 with XLA, to the same values as `cast_transpose(...).rows`."""
    # Without the barrier, XLA removes this conversion together with the inverse conversion.
    return lax.optimization_barrier(_quantize(x, inverse_scale, jnp.dtype(dtype)))


def _quantize(x: Array, inverse_scale: Array, dtype: jnp.dtype) -> Array:
    top = float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    # Infinities become NaN, so that clipping does not hide them.
    return jnp.where(jnp.isfinite(x), jnp.clip(x * inverse_scale, -top, top), jnp.nan).astype(dtype)


def _xla(x: Computed | RotatedBack, inverse_scale: Array, dtype: jnp.dtype, want: Want) -> Quantized:
    """XLA reads the array twice: for the amax and for the transpose."""
    x_MN = x.array() if isinstance(x, RotatedBack) else x.fn(*x.inputs)
    rows = cast(x_MN, inverse_scale, dtype)
    return Quantized(rows if "rows" in _WRITTEN[want] else None, rows.T if "columns" in _WRITTEN[want] else None, amax(x_MN))


def amax(x: Array) -> Array:
    """Computes the largest magnitude of a nonempty array in float32: NaN if it has a NaN. Its gradient is zero."""
    return _jgraph_amax(x)


@jax.jit
def _jgraph_amax(x: Array) -> Array:
    # The bits of nonnegative floats, read as integers, have the same order, with NaN as the largest. XLA's maximum of floats
    # may drop a NaN on a CPU.
    magnitudes = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(magnitudes), jnp.float32)


def _shape(inputs: Sequence[Array]) -> tuple[int, ...]:
    return max((x.shape for x in inputs), key=math.prod)


def _fits_tiles(shape: tuple[int, ...]) -> bool:
    # The copy engine skips a tile that is entirely outside the array, but does not clip a tile that is partly outside.
    return shape[0] % (2 * _PAIRS) == 0 and shape[1] % _WIDTH == 0


_PAIRS, _WIDTH, _TILES = 64, 64, 2
"""A block of threads processes two adjacent tiles of 64 pairs of rows by 64 columns.

Both take 64 KiB of shared memory in bfloat16. A multiprocessor holds three blocks: one computes while others load and store.
"""


class _ComputedTiles:
    """The tiles of a `Computed`."""

    width = _WIDTH

    def __init__(self, x: Computed):
        self.fn, self.inputs = x
        self.shape = _shape(x.inputs)
        # If the width is an odd number of tiles, the copy engine loads zeros for the tile outside the array, and does not store
        # it. Zeros do not change the amax, but a function of zeros may. A block therefore processes a function tile by tile.
        self.tiles = _TILES if x.fn == IDENTITY else 1
        M, N = self.shape
        self.whole = [x.shape == (M, N) for x in self.inputs]
        views: dict[Any, Any] = {(M, N): (M // 2, 2, N), (M, 1): (M // 2, 2), (1, N): (N,)}
        self.arrays = [x.reshape(views[x.shape]) for x in self.inputs]
        self.scratch = [plgpu().SMEM((self.tiles, 2, _PAIRS, _WIDTH), x.dtype) for x in self.inputs if x.shape == (M, N)]
        self.num_arrivals = 2 * len(self.scratch)
        self.num_barriers = self.tiles

    def load(self, refs: Sequence[Ref], scratch: Sequence[Ref], loaded: Ref, i: Array, j: Array) -> Callable[[int, int], Array]:
        """Starts the copies of all tiles of a block. Returns the function that computes the tile of a parity of rows."""
        gpu = plgpu()
        pairs = pl.ds(i * _PAIRS, _PAIRS)

        def columns(tile: int) -> Slice:
            return pl.ds((j * self.tiles + tile) * _WIDTH, _WIDTH)

        for tile in range(self.tiles):
            for x_H2N, x in zip((x for x, whole in zip(refs, self.whole, strict=True) if whole), scratch, strict=True):
                for parity in range(2):
                    gpu.copy_gmem_to_smem(x_H2N.at[pairs, parity, columns(tile)], x.at[tile, parity], loaded.at[tile])
        # Loaded before the wait for the tiles.
        layout = gpu.Layout.WGMMA
        vectors = {
            (which, tile, parity): gpu.load(x.at[pairs, parity], layout=layout.reduce(1), optimized=False)
            if len(x.shape) == 2
            else gpu.load(x.at[columns(tile)], layout=layout.reduce(0), optimized=False)
            for which, x in enumerate(refs)
            if not self.whole[which]
            for tile in range(self.tiles)
            for parity in range(2)
        }

        def operands(tile: int, parity: int) -> Iterator[Array]:
            tiled = iter(scratch)
            for which, x in enumerate(refs):
                if self.whole[which]:
                    found = next(tiled)[tile, parity]
                else:
                    along = (0,) if len(x.shape) == 2 else (1,)
                    found = lax.broadcast_in_dim(vectors[which, tile, parity], (_PAIRS, _WIDTH), along)
                yield gpu.layout_cast(found, layout)

        def value(tile: int, parity: int) -> Array:
            if parity == 0:
                gpu.barrier_wait(loaded.at[tile])
            return self.fn(*operands(tile, parity))

        return value


class _RotatedTiles:
    """The tiles of a `RotatedBack`. A block processes the two halves of a head."""

    tiles = 2
    num_barriers = 1
    num_arrivals = 8

    def __init__(self, x: RotatedBack):
        self.shape = x.shape
        self.width = x.head_size // 2
        self.heads = [part.shape[1] // x.head_size for part in x[:3]]
        self.positions = len(x.cos) // 2
        # Loads of float32 tables take as long as the gradients. FP8 rounds more than bfloat16.
        tables = [table.astype(jnp.bfloat16).reshape(self.positions, 2, self.width) for table in (x.cos, x.sin)]
        self.arrays = [*(part.reshape(part.shape[0] // 2, 2, part.shape[1]) for part in x[:3]), *tables]
        gpu = plgpu()
        self.scratch = [gpu.SMEM((2, 2, _PAIRS, self.width), x.dq.dtype)]
        self.scratch += [gpu.SMEM((2, _PAIRS, self.width), jnp.bfloat16)] * 2

    def load(self, refs: Sequence[Ref], scratch: Sequence[Ref], loaded: Ref, i: Array, j: Array) -> Callable[[int, int], Array]:
        gpu = plgpu()
        pairs = pl.ds(i * _PAIRS, _PAIRS)
        queries, keys, values = self.heads
        x, *tables = scratch
        starts = (0, queries, queries + keys, queries + keys + values)
        for part, first, stop in zip(refs[:3], starts[:-1], starts[1:], strict=True):

            @pl.when((j >= first) & (j < stop))
            def _(part: Ref = part, first: int = first) -> None:
                for tile in range(2):
                    columns = pl.ds(((j - first) * 2 + tile) * self.width, self.width)
                    for parity in range(2):
                        gpu.copy_gmem_to_smem(part.at[pairs, parity, columns], x.at[tile, parity], loaded.at[0])

        position = pl.ds(lax.rem(i * _PAIRS, self.positions), _PAIRS)
        for table, to in zip(refs[3:], tables, strict=True):
            for parity in range(2):
                gpu.copy_gmem_to_smem(table.at[position, parity], to.at[parity], loaded.at[0])
        rotates = (j < queries + keys).astype(jnp.float32)

        def value(tile: int, parity: int) -> Array:
            if (tile, parity) == (0, 0):
                gpu.barrier_wait(loaded.at[0])
            own, other, cos, sin = (
                gpu.layout_cast(ref[...], gpu.Layout.WGMMA).astype(jnp.float32)
                for ref in (x.at[tile, parity], x.at[1 - tile, parity], *(table.at[parity] for table in tables))
            )
            turned = other * sin
            return own + rotates * (own * (cos - 1.0) + (turned if tile == 0 else -turned))

        return value


def _mosaic(x: Computed | RotatedBack, inverse_scale: Array, dtype: jnp.dtype, want: Want) -> Quantized:
    """Transposes pairs of rows as 16-bit numbers, because Hopper cannot transpose bytes."""
    gpu = plgpu()
    source = _RotatedTiles(x) if isinstance(x, RotatedBack) else _ComputedTiles(x)
    (M, N), tiles, width = source.shape, source.tiles, source.width
    H = M // 2
    grid = (pl.cdiv(H, _PAIRS), pl.cdiv(N, width * tiles))
    out_type = {"amax": jax.ShapeDtypeStruct(grid, jnp.float32)}
    scratch: dict[str, Any] = {"xs": source.scratch}
    scratch["loaded"] = gpu.Barrier(num_arrivals=source.num_arrivals, num_barriers=source.num_barriers)
    packed = {"rows": ((H, 2, N), dtype, (2, _PAIRS, width)), "columns": ((N, H), jnp.uint16, (width, _PAIRS))}
    for name in _WRITTEN[want]:
        shape, written, tile = packed[name]
        scratch[name] = gpu.SMEM((tiles, *tile), written)
        out_type[name] = jax.ShapeDtypeStruct(shape, written)

    def cast_transpose(*refs: Ref, xs: Sequence[Ref], loaded: Ref, rows: Ref | None = None, columns: Ref | None = None) -> None:
        inputs, (scale, *others) = refs[: len(source.arrays)], refs[len(source.arrays) :]
        out = dict(zip(out_type, others, strict=True))
        i, j = lax.axis_index("i"), lax.axis_index("j")
        pairs = pl.ds(i * _PAIRS, _PAIRS)
        value = source.load(inputs, xs, loaded, i, j)
        factor = scale[0]
        amax: Any = None
        for tile in range(tiles):
            halves = []
            for parity in range(2):
                values = value(tile, parity)
                largest = jnp.max(jnp.abs(values), axis=1)
                amax = largest if amax is None else jnp.maximum(amax, largest)
                # The compiled conversion saturates, so only the interpreter must clip. The second term turns infinity into NaN.
                quantized = _quantize(values, factor, dtype) if on_cpu() else (values * factor + values * 0.0).astype(dtype)
                if rows is not None:
                    rows[tile, parity] = quantized
                halves.append(lax.bitcast_convert_type(quantized, jnp.uint8).astype(jnp.uint16))
            if columns is not None:
                # A thread holds both rows of a pair, because even and odd rows are separate tiles.
                pair = halves[0] | (halves[1] << 8)
                columns.at[tile].T[...] = gpu.layout_cast(pair, gpu.Layout.WGMMA_TRANSPOSED)
            gpu.commit_smem()
            own = pl.ds((j * tiles + tile) * width, width)
            if rows is not None:
                for parity in range(2):
                    gpu.copy_smem_to_gmem(rows.at[tile, parity], out["rows"].at[pairs, parity, own])
            if columns is not None:
                gpu.copy_smem_to_gmem(columns.at[tile], out["columns"].at[own, pairs])
        # The amax of each block, reduced after the kernel. A single amax would need an initialization and atomics.
        out["amax"][i, j] = jnp.max(amax)
        gpu.wait_smem_to_gmem(0)

    found = kernel(
        cast_transpose,
        tuple(out_type.values()),
        scratch_types=scratch,
        grid=grid,
        grid_names=("i", "j"),
    )(*source.arrays, inverse_scale.reshape(1))
    out = dict(zip(out_type, found, strict=True))
    quantized = out["rows"].reshape(M, N) if "rows" in out else None
    transposed = lax.bitcast_convert_type(out["columns"], dtype).reshape(N, M) if "columns" in out else None
    return Quantized(quantized, transposed, amax(out["amax"]))
