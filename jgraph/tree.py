"""Trees of parameters: the name of a leaf, spelled one way everywhere, and the leaves that a pattern means."""

import fnmatch
from collections.abc import Sequence
from typing import Any

import jax

from jgraph.errors import ConfigError


def path_name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf from its path of keys: `blocks/0/mlp/up/kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Any) -> list[str]:
    """Returns the name of every leaf, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def is_router(name: str) -> bool:
    """Tells whether a parameter is a router's, by its name: it is never rounded, which would send tokens to other experts."""
    return "router" in name


def is_matrix(name: str, leaf: Any) -> bool:
    """Tells whether a parameter is a matrix, to which weight decay applies.

    It has two axes or more. Scales of norms and biases are none, also where layers are stacked in one array: they are told by
    their names, which are Flax's.
    """
    return leaf.ndim > 1 and name.rpartition("/")[2] not in ("scale", "bias")


def expert_axis(name: str, ndim: int) -> int | None:
    """Returns the axis of a parameter that counts experts, by the parameter's name; None where it is not of experts.

    Arrays of layers that are stacked have an axis of layers in front of it.
    """
    return ndim - 3 if name.rpartition("/")[2] in ("up_EDF2", "down_EFD") else None


def matching(pattern: str, names: Sequence[str], *, field: str) -> list[str]:
    """Returns the names that a pattern matches as a shell would, where `*` goes over `/` too.

    Raises:
        ConfigError: there is none.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        some = ", ".join(list(names)[:3])
        raise ConfigError(f"`{field}` has {pattern!r}, which matches no parameter: must match one of {some}, ...", field=field)
    return found
