"""Small parameters side by side in one flat array, so that what is done to every parameter is a few kernels, not one each.

An optimizer step on a launch-bound model is hundreds of kernels of two microseconds: a cast, a norm and an update for each
parameter. Packed, they are a handful (H200, 12 layers of width 256: 1.53 -> 1.24 ms, notes/develop/measurements.md). Large
parameters stay arrays of their own: their kernels are long already, and concatenating their gradients would cost a pass over
memory.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.tree import is_matrix, is_router, leaf_names

PyTree = Any

# Up to here a kernel over a float32 leaf is mostly launch: 2 MiB at 4.3 TB/s is half a microsecond.
_SMALL_LEAF = 2**19


@dataclass(frozen=True)
class Packing:
    """The places of a tree's parameters in a dict of arrays; made by `Packing.of`, the same for the same shapes.

    `groups` are names with the numbers of the leaves that share an array: small ones that weight decay treats alike, or one
    large leaf alone.
    """

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, params: PyTree, *, small: int = _SMALL_LEAF, alone: Container[str] = ()) -> Self:
        """Packs leaves of fewer than `small` elements by dtype, and by whether they are matrices and a router's.

        Other leaves stay as they are, and so do those that `alone` names, as `leaf_names` has them.
        """
        members: dict[str, list[int]] = {}
        flat, treedef = jax.tree.flatten(params)
        for index, (name, leaf) in enumerate(zip(leaf_names(params), flat, strict=True)):
            if leaf.size < small and name not in alone:
                of_routers = " of routers" * is_router(name)
                name = f"small {'matrices' if is_matrix(name, leaf) else 'vectors'}{of_routers} ({leaf.dtype})"
            members.setdefault(name, []).append(index)
        leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat)
        return cls(treedef, leaves, groups=tuple((name, tuple(indices)) for name, indices in members.items()))

    def pack(self, params: PyTree) -> dict[str, Array]:
        """Returns the array of each group, by name: 1-D for a group of several leaves, a leaf alone keeps its shape."""
        leaves = self.treedef.flatten_up_to(params)
        return {
            name: leaves[indices[0]] if len(indices) == 1 else jnp.concatenate([leaves[i].ravel() for i in indices])
            for name, indices in self.groups
        }

    def unpack(self, packed: dict[str, Array]) -> PyTree:
        """Inverts `pack`; its gradient is one concatenation per group."""
        leaves: list[Array | None] = [None] * len(self.leaves)
        for name, indices in self.groups:
            if len(indices) == 1:
                leaves[indices[0]] = packed[name]  # of a device that has some of the experts, a part
                continue
            parts = jax.lax.split(packed[name], [self.leaves[i].size for i in indices])
            for i, part in zip(indices, parts, strict=True):
                leaves[i] = part.reshape(self.leaves[i].shape)
        return self.treedef.unflatten(leaves)

    def decay_mask(self) -> dict[str, bool]:
        """Returns for each group whether weight decay applies to it: to matrices."""
        names = leaf_names(self.treedef.unflatten(self.leaves))
        return {name: is_matrix(names[indices[0]], self.leaves[indices[0]]) for name, indices in self.groups}
