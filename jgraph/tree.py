"""Names of parameters: one spelling for every leaf of a tree, patterns that select leaves, and trees with selected leaves."""

import fnmatch
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jgraph.errors import ConfigError
from jgraph.types import Leaf, Mask, Tree, TreeOf

Fact = TypeVar("Fact")


def path_name(path: KeyPath) -> str:
    """Returns the name of a leaf, e.g. `blocks/0/mlp/up/kernel`. Empty if the tree is a single leaf."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_names(tree: Tree | TreeOf[str]) -> list[str]:
    """Returns the name of every leaf of a pytree, e.g. `blocks/0/mlp/up/kernel`, in the order of `jax.tree.leaves`."""
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def is_key(leaf: Any) -> bool:
    """True for a random key, or its shape."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_data(leaf: Any) -> Any:
    """Returns the integers of a random key, and any other leaf itself."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def shard_shape(leaf: Any) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array or a `jax.ShapeDtypeStruct`."""
    return tuple(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))


def shard_nbytes(tree: Tree, itemsize: int | None = None) -> int:
    """Returns the bytes of a tree in the memory of one device, with `itemsize` bytes per element or those of the dtypes."""
    leaves = (leaf for leaf in jax.tree.leaves(tree) if not is_on_host(leaf))
    return sum(math.prod(shard_shape(leaf)) * (itemsize or leaf.dtype.itemsize) for leaf in leaves)


def is_on_host(leaf: Leaf) -> bool:
    """True for an array in pinned host memory, or its shape."""
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST


def was_donated(tree: Tree) -> bool:
    """True if a call has donated an array of the tree."""
    return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(tree))


def is_router(name: str) -> bool:
    """True for the parameter of a router, the layer that chooses experts."""
    # Routers stay in full precision, because rounding changes the chosen experts.
    return "router" in name


HOST = "pinned_host"
"""JAX's name of the memory of the host that devices read and write."""

ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
"""Ends of the names of the two matrices of an adapter, after the name of its parameter."""


def is_adapter(name: str) -> bool:
    """True for `blocks/0/attention/qkv/kernel_lora_a`, a parameter of an adapter of `jgraph.lora`."""
    return name.endswith((ADAPTER_A, ADAPTER_B))


def is_matrix(name: str, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """True if a parameter counts as a matrix. Weight decay applies only to matrices."""
    # Norm scales and biases of stacked layers have two axes, too, so their Flax names exclude them.
    return leaf.ndim > 1 and name.rpartition("/")[2] not in ("scale", "bias")


def expert_axis(name: str, ndim: int) -> int | None:
    """Returns the axis of a parameter that counts through the experts of a mixture-of-experts layer; None if there is none."""
    # Stacked layers have an additional leading axis.
    return ndim - 3 if name.rpartition("/")[2] in ("up_EDF2", "down_EFD") else None


def matching(pattern: str, names: Sequence[str], *, field: str) -> list[str]:
    """Returns the parameter names that match a shell pattern, at least one. `*` also matches `/`."""
    found = fnmatch.filter(names, pattern)
    if not found:
        examples = ", ".join(list(names)[:3])
        raise ConfigError(
            f"`{field}` has {pattern!r}, which matches no parameter: must match one of {examples}, ...", field=field
        )
    return found


def only(mask: Mask, tree: Fact) -> Fact:
    """Replaces leaves with False in `mask` by None, which is no leaf of a JAX tree. A leaf may be None already."""
    return jax.tree.map(lambda keeps, leaf: leaf if keeps else None, mask, tree)
