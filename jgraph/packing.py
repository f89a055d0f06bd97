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
    """A map from the leaves of a parameter tree to a dict of fewer arrays. Made by `Packing.of`. Holds no arrays.

    Two packings are equal if their attributes are equal.

    Attributes:
        treedef: Structure of the tree, from `jax.tree.structure`.
        leaves: Shapes and dtypes of the leaves, in the order of `jax.tree.leaves`.
        groups: One tuple (name, indices) per array of the dict. `name` is its key in the dict: the name of the leaf, e.g.
            `blocks/0/kernel`, or for small leaves their kind and dtype, e.g. `small vectors (float32)`. `indices` are the
            positions of its leaves in `leaves`, from 0.
    """

    treedef: Any
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, params: PyTree, *, small: int = _SMALL_LEAF, alone: Container[str] = (), frozen: Container[str] = ()) -> Self:
        """Groups the small leaves of a tree by dtype and kind. Each other leaf is a group of its own.

        The kinds are matrices (weight decay applies), vectors, matrices of routers and vectors of routers. A router is the
        layer that chooses experts; its parameters have `router` in the name.

        Args:
            params: A pytree of arrays or `jax.ShapeDtypeStruct`. Only shapes and dtypes are used.
            small: Leaves with fewer elements than this are packed. The default is 2**19.
            alone: Names of leaves that are not packed, e.g. `blocks/0/kernel`: the keys of the path, joined by `/`.
            frozen: Names of leaves that are not packed with others. A group has only frozen leaves or none.

        Returns:
            The packing.
        """
        members: dict[str, list[int]] = {}
        flat, treedef = jax.tree.flatten(params)
        for index, (name, leaf) in enumerate(zip(leaf_names(params), flat, strict=True)):
            if leaf.size < small and name not in alone:
                of_routers = " of routers" * is_router(name)
                trains = "frozen " * (name in frozen)
                name = f"small {trains}{'matrices' if is_matrix(name, leaf) else 'vectors'}{of_routers} ({leaf.dtype})"
            members.setdefault(name, []).append(index)
        leaves = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat)
        return cls(treedef, leaves, groups=tuple((name, tuple(indices)) for name, indices in members.items()))

    def pack(self, params: PyTree) -> dict[str, Array]:
        """Concatenates the leaves of each group.

        Args:
            params: Arrays in a tree with the structure and shapes of this packing. None may replace all leaves of a group.

        Returns:
            One array per group, by the name of the group, in the dtype of its leaves. Several leaves are flattened and
            concatenated to a 1-D array. A single leaf is returned itself, with its shape and without a copy. None for a group
            of None.
        """
        leaves = self.treedef.flatten_up_to(params)

        def of(indices: tuple[int, ...]) -> Any:
            is_one = len(indices) == 1 or leaves[indices[0]] is None
            return leaves[indices[0]] if is_one else jnp.concatenate([leaves[i].ravel() for i in indices])

        return {name: of(indices) for name, indices in self.groups}

    def unpack(self, packed: dict[str, Array]) -> PyTree:
        """Inverts `pack`: splits the arrays of the groups into leaves.

        Args:
            packed: One array per group, by the name of the group. The array of a single leaf may have any shape, for example
                that of a shard. It is returned without a copy.

        Returns:
            The tree of leaves. Its gradient with respect to `packed` is one concatenation per group.

        Raises:
            KeyError: If the array of a group is missing.
        """
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
        """Returns a bool by the name of each group: True if its leaves are matrices, so that weight decay applies to them."""
        names = leaf_names(self.treedef.unflatten(self.leaves))
        return {name: is_matrix(names[indices[0]], self.leaves[indices[0]]) for name, indices in self.groups}
