"""Pools of arrays inside a program: every leaf is one array with a leading axis of slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
from jax import Array, lax

from jgraph.scopes import scope


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["slots"])
@dataclass(frozen=True)
class Pool:
    """Slots for arrays with the same lifetime.

    A pool with one slot has no axis of slots. Writing to it replaces the arrays without a copy.

    Attributes:
        leaves: An array per leaf, [slots, ...]; [...] if there is one slot.
        slots: Number of slots.
    """

    leaves: tuple[Array, ...]
    slots: int

    @classmethod
    def of(cls, avals: Sequence[jax.ShapeDtypeStruct], slots: int) -> "Pool":
        """Allocates uninitialized slots for arrays of these shapes. Returns an empty pool if `slots` is 0."""
        lead = () if slots == 1 else (slots,)
        # On a GPU, `lax.empty` only allocates. Zeros would take 1% of the step of a large model.
        return cls(tuple(lax.empty((*lead, *aval.shape), aval.dtype) for aval in avals) if slots else (), slots)

    @scope("copies")
    def read(self, slot: Array) -> tuple[Array, ...]:
        """Returns the leaves in a slot, an int32 scalar; nothing if the pool is empty."""
        if self.slots == 1:
            return self.leaves
        return tuple(lax.dynamic_index_in_dim(leaf, slot, keepdims=False) for leaf in self.leaves)

    @scope("copies")
    def write(self, slot: Array, values: Sequence[Array]) -> "Pool":
        """Returns the pool with new leaves in a slot. XLA updates in place if it can."""
        if not self.slots:
            return self
        if self.slots == 1:
            return Pool(tuple(values), 1)
        written = [lax.dynamic_update_index_in_dim(leaf, v, slot, 0) for leaf, v in zip(self.leaves, values, strict=True)]
        return Pool(tuple(written), self.slots)
