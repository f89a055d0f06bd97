"""main_grad: the float32 sums of a callable's aliased gradients, each at one address for ever."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.callables.borrowed import Borrowed, Lease
from jgraph.callables.entry import Entry


class MainGrad:
    """The float32 accumulator of a callable's aliased gradients, and the lease on what it holds now.

    Attributes:
        arrays: by place of the parameter; empty until the first gradient.
        updates: how often it was updated.
    """

    def __init__(self, entry: Entry):
        self._name = f"main_grad of callable {entry.shaped.index}"
        self._paths, self._avals = entry.shaped.params.paths, entry.shaped.params.avals
        self._device = entry.shaped.device
        self.places = sorted(entry.aliased)
        self.arrays: dict[int, jax.Array] = {}
        self.updates = 0
        self._lease = Lease(self._name)

    def open(self) -> dict[int, jax.Array]:
        """The arrays, made if they are not there."""
        if any(place not in self.arrays or self.arrays[place].is_deleted() for place in self.places):
            self.arrays = dict(zip(self.places, self.blank(tuple(self.places)), strict=True))
        return self.arrays

    def blank(self, places: tuple[int, ...]) -> list[jax.Array]:
        """New float32 zeros, in one program."""
        shapes = tuple(self._avals[place].shape for place in places)
        return _blank_program(shapes, jax.sharding.SingleDeviceSharding(self._device))() if shapes else []

    def zero(self) -> None:
        """Sets the arrays to zero, in place."""
        if self.arrays:
            self.end("set to zero by zero_grads")
            sums = self.open()
            self.arrays = dict(zip(sums, _zeros(list(sums.values())), strict=True))

    def update(self, arrays: dict[int, jax.Array], by: str) -> None:
        """Takes over what a program made of the arrays; ends every handle on what they held before."""
        self.updates += 1
        self.end(f"updated in place by {by} (update {self.updates})")
        self.arrays.update(arrays)

    def end(self, why: str) -> None:
        """Ends every handle given out so far."""
        self._lease.ended = why
        self._lease = Lease(self._name)

    def handle(self, place: int) -> Borrowed:
        return Borrowed(self.open()[place], self._lease, self._paths[place])


@functools.cache
def _blank_program(shapes: tuple[tuple[int, ...], ...], sharding: Any) -> Any:
    return jax.jit(lambda: [jnp.zeros(shape, jnp.float32) for shape in shapes], out_shardings=sharding)


_zeros = jax.jit(lambda sums: [jnp.zeros_like(total) for total in sums], donate_argnums=0, keep_unused=True)
