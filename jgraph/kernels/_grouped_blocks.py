"""Persistent blocks of threads for grouped matmuls on Hopper.

Blocks share the tiles of all groups. In each block one warpgroup copies operands into a ring in shared memory and two multiply.
A block computes the tiles of each group from the sizes of the groups.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.kernels._mosaic import SLAB, interpreted, plgpu, shared

ALIGNED, SWIZZLED = 8, 64
"""Rows are copied from multiples of 8, and columns of bfloat16 in lines of 64."""
ROWS = 2 * SLAB
"""Rows of a tile, half of them for each compute warpgroup."""
_BLOCKS = 132
"""Blocks of threads, one for each multiprocessor of an H100 or H200."""


class Shape(NamedTuple):
    """Tile sizes of a kernel.

    Attributes:
        columns: Columns of a tile.
        stages: Stages of the ring.
        slots: Pieces of a tile, one line wide, that a warpgroup stages in shared memory while it stores them.
    """

    columns: int
    stages: int
    slots: int


class Cursor(NamedTuple):
    """A group and its tiles. A block visits groups in order.

    Attributes:
        group: int32; the group after the last holds the rows beyond the sum of the sizes.
        begin: int32, first row.
        end: int32, row after the last.
        first: int32, number of the first tile.
        after: int32, number of the next group's first tile.
    """

    group: Any
    begin: Any
    end: Any
    first: Any
    after: Any


class Tiles(NamedTuple):
    """The tiles of all groups, numbered group by group.

    Attributes:
        sizes: Reference to int32[G].
        M: Rows of all groups.
        count: Returns the number of tiles of a group, given its first row and the row after its last.
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
        """Returns the cursor at the group of a tile in this group or a later one."""
        return lax.while_loop(lambda at: at.after <= tile, self.next, at)

    def counted(self) -> "Tiles":
        """Returns a copy with `total` set."""
        last = lax.fori_loop(0, self.sizes.shape[0] + 1, lambda _, at: self.next(at), self.start())
        return self._replace(total=last.after)


class Work(NamedTuple):
    """The work of one tile, for `persistent`.

    Attributes:
        steps: int32, number of products to sum.
        rows: True if the warpgroup's part of the tile has a valid row.
        columns: int32, number of valid columns.
        load: Starts the copies of a step into a stage of the ring.
        finish: Stores a warpgroup's accumulator.
        mask: Sets a warpgroup's invalid rows of a step to zero in shared memory.
        prepare: Starts the copies of the values that a warpgroup's accumulator is added to, given its columns.
    """

    steps: Any
    rows: Any
    columns: Any
    load: Callable[[Any, Any], None]
    finish: Callable[[Any], None]
    mask: Callable[[Any, Any], None] | None = None
    prepare: Callable[[int], None] | None = None


