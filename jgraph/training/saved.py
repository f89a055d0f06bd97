"""A run directory to read from: its configuration and its parameters, whatever devices it ran on. Nothing is written there."""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgraph.checkpoint import CheckpointReader
from jgraph.errors import ConfigError
from jgraph.modules import FunctionalModel
from jgraph.training.config import TrainConfig
from jgraph.training.rundir import RunDir
from jgraph.training.setup import functional_model
from jgraph.tree import path_name


class SavedRun:
    """Reads what a run saved.

    Attributes:
        config: of the run.
        step: of the checkpoint.

    Args:
        path: the run directory.
        step: of a checkpoint; None for the newest.

    Raises:
        ConfigError: it is no run directory, or of another version.
        CheckpointError: there is no such checkpoint, or, from `read`, it is damaged.
    """

    def __init__(self, path: Path, step: int | None = None):
        self.dir = RunDir(path)
        if not path.exists():
            raise ConfigError(f"`run` is {path}: no such directory", field="run")
        if not self.dir.config.exists():
            raise ConfigError(f"`run` is {path}: must be a run directory, with a config.json and checkpoints/", field="run")
        fields = self.dir.fields()
        self.config = TrainConfig.from_dict({name: fields[name] for name in fields if name not in ("corpus", "versions")})
        self._reader = CheckpointReader(self.dir.checkpoints, step)
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
        within = ".model" if self.config.is_delayed else ""  # beside it are the histories of FP8
        return self._reader.read(f".carried{within}{jax.tree_util.keystr(path)}")

    def close(self) -> None:
        """Ends the reader's threads."""
        self._reader.close()

    @cached_property
    def _leaves(self) -> dict[str, str]:
        """The checkpoint's name of every parameter."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.model.shapes)
        return {path_name(path): f".params{jax.tree_util.keystr(path)}" for path, _ in paths}
