"""Packs small parameters into flat arrays, so that an operation on all parameters runs a few kernels, not one for each.

The optimizer step of a launch-bound model consists of hundreds of kernels of two microseconds: a cast, a norm and an update for
each parameter. Packing leaves a handful (H200, 12 layers of width 256: 1.53 -> 1.24 ms,
notes/develop/measurements/single-gpu.md). Large parameters are not packed: their kernels are long, and concatenating their
gradients would cost a pass over memory.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.tree import PyTree, is_matrix, is_router, leaf_names

# A kernel over a float32 leaf of this size is mostly launch overhead: 2 MiB at 4.3 TB/s take half a microsecond.
_SMALL_LEAF = 2**19


@dataclass(frozen=True)
class Packing:
    """The positions of a tree's parameters in a dict of arrays. Made by `Packing.of`, the same for the same shapes.

    Attributes:
        treedef: Structure of the tree.
        leaves: Shapes and dtypes of its leaves.
        groups: Names of the arrays, each with the indices of the leaves in it: several small leaves, or one large leaf.
    """

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, params: PyTree, *, small: int = _SMALL_LEAF, alone: Container[str] = ()) -> Self:
        """Groups small leaves by dtype. Matrices and vectors, and parameters of routers, are in separate groups.

        Args:
            params: Arrays or shapes.
            small: Leaves with fewer elements are packed.
            alone: Names of leaves that are not packed, as `leaf_names` returns them.

        Returns:
            The packing.
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
        """Returns the arrays by name. A group of several leaves is 1-D, a single leaf keeps its shape."""
        leaves = self.treedef.flatten_up_to(params)
        return {
            name: leaves[indices[0]] if len(indices) == 1 else jnp.concatenate([leaves[i].ravel() for i in indices])
            for name, indices in self.groups
        }

    def unpack(self, packed: dict[str, Array]) -> PyTree:
        """Inverts `pack`. Its gradient is one concatenation per group."""
        leaves: list[Array | None] = [None] * len(self.leaves)
        for name, indices in self.groups:
            if len(indices) == 1:
                leaves[indices[0]] = packed[name]  # not reshaped: it may be the shard of a device
                continue
            parts = jax.lax.split(packed[name], [self.leaves[i].size for i in indices])
            for i, part in zip(indices, parts, strict=True):
                leaves[i] = part.reshape(self.leaves[i].shape)
        return self.treedef.unflatten(leaves)

    def decay_mask(self) -> dict[str, bool]:
        """Returns True for each array to which weight decay applies, because it holds matrices."""
        names = leaf_names(self.treedef.unflatten(self.leaves))
        return {name: is_matrix(names[indices[0]], self.leaves[indices[0]]) for name, indices in self.groups}
