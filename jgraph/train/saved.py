"""Reads the configuration and the parameters of a run directory, on any devices."""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgraph.checkpoint import CheckpointReader
from jgraph.dispatch import in_turn
from jgraph.modules import FunctionalModel
from jgraph.train.rundir import RunDir
from jgraph.train.setup import functional_model
from jgraph.tree import path_name

Tree = Any


class SavedRun:
    """Reads the configuration and the parameters of a saved run.

    Attributes:
        path: The run directory.
        config: The configuration of the run.
        step: Step of the checkpoint.

    Args:
        path: The run directory.
        step: Step of the checkpoint; None for the newest.
        module: Model class that the caller named. A class outside `jgraph_models` is imported only if it is named here.
        field: Argument that named the directory, for errors.

    Raises:
        ConfigError: If there is no run, it was written by another version, or its model class may not be imported.
        CheckpointError: If there is no such checkpoint, or, from `read`, it is damaged.
    """

    def __init__(self, path: Path, step: int | None = None, *, module: str = "", field: str = "run"):
        self.dir, self.path = RunDir(path), path
        self.config = self.dir.saved_config(field=field, module=module)
        self._reader = CheckpointReader(self.dir.checkpoints, step, field="step" if field == "run" else field)
        self.step = self._reader.step

    @cached_property
    def model(self) -> FunctionalModel:
        """The model as pure functions."""
        return functional_model(self.config)

    def read(self, name: str) -> np.ndarray:
        """Returns a saved parameter on the host. Collective: every process must call it."""
        return self._reader.read(self._leaves[name])

    def place(self, **like: Tree) -> dict[str, Tree]:
        """Reads parts of the state with other dtypes and shardings. Collective: every process must call it.

        Args:
            **like: `params`, `carried`, `observed` or `opt_state`, as shapes with the requested dtypes and shardings.

        Returns:
            The parts by name.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [f".{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in paths]
        found = self._reader.place({name: leaf for name, (_, leaf) in zip(names, paths, strict=True)})
        leaves = [in_turn(found[name].astype(leaf.dtype)) for name, (_, leaf) in zip(names, paths, strict=True)]
        return structure.unflatten(leaves)

    def close(self) -> None:
        """Stops the threads of the reader."""
        self._reader.close()

    @cached_property
    def _leaves(self) -> dict[str, str]:
        """The names of the parameters in the checkpoint."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.model.shapes)
        return {path_name(path): f".params{jax.tree_util.keystr(path)}" for path, _ in paths}
