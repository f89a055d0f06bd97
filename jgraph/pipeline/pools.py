"""Pools inside a program: every leaf of what is kept has one array, with the slots as its first axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, lax

from jgraph.scopes import scope


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["slots"])
@dataclass(frozen=True)
class Pool:
    """Arrays of one life.

    A pool of one slot has no axis of slots: writing to it is giving the array another name, so nothing is copied.

    Attributes:
        leaves: one array a leaf, [slots, ...]; [...] where there is one slot.
        slots: how many.
    """

    leaves: tuple[Array, ...]
    slots: int

    @classmethod
    def of(cls, avals: Sequence[Any], slots: int) -> "Pool":
        """Room for arrays of these shapes, with anything in it; no slot at all is nothing at all."""
        lead = () if slots == 1 else (slots,)
        # Not zeros: on a GPU `lax.empty` only reserves memory, and clearing it would take a hundredth of a large model's step.
        return cls(tuple(lax.empty((*lead, *aval.shape), aval.dtype) for aval in avals) if slots else (), slots)

    @scope("copies")
    def read(self, slot: Array) -> tuple[Array, ...]:
        """The leaves in a slot, an int32 scalar. Of a pool without slots, nothing."""
        if self.slots == 1:
            return self.leaves
        return tuple(lax.dynamic_index_in_dim(leaf, slot, keepdims=False) for leaf in self.leaves)

    @scope("copies")
    def write(self, slot: Array, values: Sequence[Array]) -> "Pool":
        """With these leaves in a slot, in place where the program allows it."""
        if not self.slots:
            return self
        if self.slots == 1:
            return Pool(tuple(values), 1)
        written = [lax.dynamic_update_index_in_dim(leaf, v, slot, 0) for leaf, v in zip(self.leaves, values, strict=True)]
        return Pool(tuple(written), self.slots)
