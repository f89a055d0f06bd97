"""Handles on buffers that jgraph keeps: readable until their owner takes them back, and then an error that says who and when.

A jax.Array whose buffer was donated raises a bare "Array has been deleted". Whoever is given a buffer that a later program will
donate gets a handle instead, which knows its owner.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import OwnershipError


@dataclass(eq=False)
class Lease:
    """Says to all handles on some buffers at once whether they may still be read.

    A place in a pool is free again after its last consumer; or, where no callable consumes it, when nobody holds a handle on
    it any more.

    Attributes:
        owner: whose buffers they are, e.g. `main_grad of callable 0`.
        give_back: frees a pool's place; None of accumulators, which have none and are updated where they are.
        arrays: in the place.
        ended: what took the buffers back; empty while they may be read.
        kept: whether the caller has taken them over, so that jgraph must not reuse them.
        consumers: callables that have still to read them.
    """

    owner: str
    give_back: Callable[[], None] | None = None
    arrays: list[jax.Array] = field(default_factory=list)
    ended: str = ""
    kept: bool = False
    consumers: int = 0
    _is_free: bool = False

    def __del__(self):
        self._free()

    def release(self, by: str) -> None:
        """Counts a consumer as done. After the last, ends the lease and frees the buffers that the caller does not keep."""
        self.consumers -= 1
        if self.consumers > 0 or self._is_free:
            return
        self._free()
        if not self.kept:
            self.ended = f"released after {by}, its last consumer"
            for array in self.arrays:
                array.delete()
        self.arrays.clear()

    def _free(self) -> None:
        if self.give_back is not None and not self._is_free:
            self._is_free = True
            self.give_back()


class Borrowed:
    """Stands for an array in a buffer that jgraph will use again, and can be used as one until then.

    After that it raises, as a `jax.Array` that was donated, but says what took the buffer; `copy` or `keep` it before.
    jax.numpy, numpy, operators and jitted functions take it as it is (a pytree node of one leaf), `jax.lax` takes its `value`.
    """

    __slots__ = ("_array", "_lease", "_path")

    def __init__(self, array: jax.Array, lease: Lease, path: str = ""):
        self._array, self._lease, self._path = array, lease, path

    @property
    def value(self) -> jax.Array:
        """The array, in the owner's buffer.

        Raises:
            OwnershipError: the buffer was taken back; the message says what took it.
        """
        lease = self._lease
        if lease.ended:
            what = f"{lease.owner}, {self._path!r}," if self._path else lease.owner
            raise OwnershipError(
                f"{what} was {lease.ended}: this handle is stale; take .copy() before that to keep the numbers",
                owner=lease.owner,
            )
        return self._array

    def copy(self) -> jax.Array:
        """Returns the numbers in a buffer of your own. Raises OwnershipError as `value` does."""
        return jnp.copy(self.value)

    def keep(self) -> jax.Array:
        """Returns the array itself, from now on yours: jgraph does not use its buffer again.

        Raises:
            OwnershipError: the buffer was taken back, or it is a sum in main_grad, which stays where it is: `copy` it.
        """
        array = self.value
        if self._lease.give_back is None:
            raise OwnershipError(f"{self._lease.owner} is updated in place and cannot be kept; take .copy()")
        self._lease.kept = True
        return array

    # Known also when the lease has ended, and to jax while it traces.
    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    size = property(lambda self: self._array.size)
    __array_priority__ = 100  # so that numpy leaves `array + handle` to the handle

    def __getattr__(self, name: str) -> Any:
        """Gives everything else that an array has, `.T`, `.astype`, `.at`, from `value`."""
        if name.startswith("_"):
            raise AttributeError(f"Borrowed has no attribute {name!r}")
        return getattr(self.value, name)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Always a copy: on a CPU a numpy view of the buffer would keep the program from updating it in place.
        return np.array(self.value, dtype)

    def __repr__(self) -> str:
        where = f"{self._lease.owner}{self._path and ', ' + self._path}"
        return f"Borrowed({where}: {self.dtype}{list(self.shape)}, {self._lease.ended or 'live'})"


def _operator(name: str) -> Any:
    """Returns the method of this name, which does to `value` as an array's own does."""
    return lambda self, *args: getattr(self.value, name)(*(arg.value if isinstance(arg, Borrowed) else arg for arg in args))


for _name in "add sub mul truediv floordiv mod pow matmul divmod and or xor lshift rshift".split():  # noqa: SIM905
    setattr(Borrowed, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Borrowed, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in "neg pos abs invert lt le gt ge eq ne getitem len iter contains bool int float complex index round format".split():  # noqa: SIM905
    setattr(Borrowed, f"__{_name}__", _operator(f"__{_name}__"))


def handles_in(tree: Any) -> list[Borrowed]:
    """Returns the handles in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Borrowed))
    return [leaf for leaf in leaves if isinstance(leaf, Borrowed)]


def arrays_of(tree: Any) -> Any:
    """Returns the tree with arrays in the places of its handles, for an executable to read.

    Raises:
        OwnershipError: a handle is stale, or is on an accumulator, which the program may update while it reads it.
    """
    for handle in handles_in(tree):
        if handle._lease.give_back is None:
            raise OwnershipError(
                f"{handle!r} is updated in place and cannot be an argument of a graphed callable; pass .copy()",
                owner=handle._lease.owner,
            )
    return jax.tree.map(lambda leaf: leaf, tree)


# Inside a jit and after tree.map the plain array is in the handle's place.
jax.tree_util.register_pytree_node(Borrowed, lambda handle: ((handle.value,), None), lambda _, children: children[0])  # pyright: ignore[reportArgumentType]


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
