"""Grouped products on Hopper: one kernel serves all groups, and finds the tiles of each by itself.

Each block of threads takes tiles until none is left: one warpgroup of it copies operands into a ring of shared memory, two
multiply what lies there.
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

ALIGNED, SWIZZLED, _SLAB = 8, 64, 64
"""The copy engine takes rows in eights and columns in lines of 128 bytes; an instruction of a warpgroup multiplies 64 rows."""
BLOCKS = 132
"""Blocks of threads, one a multiprocessor of an H100 or H200."""


class Shape(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        rows, columns: of the tile that a warpgroup multiplies.
        split: what two warpgroups take: `rows` of one tile, or a tile each, so that one multiplies while the other stores.
        stages: places of the ring, or of the two rings where each takes tiles of its own.
        slots: pieces of a tile that a warpgroup has in shared memory while it stores them.
        tail: into how many, side by side, a tile is cut where there are not enough for all blocks.
    """

    rows: int = 64
    columns: int = 256
    split: Literal["rows", "tiles"] = "rows"
    stages: int = 4
    slots: int = 2
    tail: int = 1

    @property
    def down(self) -> int:
        """Returns the rows of a tile."""
        return self.rows * (1 + (self.split == "rows"))


PRODUCT = Shape(tail=4)
WGRAD = Shape()
SUM = Shape(stages=3, slots=4)


class _Cursor(NamedTuple):
    """A group and its tiles, for a block that goes through them in order.

    Attributes:
        group: int32; the one after the last has the rows beyond the sum of the sizes.
        begin, end: int32, its rows.
        first, after: int32, the number of its first tile, and of the next group's.
    """

    group: Any
    begin: Any
    end: Any
    first: Any
    after: Any


class _Tiles(NamedTuple):
    """The tiles of all groups: those of a group follow each other.

    Attributes:
        sizes: reference to int32[G].
        M: rows of all groups.
        count: returns the tiles of a group from where it begins and ends.
        total: int32, tiles of all groups.
    """

    sizes: Any
    M: int
    count: Callable[[Any, Any], Any]
    total: Any

    def start(self) -> _Cursor:
        """Returns a cursor before the first group."""
        return _Cursor(jnp.int32(-1), *(jnp.int32(0),) * 4)

    def next(self, at: _Cursor) -> _Cursor:
        """Returns the cursor at the next group."""
        G, group = self.sizes.shape[0], at.group + 1
        end = jnp.minimum(at.end + self.sizes[jnp.minimum(group, G - 1)], self.M)
        end = jnp.where(group == G, self.M, end)
        return _Cursor(group, at.end, end, at.after, at.after + self.count(at.end, end))

    def seek(self, at: _Cursor, tile: Any) -> _Cursor:
        """Returns the cursor at the group of a tile that is not before."""
        return lax.while_loop(lambda at: at.after <= tile, self.next, at)

    def counted(self) -> "_Tiles":
        """Returns the same with the sum of all counts as its total."""
        last = lax.fori_loop(0, self.sizes.shape[0] + 1, lambda _, at: self.next(at), self.start())
        return self._replace(total=last.after)


class _Work(NamedTuple):
    """A tile's operands and what becomes of it, for `_persistent`.

    Attributes:
        steps: int32, products that it is the sum of.
        rows, columns: int32, how much of the warpgroup's own tile counts.
        load: starts the copies of a step into a place of the ring.
        finish: stores a warpgroup's accumulator.
        mask: sets rows of a step that do not count to zero, in shared memory, for a warpgroup.
        prepare: starts a warpgroup's copies of what its accumulator of so many rows and columns is added onto.
    """

    steps: Any
    rows: Any
    columns: Any
    load: Callable[[Any, Any], None]
    finish: Callable[[Any], None]
    mask: Callable[[Any, Any], None] | None = None
    prepare: Callable[[tuple[int, int]], None] | None = None


