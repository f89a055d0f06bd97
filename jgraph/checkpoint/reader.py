"""Single leaves of a checkpoint, believed only if their bits add up. Nothing is written: a run may be saving there just now."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jgraph.checkpoint.store import DamagedError, checksums, first_line, unseal
from jgraph.errors import CheckpointError


class CheckpointReader:
    """Reads leaves by name, one at a time.

    Args:
        directory: of the checkpoints.
        step: which one; None for the newest.

    Raises:
        CheckpointError: from all methods: there is no such checkpoint, or it is damaged.
    """

    def __init__(self, directory: Path, step: int | None = None):
        self._directory = Path(directory).absolute()
        if not self._directory.is_dir():
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        # The others follow from the first; unsaid, Orbax warns of each.
        options = ocp.CheckpointManagerOptions(read_only=True, save_interval_steps=0, create=False)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"{directory}: there is no checkpoint yet")
        if step not in (None, *steps):
            raise CheckpointError(f"`step` is {step}: must be one of {', '.join(map(str, steps))}", field="step")
        self.step = steps[-1] if step is None else step
        digest = self._restore("digest", ocp.args.JsonRestore())  # pyright: ignore[reportCallIssue]
        try:
            self._sums = unseal(digest)
        except DamagedError as e:
            raise self._damaged(str(e)) from e
        self._leaves = {leaf["name"]: (number, leaf) for number, leaf in enumerate(digest["leaves"])}

    def read(self, name: str) -> np.ndarray:
        """Returns a leaf, by its name as `jax.tree_util.keystr` spells it."""
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self._directory / str(self.step)} has no {name}")
        number, leaf = self._leaves[name]
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(self._leaves)
        wanted[number] = np.empty(leaf["shape"], jnp.dtype(leaf["dtype"]))
        how = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(wanted)
        found = self._restore("state", ocp.args.PyTreeRestore(wanted, restore_args=how))[number]  # pyright: ignore[reportCallIssue]
        if (actual := checksums([jnp.asarray(found)])[0]) != self._sums[number]:
            raise self._damaged(f"{name} has checksum {actual:08x}, not {self._sums[number]:08x}")
        return found

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
        return CheckpointError(f"checkpoint {where} is damaged ({why}); name another `step`", field="step")
