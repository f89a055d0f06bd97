"""main_grad: the float32 sums of a callable's aliased gradients, each at one address for ever."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.callables.borrowed import Borrowed, Lease
from jgraph.callables.entry import Entry
from jgraph.callables.match import check_concrete
from jgraph.errors import OwnershipError


class MainGrad:
    """The float32 accumulator of a callable's aliased gradients, and the lease on what it holds now.

    Attributes:
        places: of the parameters whose gradients are aliased.
        arrays: by place of the parameter; empty until the first gradient.
        updates: how often it was updated.
    """

    def __init__(self, entry: Entry):
        self._callable = f"callable {entry.shaped.index}"
        self._name = f"main_grad of {self._callable}"
        self._params, self._device = entry.shaped.params, entry.shaped.device
        self.places = sorted({place for kind in entry.parts for place in entry.places(kind, "add")})
        self.arrays: dict[int, jax.Array] = {}
        self.updates = 0
        self._lease = Lease(self._name)

    def open(self) -> dict[int, jax.Array]:
        """Returns the arrays, made if there are none yet.

        Raises:
            OwnershipError: the caller donated or deleted one. A sum that starts anew beside others that go on would be no sum.
        """
        if not self.arrays:
            return self.renew()
        for place, array in self.arrays.items():
            if array.is_deleted():
                raise OwnershipError(
                    f"{self._name}, {self._params.paths[place]!r}, was donated or deleted by the caller, or by a call that "
                    f"failed: call zero_grads(), which makes it anew and starts all sums from zero; donate a .copy() of a sum "
                    f"that is to go on",
                    owner=self._name,
                )
        return self.arrays

    def renew(self) -> dict[int, jax.Array]:
        """Returns the arrays for a step that starts every sum anew: all made again if one is gone."""
        if any(place not in self.arrays or self.arrays[place].is_deleted() for place in self.places):
            shapes = tuple(self._params.avals[place].shape for place in self.places)
            arrays = _blank_program(shapes, jax.sharding.SingleDeviceSharding(self._device))()
            check_concrete(self._callable, arrays)
            self.arrays = dict(zip(self.places, arrays, strict=True))
        return self.arrays

    def zero(self) -> None:
        """Sets the arrays to zero, in place."""
        if self.arrays:
            sums = self.renew()
            zeros = _zeros(list(sums.values()))
            check_concrete(self._callable, zeros)
            self.end("set to zero by zero_grads")
            self.arrays = dict(zip(sums, zeros, strict=True))

    def update(self, arrays: dict[int, jax.Array], by: str) -> None:
        """Takes over the arrays that a program gave back; ends every handle on their numbers of before."""
        self.updates += 1
        self.end(f"updated in place by {by} (update {self.updates})")
        self.arrays.update(arrays)

    def end(self, why: str) -> None:
        """Ends every handle given out so far."""
        self._lease.ended = why
        self._lease = Lease(self._name)

    def free(self) -> None:
        """Frees the arrays for good."""
        self.end("freed by reset")
        for array in self.arrays.values():
            array.delete()
        self.arrays = {}

    def tree(self, owned: Mapping[int, Any]) -> Any:
        """Returns gradients as params: those owned by the caller, handles on the others, None for those that there are not.

        Raises:
            OwnershipError: as `open`.
        """
        sums = self.open() if self.places else {}
        handles = {place: Borrowed(array, self._lease, self._params.paths[place]) for place, array in sums.items()}
        every = {**handles, **owned} if handles else owned
        return self._params.unflatten([every.get(place) for place in range(len(self._params.avals))])


@functools.cache
def _blank_program(shapes: tuple[tuple[int, ...], ...], sharding: Any) -> Any:
    return jax.jit(lambda: [jnp.zeros(shape, jnp.float32) for shape in shapes], out_shardings=sharding)


_zeros = jax.jit(lambda sums: [jnp.zeros_like(total) for total in sums], donate_argnums=0, keep_unused=True)
