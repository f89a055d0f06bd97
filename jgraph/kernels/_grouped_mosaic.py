"""Grouped matmuls on Hopper: one kernel for all groups of any size.

The kernel is persistent: one block of threads per multiprocessor, and the blocks share the tiles of all groups. In each block,
one warpgroup copies operands into a ring buffer in shared memory, and two warpgroups multiply. A block computes the tiles of
each group from the group sizes. Two blocks are a cluster: they multiply a pair of tiles with a common operand, which both
receive from one copy.
"""

# M rows, sorted by group; G groups, K contracted, N columns

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels._mosaic import LINE, SLAB, Ref, Slice, kernel, plgpu, shared

Order = Literal["GKN", "GNK", "NGK"]
"""Order of the axes of the weights: G groups, K contracted, N columns."""

ALIGNED, SWIZZLED = 8, 64
"""A copy starts at a multiple of 8 rows, and copies bfloat16 columns in lines of 64."""
_ROWS = 2 * SLAB
"""Rows per tile: half of them for each compute warpgroup."""
_CLUSTERS = 66
"""Clusters of two blocks of threads: one block per multiprocessor of an H100 or H200."""
_CLUSTER = "cluster"
"""Axis of the two blocks of a cluster."""


class _Shape(NamedTuple):
    """Tile sizes of a kernel."""

    columns: int  # of a tile
    stages: int  # of the ring buffer
    slots: int  # pieces of a tile, one line wide, that a warpgroup stages in shared memory while it stores them


class _Cursor(NamedTuple):
    """The current group of a block, which visits the groups in order. Numbers are int32."""

    group: Array  # group G holds the rows beyond the sum of the sizes
    begin: Array  # first row of the group
    end: Array  # first row of the next group
    first: Array  # first pair of tiles of the group
    after: Array  # first pair of tiles of the next group


class _Tiles(NamedTuple):
    """The pairs of tiles of all groups, numbered group by group."""

    sizes: Ref  # int32 [G], number of rows of each group
    M: int
    pairs: Callable[[Array, Array], Array]  # from `begin` and `end` of a group to its number of pairs

    def start(self) -> _Cursor:
        return _Cursor(jnp.int32(-1), *(jnp.int32(0),) * 4)  # before the first group

    def next(self, at: _Cursor) -> _Cursor:
        G = self.sizes.shape[0]
        group = at.group + 1
        end = jnp.minimum(at.end + self.sizes[jnp.minimum(group, G - 1)], self.M)
        end = jnp.where(group == G, self.M, end)
        return _Cursor(group, at.end, end, at.after, at.after + self.pairs(at.end, end))

    def seek(self, at: _Cursor, pair: Array) -> _Cursor:
        """Returns the cursor at the group of `pair`, which must not be in an earlier group."""
        return lax.while_loop(lambda at: at.after <= pair, self.next, at)

    def total(self) -> Array:
        last = lax.fori_loop(0, self.sizes.shape[0] + 1, lambda _, at: self.next(at), self.start())
        return last.after


class _Work(NamedTuple):
    """The work of one tile, for `_persistent`. Numbers are int32."""

    steps: Array  # number of matmuls to accumulate; the same for both tiles of a pair
    valid: Array  # bool: the warpgroup's half of the tile has a valid row, and the tile a valid column
    columns: Array  # number of valid columns
    right: Array  # identifies the right operand
    # `load(step, stage, kept)` starts the copies of a step into a stage of the ring buffer. If `kept`, the stage has the right
    # operand of the step.
    load: Callable[[Array, Array, Array], None]
    operands: Callable[[Array, int], tuple[Ref, Ref]]  # of the warpgroup, from a stage and a number of columns
    finish: Callable[[Array], None]  # stores the warpgroup's result, the accumulator
    mask: Callable[[Array, Array], None] | None = None  # `mask(step, stage)` sets the warpgroup's invalid rows to zero
    prepare: Callable[[int], None] | None = None  # `prepare(columns)` starts the copies of the addend of the result


