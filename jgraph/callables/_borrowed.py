"""Handles on main_grad. They are readable until the next update of main_grad; later reads raise an error that names the update.

A jax.Array raises only "Array has been deleted" after its buffer was donated. Gradients that alias main_grad are therefore
returned as handles, which name the call that updated the buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgraph.errors import OwnershipError
from jgraph.types import Tree


@dataclass(eq=False)
class Lease:
    """The validity of all handles on the arrays of one owner. Shared by these handles."""

    owner: str  # of the buffers, such as `main_grad of callable 0`
    ended: str = ""  # the call that updated the buffers; empty while the handles are valid


class Borrowed:
    """A handle: an array in a buffer of jgraph that the next update overwrites. Use it like a `jax.Array` until then.

    A handle becomes stale when jgraph updates the buffer. A stale handle raises OwnershipError with the name of the update;
    call `copy` before the update to keep the values. jax.numpy, numpy, operators and jitted functions accept a handle directly,
    as a pytree node with one leaf. For `jax.lax`, pass `value`. NumPy gets a copy. `shape`, `dtype`, `ndim` and `size` also
    work on stale handles.
    """

    __slots__ = ("_array", "_lease", "_path")

    def __init__(self, array: jax.Array, lease: Lease, path: str = ""):
        self._array = array
        self._lease = lease
        self._path = path

    @property
    def value(self) -> jax.Array:
        """The array, in the buffer of its owner. Not a copy: do not donate or delete it.

        Raises:
            OwnershipError: If the buffer was updated. The message names the update.
        """
        lease = self._lease
        if lease.ended:
            name = f"{lease.owner}, {self._path!r}," if self._path else lease.owner
            wrong = f"{name} was {lease.ended}: this handle is stale; call .copy() before the update to keep the values"
            raise OwnershipError(wrong, owner=lease.owner)
        return self._array

    def copy(self) -> jax.Array:
        """Copies the array to a new buffer of the caller, which later updates do not change.

        Raises:
            OwnershipError: If the buffer was updated.
        """
        return jnp.copy(self.value)

    # Available on stale handles too, and to JAX during tracing.
    shape = property(lambda self: self._array.shape)
    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    size = property(lambda self: self._array.size)
    __array_priority__ = 100  # NumPy then leaves `array + handle` to the handle.

    def __getattr__(self, name: str) -> Any:
        """Forwards all other attributes of an array, such as `.T` and `.astype`, to `value`."""
        if name.startswith("_"):
            raise AttributeError(f"Borrowed has no attribute {name!r}")
        return getattr(self.value, name)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        # Always a copy, because on a CPU a NumPy view of the buffer would prevent an update in place.
        return np.array(self.value, dtype)

    def __repr__(self) -> str:
        where = f"{self._lease.owner}{self._path and ', ' + self._path}"
        return f"Borrowed({where}: {self.dtype}{list(self.shape)}, {self._lease.ended or 'live'})"


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.value, name)(*(arg.value if isinstance(arg, Borrowed) else arg for arg in args))


for _name in "add sub mul truediv floordiv mod pow matmul divmod and or xor lshift rshift".split():  # noqa: SIM905
    setattr(Borrowed, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Borrowed, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in "neg pos abs invert lt le gt ge eq ne getitem len iter contains bool int float complex index round format".split():  # noqa: SIM905
    setattr(Borrowed, f"__{_name}__", _operator(f"__{_name}__"))


def check_no_handles(tree: Tree) -> None:
    """Raises OwnershipError if `tree` contains a handle (`Borrowed`), also a stale one."""
    # main_grad may be updated while an executable reads the handle's buffer.
    for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Borrowed)):
        if isinstance(leaf, Borrowed):
            wrong = f"{leaf!r} is updated in place and cannot be an argument of a graphed callable; pass .copy()"
            raise OwnershipError(wrong, owner=leaf._lease.owner)


# A jitted function and jax.tree.map replace the handle by its array.
jax.tree_util.register_pytree_node(Borrowed, lambda handle: ((handle.value,), None), lambda _, children: children[0])  # pyright: ignore[reportArgumentType]
