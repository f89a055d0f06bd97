"""Names of parameters: one spelling for every leaf of a tree, patterns that select leaves, and trees with selected leaves."""

import fnmatch
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError

PyTree: TypeAlias = Any
"""A pytree of arrays or shapes. JAX has no type for it."""


def path_name(path: Sequence[Any]) -> str:
    """Returns the name of a leaf, e.g. `blocks/0/mlp/up/kernel`.

    Args:
        path: The keys of the leaf, from `jax.tree_util.tree_flatten_with_path`.

    Returns:
        The keys joined by `/`, without brackets, quotes and leading dots. Empty if the tree is a single leaf.
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: PyTree) -> list[str]:
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


def unless_named(names: Container[str], tree: PyTree) -> PyTree:
    """Returns a tree of bools with the structure of `tree`: False for the leaves with one of the names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) not in names, tree)


def only(mask: PyTree, tree: PyTree) -> PyTree:
    """Replaces leaves by None, which is no leaf of a JAX tree.

    Args:
        mask: Tree of bools.
        tree: Tree with the structure of `mask`. A leaf may be None already.

    Returns:
        `tree` with None in place of each leaf with False in `mask`.
    """
    return jax.tree.map(lambda keeps, leaf: leaf if keeps else None, mask, tree)


def merged(mask: PyTree, tree: PyTree, other: PyTree) -> PyTree:
    """Inverts `only`: combines the leaves of two trees.

    Args:
        mask: Tree of bools.
        tree: Tree with the structure of `mask`. Read where the mask is True.
        other: Tree with the structure of `mask`. Read where the mask is False.

    Returns:
        A tree with the structure of `mask`.
    """
    return jax.tree.map(lambda keeps, leaf, rest: leaf if keeps else rest, mask, tree, other)


def depends(function: Callable[[PyTree], PyTree], mask: PyTree, shapes: PyTree) -> PyTree:
    """Finds the results of a function that depend on marked leaves of its argument. Computes no arrays.

    Args:
        function: A function of a tree like `shapes` that moves elements and does not compute, such as `pack` of a strategy.
        mask: Tree of bools, True for the marked leaves.
        shapes: Arrays or shapes, a tree with the structure of `mask`.

    Returns:
        A tree of bools with the structure of the result: True if the result has elements of a marked leaf.
    """
    # Marked leaves have the wider type, to which JAX promotes an array with elements of both kinds.
    marked = jax.tree.map(lambda marks, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.int16 if marks else jnp.int8), mask, shapes)
    return jax.tree.map(lambda leaf: leaf.dtype == jnp.int16, jax.eval_shape(function, marked))


def partly(function: Callable[[PyTree], PyTree], given: PyTree, wanted: PyTree, shapes: PyTree) -> Callable[[PyTree], PyTree]:
    """Adapts a function of whole trees to trees from `only`.

    Args:
        function: A function of a tree like `shapes`. No wanted leaf of its result may depend on a leaf that is not given.
        given: Tree of bools with the structure of `shapes`, True for leaves of the argument.
        wanted: Tree of bools with the structure of the result, True for leaves of the result.
        shapes: Arrays or shapes.

    Returns:
        A function from `only(given, tree)` to `only(wanted, function(tree))`. XLA removes the other leaves, which are zeros.
    """

    def adapted(tree: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return only(wanted, function(merged(given, tree, zeros)))

    return adapted