def _persistent(
    tiles: _Tiles,
    total: Array,  # int32, number of pairs of tiles
    work: Callable[[_Cursor, Array], _Work],  # of this block's tile, from a cursor and the index of a pair in its group
    shape: _Shape,
    columns: int,  # of the result
    full: Ref,  # barriers of filled stages
    empty: Ref,  # barriers of consumed stages
    run: int = 1,  # number of consecutive pairs that a cluster computes in sequence
) -> None:
    """Runs a block's share of the tiles: one warpgroup loads, two multiply and store."""
    gpu = plgpu()
    places = shape.stages
    widths = _widths(shape, columns)
    wg, cluster = lax.axis_index("wg"), lax.axis_index("clusters")
    count = lax.div(total + (_CLUSTERS * run - 1), jnp.int32(_CLUSTERS * run)) * run

    def place_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(places))

    def loop(steps: Array, body: Callable[[Array], None]) -> None:
        lax.fori_loop(jnp.int32(0), steps, lambda k, _: body(k), None)

    def shares(each: Callable[[_Work, Array, Array, Array], None]) -> Array:
        """Calls `each(tile_work, stages_before, stages, kept)` for the block's tiles. Returns the total number of stages."""

        def visit(turn: Array, carry: tuple[_Cursor, Array, Array]) -> tuple[_Cursor, Array, Array]:
            at, seen, before = carry
            # Rotated by one in each turn, so that all clusters share the narrower tiles of the last columns.
            round, part = lax.div(turn, jnp.int32(run)), lax.rem(turn, jnp.int32(run))
            number = (round * _CLUSTERS + lax.rem(cluster + round, jnp.int32(_CLUSTERS))) * run + part
            exists = number < total
            number = jnp.minimum(number, total - 1)
            at = tiles.seek(at, number)
            tile = work(at, number - at.first)
            tile = tile._replace(steps=jnp.where(exists, tile.steps, 0), valid=exists & tile.valid)
            # A tile with fewer steps than stages skips the other stages. A step therefore has the same stage in consecutive
            # tiles with at most as many steps as stages, and their common right operand is loaded once.
            stages = jnp.where(tile.steps > 0, jnp.maximum(tile.steps, places), 0)
            each(tile, seen, stages, (tile.right == before) & (stages == places))
            return at, seen + stages, jnp.where(tile.steps > 0, tile.right, before)

        return lax.fori_loop(jnp.int32(0), count, visit, (tiles.start(), jnp.int32(0), jnp.int32(-1)))[1]

    @pl.when(wg == 2)
    def load():
        gpu.set_max_registers(40, action="decrease")

        def each(tile: _Work, seen: Array, stages: Array, kept: Array) -> None:
            def step(k: Array) -> None:
                place = place_of(seen + k)
                pl.when(seen + k >= places)(lambda: gpu.barrier_wait(empty.at[place]))
                pl.when(k < tile.steps)(lambda: tile.load(k, place, kept))

                @pl.when(k >= tile.steps)
                def _():
                    for _ in range(2):
                        gpu.barrier_arrive(full.at[place])

            loop(stages, step)

        seen = shares(each)
        last = jnp.maximum(seen - places, 0)
        loop(seen - last, lambda k: gpu.barrier_wait(empty.at[place_of(last + k)]))

    @pl.when(wg < 2)
    def multiply():
        gpu.set_max_registers(232, action="increase")

        def each(tile: _Work, seen: Array, stages: Array, kept: Array) -> None:
            def multiplied(columns: int) -> None:
                if tile.prepare is not None:
                    tile.prepare(columns)

                def products(acc: Ref) -> Array:
                    def step(k: Array) -> None:
                        place = place_of(seen + k)
                        gpu.barrier_wait(full.at[place])
                        if tile.mask is not None:
                            tile.mask(k, place)
                        gpu.wgmma(acc, *tile.operands(place, columns))
                        gpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: gpu.barrier_arrive(empty.at[place_of(seen + k - 1)]))

                    loop(tile.steps, step)
                    return acc[...]

                result = pl.run_scoped(products, gpu.ACC((SLAB, columns)))
                last = place_of(seen + tile.steps - 1)
                pl.when(tile.steps > 0)(lambda: gpu.barrier_arrive(empty.at[last]))
                loop(stages - tile.steps, lambda k: idle(tile.steps + k))
                tile.finish(result)

            def idle(k: Array) -> None:
                gpu.barrier_wait(full.at[place_of(seen + k)])
                gpu.barrier_arrive(empty.at[place_of(seen + k)])

            for columns, less in zip(widths, (0, *widths), strict=False):
                fits = tile.valid & (tile.columns > less) & (tile.columns <= columns)
                pl.when(fits)(functools.partial(multiplied, columns))
            # A warpgroup must observe every phase of its barriers.
            pl.when(~tile.valid)(lambda: loop(stages, idle))

        shares(each)
        gpu.wait_smem_to_gmem(0)


def _widths(shape: _Shape, columns: int) -> tuple[int, ...]:
    """Returns the possible tile widths for a result with `columns` columns. A tile uses the smallest sufficient width."""
    last = columns % shape.columns
    half = shape.columns // 2
    widths = {shape.columns} if columns >= shape.columns else set()
    return tuple(sorted(widths | ({half if last <= half else shape.columns} if last else set())))


