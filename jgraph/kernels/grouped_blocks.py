"""Blocks of threads that share the tiles of all groups, of grouped products on Hopper.

Each block takes tiles until none is left: one warpgroup of it copies operands into a ring of shared memory, two multiply what
lies there. A block finds the tiles of each group by itself, from the sizes of the groups.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

ALIGNED, SWIZZLED, SLAB = 8, 64, 64
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
    total: Any

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


def persistent(
    plgpu: Any,
    tiles: Tiles,
    work: Callable[[Cursor, Any, Any], Work],
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

    def share(turn: Any, at: Cursor) -> tuple[Work, Cursor]:
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

    def shares(each: Callable[[Work, Any, Any], None]) -> tuple[Any, ...]:
        """Calls `each` with a tile, its ring and how many steps that ring has seen; returns these of all rings."""

        def one(turn: Any, carry: tuple[Cursor, tuple[Any, ...]]) -> tuple[Cursor, tuple[Any, ...]]:
            at, seen = carry
            (mine, at), ring = share(turn, at), lax.rem(turn, jnp.int32(rings))
            each(mine, ring, seen[0] if rings == 1 else jnp.where(ring == 0, *seen))
            return at, tuple(count + jnp.where(ring == number, mine.steps, 0) for number, count in enumerate(seen))

        return lax.fori_loop(jnp.int32(0), count, one, (tiles.start(), (jnp.int32(0),) * rings))[1]

    @pl.when(wg == 2)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        def each(mine: Work, ring: Any, seen: Any) -> None:
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

        def each(mine: Work, ring: Any, seen: Any) -> None:
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


def parts_of(shape: Shape, columns: int) -> tuple[int, ...]:
    """Returns how many of its columns a warpgroup may have to multiply, for a matrix of so many."""
    last, half = columns % shape.columns, shape.columns // 2
    needed = {shape.columns} if columns >= shape.columns else set()
    if last:
        needed.add(half if last <= half and half % SWIZZLED == 0 else shape.columns)
    return tuple(sorted(needed | ({shape.columns // shape.tail} if shape.tail > 1 else set())))


def transforms(plgpu: Any, dtype: DTypeLike) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def ring_of(plgpu: Any, stages: int, size: tuple[int, int]) -> Any:
    return plgpu.SMEM((stages, *size), jnp.bfloat16, transforms=transforms(plgpu, jnp.bfloat16))


def pieces_of(size: tuple[int, ...], width: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(0, size[0], SLAB) for column in range(0, size[1], width)]


def kernel_of(
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