def persistent(
    tiles: Tiles,
    work: Callable[[Cursor, Any], Work],
    operands: Callable[[Any, int], tuple[Any, Any]],
    places: int,
    widths: tuple[int, ...],
    full: Any,
    empty: Any,
) -> None:
    """Runs a block's share of the tiles: one warpgroup loads, two multiply and store.

    Args:
        tiles: The tiles of all groups.
        work: Returns the work of a tile, given a cursor at its group.
        operands: Returns references to a warpgroup's operands, given a stage of the ring and a width.
        places: Number of stages of the ring.
        widths: Possible widths of a product; the smallest sufficient one is used.
        full: Barriers of filled stages.
        empty: Barriers of consumed stages.
    """
    gpu = plgpu()
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    count = lax.div(tiles.total + (_BLOCKS - 1), jnp.int32(_BLOCKS))

    def share(turn: Any, at: Cursor) -> tuple[Work, Cursor]:
        # Rotated by one at each turn, so that the narrower last columns are spread over the blocks.
        number = turn * _BLOCKS + lax.rem(block + turn, jnp.int32(_BLOCKS))
        there, number = number < tiles.total, jnp.minimum(number, tiles.total - 1)
        at = tiles.seek(at, number)
        found = work(at, number - at.first)
        return found._replace(steps=jnp.where(there, found.steps, 0), rows=there & found.rows), at

    def place_of(step: Any) -> Any:
        return lax.rem(step, jnp.int32(places))

    def loop(steps: Any, body: Callable[[Any], None]) -> None:
        lax.fori_loop(jnp.int32(0), steps, lambda k, _: body(k), None)

    def shares(each: Callable[[Work, Any], None]) -> Any:
        """Calls `each` with a tile and the number of steps before it. Returns the total number of steps."""

        def one(turn: Any, carry: tuple[Cursor, Any]) -> tuple[Cursor, Any]:
            at, seen = carry
            mine, at = share(turn, at)
            each(mine, seen)
            return at, seen + mine.steps

        return lax.fori_loop(jnp.int32(0), count, one, (tiles.start(), jnp.int32(0)))[1]

    @pl.when(wg == 2)
    def load():
        gpu.set_max_registers(40, action="decrease")

        def each(mine: Work, seen: Any) -> None:
            def step(k: Any) -> None:
                place = place_of(seen + k)
                pl.when(seen + k >= places)(lambda: gpu.barrier_wait(empty.at[place]))
                mine.load(k, place)

            loop(mine.steps, step)

        seen = shares(each)
        last = jnp.maximum(seen - places, 0)
        loop(seen - last, lambda k: gpu.barrier_wait(empty.at[place_of(last + k)]))

    @pl.when(wg < 2)
    def multiply():
        gpu.set_max_registers(232, action="increase")

        def each(mine: Work, seen: Any) -> None:
            def run(columns: int) -> None:
                if mine.prepare is not None:
                    mine.prepare(columns)

                def products(acc: Any) -> Any:
                    def step(k: Any) -> None:
                        place = place_of(seen + k)
                        gpu.barrier_wait(full.at[place])
                        if mine.mask is not None:
                            mine.mask(k, place)
                        gpu.wgmma(acc, *operands(place, columns))
                        gpu.wgmma_wait(1)
                        pl.when(k > 0)(lambda: gpu.barrier_arrive(empty.at[place_of(seen + k - 1)]))

                    loop(mine.steps, step)
                    return acc[...]

                result = pl.run_scoped(products, gpu.ACC((SLAB, columns)))
                last = place_of(seen + mine.steps - 1)
                pl.when(mine.steps > 0)(lambda: gpu.barrier_arrive(empty.at[last]))
                mine.finish(result)

            def idle(k: Any) -> None:
                gpu.barrier_wait(full.at[place_of(seen + k)])
                gpu.barrier_arrive(empty.at[place_of(seen + k)])

            for columns, less in zip(widths, (0, *widths), strict=False):
                fits = mine.rows & (mine.columns > less) & (mine.columns <= columns)
                pl.when(fits)(functools.partial(run, columns))
            # A warpgroup must observe every phase of its barriers.
            pl.when(~mine.rows)(lambda: loop(mine.steps, idle))

        shares(each)
        gpu.wait_smem_to_gmem(0)


def widths_of(shape: Shape, columns: int) -> tuple[int, ...]:
    """Returns the possible widths of a product for a matrix of `columns` columns."""
    last, half = columns % shape.columns, shape.columns // 2
    widths = {shape.columns} if columns >= shape.columns else set()
    return tuple(sorted(widths | ({half if last <= half else shape.columns} if last else set())))


def aligned(row: Any) -> Any:
    """Rounds a row down to a multiple of `ALIGNED`, from which the copy engine can start."""
    return pl.multiple_of(lax.div(row, jnp.int32(ALIGNED)) * ALIGNED, ALIGNED)


def kernel_of(
    body: Any,
    name: str,
    out_type: Any,
    stages: int,
    operands: tuple[tuple[tuple[int, int], DTypeLike], ...],
    staged: Any,
    barriers: int,
    interpret: bool,
) -> Any:
    """Returns a kernel of one block per multiprocessor.

    The scratch arguments of its body are a ring for each operand, `staged`, the barriers of the ring, and `barriers` further
    barriers if that is not 0.
    """
    body.__name__ = body.__qualname__ = name
    gpu = plgpu()
    rings = [shared((stages, *size), dtype) for size, dtype in operands]
    return gpu.kernel(
        body,
        out_type=out_type,
        scratch_types=[
            *rings,
            staged,
            gpu.Barrier(num_arrivals=2, num_barriers=stages),
            gpu.Barrier(num_arrivals=2, num_barriers=stages),
            *([gpu.Barrier(num_arrivals=1, num_barriers=barriers)] if barriers else []),
        ],
        grid=(_BLOCKS,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        interpret=interpreted(interpret),
    )
