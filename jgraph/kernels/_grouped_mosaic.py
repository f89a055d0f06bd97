"""Grouped matmuls on Hopper: one kernel for all groups of any size."""

# M rows, sorted by group; G groups, K summed over, N columns

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.kernels._grouped_blocks import ALIGNED, ROWS, SWIZZLED, Cursor, Shape, Tiles, Work, aligned, kernel_of, persistent
from jgraph.kernels._mosaic import LINE, SLAB, plgpu, shared

Order = Literal["GKN", "GNK", "NGK"]
"""Order of the axes of weights: G groups, K summed over, N columns."""

_PRODUCT = Shape(columns=256, stages=4, slots=2)
# A sum is bound by bytes, so all of a tile's addends have slots and are loaded while the tile is multiplied.
_SUM = Shape(columns=128, stages=5, slots=4)


def product(x_MK: Array, weights: Array, sizes_G: Array, order: Order, scale: Array | None = None) -> Array:
    """Multiplies rows with their group's matrix, and the sums with `scale`; see `grouped_dot` and `grouped_dot_fp8`.

    A tile's rows of other groups are loaded and multiplied, but not stored. FP8 needs an `order` with K last.
    """
    gpu = plgpu()
    (M, K), G = x_MK.shape, sizes_G.size
    N, K_last = weights.shape[order.index("N")], order.endswith("K")
    shape, step = _PRODUCT, LINE // x_MK.dtype.itemsize
    columns, across = shape.columns, pl.cdiv(N, shape.columns)
    slots = (2, shape.slots, SLAB, SWIZZLED)
    staged = gpu.RefUnion(shared(slots, jnp.bfloat16), gpu.SMEM(slots, jnp.bfloat16))

    def count(begin: Any, end: Any) -> Any:
        return jnp.where(end > begin, lax.div(end - aligned(begin) + (ROWS - 1), jnp.int32(ROWS)) * across, 0)

    def grouped_dot(sizes, *refs):
        scaled, (x, w, y, xs, ws, staged, full, empty) = refs[:-8], refs[-8:]
        swizzled, plain = staged
        wg = lax.axis_index("wg")

        def work(at: Cursor, tile: Any) -> Work:
            # Adjacent tiles are consecutive: they read the same rows of x, and all of them the same weights.
            i, j = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
            which = jnp.minimum(at.group, G - 1)
            top = aligned(at.begin) + pl.multiple_of(i * ROWS, ALIGNED)
            begin, end = jnp.maximum(at.begin, top), jnp.minimum(at.end, top + ROWS)
            steps = jnp.where(at.group < G, jnp.int32(K // step), jnp.int32(0))
            left, slab = j * columns, top + wg * SLAB

            def load(k: Any, place: Any) -> None:
                along, side = pl.ds(k * step, step), pl.ds(left, columns)
                gpu.copy_gmem_to_smem(x.at[pl.ds(top, ROWS), along], xs.at[place], full.at[place])
                at = {"G": which, "K": along, "N": side}
                gpu.copy_gmem_to_smem(w.at[*(at[axis] for axis in order)], ws.at[place], full.at[place])

            def finish(acc: Any) -> None:
                acc = (acc * scaled[0][0] if scaled else acc).astype(y.dtype)
                low, high = jnp.clip(begin - slab, 0, SLAB), jnp.clip(end - slab, 0, SLAB)
                for number, column in enumerate(range(0, acc.shape[1], SWIZZLED)):
                    slot, side = number % shape.slots, pl.ds(left + column, SWIZZLED)
                    piece = acc[:, column : column + SWIZZLED]
                    gpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)

                    @pl.when(high - low == SLAB)
                    def _(piece=piece, slot=slot, side=side):
                        swizzled[wg, slot] = piece
                        gpu.commit_smem()
                        there = y.at[pl.ds(pl.multiple_of(slab, ALIGNED), SLAB), side]
                        gpu.copy_smem_to_gmem(swizzled.at[wg, slot], there)

                    @pl.when((high - low < SLAB) & (high > low))
                    def _(piece=piece, slot=slot, side=side):
                        plain[wg, slot] = piece
                        gpu.commit_smem()
                        # The size of a copy is static, so rows are copied in powers of two.
                        size = SLAB // 2
                        while size:
                            at = low + ((high - low) & ~(2 * size - 1))

                            @pl.when(((high - low) & size) != 0)
                            def _(at=at, size=size, slot=slot, side=side):
                                here = plain.at[wg, slot, pl.ds(at, size)]
                                gpu.copy_smem_to_gmem(here, y.at[pl.ds(slab + at, size), side], commit_group=False)

                            size //= 2
                        gpu.commit_smem_to_gmem_group()

            return Work(steps, end > slab, jnp.clip(N - left, 0, columns), load, operands, finish)

        def operands(place: Any, columns: int) -> tuple[Any, Any]:
            side = pl.ds(0, columns)
            b = ws.at[place, side].transpose((1, 0)) if K_last else ws.at[place, :, side]
            return xs.at[place, pl.ds(wg * SLAB, SLAB)], b

        tiles = Tiles(sizes, M, count).counted()
        persistent(tiles, work, shape, N, full, empty)

    operand = (columns, step) if K_last else (step, columns)
    rings = shared((shape.stages, ROWS, step), x_MK.dtype), shared((shape.stages, *operand), weights.dtype)
    kernel = kernel_of(grouped_dot, jax.ShapeDtypeStruct((M, N), jnp.bfloat16), shape.stages, rings, staged)
    return kernel(sizes_G, *([] if scale is None else [scale.reshape(1)]), x_MK, weights)


def wgrad(x_MK: Array, dy_MN: Array, sizes_G: Array, add_GKN: Array | None, dtype: jnp.dtype) -> Array:
    """Multiplies transposed rows of x with rows of dy, group by group; see `grouped_wgrad`.

    Rows of x of other groups are set to zero in shared memory, in the first and last step of a tile. The addend is read while
    the tile is multiplied, added in registers, and overwritten.
    """
    gpu = plgpu()
    adds = add_GKN is not None
    shape, step = _SUM if adds else _PRODUCT, SWIZZLED
    (M, K), N, G = x_MK.shape, dy_MN.shape[1], sizes_G.size
    columns, down, across = shape.columns, pl.cdiv(K, ROWS), pl.cdiv(N, shape.columns)
    width = LINE // dtype.itemsize
    staged = shared((2, shape.slots, SLAB, width), dtype)

    def grouped_wgrad(sizes, x, dy, dw, xs, dys, staged, full, empty, *read):
        wg = lax.axis_index("wg")

        def work(at: Cursor, tile: Any) -> Work:
            i, j = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
            begin, end = at.begin, at.end
            top = aligned(begin)
            steps = jnp.where(end > begin, lax.div(end - top + (step - 1), jnp.int32(step)), 0)

            def load(k: Any, place: Any) -> None:
                along = pl.ds(pl.multiple_of(top + k * step, ALIGNED), step)
                gpu.copy_gmem_to_smem(x.at[along, pl.ds(i * ROWS, ROWS)], xs.at[place], full.at[place])
                gpu.copy_gmem_to_smem(dy.at[along, pl.ds(j * columns, columns)], dys.at[place], full.at[place])

            def mask(k: Any, place: Any) -> None:
                low, high = begin - top - k * step, end - top - k * step

                @pl.when((low > 0) | (high < step))
                def _():
                    here = xs.at[place, :, pl.ds(wg * SLAB, SLAB)]
                    row = gpu.broadcasted_iota(jnp.int32, (step, SLAB), 0, layout=gpu.Layout.WGMMA)
                    here[...] = jnp.where((row >= low) & (row < high), here[...], jnp.bfloat16(0))
                    gpu.commit_smem()

            head, left = i * ROWS + wg * SLAB, j * columns

            def there(column: int) -> Any:
                return dw.at[at.group, pl.ds(head, SLAB), pl.ds(left + column, width)]

            def prepare(columns: int) -> None:
                @pl.when(steps > 0)
                def _():
                    gpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for slot, column in enumerate(range(0, columns, width)):
                        gpu.copy_gmem_to_smem(there(column), staged.at[wg, slot], read[0].at[wg * shape.slots + slot])

            def store(acc: Any) -> None:
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
                    gpu.copy_smem_to_gmem(staged.at[wg, slot], there(column))

            def finish(acc: Any) -> None:
                if adds:
                    pl.when(steps > 0)(lambda: store(acc))
                else:
                    store(acc)

            counted = jnp.clip(N - left, 0, columns)
            return Work(steps, head < K, counted, load, operands, finish, mask, prepare if adds else None)

        def operands(place: Any, columns: int) -> tuple[Any, Any]:
            return xs.at[place, :, pl.ds(wg * SLAB, SLAB)].transpose((1, 0)), dys.at[place, :, pl.ds(0, columns)]

        tiles = Tiles(sizes, M, lambda begin, end: jnp.int32(down * across), jnp.int32(G * down * across))
        persistent(tiles, work, shape, N, full, empty)

    rings = shared((shape.stages, step, ROWS), x_MK.dtype), shared((shape.stages, step, columns), dy_MN.dtype)
    barriers = 2 * shape.slots if adds else 0
    out_type = () if adds else jax.ShapeDtypeStruct((G, K, N), dtype)
    kernel = kernel_of(grouped_wgrad, out_type, shape.stages, rings, staged, barriers)
    if add_GKN is None:
        return kernel(sizes_G, x_MK, dy_MN)
    sum_GKN = jax.new_ref(add_GKN)
    kernel(sizes_G, x_MK, dy_MN, sum_GKN)
    return sum_GKN[...]