def _persistent(
    plgpu: Any,
    tiles: _Tiles,
    work: Callable[[_Cursor, Any, Any], _Work],
    operands: Callable[..., tuple[Any, Any]],
    shape: Shape,
    parts: tuple[tuple[int, ...], tuple[int, ...]],
    full: Any,
    empty: Any,
) -> None:
    """Runs a block's share of the tiles: a warpgroup loads, two multiply and store.

    Args:
        work: given a cursor, a tile of its group, and which part of the tile if it is cut, otherwise -1.
        parts: rows and columns that may have to be multiplied; the least that is enough is taken.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    # The last round is of tiles that are cut, so that fewer blocks stand still, and for less long.
    whole = tiles.total if shape.tail == 1 else lax.div(tiles.total, jnp.int32(BLOCKS)) * BLOCKS
    total = whole + (tiles.total - whole) * shape.tail
    count = lax.div(total + (BLOCKS - 1), jnp.int32(BLOCKS))

    def share(turn: Any, at: _Cursor) -> tuple[_Work, _Cursor]:
        # Turned by one at each turn, so that no block gets the last columns, which are fewer, again and again.
        number = turn * BLOCKS + lax.rem(block + turn, jnp.int32(BLOCKS))
        there = number < total
        number = jnp.minimum(number, total - 1)
        cut = jnp.maximum(number - whole, 0)
        tile = jnp.minimum(number, whole) + lax.div(cut, jnp.int32(shape.tail))
        part = jnp.where(number < whole, -1, lax.rem(cut, jnp.int32(shape.tail)))
        at = tiles.seek(at, tile)
        found = work(at, tile - at.first, part)
        mine = there & (found.columns > 0) if shape.split == "rows" else there
        return found._replace(steps=jnp.where(mine, found.steps, 0), rows=jnp.where(there, found.rows, 0)), at

    rings = 2 if shape.split == "tiles" else 1
    places = shape.stages // rings

    def place_of(step: Any, ring: Any) -> Any:
        return ring * places + lax.rem(step, jnp.int32(places))

    def loop(steps: Any, body: Callable[[Any], None]) -> None:
        lax.fori_loop(jnp.int32(0), steps, lambda k, _: body(k), None)

    def shares(each: Callable[[_Work, Any, Any], None]) -> tuple[Any, ...]:
        """Calls `each` with a tile, its ring and how many steps that ring has seen; returns these of all rings."""

        def one(turn: Any, carry: tuple[_Cursor, tuple[Any, ...]]) -> tuple[_Cursor, tuple[Any, ...]]:
            at, seen = carry
            (mine, at), ring = share(turn, at), lax.rem(turn, jnp.int32(rings))
            each(mine, ring, seen[0] if rings == 1 else jnp.where(ring == 0, *seen))
            return at, tuple(count + jnp.where(ring == number, mine.steps, 0) for number, count in enumerate(seen))

        return lax.fori_loop(jnp.int32(0), count, one, (tiles.start(), (jnp.int32(0),) * rings))[1]

    @pl.when(wg == 2)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def each(mine: _Work, ring: Any, seen: Any) -> None:
            def step(k: Any) -> None:
                place = place_of(seen + k, ring)
                pl.when(seen + k >= places)(lambda: plgpu.barrier_wait(empty.at[place]))
                mine.load(k, place)

            loop(mine.steps, step)

        for ring, seen in enumerate(shares(each)):
            last = jnp.maximum(seen - places, 0)
            loop(seen - last, lambda k, last=last, ring=ring: plgpu.barrier_wait(empty.at[place_of(last + k, ring)]))

    @pl.when(wg < 2)
    def multiply():
        plgpu.set_max_registers(232, action="increase")

        def each(mine: _Work, ring: Any, seen: Any) -> None:
            def run(rows: int, columns: int) -> None:
                if mine.prepare is not None:
                    mine.prepare((rows, columns))

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

        shares(each)
        plgpu.wait_smem_to_gmem(0)


def _parts(shape: Shape, columns: int) -> tuple[int, ...]:
    """Returns how many of its columns a warpgroup may have to multiply, for a matrix of so many."""
    last, half = columns % shape.columns, shape.columns // 2
    needed = {shape.columns} if columns >= shape.columns else set()
    if last:
        needed.add(half if last <= half and half % SWIZZLED == 0 else shape.columns)
    return tuple(sorted(needed | ({shape.columns // shape.tail} if shape.tail > 1 else set())))


def _transforms(plgpu: Any, dtype: DTypeLike) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _ring(plgpu: Any, stages: int, size: tuple[int, int]) -> Any:
    return plgpu.SMEM((stages, *size), jnp.bfloat16, transforms=_transforms(plgpu, jnp.bfloat16))


def _pieces(size: tuple[int, ...], width: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(0, size[0], _SLAB) for column in range(0, size[1], width)]


def _kernel(
    plgpu: Any, body: Any, name: str, out_type: Any, shape: Shape, rings: Any, staged: Any, barriers: int, interpret: bool
) -> Any:
    body.__name__ = body.__qualname__ = name
    arrivals = 1 if shape.split == "tiles" else 2
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *rings,
            staged,
            plgpu.Barrier(num_arrivals=2, num_barriers=shape.stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=shape.stages),
            *([plgpu.Barrier(num_arrivals=1, num_barriers=barriers)] if barriers else []),
        ],
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )


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
    slab = (2, shape.slots, _SLAB, SWIZZLED)
    staged = plgpu.RefUnion(
        plgpu.SMEM(slab, jnp.bfloat16, transforms=_transforms(plgpu, jnp.bfloat16)), plgpu.SMEM(slab, jnp.bfloat16)
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

        def work(at: _Cursor, tile: Any, part: Any) -> _Work:
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
                for number, (row, column) in enumerate(_pieces(acc.shape, SWIZZLED)):
                    slot = number % shape.slots
                    piece = acc[row : row + _SLAB, column : column + SWIZZLED]
                    low = jnp.clip(begin - slabs - row, 0, _SLAB)
                    high = jnp.clip(end - slabs - row, 0, _SLAB)
                    side = pl.ds(left + column, SWIZZLED)
                    plgpu.wait_smem_to_gmem(shape.slots - 1, wait_read_only=True)

                    @pl.when(high - low == _SLAB)
                    def _(piece=piece, slot=slot, row=row, side=side):
                        swizzled[wg, slot] = piece
                        plgpu.commit_smem()
                        there = y.at[pl.ds(pl.multiple_of(slabs + row, ALIGNED), _SLAB), side]
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

            counted = jnp.clip(N - left, 0, columns)
            if shape.tail > 1:
                # What is cut lies elsewhere in shared memory: a whole tile counts as more than that.
                counted = jnp.where(part < 0, jnp.maximum(counted, narrow + 1), jnp.minimum(counted, narrow))
            return _Work(steps, jnp.clip(end - slabs, 0, shape.rows), counted, load, finish)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            b = weights_at(place, columns)
            return a, b.transpose((1, 0)) if transposed else b

        parts = tuple(range(_SLAB, shape.rows + 1, _SLAB)), _parts(shape, N)
        _persistent(plgpu, _Tiles(sizes, M, count, None).counted(), work, operands, shape, parts, full, empty)

    operand, cut = ((width, step) if transposed else (step, width) for width in (columns, narrow))
    ring = _ring(plgpu, shape.stages, operand)
    if shape.tail > 1:
        # A copy fills contiguous memory, which a part of the columns of a tile is not.
        ring = plgpu.RefUnion(ring, _ring(plgpu, shape.stages * shape.tail, cut))
    rings = [_ring(plgpu, shape.stages, (rows, step)), ring]
    kernel = _kernel(plgpu, grouped_dot, "grouped_dot", out_type, shape, rings, staged, 0, interpret)
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
    staged = plgpu.SMEM((2, shape.slots, _SLAB, width), dtype, transforms=_transforms(plgpu, dtype))

    def grouped_wgrad(sizes, x, dy, dw, xs, dys, staged, full, empty, *read):
        wg = lax.axis_index("wg")

        def work(at: _Cursor, tile: Any, _: Any) -> _Work:
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
                return dw.at[at.group, pl.ds(head + row, _SLAB), pl.ds(left + column, width)]

            def fetch(number: int, piece: tuple[int, int]) -> None:
                slot = number % shape.slots
                plgpu.copy_gmem_to_smem(there(*piece), staged.at[wg, slot], read[0].at[wg * shape.slots + slot])

            def prepare(size: tuple[int, int]) -> None:
                @pl.when(steps > 0)
                def _():
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    for number, piece in enumerate(_pieces(size, width)[: shape.slots]):
                        fetch(number, piece)

            def store(acc: Any) -> None:
                pieces = _pieces(acc.shape, width)
                for number, (row, column) in enumerate(pieces):
                    slot = number % shape.slots
                    new = acc[row : row + _SLAB, column : column + width].astype(dtype)
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
            return _Work(steps, *counts, load, finish, mask, prepare if adds else None)

        def operands(place: Any, wg: Any, rows: int, columns: int) -> tuple[Any, Any]:
            a = xs.at[place, :, pl.ds(wg * shape.rows if shape.split == "rows" else 0, rows)]
            return a.transpose((1, 0)), dys.at[place, :, pl.ds(0, columns)]

        parts = (shape.rows,), _parts(shape, N)
        tiles = _Tiles(sizes, M, lambda begin, end: jnp.int32(down * across), jnp.int32(G * down * across))
        _persistent(plgpu, tiles, work, operands, shape, parts, full, empty)

    rings = [_ring(plgpu, shape.stages, (step, rows)), _ring(plgpu, shape.stages, (step, columns))]
    barriers = 2 * shape.slots if adds else 0
    out_type = () if adds else jax.ShapeDtypeStruct((G, K, N), dtype)
    kernel = _kernel(plgpu, grouped_wgrad, "grouped_wgrad", out_type, shape, rings, staged, barriers, interpret)
    if add_GKN is None:
        return kernel(sizes_G, x_MK, dy_MN)
    sum_GKN = jax.new_ref(add_GKN)
    kernel(sizes_G, x_MK, dy_MN, sum_GKN)
    return sum_GKN[...]
