"""From a folder to a model's parameters where they belong: tensor by tensor, each device its own slices."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jgraph.interop.folder import Folder, read
from jgraph.interop.names import Part
from jgraph.tree import path_name

Tree = Any


def load(folder: Folder, parts: Mapping[str, Sequence[Part]], like: Tree) -> Tree:
    """Returns a model's parameters, read from a folder that was checked.

    Args:
        folder: with the tensors.
        parts: of each parameter, by its name.
        like: `jax.ShapeDtypeStruct`s of the parameters; with shardings, a process reads only what its devices hold.
    """

    def leaf(path: Any, aval: Any) -> jax.Array:
        slices: Any = partial(read, folder, parts[path_name(path)], aval.shape, aval.dtype)
        where = aval.sharding or SingleDeviceSharding(jax.devices()[0])
        return jax.make_array_from_callback(aval.shape, where, slices)

    return jax.tree_util.tree_map_with_path(leaf, like)
