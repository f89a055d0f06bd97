"""Products of groups of rows with a matrix each: the linear layers of a mixture of experts.

How many rows a group has is known on the device only. On Hopper one kernel serves all groups: each block of threads takes tiles
until none is left; one warpgroup of it copies operands into a ring of shared memory, two multiply what lies there.
"""

# M rows, sorted by group; G groups, K summed over, N columns

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels.target import target

CALLS = DOT, DGRAD, WGRAD = "_jgraph_grouped_dot", "_jgraph_grouped_dgrad", "_jgraph_grouped_wgrad"
"""Names of the jitted functions, by which a product and its two gradients are found in a trace."""

ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
"""Of a grouped product as a `ragged_dot_general`; then that of its dgrad and its wgrad."""
TURNED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def grouped_dot(
    x_MK: Array, weights_GKN: Array, sizes_G: Array, *, implementation: str = "auto", interpret: bool = False
) -> Array:
    """Multiplies the rows of each group with the group's matrix; sums in float32, the result in x's dtype.

    Differentiable by rows and weights.

    Args:
        x_MK: bfloat16 or float32; the rows of group 0 come first, then those of group 1.
        weights_GKN: one matrix a group, of x's dtype.
        sizes_G: int32, rows of each group; they may be zero. Rows beyond their sum give zeros.
        implementation: `mosaic` (Hopper; jax 0.11 or newer; bfloat16; M a multiple of 8, K and N of 64), `tiles` (plain jax,
            a loop over tiles of rows), `xla` (`lax.ragged_dot`, on an NVIDIA GPU a product of all rows with every matrix), or
            `auto`: on a GPU the first that can, elsewhere `xla`.
        interpret: runs a kernel's body on the CPU, for tests.

    Raises:
        ConfigError: there is no such implementation.
        ShapeError: shapes or dtypes are not allowed, or not by the implementation.
    """
    _check(implementation, sizes_G, x_MK=(x_MK, 2), weights_GKN=(weights_GKN, 3))
    (M, K), (G, rows, N) = x_MK.shape, weights_GKN.shape
    if (G, rows) != (sizes_G.size, K):
        raise ShapeError(f"`weights_GKN` is {weights_GKN.shape}: must be ({sizes_G.size}, {K}, N)", field="weights_GKN")
    if weights_GKN.dtype != x_MK.dtype:
        raise ShapeError(f"`weights_GKN` is {weights_GKN.dtype}: must be {x_MK.dtype} as `x_MK` is", field="weights_GKN")
    return _dot(x_MK, weights_GKN, sizes_G, _chosen(implementation, (M, K, N), x_MK.dtype), interpret)


def grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Multiplies the rows of dy with their group's transposed matrix: the gradient of the rows of `grouped_dot`."""
    (M, N), K = dy_MN.shape, weights_GKN.shape[1]
    return _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, choose((M, K, N), dy_MN.dtype), False)


