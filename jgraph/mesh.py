"""Names of mesh axes, and the axes that a batch is spread over."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

from jgraph.errors import ConfigError, JgraphError

Tree = Any


class Axis(StrEnum):
    """An axis of a mesh, by what its devices share."""

    DATA = "data"
    """Devices with the same parameters and different parts of the batch."""
    FSDP = "fsdp"
    """Devices that share the parameters, with different parts of the batch."""
    PIPE = "pipe"
    """Ranks of a pipeline, with different layers and the same part of the batch."""


# Any, because Flax annotates `axis_name` as a string although it takes a tuple.
BATCH_AXES: Any = (Axis.DATA.value, Axis.FSDP.value)
"""The mesh axes that a batch is spread over, as an `axis_name` for reductions over all rows of a microbatch.

Every layout binds both axes inside a loss: `nnx.BatchNorm(64, axis_name=jgraph.BATCH_AXES, rngs=rngs)`.
"""


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the `BATCH_AXES` of a mesh, in their order."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def num_data_ranks(mesh: Mesh | None) -> int:
    """Returns the number of devices that share the rows of a batch. A mesh of None is one device."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def with_batch_axes(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Lets a function reduce over `BATCH_AXES` on layouts that lack one of them.

    The missing axes are bound with size one, but only if the function reduces over one: other functions are traced as they
    are. A function that does is traced a second time, and the operations of its first trace are dead code.

    Args:
        fn: A function of trees of arrays. It raises a ConfigError if it reduces over an axis that cannot be bound.

    Returns:
        The function, with the same arguments and results.
    """

    @functools.wraps(fn)
    def bound(*args: Tree) -> Tree:
        try:
            return fn(*args)
        except NameError as e:
            if not _unbound_axis(e):
                raise
        missing = [axis for axis in BATCH_AXES if not _is_bound(axis)]
        with refused_axes(_not_a_batch_axis):
            return functools.reduce(_over_one, missing, fn)(*args)

    return bound


@contextlib.contextmanager
def refused_axes(error: Callable[[str], JgraphError]) -> Iterator[None]:
    """Raises `error(axis)` instead of JAX's NameError for a mesh axis that is not bound."""
    try:
        yield
    except NameError as e:
        if axis := _unbound_axis(e):
            raise error(axis) from None
        raise


def _not_a_batch_axis(axis: str) -> ConfigError:
    allowed = " or ".join(map(repr, BATCH_AXES))
    message = f"`axis_name` is {axis!r}: must be {allowed}, or jgraph.BATCH_AXES for both"
    return ConfigError(message, field="axis_name")


def _unbound_axis(error: NameError) -> str:
    """Returns the mesh axis that a NameError of JAX is about. Empty for Python's own NameErrors."""
    found = re.search(r"unbound axis name: (\w+)", str(error))  # the error has no attribute for it
    return found[1] if found else ""


def _is_bound(axis: str) -> bool:
    """True if collectives can use a mesh axis in the current trace."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def _over_one(fn: Callable[..., Tree], axis: str) -> Callable[..., Tree]:
    """Binds a mesh axis with size one. No argument is mapped, so the operations of `fn` keep their shapes."""
    mapped = jax.vmap(fn, in_axes=None, axis_name=axis, axis_size=1)
    return lambda *args: jax.tree.map(lambda leaf: leaf[0], mapped(*args))


def checked(mesh: Any, *, needs: tuple[Axis, ...], allows: tuple[Axis, ...]) -> Mesh:
    """Returns the mesh with automatic axes.

    With the explicit axes that `jax.make_mesh` gives by default, arguments would have to lie where they belong before a call.

    Raises:
        ConfigError: `mesh` is no mesh, lacks an axis of `needs`, or has one that is neither in `needs` nor in `allows`.
    """
    allowed = (*needs, *allows)
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) - set(allowed) or set(needs) - set(mesh.axis_names):
        found = f"axes {mesh.axis_names}" if isinstance(mesh, Mesh) else repr(mesh)
        optional = f", and may have {', '.join(allows)}" if allows else ""
        raise ConfigError(
            f"`mesh` has {found}: must be a jax.sharding.Mesh with the axes {', '.join(needs) or 'data'}{optional}",
            field="mesh",
        )
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)
