"""The list of the leaves of a checkpoint with their checksums, by which later damage is found.

A checksum of the bits of every leaf is computed on the devices before writing.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NotRequired, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from jgraph.autodiff.host import in_order
from jgraph.errors import CheckpointError
from jgraph.tree import is_key, key_data
from jgraph.types import Leaf, Tree

ReadFrozen: TypeAlias = Callable[[str, Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, Array]]
"""Reads leaves by name from the place that `Checkpoints.refer` names, with their shapes, dtypes and shardings."""


class Described(TypedDict):
    """A leaf of a state."""

    name: str
    dtype: str
    shape: list[int]


class Digest(TypedDict):
    """The content of a checkpoint, and its checksums. Earlier versions wrote no step."""

    leaves: list[Described]
    checksums: list[int]
    step: NotRequired[int]
    # `crc` of the frozen leaves that belong to it, which are saved elsewhere
    base: NotRequired[int]
    # where the leaves are, if not beside the digest
    source: NotRequired[str]
    crc: int


class DamagedError(Exception):
    """A checkpoint is damaged. The message is the reason."""


def named(tree: Tree) -> dict[str, Leaf]:
    """Returns the leaves of a state by name, such as `.params['norm']['scale']`, in the order of `jax.tree.leaves`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(leaves: list[Array], wait: Callable[[list[Array]], list[Array]] = jax.block_until_ready) -> list[int]:
    """Computes a checksum of the bits and positions of the elements of each leaf, on the devices. Blocks until it is known."""
    # In [0, 2**32), or in [0, 2**64) for a leaf of 64 bits. It does not depend on the sharding, and every change of a single
    # element changes it. Leaves are booleans, integers or floats of 8 to 64 bits.
    sums = jax.device_get(wait(_checksums(leaves)))
    return [sum(int(word) << 32 * place for place, word in enumerate(np.ravel(words))) for words in sums]


def _checksum(leaf: Array) -> Array:
    # A sum of integers does not depend on the order or the device. The factors are odd and have inverses modulo 2**32, so a
    # change of one element changes the sum.
    words = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    is_wide = words.dtype.itemsize == 8  # then the low and the high word, on a new last axis
    bits = 32 if is_wide else 8 * words.dtype.itemsize
    words = jax.lax.bitcast_convert_type(words, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)
    axes = tuple(range(words.ndim - is_wide))
    # Positions are computed axis by axis, because flattening would reshard a leaf on several devices.
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(axes):
        place += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (2 * place + 1), axis=axes, dtype=jnp.uint32)


# One program for all leaves, so that XLA combines the collectives of all sums. It compiles in 2 s on two cores for the
# 226 leaves of GPT 124M and an H200; a program for each shape took 0.9 s.
_checksums = jax.jit(partial(in_order, lambda leaves: [_checksum(leaf) for leaf in leaves]))


def describe(leaves: Mapping[str, Leaf]) -> list[Described]:
    return [{"name": name, "dtype": str(leaf.dtype), "shape": list(leaf.shape)} for name, leaf in leaves.items()]


def digest_of(leaves: Mapping[str, Leaf], sums: list[int], *, step: int, base: int | None = None, source: str = "") -> Digest:
    """Returns a digest. It has a checksum too, so that a flipped digit in it is not reported as another model."""
    digest = Digest(leaves=describe(leaves), checksums=sums, step=step, crc=0)
    if base is not None:
        digest["base"] = base
    if source:
        digest["source"] = source
    digest["crc"] = _crc(digest)
    return digest


def unseal(digest: Digest) -> list[int]:
    """Returns the checksums in a digest. Raises DamagedError if the digest is damaged."""
    try:
        if digest["crc"] == _crc(digest):
            return digest["checksums"]
    except (KeyError, TypeError, RecursionError) as e:
        raise DamagedError("its digest is incomplete") from e
    raise DamagedError("its digest does not match its checksum")


def _crc(digest: Digest) -> int:
    rest = [value for value in (digest.get("step"), digest.get("base"), digest.get("source")) if value is not None]
    return zlib.crc32(json.dumps([digest["leaves"], digest["checksums"], *rest], sort_keys=True).encode())


def check_step(path: Path, digest: Digest, field: str = "") -> None:
    if (step := digest.get("step", int(path.name))) != int(path.name):
        raise CheckpointError(
            f"checkpoint {path} was saved as {step}: rename its directory to {step}, or move it away", field=field
        )


def mask(digest: Digest) -> int:
    """Returns the bits of a checksum that a digest has. Without a step, it is from an earlier version: the low word only."""
    return -1 if "step" in digest else 2**32 - 1


def shown_shape(leaf: Described | None) -> str:
    return f"{leaf['dtype']}{leaf['shape']}" if leaf else "absent"


def no_reader(source: str, like: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Array]:
    """The default `ReadFrozen`."""
    raise CheckpointError(f"`read_frozen` is missing: the frozen leaves are not in the checkpoint, but in {source}")


def changed(directory: Path, source: str, name: str, actual: int, stored: int) -> CheckpointError:
    """Returns the error about a leaf in `source` that is not the one to which `directory` refers."""
    was = f"{name} has checksum {actual:08x} and had {stored:08x}"
    return CheckpointError(f"{directory} refers to the weights in {source}, which have changed: {was}; put the old files back")


def placed(leaf: Leaf) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    stored = jax.eval_shape(key_data, leaf)
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


def like_key(like: Leaf, stored: Array) -> Array:
    """Inverts `key_data`."""
    if not is_key(like):
        return stored
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(stored, impl=impls[0])
