"""Blocks of threads that share the tiles of all groups, of grouped products on Hopper.

Each block takes tiles until none is left: one warpgroup of it copies operands into a ring of shared memory, two multiply what
lies there. A block finds the tiles of each group by itself, from the sizes of the groups.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

ALIGNED, SWIZZLED, SLAB = 8, 64, 64
"""The copy engine takes rows in eights and columns in lines of 128 bytes; an instruction of a warpgroup multiplies 64 rows."""
LINE = 128
"""Bytes of a line of shared memory, and of a step along what is summed over."""
ROWS = 2 * SLAB
"""Rows of a tile, half of them a warpgroup's."""
BLOCKS = 132
"""Blocks of threads, one a multiprocessor of an H100 or H200."""


class Shape(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
        columns: of a tile.
        stages: places of the ring.
        slots: pieces of a tile, a line wide, that a warpgroup has in shared memory while it stores them.
    """

    columns: int
    stages: int
    slots: int


class Cursor(NamedTuple):
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


class Tiles(NamedTuple):
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
    total: Any = None

    def start(self) -> Cursor:
        """Returns a cursor before the first group."""
        return Cursor(jnp.int32(-1), *(jnp.int32(0),) * 4)

    def next(self, at: Cursor) -> Cursor:
        """Returns the cursor at the next group."""
        G, group = self.sizes.shape[0], at.group + 1
        end = jnp.minimum(at.end + self.sizes[jnp.minimum(group, G - 1)], self.M)
        end = jnp.where(group == G, self.M, end)
        return Cursor(group, at.end, end, at.after, at.after + self.count(at.end, end))

    def seek(self, at: Cursor, tile: Any) -> Cursor:
        """Returns the cursor at the group of a tile that is not before."""
        return lax.while_loop(lambda at: at.after <= tile, self.next, at)

    def counted(self) -> "Tiles":
        """Returns the same with the sum of all counts as its total."""
        last = lax.fori_loop(0, self.sizes.shape[0] + 1, lambda _, at: self.next(at), self.start())
        return self._replace(total=last.after)


class Work(NamedTuple):
    """A tile's operands and what becomes of it, for `persistent`.

    Attributes:
        steps: int32, products that it is the sum of.
        rows: whether any row of the warpgroup's part of the tile counts.
        columns: int32, how many columns of the tile count.
        load: starts the copies of a step into a place of the ring.
        finish: stores a warpgroup's accumulator.
        mask: sets rows of a step that do not count to zero, in shared memory, for a warpgroup.
        prepare: starts a warpgroup's copies of what its accumulator of so many columns is added onto.
    """

    steps: Any
    rows: Any
    columns: Any
    load: Callable[[Any, Any], None]
    finish: Callable[[Any], None]
    mask: Callable[[Any, Any], None] | None = None
    prepare: Callable[[int], None] | None = None


def persistent(
    plgpu: Any,
    tiles: Tiles,
    work: Callable[[Cursor, Any], Work],
    operands: Callable[[Any, int], tuple[Any, Any]],
    places: int,
    widths: tuple[int, ...],
    full: Any,
    empty: Any,
) -> None:
    """Runs a block's share of the tiles: a warpgroup loads, two multiply and store.

    Args:
        work: given a cursor, and a tile of its group.
        operands: returns references to a warpgroup's operands, given a place of the ring and a width.
        places: how many the ring has.
        widths: columns that may have to be multiplied; the least that is enough is taken.
        full, empty: barriers of the ring.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(tiles.total + (BLOCKS - 1), jnp.int32(BLOCKS))

    def share(turn: Any, at: Cursor) -> tuple[Work, Cursor]:
        # Turned by one at each turn, so that no block gets the last columns, which are fewer, again and again.
        number = turn * BLOCKS + lax.rem(block + turn, jnp.int32(BLOCKS))
        there, number = number < tiles.total, jnp.minimum(number, tiles.total - 1)
        at = tiles.seek(at, number)
        found = work(at, number - at.first)
        return found._replace(steps=jnp.where(there, found.steps, 0), rows=there & found.rows), at

    def place_of(step: Any) -> Any:
        return lax.rem(step, jnp.int32(places))

    def loop(steps: Any, body: Callable[[Any], None]) -> None:
        lax.fori_loop(jnp.int32(0), steps, lambda k, _: body(k), None)

    def shares(each: Callable[[Work, Any], None]) -> Any:
        """Calls `each` with a tile and how many steps there were before it; returns how many there were in all."""

        def one(turn: Any, carry: tuple[Cursor, Any]) -> tuple[Cursor, Any]:
            at, seen = carry
            mine, at = share(turn, at)
            each(mine, seen)
            return at, seen + mine.steps

        return lax.fori_loop(jnp.int32(0), count, one, (tiles.start(), jnp.int32(0)))[1]

    @pl.when(wg == 2)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def each(mine: Work, seen: Any) -> None:
            def step(k: Any) -> None:
                place = place_of(seen + k)
                pl.when(seen + k >= places)(lambda: plgpu.barrier_wait(empty.at[place]))
                mine.load(k, place)

            loop(mine.steps, step)

        seen = shares(each)
        last = jnp.maximum(seen - places, 0)
        loop(seen - last, lambda k: plgpu.barrier_wait(empty.at[place_of(last + k)]))

    @pl.when(wg < 2)
    def multiply():
        plgpu.set_max_registers(232, action="increase")

        def each(mine: Work, seen: Any) -> None:
            def run(columns: int) -> None:
                if mine.prepare is not None:
                    mine.prepare(columns)

                def products(acc: Any) -> Any:
                    def step(k: Any) -> None:
                        place = place_of(seen + k)
                        plgpu.barrier_wait(full.at[place])
                        if mine.mask is not None:
                            mine.mask(k, place)
                        plgpu.wgmma(acc, *operands(place, columns))
                        plgpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[place_of(seen + k - 1)]))

                    loop(mine.steps, step)
                    return acc[...]

                result = pl.run_scoped(products, plgpu.ACC((SLAB, columns)))
                last = place_of(seen + mine.steps - 1)
                pl.when(mine.steps > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
                mine.finish(result)

            def idle(k: Any) -> None:
                plgpu.barrier_wait(full.at[place_of(seen + k)])
                plgpu.barrier_arrive(empty.at[place_of(seen + k)])

            for columns, less in zip(widths, (0, *widths), strict=False):
                fits = mine.rows & (mine.columns > less) & (mine.columns <= columns)
                pl.when(fits)(functools.partial(run, columns))
            # A warpgroup has to see every phase of the barriers that it waits for.
            pl.when(~mine.rows)(lambda: loop(mine.steps, idle))

        shares(each)
        plgpu.wait_smem_to_gmem(0)


def widths_of(shape: Shape, columns: int) -> tuple[int, ...]:
    """Returns how many columns of a tile may have to be multiplied, for a matrix of so many."""
    last, half = columns % shape.columns, shape.columns // 2
    widths = {shape.columns} if columns >= shape.columns else set()
    return tuple(sorted(widths | ({half if last <= half else shape.columns} if last else set())))


def aligned(row: Any) -> Any:
    """Returns the last row up to this one that the copy engine can begin with."""
    return pl.multiple_of(lax.div(row, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)


def transforms(plgpu: Any, dtype: DTypeLike) -> tuple[Any, ...]:
    """Returns how tensor cores want an array in shared memory."""
    return plgpu.TilingTransform((8, LINE // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def kernel_of(
    plgpu: Any,
    body: Any,
    name: str,
    out_type: Any,
    stages: int,
    operands: tuple[tuple[tuple[int, int], DTypeLike], ...],
    staged: Any,
    barriers: int,
    interpret: bool,
) -> Any:
    """Returns a kernel of `BLOCKS` blocks: its body gets a ring for each operand, `staged`, and the barriers of the ring.

    The last argument of the body are `barriers` more, for copies of its own, if there are any.
    """
    body.__name__ = body.__qualname__ = name
    rings = [plgpu.SMEM((stages, *size), dtype, transforms=transforms(plgpu, dtype)) for size, dtype in operands]
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *rings,
            staged,
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            *([plgpu.Barrier(num_arrivals=1, num_barriers=barriers)] if barriers else []),
        ],
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