def grouped_wgrad(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    *,
    dtype: DTypeLike,
    add_GKN: Array | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> Array:
    """Multiplies the transposed rows of each group with its rows of dy: the gradients of the weights of `grouped_dot`.

    Args:
        x_MK: bfloat16 or float32. Rows beyond the sum of the sizes do not count.
        dy_MN: of x's dtype; what stands in rows that do not count must be finite.
        sizes_G: int32, rows of each group; empty ones give zeros.
        dtype: of the result, bfloat16 or float32; float32 with `add_GKN`.
        add_GKN: float32, what the result is added onto. In a jitted function that donates it nothing is copied.
        implementation, interpret: as of `grouped_dot`.

    Raises:
        ConfigError: there is no such implementation or dtype.
        ShapeError: shapes or dtypes are not allowed, or not by the implementation.
    """
    _check(implementation, sizes_G, x_MK=(x_MK, 2), dy_MN=(dy_MN, 2))
    (M, K), N = x_MK.shape, dy_MN.shape[1]
    if dy_MN.shape[0] != M or dy_MN.dtype != x_MK.dtype:
        message = f"`dy_MN` is {dy_MN.dtype}{list(dy_MN.shape)}: must be {x_MK.dtype} of shape ({M}, N), as `x_MK` has it"
        raise ShapeError(message, field="dy_MN")
    dtype = jnp.dtype(dtype)
    check_choice("dtype", dtype.name, ("bfloat16", "float32") if add_GKN is None else ("float32",))
    shape = (sizes_G.size, K, N)
    if add_GKN is not None and (add_GKN.shape != shape or add_GKN.dtype != jnp.float32):
        message = f"`add_GKN` is {add_GKN.dtype}{list(add_GKN.shape)}: must be float32 of shape {shape}"
        raise ShapeError(message, field="add_GKN")
    return _jgraph_grouped_wgrad(
        x_MK, dy_MN, sizes_G, add_GKN, dtype, _chosen(implementation, (M, K, N), x_MK.dtype), interpret
    )


def choose(shape: tuple[int, int, int], dtype: DTypeLike) -> str:
    """Returns the implementation for M rows, K and N columns on the device that is compiled for."""
    device = target()
    if device is None:
        return "xla"
    return "mosaic" if device.capability == (9, 0) and jax.__version_info__ >= (0, 11) and _fits(shape, dtype) else "tiles"


def _fits(shape: tuple[int, int, int], dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16 and shape[0] % _ALIGNED == 0 and not any(size % _SWIZZLED for size in shape[1:])


def _chosen(implementation: str, shape: tuple[int, int, int], dtype: jnp.dtype) -> str:
    if implementation == "auto":
        return choose(shape, dtype)
    if implementation == "mosaic" and not _fits(shape, dtype):
        message = f"`x_MK` is {dtype} with M, K, N of {shape}: must be bfloat16 and multiples of {_ALIGNED}, {_SWIZZLED} and"
        raise ShapeError(f"{message} {_SWIZZLED} for `implementation` mosaic; pad them, or take auto", field="x_MK")
    return implementation


def _check(implementation: str, sizes_G: Array, **arrays: tuple[Array, int]) -> None:
    check_choice("implementation", implementation, ("auto", "mosaic", "tiles", "xla"))
    for name, (array, rank) in arrays.items():
        if array.ndim != rank or not array.size or array.dtype not in (jnp.bfloat16, jnp.float32):
            message = f"`{name}` is {array.dtype}{list(array.shape)}: must be bfloat16 or float32, not empty, of rank {rank}"
            raise ShapeError(message, field=name)
    if sizes_G.ndim != 1 or not sizes_G.size or sizes_G.dtype != jnp.int32:
        raise ShapeError(f"`sizes_G` is {sizes_G.dtype}{list(sizes_G.shape)}: must be int32 of rank 1", field="sizes_G")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G, implementation, interpret)


def _dot_forward(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Any:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G, implementation, interpret), (x_MK, weights_GKN, sizes_G)


def _dot_backward(implementation: str, interpret: bool, kept: tuple[Array, ...], dy_MN: Array) -> tuple[Any, ...]:
    x_MK, weights_GKN, sizes_G = kept
    dx_MK = _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, implementation, interpret)
    dw_GKN = _jgraph_grouped_wgrad(x_MK, dy_MN, sizes_G, None, weights_GKN.dtype, implementation, interpret)
    return dx_MK, dw_GKN, None


_dot.defvjp(_dot_forward, _dot_backward)


# jax 0.11 gives every call of a kernel a name of its own, and compiles each: so these are functions of the program.
@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def _jgraph_grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _product(x_MK, weights_GKN, sizes_G, implementation, interpret, transposed=False)


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def _jgraph_grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _product(dy_MN, weights_GKN, sizes_G, implementation, interpret, transposed=True)


def _product(x_MK: Array, weights: Array, sizes_G: Array, implementation: str, interpret: bool, *, transposed: bool) -> Array:
    if implementation == "mosaic":
        return _product_mosaic(x_MK, weights, sizes_G, transposed, interpret)
    return {"tiles": _product_tiles, "xla": _product_xla}[implementation](x_MK, weights, sizes_G, transposed)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation", "interpret"))
def _jgraph_grouped_wgrad(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    add_GKN: Array | None,
    dtype: jnp.dtype,
    implementation: str,
    interpret: bool,
) -> Array:
    if implementation == "mosaic":
        return _wgrad_mosaic(x_MK, dy_MN, sizes_G, add_GKN, dtype, interpret)
    dw_GKN = {"tiles": _wgrad_tiles, "xla": _wgrad_xla}[implementation](x_MK, dy_MN, sizes_G)
    return dw_GKN.astype(dtype) if add_GKN is None else add_GKN + dw_GKN


