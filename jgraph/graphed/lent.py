"""Buffers that single calls use again: how many of each pool are live, and handles on them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from jgraph.graphed.borrowed import Borrowed, Lease, handles_in


class LentBuffers:
    """Lends buffers to callables and callers, by the names of `jgraph.schedule.POOLS`; without names, lends nothing.

    Attributes:
        live: how many buffers of each pool are in use.
        peak: how many ever were at once.
    """

    def __init__(self, names: Iterable[str]):
        self.live = dict.fromkeys(names, 0)
        self.peak = dict(self.live)

    def __bool__(self) -> bool:
        return bool(self.live)

    def take(self, pool: str, arrays: Sequence[Any]) -> Lease:
        """Returns the lease on a place of a pool, which these arrays now have."""
        self.live[pool] += 1
        self.peak[pool] = max(self.peak[pool], self.live[pool])
        return Lease(f"a buffer of pool {pool}", partial(self._give_back, pool), list(arrays))

    def lend(self, pool: str, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns handles on arrays, which take a place; the arrays themselves where nothing is reused."""
        if not self:
            return arrays
        lease = self.take(pool, arrays)
        return [Borrowed(array, lease) for array in arrays]

    def leases_in(self, tree: Any) -> list[Lease]:
        """Returns the leases on places that the handles in a tree have, each once."""
        handles = handles_in(tree) if self else ()
        return list({handle._lease: None for handle in handles if handle._lease.give_back is not None})

    def _give_back(self, pool: str) -> None:
        self.live[pool] -= 1
