"""Packs small parameters into flat arrays, so that an operation on all parameters runs a few kernels, not one for each.

The optimizer step of a launch-bound model consists of hundreds of kernels of two microseconds: a cast, a norm and an update for
each parameter. Packing leaves a handful (H200, 12 layers of width 256: 1.53 -> 1.24 ms,
notes/develop/measurements/single-gpu.md). Large parameters are not packed: their kernels are long, and concatenating their
gradients would cost a pass over memory.
"""

import math
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.layout._layout import Layout, MakeLayout, Whole, named
from jgraph.layout._param import Description, Param
from jgraph.mesh import Axis
from jgraph.tree import leaf_names
from jgraph.types import Arrays, TreeDef

# A kernel over a float32 leaf of this size is mostly launch overhead: 2 MiB at 4.3 TB/s take half a microsecond.
SMALL = 2**19

_PLURALS = {
    "matrix": "matrices",
    "vector": "vectors",
    "router matrix": "matrices of routers",
    "router vector": "vectors of routers",
}


def packed(small: int = SMALL) -> MakeLayout:
    """A layout that joins arrays with fewer elements than `small`, if they are alike: of one kind, dtype and training.

    An array of stacked layers is joined with others along the elements of each rank. Arrays on other mesh axes are not joined.
    """

    def make(params: Description) -> Layout[Arrays]:
        groups: dict[str, list[str]] = {}
        for name, param in params.items():
            groups.setdefault(_group(name, param, small), []).append(name)
        return _grouped(params, {_name_in_state(group, names, params): names for group, names in groups.items()})

    return make


def _name_in_state(group: str, names: Sequence[str], params: Description) -> str:
    """Returns the key of a group. Names of frozen groups have a checksum of their leaves.

    Otherwise a state of a step that freezes other leaves of the same total size would fit. `Packing` has no checksum.
    """
    if params[names[0]].is_trained or group in names:
        return group
    return f"{group} {zlib.crc32(' '.join(names).encode()):08x}"


def _grouped(params: Description, groups: Mapping[str, Sequence[str]]) -> Layout[Arrays]:
    """Joins the arrays of each group. An array without others keeps its shape."""
    lead = {group: _lead(params[names[0]]) for group, names in groups.items()}
    sizes = {group: [math.prod(params[name].shape[lead[group] :]) for name in names] for group, names in groups.items()}

    def describe(group: str, names: Sequence[str]) -> Param:
        first = params[names[0]]
        if len(names) == 1:
            return first
        count = lead[group]
        return replace(first, shape=(*first.shape[:count], sum(sizes[group])), axes=(*first.axes[:count], None))

    def join(group: str, arrays: Sequence[Array]) -> Array:
        count = lead[group]
        if len(arrays) == 1:
            return arrays[0]
        return jnp.concatenate([array.reshape(*array.shape[:count], -1) for array in arrays], count)

    def pack(arrays: Arrays) -> Arrays:
        given = {group: names for group, names in groups.items() if names[0] in arrays}
        return {group: join(group, [arrays[name] for name in names]) for group, names in given.items()}

    def unpack(arrays: Arrays) -> Arrays:
        parts: Arrays = {}
        for group, names in groups.items():
            if len(names) == 1:
                parts[names[0]] = arrays[group]  # not reshaped: it may be the shard of a device
                continue
            split = jax.lax.split(arrays[group], sizes[group], axis=lead[group])
            parts |= {name: part.reshape(params[name].shape) for name, part in zip(names, split, strict=True)}
        return {name: parts[name] for name in params}

    return Layout({group: describe(group, names) for group, names in groups.items()}, pack, unpack)


def _lead(param: Param) -> int:
    """The number of axes in front of the elements of a rank."""
    return 1 if param.axes[:1] == (Axis.PIPE.value,) else 0


def _group(name: str, param: Param, small: int) -> str:
    """Returns the name of the array that holds a parameter."""
    lead = _lead(param)
    has_axis = isinstance(param.wanted, int) or any(entry is not None for entry in param.axes[lead:])
    if not param.joins or has_axis or math.prod(param.shape[lead:]) >= small:
        return name
    frozen = "" if all(param.trained) else "partly frozen " if param.is_trained else "frozen "
    rows = f" {''.join('01'[row] for row in param.trained)}" if len(set(param.trained)) > 1 else ""
    prefix = "layers/" if lead else ""
    return f"{prefix}small {frozen}{_PLURALS[param.kind]}{rows} ({param.dtype})"


@dataclass(frozen=True)
class Packing(Generic[Whole]):
    """A map from the leaves of a parameter tree to a dict of fewer arrays. Made by `Packing.of`. Holds no arrays.

    Two packings are equal if their attributes are equal.

    Attributes:
        treedef: Structure of the tree, from `jax.tree.structure`.
        leaves: Shapes and dtypes of the leaves, in the order of `jax.tree.leaves`.
        groups: One tuple (name, indices) per array of the dict. `name` is its key in the dict: the name of the leaf, e.g.
            `blocks/0/kernel`, or for small leaves their kind and dtype, e.g. `small vectors (float32)`. `indices` are the
            positions of its leaves in `leaves`, from 0.
    """

    treedef: TreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, params: Whole, *, small: int = SMALL, alone: Container[str] = (), frozen: Container[str] = ()) -> Self:
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
        leaves, structure = jax.tree.flatten(params)
        members: dict[str, list[int]] = {}
        for index, (name, leaf) in enumerate(zip(leaf_names(params), leaves, strict=True)):
            param = replace(Param.describe(name, leaf, trained=name not in frozen), joins=name not in alone)
            members.setdefault(_group(name, param, small), []).append(index)
        groups = tuple((name, tuple(indices)) for name, indices in members.items())
        return cls(structure, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves), groups)

    @cached_property
    def _layout(self) -> Layout[Whole]:
        tree: Whole = jax.tree.unflatten(self.treedef, self.leaves)
        names = leaf_names(tree)
        groups = {group: [names[i] for i in indices] for group, indices in self.groups}
        return named(tree).then(lambda params: _grouped(params, groups))

    def pack(self, params: Whole) -> dict[str, Array | None]:
        """Concatenates the leaves of each group.

        Args:
            params: Arrays in a tree with the structure and shapes of this packing. None may replace all leaves of a group.

        Returns:
            One array per group, by the name of the group, in the dtype of its leaves. Several leaves are flattened and
            concatenated to a 1-D array. A single leaf is returned itself, with its shape and without a copy. None for a group
            of None.
        """
        arrays = self._layout.pack(params)
        return {name: arrays.get(name) for name, _ in self.groups}

    def unpack(self, packed: Arrays) -> Whole:
        """Inverts `pack`: splits the arrays of the groups into leaves.

        Args:
            packed: One array per group, by the name of the group. The array of a single leaf may have any shape, for example
                that of a shard. It is returned without a copy.

        Returns:
            The tree of leaves. Its gradient with respect to `packed` is one concatenation per group.

        Raises:
            KeyError: If the array of a group is missing.
        """
        return self._layout.unpack(packed)

    def decay_mask(self) -> dict[str, bool]:
        """Returns a bool by the name of each group: True if its leaves are matrices, so that weight decay applies to them."""
        return {name: param.decays for name, param in self._layout.params.items()}
