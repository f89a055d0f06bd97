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


def load_parameters(folder: Folder, parts: Mapping[str, Sequence[Part]], like: Tree) -> Tree:
    """Loads the parameters of a model, cast and placed as the `jax.ShapeDtypeStruct`s of `like`. Call `Folder.check` first."""
    check_filled(parts, dict(zip(leaf_names(like), (leaf.shape for leaf in jax.tree.leaves(like)), strict=True)))

    def leaf(path: Any, aval: jax.ShapeDtypeStruct) -> jax.Array:
        slices: Any = partial(read, folder, parts[path_name(path)], aval.shape, aval.dtype)
        where = aval.sharding or SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(aval.shape, where, slices)

    return jax.tree_util.tree_map_with_path(leaf, like)
