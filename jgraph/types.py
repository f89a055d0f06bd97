"""Types of arrays and trees, each described once. A file that needs one of these words imports it from here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

_Leaf = TypeVar("_Leaf")

Leaf: TypeAlias = Array | jax.ShapeDtypeStruct | np.ndarray
"""A leaf of a tree: an array, or the shape and dtype of one in functions that compute with shapes only."""

TreeOf: TypeAlias = _Leaf | Mapping[Any, "TreeOf[_Leaf]"] | Sequence["TreeOf[_Leaf]"] | None
"""A pytree with leaves of one type: nested dicts (keys are strings or integers), lists and tuples. None has no leaves."""


class Registered(Protocol):
    """A dataclass that is registered as a pytree, such as `jgraph.Loss`."""

    __dataclass_fields__: ClassVar[dict[str, Field]]


Tree: TypeAlias = TreeOf[Leaf | Registered]
"""A pytree of arrays."""

Params: TypeAlias = Tree
"""Parameters in the model's own tree, or a tree like it: gradients, moments, shapes."""

Arrays: TypeAlias = dict[str, Array]
"""The arrays of a step by name: packed, padded, stacked or sharded parameters."""

Avals: TypeAlias = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of arrays by name."""

Carried: TypeAlias = Tree
"""Mutable state of the model that a step passes to the next one, such as running statistics; {} if there is none."""

Observed: TypeAlias = Tree
"""State that the backward pass computes: amax histories of FP8; {} if there is none."""

OptState: TypeAlias = Tree
"""State of an optax transform, mostly nested named tuples with moments of the parameters."""

Batch: TypeAlias = Tree
"""The input of a step: leaves [B, ...] with the rows first, or [M, B/M, ...] for M microbatches."""

Key: TypeAlias = Array
"""A random key of `jax.random.key`, a scalar."""

Metrics: TypeAlias = Mapping[str, Array]
"""Scalars of a step by name."""

Mask: TypeAlias = TreeOf[bool]
"""A bool for each array of a tree."""

Reduction: TypeAlias = Literal["max", "sum", "mean", "last", "halt"]
"""How an array of carried state is reduced over microbatches and devices."""

Reductions: TypeAlias = TreeOf[Reduction]
"""The reduction of each array of carried state."""

Specs: TypeAlias = TreeOf[PartitionSpec]
"""The mesh axes of each array of a tree. A spec in place of a subtree holds for all its arrays."""

Annotations: TypeAlias = Mapping[str, PartitionSpec | None]
"""The mesh axes that a model asks for each parameter, by its name. None or no entry asks for none."""

Shardings: TypeAlias = TreeOf[NamedSharding]
"""The placement of each array of a tree."""

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | int | float | None
"""A value of a JSON file."""


class TreeDef(Protocol):
    """The structure of a tree, a `jax.tree_util.PyTreeDef`, which type checkers take for a variable."""

    @property
    def num_leaves(self) -> int: ...

    def unflatten(self, leaves: Iterable[_Leaf], /) -> TreeOf[_Leaf]: ...

    def flatten_up_to(self, tree: Tree, /) -> list[Tree]: ...


JaxDevice: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
"""A device. Type checkers do not accept `jax.Device` itself, because jax declares it without a type."""
