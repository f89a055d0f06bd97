"""Arrays sharded over the mesh axis `fsdp`: choice of the sharded axis, all-gather, reduce-scatter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jgraph.errors import ConfigError
from jgraph.layout._layout import Change, MakeLayout, each
from jgraph.layout._param import Param
from jgraph.mesh import Axis, per_shard

AXIS = Axis.FSDP.value


def sharded(ranks: int, *, uneven: Literal["pad", "replicate"] = "pad") -> MakeLayout:
    """A layout that shards an axis of each array: the wanted axis, else the first divisible axis, else the longest axis."""

    def change(name: str, param: Param) -> Change | None:
        axis = _axis(name, param, ranks, uneven)
        if axis is None:
            return None
        length = param.shape[axis]
        padding = -length % ranks
        shape = tuple(n + padding if i == axis else n for i, n in enumerate(param.shape))
        placed = replace(param.placed(axis, AXIS), shape=shape, padding=padding)
        shard = Shard.from_param(placed)
        return Change(placed, shard.pad, shard.unpad)

    return each(change)


def _axis(name: str, param: Param, ranks: int, uneven: Literal["pad", "replicate"]) -> int | None:
    """Returns the array axis to shard; None to replicate the array."""
    free = [i for i, entry in enumerate(param.axes) if entry is None]
    wanted = param.wanted
    if wanted == "none":
        return None
    if isinstance(wanted, int):
        if wanted in free:
            return wanted
        must = f"below {len(param.shape)}, its shape is {param.shape}"
        if wanted < len(param.shape):
            must = "another axis, because this one is split over another mesh axis"
        raise ConfigError(f"`shard_rules` shards {name} along axis {wanted}: must be {must}", field="shard_rules")
    divisible = next((i for i in free if param.shape[i] % ranks == 0), None)
    if divisible is not None or uneven == "replicate":
        return divisible
    return max(free, key=lambda i: param.shape[i], default=None)


@dataclass(frozen=True)
class Shard:
    """The shard of an array on a device of the mesh axis `fsdp`: 1/N of the padded array."""

    axis: int | None  # None if the array is replicated
    padding: int = 0  # zeros at the end of this axis
    # Number of equal groups of consecutive devices. `gather` returns the shards of the own group: the whole array for one
    # group, the experts that its tokens are sent to for several.
    groups: int = 1
    partitioned: PartitionSpec | None = None  # over the axes over which XLA partitions the step
    dtype: DTypeLike | None = None  # of the working copy; None for the dtype of the parameter

    @classmethod
    def from_param(cls, param: Param, *, lead: int = 0, compute_dtype: DTypeLike | None = None) -> Self:
        """Returns the shard of an array, without the first `lead` axes."""
        axis = param.axis_of(AXIS)
        partitioned = PartitionSpec(*param.partitioned_spec[lead:])
        return cls(
            axis=None if axis is None else axis - lead,
            padding=param.padding,
            groups=param.groups,
            partitioned=partitioned if len(partitioned) else None,
            dtype=compute_dtype if param.is_cast else None,
        )

    def pad(self, whole: Array) -> Array:
        if not self.padding:
            return whole
        return jnp.pad(whole, [(0, self.padding) if i == self.axis else (0, 0) for i in range(whole.ndim)])

    def unpad(self, padded: Array) -> Array:
        if self.axis is None or not self.padding:
            return padded
        return lax.slice_in_dim(padded, 0, padded.shape[self.axis] - self.padding, axis=self.axis)

    # --- On one device, under `jax.shard_map` ---

    def working_copy(self, part: Array) -> Array:
        """Casts the shard of a parameter, and gathers it."""
        return self.gather(part if self.dtype is None else part.astype(self.dtype))

    def gather(self, part: Array) -> Array:
        """All-gathers the shards of the own group of devices, without padding."""
        if self.axis is None or self._is_own:
            return part
        # FP8 is sent as bytes, because not every collective library supports it.
        is_fp8 = part.dtype.itemsize == 1
        payload = lax.bitcast_convert_type(part, jnp.uint8) if is_fp8 else part
        collective = partial(lax.all_gather, axis_name=AXIS, axis=self.axis, tiled=True, axis_index_groups=self._neighbors)
        whole = self.unpad(self._on_shards(collective, payload))
        return lax.bitcast_convert_type(whole, part.dtype) if is_fp8 else whole

    def scatter(self, whole: Array) -> Array:
        """Sums a gradient of `gather` over the own group, and returns the shard of this device, with padding."""
        if self.axis is None:
            return lax.psum(whole, AXIS)
        if self._is_own:
            return whole
        options = {"axis_name": AXIS, "axis_index_groups": self._neighbors}
        return self._on_shards(partial(lax.psum_scatter, scatter_dimension=self.axis, tiled=True, **options), self.pad(whole))

    def _on_shards(self, collective: Callable[[Array], Array], x: Array) -> Array:
        # XLA would gather the argument of the collective over the partitioned axes.
        if self.partitioned is None:
            return collective(x)
        return per_shard(collective, (self.partitioned,), self.partitioned)(x)

    @property
    def _is_own(self) -> bool:
        """True if each device is a group of its own, so nothing is gathered."""
        return self.groups > 1 and self.groups == lax.axis_size(AXIS)

    @property
    def _neighbors(self) -> list[list[int]] | None:
        if self.groups == 1:
            return None
        size = lax.axis_size(AXIS) // self.groups
        return [list(range(first, first + size)) for first in range(0, self.groups * size, size)]