def _product_xla(x_MK: Array, weights: Array, sizes_G: Array, transposed: bool) -> Array:
    numbers = TURNED if transposed else ROWS
    return lax.ragged_dot_general(x_MK, weights, sizes_G, numbers, preferred_element_type=jnp.float32).astype(x_MK.dtype)


def _wgrad_xla(x_MK: Array, dy_MN: Array, sizes_G: Array) -> Array:
    return lax.ragged_dot_general(x_MK, dy_MN, sizes_G, SUMMED, preferred_element_type=jnp.float32)


class _Tiles(NamedTuple):
    """Tiles of rows, each of one group. Those of the group after the last are beyond the sum of the sizes.

    Attributes:
        group, first: int32[T], a tile's group and the first row of it, a multiple of `_ALIGNED`.
        begin, end: int32[T], which rows of it are the group's.
        total: int32, how many tiles there are; T is the most that there may be.
    """

    group: Array
    first: Array
    begin: Array
    end: Array
    total: Array


def _bounds(sizes_G: Array, M: int) -> tuple[Array, Array]:
    """Returns where groups begin and end, with one more for the rows beyond."""
    G = sizes_G.size
    # As sums over a mask XLA makes it one kernel.
    ends = jnp.sum(jnp.where(jnp.tri(G, dtype=bool), sizes_G, 0), axis=1, dtype=jnp.int32)
    ends = jnp.minimum(ends, M)
    ends = jnp.concatenate([ends, jnp.full((1,), M, jnp.int32)])
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]]), ends


