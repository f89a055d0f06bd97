"""Describes the arrays of a step. All facts that follow from the name of a parameter are read here, once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jgraph.mesh import PARTITIONED_AXES, axis_names
from jgraph.tree import expert_axis, is_matrix, is_router

Entry: TypeAlias = str | tuple[str, ...] | None
"""The mesh axes of an array axis, as in a PartitionSpec."""

Kind: TypeAlias = Literal["matrix", "vector", "router matrix", "router vector"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Param:
    """What a step knows of an array."""

    shape: tuple[int, ...]  # with padding
    dtype: np.dtype  # of the parameters in the model's own tree
    kind: Kind  # matrices have weight decay, and routers, the layers that choose experts, are never cast
    axes: tuple[Entry, ...]  # one entry for each array axis
    trained: tuple[bool, ...] = (True,)  # whether elements are trained: one flag, or one for each row of stacked layers
    joins: bool = True  # whether it may share an array with others, if it is small
    # The array axis that rules, annotations or experts ask to shard over `fsdp`. `any` lets the layout choose an axis, and
    # `none` replicates the array.
    wanted: int | Literal["any", "none"] = "any"
    # Number of equal groups of consecutive devices of `fsdp`. Each group gathers another part of the array: other experts. Not
    # the groups of `moe/_experts.py`, which exchange rows: those have one device of each group.
    groups: int = 1
    expert_axis: int | None = None  # in the model's own tree: layouts do not change it
    padding: int = 0  # zeros at the end of the array axis that is sharded over `fsdp`

    @classmethod
    def describe(cls, name: str, leaf: Array | jax.ShapeDtypeStruct, *, trained: bool = True) -> Self:
        """Describes a parameter of the model by its name, shape and dtype."""
        if is_matrix(name, leaf):
            kind = "router matrix" if is_router(name) else "matrix"
        else:
            kind = "router vector" if is_router(name) else "vector"
        axes = (None,) * leaf.ndim
        return cls(leaf.shape, leaf.dtype, kind, axes, (trained,), expert_axis=expert_axis(name, leaf.ndim))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def spec(self) -> PartitionSpec:
        return _spec(self.axes)

    @property
    def rank_spec(self) -> PartitionSpec:
        """The part of `spec` on the mesh axes of ranks: a function under `jax.shard_map` sees the other axes whole."""
        return _spec(self._axes_in(lambda name: name not in PARTITIONED_AXES))

    @property
    def partitioned_spec(self) -> PartitionSpec:
        """The part of `spec` on the mesh axes over which XLA partitions the step."""
        return _spec(self._axes_in(PARTITIONED_AXES.__contains__))

    def _axes_in(self, keeps: Callable[[str], bool]) -> list[Entry]:
        kept = [tuple(filter(keeps, axis_names(entry))) for entry in self.axes]
        return [names[0] if len(names) == 1 else names or None for names in kept]

    @property
    def decays(self) -> bool:
        return self.kind.endswith("matrix")

    @property
    def is_cast(self) -> bool:
        """True if a strategy computes with a copy in its compute dtype."""
        return self.kind == "matrix"

    @property
    def is_trained(self) -> bool:
        return any(self.trained)

    def mask(self) -> Array | None:
        """Bools that broadcast to the array, False for frozen rows; None if the whole array is trained."""
        if all(self.trained):
            return None
        return jnp.asarray(np.reshape(self.trained, (-1, *[1] * (len(self.shape) - 1))))

    def axis_of(self, mesh_axis: str) -> int | None:
        """Returns the array axis that is sharded over a mesh axis; None if there is none."""
        return next((i for i, entry in enumerate(self.axes) if mesh_axis in axis_names(entry)), None)

    def placed(self, axis: int, *mesh_axes: str) -> Self:
        """Returns a copy with the array axis `axis` sharded over exactly `mesh_axes`."""
        entry = mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes
        return replace(self, axes=tuple(entry if i == axis else old for i, old in enumerate(self.axes)))


Description: TypeAlias = Mapping[str, Param]
"""The `Param` of each array by name."""


def _spec(axes: Sequence[Entry]) -> PartitionSpec:
    """Without None at the end, so that equal placements are equal specs."""
    count = max((i + 1 for i, entry in enumerate(axes) if entry is not None), default=0)
    return PartitionSpec(*axes[:count])
