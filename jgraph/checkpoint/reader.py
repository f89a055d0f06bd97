"""Reads single leaves of a checkpoint, and verifies their checksums."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import SingleDeviceSharding

from jgraph.checkpoint._digest import (
    DamagedError,
    Described,
    Digest,
    ReadFrozen,
    changed,
    check_step,
    checksums,
    like_key,
    mask,
    no_reader,
    placed,
    unseal,
)
from jgraph.checkpoint.store import BASE, Names, check_path, first_line
from jgraph.errors import CheckpointError
from jgraph.processes import all_or_raise
from jgraph.tree import is_key


class CheckpointReader:
    """Reads single leaves of a checkpoint by name, such as `.params['norm']['scale']` (`jax.tree_util.keystr`). Writes nothing.

    Verifies checksums. All processes of a run call every method together. Errors name the caller's argument `field`.
    """

    # The step is None for the newest.
    def __init__(self, directory: Path, step: int | None = None, *, field: str = "step", read_frozen: ReadFrozen = no_reader):
        self._directory = Path(directory).absolute()
        self._field = field
        self._read_frozen = read_frozen
        check_path(self._directory, "\\", names=Names("run_dir"))
        if not self._directory.is_dir():
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        # Orbax warns if read_only is set without the other options.
        options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        if step not in (None, *steps):
            raise CheckpointError(f"`{field}` is {step}: must be one of {', '.join(map(str, steps))}", field=field)
        self.step = steps[-1] if step is None else step
        digest = self._restore("digest", ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        try:
            self._sums = unseal(digest)
        except DamagedError as e:
            raise self._damaged(str(e)) from e
        check_step(self._directory / str(self.step), digest, field)
        self._mask = mask(digest)
        self._source = digest.get("source")
        self._base = self._open_base(digest)
        self.crc = digest["crc"]
        self._leaves = {leaf["name"]: (number, leaf) for number, leaf in enumerate(digest["leaves"])}

    def read(self, name: str) -> np.ndarray:
        """Returns a whole leaf on the host, with its saved shape and dtype."""
        _, saved = self._leaf(name)
        here = SingleDeviceSharding(jax.local_devices()[0])
        like = jax.ShapeDtypeStruct(tuple(saved["shape"]), jnp.dtype(saved["dtype"]), sharding=here)
        return np.asarray(self.place({name: like})[name])

    def place(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Reads leaves to devices, in their saved shapes and dtypes. Each process reads only its own shards."""
        # The dtypes of `like` are ignored. A leaf without a sharding is placed on the first device.
        if self._base:
            frozen = {name: leaf for name, leaf in like.items() if name not in self._leaves}
            own = {name: leaf for name, leaf in like.items() if name not in frozen}
            return self._place(own) | (self._base.place(frozen) if frozen else {})
        return self._place(like)

    def _place(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        avals: dict[str, jax.ShapeDtypeStruct] = {}
        for name, leaf in like.items():
            _, saved = self._leaf(name)
            if tuple(saved["shape"]) != leaf.shape:
                where = self._directory / str(self.step)
                shapes = f"{saved['shape']} in it and {list(leaf.shape)} in this run"
                raise CheckpointError(f"checkpoint {where} does not fit this run: {name} has shape {shapes}", field=self._field)
            dtype = leaf.dtype if is_key(leaf) else jnp.dtype(saved["dtype"])
            avals[name] = placed(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding))
        found = self._stored(avals) if self._source is None else self._read_frozen(self._source, avals)
        arrays = {name: found[name] for name in like}
        for name, actual in zip(arrays, checksums(list(arrays.values())), strict=True):
            if actual & self._mask != (expected := self._sums[self._leaf(name)[0]]):
                if self._source is not None:
                    raise changed(self._directory, self._source, name, actual, expected)
                raise self._damaged(f"{name} has checksum {actual:08x}, not {expected:08x}")
        return {name: like_key(like[name], array) for name, array in arrays.items()}

    def _stored(self, avals: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        leaves: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        restore_args = [ocp.RestoreArgs()] * len(self._leaves)
        numbers = {name: self._leaf(name)[0] for name in avals}
        for name, aval in avals.items():
            leaves[numbers[name]] = aval
            restore_args[numbers[name]] = ocp.ArrayRestoreArgs(sharding=aval.sharding, dtype=aval.dtype)
        with all_or_raise():
            found = self._restore("state", ocp.args.PyTreeRestore(leaves, restore_args=restore_args))  # pyright: ignore[reportCallIssue]
        return {name: found[number] for name, number in numbers.items()}

    def _leaf(self, name: str) -> tuple[int, Described]:
        if self._base and name not in self._leaves:
            return self._base._leaf(name)
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        return self._leaves[name]

    def close(self) -> None:
        self._manager.close()
        if self._base:
            self._base.close()

    def _open_base(self, digest: Digest) -> "CheckpointReader | None":
        if "base" not in digest:
            return None
        try:
            base = CheckpointReader(self._directory / BASE, field=self._field, read_frozen=self._read_frozen)
        except CheckpointError as e:
            raise self._damaged(f"its frozen leaves: {e}") from e
        if base.crc != digest["base"]:
            raise self._damaged(f"{self._directory / BASE} holds the frozen leaves of another run")
        return base

    def _restore(self, name: str, how: ocp.args.CheckpointArgs) -> Any:
        try:
            return self._manager.restore(self.step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as e:  # Orbax, TensorStore and JSON raise different errors for damaged files
            raise self._damaged(f"{name} cannot be read: {first_line(e)}") from e

    def _damaged(self, why: str) -> CheckpointError:
        where = self._directory / str(self.step)
        return CheckpointError(f"checkpoint {where} is damaged ({why}); name another `{self._field}`", field=self._field)