def _tiles(sizes_G: Array, M: int, rows: int) -> _Tiles:
    G = sizes_G.size
    begin, end = _bounds(sizes_G, M)
    aligned = begin // _ALIGNED * _ALIGNED
    counts = jnp.where(end > begin, (end - aligned + rows - 1) // rows, 0)
    ends = jnp.sum(jnp.where(jnp.tri(G + 1, dtype=bool), counts, 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange((M + (_ALIGNED - 1) * (G + 1)) // rows + G + 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, G)
    first = aligned[group] + (tile - (ends - counts)[group]) * rows
    begin, end = jnp.maximum(begin[group], first), jnp.minimum(end[group], first + rows)
    return _Tiles(group, first, begin, end, ends[-1])


_ROWS = 256
"""Rows of a tile of the loop."""


def _product_tiles(x_MK: Array, weights: Array, sizes_G: Array, transposed: bool) -> Array:
    """One product a tile, in a loop: at most twice the least work where groups have as many rows as a tile or more."""
    (M, _), G = x_MK.shape, sizes_G.size
    tiles = _tiles(sizes_G, M, _ROWS)
    x = jnp.pad(x_MK, ((0, _ROWS), (0, 0)))
    y = jnp.zeros((M + _ROWS, weights.shape[1 if transposed else 2]), x.dtype)

    def step(tile: Array, y: Array) -> Array:
        group, first, begin, end = (part[tile] for part in tiles[:4])
        weight = weights[jnp.minimum(group, G - 1)]
        new = jnp.dot(
            lax.dynamic_slice_in_dim(x, first, _ROWS), weight.T if transposed else weight, preferred_element_type=jnp.float32
        ).astype(y.dtype)
        row = first + jnp.arange(_ROWS)[:, None]
        new = jnp.where((row >= begin) & (row < end) & (group < G), new, lax.dynamic_slice_in_dim(y, first, _ROWS))
        return lax.dynamic_update_slice_in_dim(y, new, first, 0)

    return lax.fori_loop(0, tiles.group.size, step, y)[:M]


def _wgrad_tiles(x_MK: Array, dy_MN: Array, sizes_G: Array) -> Array:
    M, G = x_MK.shape[0], sizes_G.size
    tiles = _tiles(sizes_G, M, _ROWS)
    x, dy = (jnp.pad(array, ((0, _ROWS), (0, 0))) for array in (x_MK, dy_MN))

    def step(tile: Array, dw: Array) -> Array:
        group, first, begin, end = (part[tile] for part in tiles[:4])
        row = first + jnp.arange(_ROWS)[:, None]
        part = jnp.where((row >= begin) & (row < end) & (group < G), lax.dynamic_slice_in_dim(x, first, _ROWS), 0)
        new = jnp.dot(part.T, lax.dynamic_slice_in_dim(dy, first, _ROWS), preferred_element_type=jnp.float32)
        return dw.at[jnp.minimum(group, G - 1)].add(new)

    return lax.fori_loop(0, tiles.group.size, step, jnp.zeros((G, x.shape[1], dy.shape[1]), jnp.float32))


_ALIGNED, _SWIZZLED, _SLAB = 8, 64, 64
"""The copy engine takes rows in eights and columns in lines of 128 bytes; an instruction of a warpgroup multiplies 64 rows."""
_BLOCKS = 132
"""Blocks of threads, one a multiprocessor of an H100 or H200."""


class Shape(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        rows, columns: of the tile that a warpgroup multiplies.
        split: what two warpgroups take: `rows` or `columns` of one tile, or a tile each, so that one multiplies while the other
            stores.
        stages: places of the ring, or of the two rings where each takes tiles of its own.
    """

    rows: int = 64
    columns: int = 256
    split: Literal["rows", "columns", "tiles"] = "rows"
    stages: int = 4

    @property
    def tile(self) -> tuple[int, int]:
        """Returns rows and columns of a tile."""
        return self.rows * (1 + (self.split == "rows")), self.columns * (1 + (self.split == "columns"))


_PRODUCT = Shape(64, 256, "rows", 4)
_WGRAD = Shape(64, 256, "rows", 4)


class _Work(NamedTuple):
    """A tile's operands and what becomes of it, for `_persistent`.

    Attributes:
        steps: int32, products that it is the sum of.
        rows, columns: int32, how much of the warpgroup's own tile counts.
        load: starts the copies of a step into a place of the ring.
        finish: stores a warpgroup's accumulator.
        mask: sets rows of a step that do not count to zero, in shared memory, for a warpgroup.
    """

    steps: Any
    rows: Any
    columns: Any
    load: Callable[[Any, Any], None]
    finish: Callable[[Any], None]
    mask: Callable[[Any, Any], None] | None = None


def _persistent(
    plgpu: Any,
    total: Any,
    work: Callable[[Any], _Work],
    operands: Callable[..., tuple[Any, Any]],
    shape: Shape,
    parts: tuple[tuple[int, ...], tuple[int, ...]],
    full: Any,
    empty: Any,
) -> None:
    """Runs a block's share of the tiles: a warpgroup loads, two multiply and store.

    `parts` are the rows and columns that may have to be multiplied; the least that is enough is taken.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(total + (_BLOCKS - 1), jnp.int32(_BLOCKS))

    def share(turn: Any) -> _Work:
        # Turned by one at each turn, so that no block gets the last columns, which are fewer, again and again.
        number = turn * _BLOCKS + lax.rem(block + turn, jnp.int32(_BLOCKS))
        found = work(jnp.minimum(number, total - 1))
        return found._replace(steps=jnp.where(number < total, found.steps, 0), rows=jnp.where(number < total, found.rows, 0))

    rings = 2 if shape.split == "tiles" else 1
    places = shape.stages // rings

    def place_of(step: Any, ring: Any) -> Any:
        return ring * places + lax.rem(step, jnp.int32(places))

    def loop(steps: Any, body: Callable[[Any], None]) -> None:
        lax.fori_loop(jnp.int32(0), steps, lambda k, _: body(k), None)

    def tiles(each: Callable[[_Work, Any, Any], None]) -> tuple[Any, ...]:
        """Calls `each` with a tile, its ring and how many steps that ring has seen; returns these of all rings."""

        def tile(turn: Any, seen: tuple[Any, ...]) -> tuple[Any, ...]:
            mine, ring = share(turn), lax.rem(turn, jnp.int32(rings))
            each(mine, ring, seen[0] if rings == 1 else jnp.where(ring == 0, *seen))
            return tuple(count + jnp.where(ring == number, mine.steps, 0) for number, count in enumerate(seen))

        return lax.fori_loop(jnp.int32(0), count, tile, (jnp.int32(0),) * rings)

    @pl.when(wg == 2)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def each(mine: _Work, ring: Any, seen: Any) -> None:
            def step(k: Any) -> None:
                place = place_of(seen + k, ring)
                pl.when(seen + k >= places)(lambda: plgpu.barrier_wait(empty.at[place]))
                mine.load(k, place)

            loop(mine.steps, step)

        for ring, seen in enumerate(tiles(each)):
            last = jnp.maximum(seen - places, 0)
            loop(seen - last, lambda k, last=last, ring=ring: plgpu.barrier_wait(empty.at[place_of(last + k, ring)]))

    @pl.when(wg < 2)
    def multiply():
        plgpu.set_max_registers(232, action="increase")

        def each(mine: _Work, ring: Any, seen: Any) -> None:
            def run(rows: int, columns: int) -> None:
                def products(acc: Any) -> Any:
                    def step(k: Any) -> None:
                        place = place_of(seen + k, ring)
                        plgpu.barrier_wait(full.at[place])
                        if mine.mask is not None:
                            mine.mask(k, place)
                        plgpu.wgmma(acc, *operands(place, wg, rows, columns))
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[place_of(seen + k - 1, ring)]))

                    loop(mine.steps, step)
                    return acc[...]

                result = pl.run_scoped(products, plgpu.ACC((rows, columns)))
                last = place_of(seen + mine.steps - 1, ring)
                pl.when(mine.steps > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
                mine.finish(result)

            def idle(k: Any) -> None:
                plgpu.barrier_wait(full.at[place_of(seen + k, ring)])
                plgpu.barrier_arrive(empty.at[place_of(seen + k, ring)])

            # A warpgroup has to see every phase of the barriers that it waits for: hence a ring each where tiles are split.
            turns = ring == wg if rings == 2 else ring == 0
            counts = (mine.rows > 0) & (mine.columns > 0)
            for rows, fewer in zip(parts[0], (0, *parts[0]), strict=False):
                for columns, less in zip(parts[1], (0, *parts[1]), strict=False):
                    fits = (mine.rows > fewer) & (mine.rows <= rows) & (mine.columns > less) & (mine.columns <= columns)
                    pl.when(turns & fits)(functools.partial(run, rows, columns))
            pl.when(turns & ~counts)(lambda: loop(mine.steps, idle))

        tiles(each)
        plgpu.wait_smem_to_gmem(0)


def _parts(shape: Shape, columns: int) -> tuple[int, ...]:
    """Returns how many of its columns a warpgroup may have to multiply, for a matrix of so many."""
    last = columns % shape.tile[1]
    counts = [last - left for left in (0, shape.columns) if left < last and left < shape.tile[1]]
    half = shape.columns // 2 if shape.columns % (2 * _SWIZZLED) == 0 else shape.columns
    needed = {half if count <= half else shape.columns for count in counts}
    return tuple(sorted(needed | ({shape.columns} if columns >= shape.tile[1] or not needed else set())))


def _transforms(plgpu: Any, dtype: DTypeLike) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _pieces(size: tuple[int, ...], width: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(0, size[0], _SLAB) for column in range(0, size[1], width)]


def _kernel(plgpu: Any, body: Any, name: str, out_type: Any, shape: Shape, operands: Any, staged: Any, interpret: bool) -> Any:
    body.__name__ = body.__qualname__ = name
    arrivals = 1 if shape.split == "tiles" else 2
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *(
                plgpu.SMEM((shape.stages, *size), jnp.bfloat16, transforms=_transforms(plgpu, jnp.bfloat16))
                for size in operands
            ),
            staged,
            plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=shape.stages),
        ],
        grid=(_BLOCKS,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )


def _product_mosaic(
    x_MK: Array, weights: Array, sizes_G: Array, transposed: bool, interpret: bool, shape: Shape = _PRODUCT
) -> Array:
    """Rows of a tile that are another group's are loaded, multiplied and not stored."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    (M, K), G = x_MK.shape, sizes_G.size
    N = weights.shape[1 if transposed else 2]
    rows, columns = shape.tile
    tiles = _tiles(sizes_G, M, rows)
    across = pl.cdiv(N, columns)
    step = _SWIZZLED
    out_type = jax.ShapeDtypeStruct((M, N), x_MK.dtype)
    slab = (2, 2, _SLAB, _SWIZZLED)
    staged = plgpu.RefUnion(
        plgpu.SMEM(slab, jnp.bfloat16, transforms=_transforms(plgpu, jnp.bfloat16)), plgpu.SMEM(slab, jnp.bfloat16)
    )

    def grouped_dot(group, first, begin, end, total, x, w, y, xs, ws, staged, full, empty):
        swizzled, plain = staged
        wg = lax.axis_index("wg")

        def work(number: Any) -> _Work:
            # Tiles side by side follow each other: they read the same rows of x, and all of them the same weights.
            tile, j = lax.div(number, jnp.int32(across)), lax.rem(number, jnp.int32(across))
            which, top = group[tile], pl.multiple_of(first[tile], _ALIGNED)
            steps = jnp.where(which < G, jnp.int32(K // step), jnp.int32(0))
            left = j * columns + (wg * shape.columns if shape.split == "columns" else 0)
            slabs = top + (wg * shape.rows if shape.split == "rows" else 0)

            def load(k: Any, place: Any) -> None:
                along, side = pl.ds(k * step, step), pl.ds(j * columns, columns)
                plgpu.copy_gmem_to_smem(x.at[pl.ds(top, rows), along], xs.at[place], full.at[place])
                plgpu.copy_gmem_to_smem(
                    w.at[which, side, along] if transposed else w.at[which, along, side], ws.at[place], full.at[place]
                )

            def finish(acc: Any) -> None:
                acc = acc.astype(y.dtype)
                for number, (row, column) in enumerate(_pieces(acc.shape, _SWIZZLED)):
                    slot = number % 2
                    piece = acc[row : row + _SLAB, column : column + _SWIZZLED]
                    low = jnp.clip(begin[tile] - slabs - row, 0, _SLAB)
                    high = jnp.clip(end[tile] - slabs - row, 0, _SLAB)
                    side = pl.ds(left + column, _SWIZZLED)
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)

                    @pl.when(high - low == _SLAB)
                    def _(piece=piece, slot=slot, row=row, side=side):
                        swizzled[wg, slot] = piece
                        plgpu.commit_smem()
                        there = y.at[pl.ds(pl.multiple_of(slabs + row, _ALIGNED), _SLAB), side]
                        plgpu.copy_smem_to_gmem(swizzled.at[wg, slot], there)

                    @pl.when((high - low < _SLAB) & (high > low))
                    def _(piece=piece, slot=slot, row=row, side=side, low=low, high=high):
                        plain[wg, slot] = piece
                        plgpu.commit_smem()
                        # A copy has a size that is known now: so a power of two after the other.
                        size = _SLAB // 2
                        while size:
                            at = low + ((high - low) & ~(2 * size - 1))

                            @pl.when(((high - low) & size) != 0)
                            def _(at=at, size=size):
                                here = plain.at[wg, slot, pl.ds(at, size)]
                                plgpu.copy_smem_to_gmem(here, y.at[pl.ds(slabs + row + at, size), side], commit_group=False)

                            size //= 2
                        plgpu.commit_smem_to_gmem_group()

            counts = jnp.clip(end[tile] - slabs, 0, shape.rows), jnp.clip(N - left, 0, shape.columns)
            return _Work(steps, *counts, load, finish)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            side = pl.ds(wg * shape.columns if shape.split == "columns" else 0, columns)
            return a, ws.at[place, side].transpose((1, 0)) if transposed else ws.at[place, :, side]

        parts = tuple(range(_SLAB, shape.rows + 1, _SLAB)), _parts(shape, N)
        _persistent(plgpu, total[0] * across, work, operands, shape, parts, full, empty)

    operand = (columns, step) if transposed else (step, columns)
    kernel = _kernel(plgpu, grouped_dot, "grouped_dot", out_type, shape, [(rows, step), operand], staged, interpret)
    return kernel(*tiles[:4], tiles.total.reshape(1), x_MK, weights)


def _wgrad_mosaic(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    add_GKN: Array | None,
    dtype: jnp.dtype,
    interpret: bool,
    shape: Shape = _WGRAD,
) -> Array:
    """Rows of x that are another group's are set to zero in shared memory, in the first and the last step of a tile."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], sizes_G.size
    rows, columns = shape.tile
    down, across = pl.cdiv(K, rows), pl.cdiv(N, columns)
    step = _SWIZZLED
    begins, ends = _bounds(sizes_G, M)
    width = 128 // dtype.itemsize
    adds = add_GKN is not None and not interpret  # jax interprets no copy that adds
    out_type = () if adds else jax.ShapeDtypeStruct((G, K, N), dtype)
    staged = plgpu.SMEM((2, 2, _SLAB, width), dtype, transforms=_transforms(plgpu, dtype))

    def grouped_wgrad(begins, ends, x, dy, dw, xs, dys, staged, full, empty):
        wg = lax.axis_index("wg")

        def work(number: Any) -> _Work:
            which, rest = lax.div(number, jnp.int32(down * across)), lax.rem(number, jnp.int32(down * across))
            i, j = lax.div(rest, jnp.int32(across)), lax.rem(rest, jnp.int32(across))
            begin, end = begins[which], ends[which]
            top = pl.multiple_of(lax.div(begin, jnp.int32(_ALIGNED)) * _ALIGNED, _ALIGNED)
            steps = jnp.where(end > begin, lax.div(end - top + (step - 1), jnp.int32(step)), 0)

            def load(k: Any, place: Any) -> None:
                along = pl.ds(pl.multiple_of(top + k * step, _ALIGNED), step)
                plgpu.copy_gmem_to_smem(x.at[along, pl.ds(i * rows, rows)], xs.at[place], full.at[place])
                plgpu.copy_gmem_to_smem(dy.at[along, pl.ds(j * columns, columns)], dys.at[place], full.at[place])

            def mask(k: Any, place: Any) -> None:
                low, high = begin - top - k * step, end - top - k * step

                @pl.when((low > 0) | (high < step))
                def _():
                    for column in range(0, shape.rows, _SWIZZLED):
                        at = column + (wg * shape.rows if shape.split == "rows" else 0)
                        here = xs.at[place, :, pl.ds(at, _SWIZZLED)]
                        row = plgpu.broadcasted_iota(jnp.int32, (step, _SWIZZLED), 0, layout=plgpu.Layout.WGMMA)
                        here[...] = jnp.where((row >= low) & (row < high), here[...], jnp.bfloat16(0))
                    plgpu.commit_smem()

            head = i * rows + (wg * shape.rows if shape.split == "rows" else 0)
            left = j * columns + (wg * shape.columns if shape.split == "columns" else 0)

            def finish(acc: Any) -> None:
                def store():
                    new = acc.astype(dtype)
                    for number, (row, column) in enumerate(_pieces(acc.shape, width)):
                        slot = number % 2
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        staged[wg, slot] = new[row : row + _SLAB, column : column + width]
                        plgpu.commit_smem()
                        there = dw.at[which, pl.ds(head + row, _SLAB), pl.ds(left + column, width)]
                        how = {"reduction_op": "add"} if adds else {}
                        plgpu.copy_smem_to_gmem(staged.at[wg, slot], there, **how)

                if adds:
                    pl.when(steps > 0)(store)
                else:
                    store()

            counts = jnp.clip(K - head, 0, shape.rows), jnp.clip(N - left, 0, shape.columns)
            return _Work(steps, *counts, load, finish, mask)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, :, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            b = dys.at[place, :, pl.ds(wg * shape.columns if shape.split == "columns" else 0, columns)]
            return a.transpose((1, 0)), b

        parts = (shape.rows,), _parts(shape, N)
        _persistent(plgpu, jnp.int32(G * down * across), work, operands, shape, parts, full, empty)

    kernel = _kernel(plgpu, grouped_wgrad, "grouped_wgrad", out_type, shape, [(step, rows), (step, columns)], staged, interpret)
    if not adds:
        dw_GKN = kernel(begins, ends, x_MK, dy_MN)
        return dw_GKN if add_GKN is None else add_GKN + dw_GKN
    sum_GKN = jax.new_ref(add_GKN)
    kernel(begins, ends, x_MK, dy_MN, sum_GKN)
    return sum_GKN[...]
