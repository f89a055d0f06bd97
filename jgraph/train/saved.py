"""Reads the configuration and the parameters of a run directory, on any devices."""

from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.adapters import A, AdaptedModel, B
from jgraph.checkpoint import CheckpointReader
from jgraph.checkpoint.canonical import leaves_of
from jgraph.dispatch import in_turn
from jgraph.modules import FunctionalModel
from jgraph.train._functional import functional_model
from jgraph.train.rundir import RunDir
from jgraph.types import Tree


class SavedRun:
    """One checkpoint of a saved run, which may still be training. Reads no arrays until it is asked to.

    Imports the model class. In several processes, every one creates it and calls its methods in the same order.
    """

    def __init__(self, path: Path, step: int | None = None, *, module: str = "", field: str = "run"):
        self.dir = RunDir(path)
        self.path = path
        self.config = self.dir.saved_config(field=field, module=module)
        self._reader = CheckpointReader(self.dir.checkpoints, step, field="step" if field == "run" else field)
        self.step = self._reader.step

    @cached_property
    def model(self) -> FunctionalModel:
        """The model as pure functions, traced at the first access."""
        return functional_model(self.config)

    def read(self, name: str) -> np.ndarray:
        """Reads one whole parameter to the host, in the dtype of the checkpoint. Collective."""
        return self._reader.read(self._leaves[name])

    def read_merged(self, name: str) -> np.ndarray:
        """Reads one whole parameter to the host. Adds its adapter in float32 if it has one. Collective."""
        weight = self.read(name)
        if not isinstance(self.model, AdaptedModel) or name not in self.model.adapters:
            return weight
        arrays = weight.astype(np.float32), self.read(name + A), self.read(name + B)
        return np.asarray(self.model.merged(name, *map(jnp.asarray, arrays)))

    def read_tree(self, **like: Tree) -> dict[str, Tree]:
        """Reads parts of the state, such as `params`, to the shardings of trees of shapes, in the saved dtypes. Collective.

        A leaf without a sharding goes to the first device.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [f".{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in paths]
        found = self._reader.place({name: leaf for name, (_, leaf) in zip(names, paths, strict=True)})
        return structure.unflatten([found[name] for name in names])

    def place(self, **like: Tree) -> dict[str, Tree]:
        """Reads parts of the state as `read_tree` does, and casts them to the dtypes of `like`."""
        return jax.tree.map(lambda array, leaf: in_turn(array.astype(leaf.dtype)), self.read_tree(**like), like)

    def close(self) -> None:
        """Ends the threads that read the checkpoint. No array can be read afterwards."""
        self._reader.close()

    @cached_property
    def _leaves(self) -> dict[str, str]:
        return leaves_of(self.model.shapes)
