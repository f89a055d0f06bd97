"""Reads single leaves of a checkpoint and verifies them. Writes nothing, so a run may be saving to the same directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array

from jgraph.checkpoint.store import DamagedError, checksums, described_leaves, first_line, has_old_units, placed, unseal
from jgraph.errors import CheckpointError
from jgraph.processes import all_or_raise


class CheckpointReader:
    """Reads leaves by name. The name of a leaf is its path as `jax.tree_util.keystr` spells it.

    Attributes:
        step: The step of the checkpoint.
        has_old_units: True if an earlier version saved the checkpoint. Its amax histories depend on the layout of the run.

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
        self.has_old_units = has_old_units(digest)
        self._leaves = {leaf["name"]: (number, leaf) for number, leaf in enumerate(described_leaves(digest))}

    def read(self, name: str) -> np.ndarray:
        """Returns a leaf on the host."""
        _, leaf = self._leaf(name)
        host = ocp.RestoreArgs(restore_type=np.ndarray)
        (found,) = self._read({name: (np.empty(leaf["shape"], jnp.dtype(leaf["dtype"])), host)})
        self._check({name: jnp.asarray(found)})
        return found

    def place(self, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Array]:
        """Returns leaves on devices. All processes call it together; each reads its own shards.

        Args:
            like: The shape and sharding of each leaf, by name.

        Returns:
            The arrays by name, in their saved dtypes.

        Raises:
            CheckpointError: If a leaf has another shape.
        """
        wanted: dict[str, tuple[jax.ShapeDtypeStruct, ocp.RestoreArgs]] = {}
        for name, leaf in like.items():
            _, saved = self._leaf(name)
            if tuple(saved["shape"]) != leaf.shape:
                where, shapes = self._directory / str(self.step), f"{saved['shape']} in it and {list(leaf.shape)} in this run"
                raise CheckpointError(f"checkpoint {where} does not fit this run: {name} has shape {shapes}", field=self._field)
            own = placed(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved["dtype"]), sharding=leaf.sharding))
            wanted[name] = own, ocp.ArrayRestoreArgs(sharding=own.sharding, dtype=own.dtype)
        with all_or_raise():
            leaves = dict(zip(like, self._read(wanted), strict=True))
        self._check(leaves)
        return leaves

    def _leaf(self, name: str) -> tuple[int, dict[str, Any]]:
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        return self._leaves[name]

    def _read(self, wanted: Mapping[str, tuple[Any, ocp.RestoreArgs]]) -> list[Any]:
        """Reads leaves, by name as Orbax's placeholder and options, in the order of `wanted`."""
        items: list[tuple[Any, ocp.RestoreArgs]] = [(ocp.PLACEHOLDER, ocp.RestoreArgs())] * len(self._leaves)
        for name, item in wanted.items():
            items[self._leaf(name)[0]] = item
        leaves, how = map(list, zip(*items, strict=True))
        found = self._restore("state", ocp.args.PyTreeRestore(leaves, restore_args=how))  # pyright: ignore[reportCallIssue]
        return [found[self._leaf(name)[0]] for name in wanted]

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
