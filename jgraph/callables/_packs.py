"""Packs: small residuals of one dtype, concatenated into one array between forward and backward.

An array that passes from one executable to the next costs the host the same time at any size, and a copy of a small array is
cheap.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.callables.shaped import Shaped

# Larger residuals are not packed, because the copy takes longer than the host saves.
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Pack:
    """Residuals of one dtype that are stored as one array."""

    places: tuple[int, ...]  # indices of the residuals
    avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sum(aval.size for aval in self.avals),), self.avals[0].dtype)

    def join(self, arrays: Sequence[Array]) -> list[Array]:
        return [jnp.concatenate([array.ravel() for array in arrays])]

    def split(self, packed: Sequence[Array]) -> list[Array]:
        (pack,) = packed
        pieces = jnp.split(pack, np.cumsum([aval.size for aval in self.avals])[:-1])
        return [piece.reshape(aval.shape) for piece, aval in zip(pieces, self.avals, strict=True)]


def packs_of(shaped: Shaped) -> list[Pack]:
    """Groups the small residuals that forward computes by dtype. A dtype with one small residual has no pack."""
    places: dict[jnp.dtype, list[int]] = defaultdict(list)
    for i, (aval, source) in enumerate(zip(shaped.residuals.avals, shaped.residuals_from, strict=True)):
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        if source is None and not is_key and aval.size * aval.dtype.itemsize <= _MOST_BYTES:
            places[aval.dtype].append(i)
    return [Pack(tuple(few), tuple(shaped.residuals.avals[i] for i in few)) for few in places.values() if len(few) > 1]
