"""Loads the parameters of a model from a folder, one parameter at a time. Each device reads its own shards."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jgraph.interop.folder import Folder, read
from jgraph.interop.names import Part, check_filled
from jgraph.tree import leaf_names, path_name
from jgraph.types import Tree


def load(folder: Folder, parts: Mapping[str, Sequence[Part]], like: Tree) -> Tree:
    """Loads the parameters of a model from a folder, one parameter at a time. Call `Folder.check` first.

    Each process reads only the shards of its own devices. Tensors are cast to the dtypes of `like`.

    Args:
        folder: The folder with the tensors.
        parts: The tensors of every parameter and their positions in it, by parameter name (`blocks/0/mlp/up/kernel`).
        like: Pytree of the parameters as `jax.ShapeDtypeStruct`s. A leaf without a sharding is placed on the first device.

    Returns:
        A pytree of `jax.Array` with the structure, shapes, dtypes and shardings of `like`.

    Raises:
        ConfigError: If a file cannot be read.
        AssertionError: If `parts` has other parameter names than `like`, or the tensors do not fill a parameter.
    """
    check_filled(parts, dict(zip(leaf_names(like), (leaf.shape for leaf in jax.tree.leaves(like)), strict=True)))

    def leaf(path: Any, aval: jax.ShapeDtypeStruct) -> jax.Array:
        slices: Any = partial(read, folder, parts[path_name(path)], aval.shape, aval.dtype)
        where = aval.sharding or SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(aval.shape, where, slices)

    return jax.tree_util.tree_map_with_path(leaf, like)
