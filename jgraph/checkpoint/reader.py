"""Single leaves of a checkpoint, believed only if their bits add up. Nothing is written: a run may be saving there just now."""

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
    """Reads leaves by name, one at a time.

    Attributes:
        step: The step of the checkpoint.
        has_old_units: True if an earlier version saved the checkpoint. Its amax histories depend on the layout of the run.

    Args:
        directory: of the checkpoints.
        step: which one; None for the newest.
        field: the argument that named it, for errors.

    Raises:
        CheckpointError: from all methods: there is no such checkpoint, or it is damaged.
    """

    def __init__(self, directory: Path, step: int | None = None, *, field: str = "step"):
        self._directory, self._field = Path(directory).absolute(), field
        if not self._directory.is_dir():
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        # The others follow from the first; unsaid, Orbax warns of each.
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
        """Returns a leaf, by its name as `jax.tree_util.keystr` spells it."""
        number, leaf = self._leaf(name)
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        wanted[number] = np.empty(leaf["shape"], jnp.dtype(leaf["dtype"]))
        how = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(wanted)
        found = self._restore("state", ocp.args.PyTreeRestore(wanted, restore_args=how))[number]  # pyright: ignore[reportCallIssue]
        self._check({name: jnp.asarray(found)})
        return found

    def place(self, like: Mapping[str, Any]) -> dict[str, Array]:
        """Returns leaves by name, each where its `jax.ShapeDtypeStruct` lies, in the dtype in which it was saved.

        All processes call this together; each reads what its devices have. Raises CheckpointError for another shape, too.
        """
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        for name, leaf in like.items():
            number, saved = self._leaf(name)
            if tuple(saved["shape"]) != leaf.shape:
                where, shapes = self._directory / str(self.step), f"{saved['shape']} there and {list(leaf.shape)} here"
                raise CheckpointError(f"checkpoint {where} does not fit this run: {name} has shape {shapes}", field=self._field)
            wanted[number] = placed(jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(saved["dtype"]), sharding=leaf.sharding))
        how = [
            ocp.RestoreArgs() if leaf is ocp.PLACEHOLDER else ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype)
            for leaf in wanted
        ]
        with all_or_raise():
            found = self._restore("state", ocp.args.PyTreeRestore(wanted, restore_args=how))  # pyright: ignore[reportCallIssue]
        leaves = {name: found[self._leaves[name][0]] for name in like}
        self._check(leaves)
        return leaves

    def _leaf(self, name: str) -> tuple[int, Any]:
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        return self._leaves[name]

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
        except Exception as e:  # damaged bytes reach Orbax, TensorStore and JSON alike
            raise self._damaged(f"{name} cannot be read: {first_line(e)}") from e

    def _damaged(self, why: str) -> CheckpointError:
        where = self._directory / str(self.step)
        return CheckpointError(f"checkpoint {where} is damaged ({why}); name another `{self._field}`", field=self._field)
