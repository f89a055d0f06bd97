"""Buffers that jgraph may use again: numbered places, free after the last consumer."""

import heapq
from dataclasses import dataclass, field
from typing import Any

import jax

from jgraph.graphed.borrowed import Borrowed, Lease, handles_in


@dataclass
class Pool:
    """Numbers for the buffers of one kind on one device; the lowest free one is given out.

    Attributes:
        name: in `jgraph.schedule.POOLS`.
        peak: how many were ever live at once.
    """

    name: str
    peak: int = 0
    _free: list[int] = field(default_factory=list)
    _live: set[int] = field(default_factory=set)

    def take(self) -> "Slot":
        """A free place."""
        number = heapq.heappop(self._free) if self._free else len(self._live)
        self._live.add(number)
        self.peak = max(self.peak, len(self._live))
        return Slot(self, number, Lease(f"slot {number} of pool {self.name}"))

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
    arrays: list[jax.Array] = field(default_factory=list)
    consumers: int = 0
    is_free: bool = False

    def __del__(self):
        if not self.is_free:
            self.pool.give_back(self.number)

    def lend(self, array: jax.Array) -> Borrowed:
        """A handle on an array in this place."""
        self.arrays.append(array)
        return Borrowed(array, self.lease, slot=self)

    def release(self, by: str) -> None:
        """A consumer is done. After the last one the lease ends and the buffers are freed, unless the caller keeps them."""
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


def slots_of(tree: Any) -> list[Slot]:
    """The places that the handles in a tree are on, each once."""
    return list({id(handle.slot): handle.slot for handle in handles_in(tree) if handle.slot is not None}.values())
