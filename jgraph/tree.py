"""Names of parameters: one spelling for every leaf of a tree, and patterns that select leaves."""

import fnmatch
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from jgraph.errors import ConfigError

PyTree: TypeAlias = Any
"""A pytree of arrays or shapes. JAX has no type for it."""


def path_name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf, e.g. `blocks/0/mlp/up/kernel`, from its path of JAX keys."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the name of every leaf, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def is_router(name: str) -> bool:
    """True if a parameter belongs to a router. Routers stay in full precision, because rounding changes the chosen experts."""
    return "router" in name


def is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """True if weight decay applies to a parameter, because it is a matrix.

    A matrix has two axes or more. Norm scales and biases of stacked layers do, too, so they are excluded by their Flax names.

    Args:
        name: The name of the parameter.
        leaf: The parameter or its shape.

    Returns:
        False for vectors and scalars, and for leaves named `scale` or `bias`.
    """
    return leaf.ndim > 1 and name.rpartition("/")[2] not in ("scale", "bias")


def expert_axis(name: str, ndim: int) -> int | None:
    """Returns the expert axis of an expert weight, or None for other parameters.

    Args:
        name: The name of the parameter.
        ndim: Its number of axes. Stacked layers have an additional leading axis.

    Returns:
        The index of the axis.
    """
    return ndim - 3 if name.rpartition("/")[2] in ("up_EDF2", "down_EFD") else None


def matching(pattern: str, names: Sequence[str], *, field: str) -> list[str]:
    """Returns the names that match a shell pattern.

    Args:
        pattern: The pattern. `*` also matches `/`.
        names: The names of all parameters.
        field: The argument that has the pattern, for the error.

    Returns:
        At least one name, in the order of `names`.

    Raises:
        ConfigError: If no name matches.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        examples = ", ".join(list(names)[:3])
        raise ConfigError(
            f"`{field}` has {pattern!r}, which matches no parameter: must match one of {examples}, ...", field=field
        )
    return found
