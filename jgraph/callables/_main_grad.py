"""main_grad: the float32 sums of a callable's aliased gradients. Each sum stays in the same buffer."""

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from jgraph.callables._arguments import check_concrete
from jgraph.callables._borrowed import Borrowed, Lease
from jgraph.callables._compile import Executable
from jgraph.callables.shaped import Shaped
from jgraph.errors import OwnershipError
from jgraph.types import Tree


class MainGrad:
    """The float32 sums of a callable's aliased gradients, and the lease on their current values."""

    def __init__(self, shaped: Shaped, parts: Iterable[Executable]):
        self._callable = f"callable {shaped.index}"
        self._name = f"main_grad of {self._callable}"
        self._params = shaped.params
        self._device = shaped.device
        # Indices of the parameters with aliased gradients.
        self.places = sorted({place for part in parts for place in part.adds})
        self.arrays: dict[int, jax.Array] = {}  # sums by parameter index; empty until the first gradient
        self.updates = 0
        self._lease = Lease(self._name)

    def open(self) -> dict[int, jax.Array]:
        """Returns the sums by parameter index, not a copy. Allocates them as zeros before the first gradient."""
        if not self.arrays:
            return self.renew()
        for place, array in self.arrays.items():
            # A deleted sum cannot restart from zero while the other sums continue.
            if array.is_deleted():
                gone = f"{self._name}, {self._params.paths[place]!r}, was donated or deleted by the caller, or by a failed call"
                advice = "call zero_grads() to start all sums from zero; to keep a sum, donate a .copy() of it"
                raise OwnershipError(f"{gone}: {advice}", owner=self._name)
        return self.arrays

    def renew(self) -> dict[int, jax.Array]:
        """Returns the buffers for sums that start from zero. Does not set existing buffers to zero."""
        if any(place not in self.arrays or self.arrays[place].is_deleted() for place in self.places):
            avals = self._params.avals
            arrays = {i: jnp.zeros(avals[i].shape, jnp.float32, device=self._device) for i in self.places}
            check_concrete(self._callable, arrays)
            self.arrays = arrays
        return self.arrays

    def zero(self) -> None:
        """Sets the sums to zero, in place, and makes all handles stale. Does nothing before the first gradient."""
        if self.arrays:
            sums = self.renew()
            zeros = _zeros(list(sums.values()))
            check_concrete(self._callable, zeros)
            self.end("set to zero by zero_grads")
            self.arrays = dict(zip(sums, zeros, strict=True))

    def update(self, arrays: Iterable[tuple[int, jax.Array]], by: str) -> None:
        """Stores new sums by parameter index, and makes all handles stale. `by` names the call, for their message."""
        self.updates += 1
        self.end(f"updated in place by {by} (update {self.updates})")
        self.arrays.update(arrays)

    def end(self, reason: str) -> None:
        """Makes all existing handles stale. Reading them raises OwnershipError with `reason`. New handles get a new lease."""
        self._lease.ended = reason
        self._lease = Lease(self._name)

    def free(self) -> None:
        """Makes all existing handles stale, and deletes the sums."""
        self.end("freed by reset")
        for array in self.arrays.values():
            array.delete()
        self.arrays = {}

    def handles(self) -> list[Borrowed]:
        """Returns one handle per entry of `places`. Allocates the sums as zeros before the first gradient."""
        if not self.places:
            return []
        sums = self.open()
        return [Borrowed(sums[place], self._lease, self._params.paths[place]) for place in self.places]

    def tree(self, owned: Mapping[int, jax.Array]) -> Tree:
        """Returns gradients in the structure of params: the array of `owned`, else a handle on the sum, else None."""
        gradients = {**dict(zip(self.places, self.handles(), strict=True)), **owned}
        return self._params.unflatten([gradients.get(place) for place in range(len(self._params))])


_zeros = jax.jit(lambda sums: [jnp.zeros_like(total) for total in sums], donate_argnums=0, keep_unused=True)
