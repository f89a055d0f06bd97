"""Names of mesh axes, and what lies along them."""

from enum import StrEnum
from typing import Any

import jax
from jax.sharding import Mesh

from jgraph.errors import ConfigError


class Axis(StrEnum):
    """An axis of a mesh, by what its devices share."""

    DATA = "data"
    """Devices with the same parameters and different parts of the batch."""
    FSDP = "fsdp"
    """Devices that share the parameters, with different parts of the batch."""
    PIPE = "pipe"
    """Ranks of a pipeline, with different layers and the same part of the batch."""


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of a mesh over which a batch is spread: those of `data` and `fsdp` that it has."""
    return tuple(axis.value for axis in (Axis.DATA, Axis.FSDP) if axis in mesh.axis_names)


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
