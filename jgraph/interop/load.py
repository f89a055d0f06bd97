"""Loads the parameters of a model from a folder, one parameter at a time. Each device reads its own shards."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jgraph.interop.folder import Folder, read
from jgraph.interop.names import Part, check_filled
from jgraph.tree import PyTree, leaf_names, path_name


def load(folder: Folder, parts: Mapping[str, Sequence[Part]], like: PyTree) -> PyTree:
    """Loads the parameters of a model from a folder. Call `Folder.check` first.

    Args:
        folder: The folder with the tensors.
        parts: Parts of every parameter, by parameter name.
        like: `jax.ShapeDtypeStruct`s of the parameters. A process reads only the shards of its own devices.

    Returns:
        The parameters, with the shapes, dtypes and shardings of `like`.
    """
    check_filled(parts, dict(zip(leaf_names(like), (leaf.shape for leaf in jax.tree.leaves(like)), strict=True)))

    def leaf(path: Any, aval: jax.ShapeDtypeStruct) -> jax.Array:
        slices: Any = partial(read, folder, parts[path_name(path)], aval.shape, aval.dtype)
        where = aval.sharding or SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(aval.shape, where, slices)

    return jax.tree_util.tree_map_with_path(leaf, like)