def _aligned(row: Array) -> Array:
    return pl.multiple_of(lax.div(row, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)


def _persistent_kernel(
    body: Callable[..., None],
    outs: Sequence[jax.ShapeDtypeStruct],
    stages: int,
    rings: Sequence[pl.MemoryRef],  # types of the ring buffers
    staged: pl.MemoryRef,  # type of the buffer that stages results
    barriers: int = 0,  # in addition to the barriers of filled and consumed stages
) -> Callable[..., Sequence[Array]]:
    """Returns a kernel with one block per multiprocessor, in clusters of two."""
    body.__qualname__ = body.__name__
    gpu = plgpu()
    return kernel(
        body,
        outs,
        scratch_types=[
            *rings,
            staged,
            gpu.Barrier(num_arrivals=2, num_barriers=stages),
            # A copy into the memory of both blocks waits until both have consumed the stage.
            gpu.ClusterBarrier(collective_axes=(_CLUSTER,), num_arrivals=2, num_barriers=stages),
            *([gpu.Barrier(num_arrivals=1, num_barriers=barriers)] if barriers else []),
        ],
        grid=(_CLUSTERS,),
        grid_names=("clusters",),
        cluster=(2,),
        cluster_names=(_CLUSTER,),
        num_threads=3,
        thread_name="wg",
    )


_PRODUCT = _Shape(columns=256, stages=4, slots=2)
# wgrad with an addend is bound by memory bandwidth. All pieces of a tile have slots, so that the addend is loaded during the
# multiplication of the tile.
_SUM = _Shape(columns=128, stages=5, slots=4)

_RUN = 4
"""Number of pairs in sequence for wgrad of small groups."""


# Not checked: sizes are those that `_fits` of grouped.py allows, and FP8 has an order with K last. Rows beyond the sum of the
# sizes give zeros.
def product(x_MK: Array, weights: Array, sizes_G: Array, order: Order, scale: Array | None = None) -> Array:
    """Multiplies the rows of each group by its matrix, and the result by `scale`, in a kernel for Hopper."""
    gpu = plgpu()
    (M, K), G = x_MK.shape, sizes_G.size
    N = weights.shape[order.index("N")]
    K_last = order.endswith("K")
    shape = _PRODUCT
    step = LINE // x_MK.dtype.itemsize
    columns = shape.columns
    across = pl.cdiv(N, shape.columns)
    slots = (2, shape.slots, SLAB, SWIZZLED)
    staged = gpu.RefUnion(shared(slots, jnp.bfloat16), gpu.SMEM(slots, jnp.bfloat16))

    def split(begin: Array, end: Array) -> tuple[Array, Array]:
        """Returns the number of row tiles of a group, and the number of pairs of tiles one above the other."""
        down = lax.div(end - _aligned(begin) + (_ROWS - 1), jnp.int32(_ROWS))
        return down, lax.div(down, jnp.int32(2)) * across

    def count(begin: Array, end: Array) -> Array:
        down, pairs = split(begin, end)
        return jnp.where(end > begin, pairs + lax.rem(down, jnp.int32(2)) * pl.cdiv(across, 2), 0)

    def grouped_dot(sizes: Ref, *refs: Ref) -> None:
        scaled, (x, w, y, xs, ws, staged, full, empty) = refs[:-8], refs[-8:]
        swizzled, plain = staged
        wg = lax.axis_index("wg")

        def work(at: _Cursor, pair: Array) -> _Work:
            # The tiles of a pair are one above the other and share weights. A last single row of tiles is paired side by side,
            # and the pairs share rows of x.
            block = lax.axis_index(_CLUSTER)
            down, above = split(at.begin, at.end)
            beside = pair - above
            i = jnp.where(beside < 0, 2 * lax.div(pair, jnp.int32(across)) + block, down - 1)
            j = jnp.where(beside < 0, lax.rem(pair, jnp.int32(across)), 2 * beside + block)
            group = jnp.minimum(at.group, G - 1)
            top = _aligned(at.begin) + pl.multiple_of(i * _ROWS, ALIGNED)
            begin, end = jnp.maximum(at.begin, top), jnp.minimum(at.end, top + _ROWS)
            steps = jnp.where(at.group < G, jnp.int32(K // step), jnp.int32(0))
            left = j * columns
            slab = top + wg * SLAB

            def load(k: Array, place: Array, kept: Array) -> None:
                along, side = pl.ds(k * step, step), pl.ds(left, columns)
                at = {"G": group, "K": along, "N": side}

                def copy(to_x: str | None, to_w: str | None) -> None:
                    rows, matrix = x.at[pl.ds(top, _ROWS), along], w.at[*(at[axis] for axis in order)]
                    gpu.copy_gmem_to_smem(rows, xs.at[place], full.at[place], collective_axes=to_x)
                    gpu.copy_gmem_to_smem(matrix, ws.at[place], full.at[place], collective_axes=to_w)

                pl.when(beside < 0)(lambda: copy(None, _CLUSTER))
                pl.when(beside >= 0)(lambda: copy(_CLUSTER, None))

            # Rows of other groups in the tile are loaded and multiplied, but not stored.
            def finish(acc: Array) -> None:
                acc = (acc * scaled[0][0] if scaled else acc).astype(y.dtype)
                low, high = jnp.clip(begin - slab, 0, SLAB), jnp.clip(end - slab, 0, SLAB)
                for number, column in enumerate(range(0, acc.shape[1], SWIZZLED)):
                    slot = number % shape.slots
                    side = pl.ds(left + column, SWIZZLED)
                    piece = acc[:, column : column + SWIZZLED]
                    gpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)

                    @pl.when(high - low == SLAB)
                    def _(piece: Array = piece, slot: int = slot, side: Slice = side) -> None:
                        swizzled[wg, slot] = piece
                        gpu.commit_smem()
                        target = y.at[pl.ds(pl.multiple_of(slab, ALIGNED), SLAB), side]
                        gpu.copy_smem_to_gmem(swizzled.at[wg, slot], target)

                    @pl.when((high - low < SLAB) & (high > low))
                    def _(piece: Array = piece, slot: int = slot, side: Slice = side) -> None:
                        plain[wg, slot] = piece
                        gpu.commit_smem()
                        # The size of a copy is static, so the rows are copied in pieces of powers of two.
                        size = SLAB // 2
                        while size:
                            at = low + ((high - low) & ~(2 * size - 1))

                            @pl.when(((high - low) & size) != 0)
                            def _(at: Array = at, size: int = size, slot: int = slot, side: Slice = side) -> None:
                                source = plain.at[wg, slot, pl.ds(at, size)]
                                gpu.copy_smem_to_gmem(source, y.at[pl.ds(slab + at, size), side], commit_group=False)

                            size //= 2
                        gpu.commit_smem_to_gmem_group()

            valid = (end > slab) & (left < N)
            right = at.first + pair
            return _Work(steps, valid, jnp.clip(N - left, 0, columns), right, load, operands, finish)

        def operands(place: Array, columns: int) -> tuple[Ref, Ref]:
            side = pl.ds(0, columns)
            b = ws.at[place, side].transpose((1, 0)) if K_last else ws.at[place, :, side]
            return xs.at[place, pl.ds(wg * SLAB, SLAB)], b

        tiles = _Tiles(sizes, M, count)
        _persistent(tiles, tiles.total(), work, shape, N, full, empty)

    operand = (columns, step) if K_last else (step, columns)
    rings = shared((shape.stages, _ROWS, step), x_MK.dtype), shared((shape.stages, *operand), weights.dtype)
    run = _persistent_kernel(grouped_dot, [jax.ShapeDtypeStruct((M, N), jnp.bfloat16)], shape.stages, rings, staged)
    (y_MN,) = run(sizes_G, *([] if scale is None else [scale.reshape(1)]), x_MK, weights)
    return y_MN


# Not checked: arrays are bfloat16, sizes are those that `_fits` of grouped.py allows, rows of dy in no group are finite, and
# the addend and its sum are float32.
def wgrad(x_MK: Array, dy_MN: Array, sizes_G: Array, add_GKN: Array | None, dtype: jnp.dtype) -> Array:
    """Computes x.T @ dy + add [G, K, N] of each group's rows, in a kernel for Hopper."""
    gpu = plgpu()
    adds = add_GKN is not None
    shape = _SUM if adds else _PRODUCT
    step = SWIZZLED
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], sizes_G.size
    columns = shape.columns
    down = pl.cdiv(K, 2 * _ROWS)
    across = pl.cdiv(N, shape.columns)
    width = LINE // dtype.itemsize
    # If the rows of an average group fit into the ring buffer, its columns of dy stay there for several tiles.
    run = 1 if adds or G * shape.stages * step < M else _RUN
    staged = shared((2, shape.slots, SLAB, width), dtype)

    def grouped_wgrad(
        sizes: Ref, x: Ref, dy: Ref, dw: Ref, xs: Ref, dys: Ref, staged: Ref, full: Ref, empty: Ref, *read: Ref
    ) -> None:
        wg = lax.axis_index("wg")

        def work(at: _Cursor, pair: Array) -> _Work:
            # The tiles of a pair are one above the other and share columns of dy. So do all pairs of a run.
            if run > 1:
                i, j = lax.rem(pair, jnp.int32(down)), lax.div(pair, jnp.int32(down))
            else:
                i, j = lax.div(pair, jnp.int32(across)), lax.rem(pair, jnp.int32(across))
            i = 2 * i + lax.axis_index(_CLUSTER)
            right = at.group * across + j
            begin, end = at.begin, at.end
            top = _aligned(begin)
            steps = jnp.where(end > begin, lax.div(end - top + (step - 1), jnp.int32(step)), 0)

            def load(k: Array, place: Array, kept: Array) -> None:
                along = pl.ds(pl.multiple_of(top + k * step, ALIGNED), step)
                gpu.copy_gmem_to_smem(x.at[along, pl.ds(i * _ROWS, _ROWS)], xs.at[place], full.at[place])

                @pl.when(~kept)
                def _():
                    rows = dy.at[along, pl.ds(j * columns, columns)]
                    gpu.copy_gmem_to_smem(rows, dys.at[place], full.at[place], collective_axes=_CLUSTER)

                pl.when(kept)(lambda: gpu.barrier_arrive(full.at[place]))

            # The first and last step of a tile may load rows of other groups.
            def mask(k: Array, place: Array) -> None:
                low, high = begin - top - k * step, end - top - k * step

                @pl.when((low > 0) | (high < step))
                def _():
                    rows = xs.at[place, :, pl.ds(wg * SLAB, SLAB)]
                    row = gpu.broadcasted_iota(jnp.int32, (step, SLAB), 0, layout=gpu.Layout.WGMMA)
                    rows[...] = jnp.where((row >= low) & (row < high), rows[...], jnp.bfloat16(0))
                    gpu.commit_smem()

            head = i * _ROWS + wg * SLAB
            left = j * columns

            def piece_at(column: int) -> Ref:
                return dw.at[at.group, pl.ds(head, SLAB), pl.ds(left + column, width)]

            def prepare(columns: int) -> None:
                @pl.when(steps > 0)
                def _():
                    gpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for slot, column in enumerate(range(0, columns, width)):
                        gpu.copy_gmem_to_smem(piece_at(column), staged.at[wg, slot], read[0].at[wg * shape.slots + slot])

            def store(acc: Array) -> None:
                for number, column in enumerate(range(0, acc.shape[1], width)):
                    slot = number % shape.slots
                    new = acc[:, column : column + width].astype(dtype)
                    if adds:
                        gpu.barrier_wait(read[0].at[wg * shape.slots + slot])
                        new += staged[wg, slot]
                    else:
                        gpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)
                    staged[wg, slot] = new
                    gpu.commit_smem()
                    gpu.copy_smem_to_gmem(staged.at[wg, slot], piece_at(column))

            def finish(acc: Array) -> None:
                if adds:
                    pl.when(steps > 0)(lambda: store(acc))
                else:
                    store(acc)

            counted = jnp.clip(N - left, 0, columns)
            return _Work(steps, head < K, counted, right, load, operands, finish, mask, prepare if adds else None)

        def operands(place: Array, columns: int) -> tuple[Ref, Ref]:
            return xs.at[place, :, pl.ds(wg * SLAB, SLAB)].transpose((1, 0)), dys.at[place, :, pl.ds(0, columns)]

        tiles = _Tiles(sizes, M, lambda begin, end: jnp.int32(down * across))
        _persistent(tiles, jnp.int32(G * down * across), work, shape, N, full, empty, run)

    rings = shared((shape.stages, step, _ROWS), x_MK.dtype), shared((shape.stages, step, columns), dy_MN.dtype)
    barriers = 2 * shape.slots if adds else 0
    outs = () if adds else (jax.ShapeDtypeStruct((G, K, N), dtype),)
    call = _persistent_kernel(grouped_wgrad, outs, shape.stages, rings, staged, barriers)
    if add_GKN is None:
        (dw_GKN,) = call(sizes_G, x_MK, dy_MN)
        return dw_GKN
    # Overwritten in place. XLA copies the addend unless the caller's jit donates it.
    sum_GKN = jax.new_ref(add_GKN)
    call(sizes_G, x_MK, dy_MN, sum_GKN)
    return sum_GKN[...]
