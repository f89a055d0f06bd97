"""A run directory to read from: its configuration and its parameters, whatever devices it ran on. Nothing is written there."""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgraph.checkpoint import CheckpointReader
from jgraph.dispatch import in_turn
from jgraph.modules import FunctionalModel
from jgraph.train.functional import functional_model
from jgraph.train.rundir import RunDir
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
        """Returns a parameter by its name, as it was saved."""
        return self._reader.read(self._leaves[name])

    def read_carried(self, path: Any) -> np.ndarray:
        """Returns a leaf of the model's other state, by its path of keys, as it was saved."""
        return self._reader.read(f".carried{jax.tree_util.keystr(path)}")

    def place(self, **like: Tree) -> dict[str, Tree]:
        """Reads parts of the saved state onto devices. All processes call it.

        Args:
            like: `params`, `carried`, `observed` or `opt_state` as shapes with shardings.

        Returns:
            The same trees of arrays, in the dtypes and with the shardings of `like`.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [f".{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in paths]
        found = self._reader.place({name: leaf for name, (_, leaf) in zip(names, paths, strict=True)})
        leaves = [in_turn(found[name].astype(leaf.dtype)) for name, (_, leaf) in zip(names, paths, strict=True)]
        return structure.unflatten(leaves)

    def close(self) -> None:
        """Ends the reader's threads."""
        self._reader.close()

    @cached_property
    def _leaves(self) -> dict[str, str]:
        """The checkpoint's name of every parameter."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.model.shapes)
        return {path_name(path): f".params{jax.tree_util.keystr(path)}" for path, _ in paths}
