"""Grouped products on Hopper: one kernel serves all groups, whatever their sizes."""

# M rows, sorted by group; G groups, K summed over, N columns

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels.grouped_blocks import (
    ALIGNED,
    SLAB,
    SWIZZLED,
    Cursor,
    Shape,
    Tiles,
    Work,
    kernel_of,
    parts_of,
    persistent,
    pieces_of,
    ring_of,
    transforms,
)

PRODUCT = Shape(tail=4)
WGRAD = Shape()
SUM = Shape(stages=3, slots=4)


def product(x_MK: Array, weights: Array, sizes_G: Array, transposed: bool, interpret: bool, shape: Shape = PRODUCT) -> Array:
    """Multiplies rows with their group's matrix, or with its transpose; see `grouped_dot`.

    Rows of a tile that are another group's are loaded, multiplied and not stored.
    """
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    (M, K), G = x_MK.shape, sizes_G.size
    N = weights.shape[1 if transposed else 2]
    rows, columns, narrow = shape.down, shape.columns, shape.columns // shape.tail
    across = pl.cdiv(N, columns)
    step = SWIZZLED
    out_type = jax.ShapeDtypeStruct((M, N), x_MK.dtype)
    slab = (2, shape.slots, SLAB, SWIZZLED)
    staged = plgpu.RefUnion(
        plgpu.SMEM(slab, jnp.bfloat16, transforms=transforms(plgpu, jnp.bfloat16)), plgpu.SMEM(slab, jnp.bfloat16)
    )

    def top_of(begin: Any) -> Any:
        return pl.multiple_of(lax.div(begin, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)

    def count(begin: Any, end: Any) -> Any:
        return jnp.where(end > begin, lax.div(end - top_of(begin) + (rows - 1), jnp.int32(rows)) * across, 0)

    def grouped_dot(sizes, x, w, y, xs, ws, staged, full, empty):
        swizzled, plain = staged
        wg = lax.axis_index("wg")

        def weights_at(place: Any, width: int) -> Any:
            if shape.tail > 1 and width == narrow:
                return ws[1].at[place * shape.tail]
            whole = ws if shape.tail == 1 else ws[0]
            return whole.at[place, pl.ds(0, width)] if transposed else whole.at[place, :, pl.ds(0, width)]

        def work(at: Cursor, tile: Any, part: Any) -> Work:
            # Tiles side by side follow each other: they read the same rows of x, and all of them the same weights.
            i, j = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
            which = jnp.minimum(at.group, G - 1)
            top = top_of(at.begin) + pl.multiple_of(i * rows, ALIGNED)
            begin, end = jnp.maximum(at.begin, top), jnp.minimum(at.end, top + rows)
            steps = jnp.where(at.group < G, jnp.int32(K // step), jnp.int32(0))
            left = j * columns + jnp.maximum(part, 0) * narrow
            slabs = top + (wg * shape.rows if shape.split == "rows" else 0)

            def load(k: Any, place: Any) -> None:
                along = pl.ds(k * step, step)
                plgpu.copy_gmem_to_smem(x.at[pl.ds(top, rows), along], xs.at[place], full.at[place])

                def copy(width: int) -> None:
                    side = pl.ds(left, width)
                    here = w.at[which, side, along] if transposed else w.at[which, along, side]
                    plgpu.copy_gmem_to_smem(here, weights_at(place, width), full.at[place])

                if shape.tail == 1:
                    copy(columns)
                else:
                    pl.when(part < 0)(lambda: copy(columns))
                    pl.when(part >= 0)(lambda: copy(narrow))

            def finish(acc: Any) -> None:
                acc = acc.astype(y.dtype)
                for number, (row, column) in enumerate(pieces_of(acc.shape, SWIZZLED)):
                    slot = number % shape.slots
                    piece = acc[row : row + SLAB, column : column + SWIZZLED]
                    low = jnp.clip(begin - slabs - row, 0, SLAB)
                    high = jnp.clip(end - slabs - row, 0, SLAB)
                    side = pl.ds(left + column, SWIZZLED)
                    plgpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)

                    @pl.when(high - low == SLAB)
                    def _(piece=piece, slot=slot, row=row, side=side):
                        swizzled[wg, slot] = piece
                        plgpu.commit_smem()
                        there = y.at[pl.ds(pl.multiple_of(slabs + row, ALIGNED), SLAB), side]
                        plgpu.copy_smem_to_gmem(swizzled.at[wg, slot], there)

                    @pl.when((high - low < SLAB) & (high > low))
                    def _(piece=piece, slot=slot, row=row, side=side, low=low, high=high):
                        plain[wg, slot] = piece
                        plgpu.commit_smem()
                        # A copy has a size that is known now: so a power of two after the other.
                        size = SLAB // 2
                        while size:
                            at = low + ((high - low) & ~(2 * size - 1))

                            @pl.when(((high - low) & size) != 0)
                            def _(at=at, size=size):
                                here = plain.at[wg, slot, pl.ds(at, size)]
                                plgpu.copy_smem_to_gmem(here, y.at[pl.ds(slabs + row + at, size), side], commit_group=False)

                            size //= 2
                        plgpu.commit_smem_to_gmem_group()

            counted = jnp.clip(N - left, 0, columns)
            if shape.tail > 1:
                # What is cut lies elsewhere in shared memory: a whole tile counts as more than that.
                counted = jnp.where(part < 0, jnp.maximum(counted, narrow + 1), jnp.minimum(counted, narrow))
            return Work(steps, jnp.clip(end - slabs, 0, shape.rows), counted, load, finish)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            b = weights_at(place, columns)
            return a, b.transpose((1, 0)) if transposed else b

        parts = tuple(range(SLAB, shape.rows + 1, SLAB)), parts_of(shape, N)
        persistent(plgpu, Tiles(sizes, M, count, None).counted(), work, operands, shape, parts, full, empty)

    operand, cut = ((width, step) if transposed else (step, width) for width in (columns, narrow))
    weights_ring = ring_of(plgpu, shape.stages, operand)
    if shape.tail > 1:
        # A copy fills contiguous memory, which a part of the columns of a tile is not.
        weights_ring = plgpu.RefUnion(weights_ring, ring_of(plgpu, shape.stages * shape.tail, cut))
    rings = [ring_of(plgpu, shape.stages, (rows, step)), weights_ring]
    kernel = kernel_of(plgpu, grouped_dot, "grouped_dot", out_type, shape, rings, staged, 0, interpret)
    return kernel(sizes_G, x_MK, weights)


def wgrad(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    add_GKN: Array | None,
    dtype: jnp.dtype,
    interpret: bool,
    shape: Shape | None = None,
) -> Array:
    """Multiplies transposed rows of x with rows of dy, group by group; see `grouped_wgrad`.

    Rows of x that are another group's are set to zero in shared memory, in the first and the last step of a tile. What the
    result is added onto is read while the tile is multiplied, added in registers, and stored where it was.
    """
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    adds = add_GKN is not None
    shape = shape or (SUM if adds else WGRAD)
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], sizes_G.size
    rows, columns = shape.down, shape.columns
    down, across = pl.cdiv(K, rows), pl.cdiv(N, columns)
    step = SWIZZLED
    width = 128 // dtype.itemsize
    staged = plgpu.SMEM((2, shape.slots, SLAB, width), dtype, transforms=transforms(plgpu, dtype))

    def grouped_wgrad(sizes, x, dy, dw, xs, dys, staged, full, empty, *read):
        wg = lax.axis_index("wg")

        def work(at: Cursor, tile: Any, _: Any) -> Work:
            i, j = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
            begin, end = at.begin, at.end
            top = pl.multiple_of(lax.div(begin, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)
            steps = jnp.where(end > begin, lax.div(end - top + (step - 1), jnp.int32(step)), 0)

            def load(k: Any, place: Any) -> None:
                along = pl.ds(pl.multiple_of(top + k * step, ALIGNED), step)
                plgpu.copy_gmem_to_smem(x.at[along, pl.ds(i * rows, rows)], xs.at[place], full.at[place])
                plgpu.copy_gmem_to_smem(dy.at[along, pl.ds(j * columns, columns)], dys.at[place], full.at[place])

            def mask(k: Any, place: Any) -> None:
                low, high = begin - top - k * step, end - top - k * step

                @pl.when((low > 0) | (high < step))
                def _():
                    for column in range(0, shape.rows, SWIZZLED):
                        at = column + (wg * shape.rows if shape.split == "rows" else 0)
                        here = xs.at[place, :, pl.ds(at, SWIZZLED)]
                        row = plgpu.broadcasted_iota(jnp.int32, (step, SWIZZLED), 0, layout=plgpu.Layout.WGMMA)
                        here[...] = jnp.where((row >= low) & (row < high), here[...], jnp.bfloat16(0))
                    plgpu.commit_smem()

            head = i * rows + (wg * shape.rows if shape.split == "rows" else 0)
            left = j * columns

            def there(row: int, column: int) -> Any:
                return dw.at[at.group, pl.ds(head + row, SLAB), pl.ds(left + column, width)]

            def fetch(number: int, piece: tuple[int, int]) -> None:
                slot = number % shape.slots
                plgpu.copy_gmem_to_smem(there(*piece), staged.at[wg, slot], read[0].at[wg * shape.slots + slot])

            def prepare(size: tuple[int, int]) -> None:
                @pl.when(steps > 0)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for number, piece in enumerate(pieces_of(size, width)[: shape.slots]):
                        fetch(number, piece)

            def store(acc: Any) -> None:
                pieces = pieces_of(acc.shape, width)
                for number, (row, column) in enumerate(pieces):
                    slot = number % shape.slots
                    new = acc[row : row + SLAB, column : column + width].astype(dtype)
                    if adds:
                        plgpu.barrier_wait(read[0].at[wg * shape.slots + slot])
                        new += staged[wg, slot]
                    else:
                        plgpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)
                    staged[wg, slot] = new
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staged.at[wg, slot], there(row, column))
                    # The slot before this has been stored, or soon is: so it takes what will be added next.
                    after = number - 1 + shape.slots
                    if adds and number and after < len(pieces):
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        fetch(after, pieces[after])

            def finish(acc: Any) -> None:
                if adds:
                    pl.when(steps > 0)(lambda: store(acc))
                else:
                    store(acc)

            counts = jnp.clip(K - head, 0, shape.rows), jnp.clip(N - left, 0, shape.columns)
            return Work(steps, *counts, load, finish, mask, prepare if adds else None)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, :, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            return a.transpose((1, 0)), dys.at[place, :, pl.ds(0, columns)]

        parts = (shape.rows,), parts_of(shape, N)
        tiles = Tiles(sizes, M, lambda begin, end: jnp.int32(down * across), jnp.int32(G * down * across))
        persistent(plgpu, tiles, work, operands, shape, parts, full, empty)

    rings = [ring_of(plgpu, shape.stages, (step, rows)), ring_of(plgpu, shape.stages, (step, columns))]
    barriers = 2 * shape.slots if adds else 0
    out_type = () if adds else jax.ShapeDtypeStruct((G, K, N), dtype)
    kernel = kernel_of(plgpu, grouped_wgrad, "grouped_wgrad", out_type, shape, rings, staged, barriers, interpret)
    if add_GKN is None:
        return kernel(sizes_G, x_MK, dy_MN)
    sum_GKN = jax.new_ref(add_GKN)
    kernel(sizes_G, x_MK, dy_MN, sum_GKN)
    return sum_GKN[...]
