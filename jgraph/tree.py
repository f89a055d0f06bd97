"""Names of parameters: one spelling for every leaf of a tree, patterns that select leaves, and trees with selected leaves."""

import fnmatch
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.tree_util import KeyPath

from jgraph.errors import ConfigError
from jgraph.types import Mask, Tree, TreeOf

Fact = TypeVar("Fact")


def path_name(path: KeyPath) -> str:
    """Returns the name of a leaf, e.g. `blocks/0/mlp/up/kernel`.

    Args:
        path: The keys of the leaf, from `jax.tree_util.tree_flatten_with_path`.

    Returns:
        The keys joined by `/`, without brackets, quotes and leading dots. Empty if the tree is a single leaf.
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Tree | TreeOf[str]) -> list[str]:
    """Returns the name of every leaf of a pytree, e.g. `blocks/0/mlp/up/kernel`, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def is_router(name: str) -> bool:
    """True if a parameter name, e.g. `blocks/0/mlp/router`, contains `router`. A router is the layer that chooses experts.

    Routers stay in full precision, because rounding changes the chosen experts.
    """
    return "router" in name


ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
"""Ends of the names of the two matrices of an adapter, after the name of its parameter."""


def is_adapter(name: str) -> bool:
    """True if a parameter name, e.g. `blocks/0/attention/qkv/kernel_lora_a`, is that of an adapter of `jgraph.lora`."""
    return name.endswith((ADAPTER_A, ADAPTER_B))


def is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """True if a parameter counts as a matrix. Weight decay applies only to matrices.

    Norm scales and biases of stacked layers have two axes, too, so they are excluded by their Flax names.

    Args:
        name: The name of the parameter, e.g. `blocks/0/kernel`. Only its last part is used.
        leaf: The parameter or its `jax.ShapeDtypeStruct`.

    Returns:
        True for leaves with two axes or more. False for vectors and scalars, and for leaves named `scale` or `bias`.
    """
    return leaf.ndim > 1 and name.rpartition("/")[2] not in ("scale", "bias")


def expert_axis(name: str, ndim: int) -> int | None:
    """Returns the axis of a parameter that counts through the experts of a mixture-of-experts layer.

    Args:
        name: The name of the parameter, e.g. `blocks/0/mlp/up_EDF2`. Only its last part is used.
        ndim: The number of axes of the parameter. Stacked layers have an additional leading axis.

    Returns:
        The index of the axis, ndim - 3, for the weights of experts, which are named `up_EDF2` and `down_EFD`. None for other
        parameters.
    """
    return ndim - 3 if name.rpartition("/")[2] in ("up_EDF2", "down_EFD") else None


def matching(pattern: str, names: Sequence[str], *, field: str) -> list[str]:
    """Returns the parameter names that match a shell pattern, as in Python's `fnmatch`.

    Args:
        pattern: The pattern, matched against the whole name: `*`, `?`, `[...]`. `*` also matches `/`.
        names: The names of all parameters, e.g. `blocks/0/kernel`.
        field: The name of the caller's argument that contains the pattern, for the error.

    Returns:
        The matching names, at least one, in the order of `names`.

    Raises:
        ConfigError: If no name matches. The message has the first three names as examples.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        examples = ", ".join(list(names)[:3])
        raise ConfigError(
            f"`{field}` has {pattern!r}, which matches no parameter: must match one of {examples}, ...", field=field
        )
    return found


def only(mask: Mask, tree: Fact) -> Fact:
    """Replaces leaves by None, which is no leaf of a JAX tree.

    Args:
        mask: Tree of bools.
        tree: Tree with the structure of `mask`. A leaf may be None already.

    Returns:
        `tree` with None in place of each leaf with False in `mask`.
    """
    return jax.tree.map(lambda keeps, leaf: leaf if keeps else None, mask, tree)
