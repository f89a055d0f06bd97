"""Handles on buffers that jgraph keeps: readable until their owner takes them back, and then an error that says who and when.

A jax.Array whose buffer was donated raises a bare "Array has been deleted". Whoever is given a buffer that a later program will
donate gets a handle instead, which knows its owner.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import OwnershipError


@dataclass
class Lease:
    """Ends for all handles on one owner's buffers at once.

    Attributes:
        owner: whose buffers they are, e.g. `main_grad of callable 0`.
        ended: what took the buffers back; empty while they may be read.
        kept: whether the caller has taken them over, so that jgraph must not reuse them.
    """

    owner: str
    ended: str = ""
    kept: bool = False


class Borrowed:
    """An array in a buffer of jgraph's own, which can be used where an array can until its owner takes the buffer back.

    As a pytree it is a node whose only leaf is the array, so a tree with handles can be given to a jitted function as it is.
    Functions of `jax.lax` take `value`.
    """

    __slots__ = ("_array", "_lease", "_path", "slot")

    def __init__(self, array: jax.Array, lease: Lease, path: str = "", slot: Any = None):
        self._array, self._lease, self._path, self.slot = array, lease, path, slot

    @property
    def value(self) -> jax.Array:
        """The array, in the owner's buffer.

        Raises:
            OwnershipError: the buffer was taken back; the message says by what.
        """
        lease = self._lease
        if lease.ended:
            what = f"{lease.owner}, {self._path!r}," if self._path else f"{lease.owner}"
            raise OwnershipError(
                f"{what} was {lease.ended}: this handle is stale; take .copy() before that to keep the numbers",
                owner=lease.owner,
            )
        return self._array

    def copy(self) -> jax.Array:
        """Returns the same numbers in a buffer of the caller's own. Raises OwnershipError as `value` does."""
        return jnp.copy(self.value)

    def keep(self) -> jax.Array:
        """Returns the array itself, from now on the caller's: a pool buffer that is kept is not used again.

        Raises:
            OwnershipError: it was taken back, or it is an accumulator, which stays where it is.
        """
        array = self.value
        if self.slot is None:
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
        state = f"{self._lease.ended}" if self._lease.ended else "live"
        return f"Borrowed({self._lease.owner}{self._path and ', ' + self._path}: {self.dtype}{list(self.shape)}, {state})"


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
        if handle.slot is None:
            raise OwnershipError(
                f"{handle!r} is updated in place and cannot be an argument of a graphed callable; pass .copy()",
                owner=handle._lease.owner,
            )
    return jax.tree.map(lambda leaf: leaf, tree)


# Inside a jit and after tree.map the plain array is in the handle's place.
jax.tree_util.register_pytree_node(Borrowed, lambda handle: ((handle.value,), None), lambda _, children: children[0])  # pyright: ignore[reportArgumentType]
