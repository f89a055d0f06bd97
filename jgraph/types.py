"""Types of arrays and trees, each described once. A file that needs one of these words imports it from here."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

Leaf: TypeAlias = jax.Array | jax.ShapeDtypeStruct | np.ndarray
"""A leaf of a tree: an array, or the shape and dtype of one in functions that compute with shapes only."""

Tree: TypeAlias = "Leaf | Mapping[str, Tree] | Sequence[Tree]"
"""A pytree of arrays, nested dicts, lists and tuples. Registered classes, such as a Flax state, are trees too."""

Params: TypeAlias = Tree
"""Parameters in the model's own tree, or a tree like it: gradients, moments, shapes."""

Batch: TypeAlias = Tree
"""The input of a step: leaves [B, ...] with the rows first, or [M, B/M, ...] for M microbatches."""

Key: TypeAlias = jax.Array
"""A random key of `jax.random.key`, a scalar."""

Metrics: TypeAlias = Mapping[str, jax.Array]
"""Scalars of a step by name."""
