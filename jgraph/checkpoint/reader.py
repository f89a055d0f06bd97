"""Reads single leaves of a checkpoint and verifies them. Writes nothing, so a run may be saving to the same directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import SingleDeviceSharding

from jgraph.checkpoint.store import DamagedError, checksums, first_line, placed, unseal
from jgraph.errors import CheckpointError
from jgraph.processes import all_or_raise


class CheckpointReader:
    """Reads leaves by name. The name of a leaf is its path as `jax.tree_util.keystr` spells it.

    Attributes:
        step: The step of the checkpoint.

    Args:
        directory: Directory of the checkpoints.
        step: Step of the checkpoint; None for the newest.
        field: Argument that named the step, for errors.

    Raises:
        CheckpointError: From all methods, if there is no such checkpoint or it is damaged.
    """

    def __init__(self, directory: Path, step: int | None = None, *, field: str = "step"):
        self._directory, self._field = Path(directory).absolute(), field
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
        self._leaves = {leaf["name"]: (number, leaf) for number, leaf in enumerate(digest["leaves"])}

    def read(self, name: str) -> np.ndarray:
        """Returns a leaf on the host. Other processes need not call it."""
        _, saved = self._leaf(name)
        here = SingleDeviceSharding(jax.local_devices()[0])
        leaves = self._read({name: jax.ShapeDtypeStruct(tuple(saved["shape"]), jnp.dtype(saved["dtype"]), sharding=here)})
        self._check(leaves)
        return np.asarray(leaves[name])

    def place(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Returns leaves on devices. All processes call it together; each reads its own shards.

        Args:
            like: The shape and sharding of each leaf, by name.

        Returns:
            The arrays by name, in their saved dtypes.

        Raises:
            CheckpointError: If a leaf has another shape.
        """
        wanted: dict[str, jax.ShapeDtypeStruct] = {}
        for name, leaf in like.items():
            _, saved = self._leaf(name)
            if tuple(saved["shape"]) != leaf.shape:
                where, shapes = self._directory / str(self.step), f"{saved['shape']} in it and {list(leaf.shape)} in this run"
                raise CheckpointError(f"checkpoint {where} does not fit this run: {name} has shape {shapes}", field=self._field)
            wanted[name] = placed(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved["dtype"]), sharding=leaf.sharding))
        with all_or_raise():
            leaves = self._read(wanted)
        self._check(leaves)
        return leaves

    def _leaf(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        return self._leaves[name]

    def _read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        leaves: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        how = [ocp.RestoreArgs()] * len(self._leaves)
        for name, leaf in wanted.items():
            number, _ = self._leaf(name)
            leaves[number], how[number] = leaf, ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
        found = self._restore("state", ocp.args.PyTreeRestore(leaves, restore_args=how))  # pyright: ignore[reportCallIssue]
        return {name: found[self._leaf(name)[0]] for name in wanted}

    def _check(self, leaves: Mapping[str, Array]) -> None:
        for name, actual in zip(leaves, checksums(list(leaves.values())), strict=True):
            if actual != (wanted := self._sums[self._leaves[name][0]]):
                raise self._damaged(f"{name} has checksum {actual:08x}, not {wanted:08x}")

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()

    def _restore(self, name: str, how: Any) -> Any:
        try:
            return self._manager.restore(self.step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as e:  # Orbax, TensorStore and JSON raise different errors for damaged files
            raise self._damaged(f"{name} cannot be read: {first_line(e)}") from e

    def _damaged(self, why: str) -> CheckpointError:
        where = self._directory / str(self.step)
        return CheckpointError(f"checkpoint {where} is damaged ({why}); name another `{self._field}`", field=self._field)
