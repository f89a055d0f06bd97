"""Buffers that jgraph may use again: numbered places, free after the last consumer."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jgraph.graphed.borrowed import Borrowed, Lease, handles_in


@dataclass
class Pool:
    """Hands out numbers for the buffers of one kind, the lowest free one first.

    Attributes:
        name: in `jgraph.schedule.POOLS`.
        peak: how many were ever live at once.
    """

    name: str
    peak: int = 0
    _free: list[int] = field(default_factory=list)
    _live: set[int] = field(default_factory=set)

    def take(self, arrays: Sequence[Any] = ()) -> "Slot":
        """Returns a free place, which these arrays now have."""
        number = heapq.heappop(self._free) if self._free else len(self._live)
        self._live.add(number)
        self.peak = max(self.peak, len(self._live))
        return Slot(self, number, Lease(f"slot {number} of pool {self.name}"), list(arrays))

    def give_back(self, number: int) -> None:
        self._live.remove(number)
        heapq.heappush(self._free, number)


@dataclass
class Slot:
    """A place that is taken, and the lease of those who may read it.

    Free again after its last consumer; or, where no callable consumes it, when nobody holds a handle on it any more.
    """

    pool: Pool
    number: int
    lease: Lease
    arrays: list[jax.Array]
    consumers: int = 0
    is_free: bool = False

    def __del__(self):
        if not self.is_free:
            self.pool.give_back(self.number)

    def release(self, by: str) -> None:
        """Counts a consumer as done. After the last, ends the lease and frees the buffers that the caller does not keep."""
        self.consumers -= 1
        if self.consumers > 0 or self.is_free:
            return
        self.is_free = True
        self.pool.give_back(self.number)
        if not self.lease.kept:
            self.lease.ended = f"released after {by}, its last consumer"
            for array in self.arrays:
                array.delete()
        self.arrays.clear()


class Pools(dict[str, Pool]):
    """Pools by name; empty where buffers are not reused, and then arrays belong to whoever gets them."""

    def lend(self, pool: str, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns handles on arrays, which take a place; the arrays themselves where nothing is reused."""
        if not self:
            return arrays
        slot = self[pool].take(arrays)
        return [Borrowed(array, slot.lease, slot=slot) for array in arrays]

    def slots_of(self, tree: Any) -> list[Slot]:
        """Returns the places that the handles in a tree are on, each once."""
        handles = handles_in(tree) if self else ()
        return list({id(handle.slot): handle.slot for handle in handles if handle.slot is not None}.values())
