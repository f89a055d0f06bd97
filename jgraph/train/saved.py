"""Reads the configuration and the parameters of a run directory, on any devices."""

from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.adapters import A, AdaptedModel, B
from jgraph.checkpoint import CheckpointReader
from jgraph.dispatch import in_turn
from jgraph.modules import FunctionalModel
from jgraph.train.rundir import RunDir
from jgraph.train.setup import functional_model
from jgraph.tree import path_name
from jgraph.types import Tree


class SavedRun:
    """Reads the configuration and the arrays of one checkpoint of a saved run. Writes nothing. The run may still be training.

    Creating this object reads config.json, imports the model class, and opens the checkpoint, but reads no arrays. In a
    distributed program, every process must create it and call its methods in the same order.

    Attributes:
        dir: The files of the run directory.
        path: Path of the run directory.
        config: The configuration of the run.
        step: Number of finished steps of the checkpoint.

    Args:
        path: Path of the run directory.
        step: Number of finished steps of the checkpoint; None for the newest checkpoint.
        module: Model class that the caller trusts, as `package.module:Class`. Required for a class outside `jgraph_models`,
            and may be empty otherwise.
        field: Name of the caller's argument that holds the directory, for errors.

    Raises:
        ConfigError: If there is no config.json, it is damaged or from another version, `module` is another class than the saved
            one, or `module` is empty for a class outside `jgraph_models`.
        CheckpointError: If the run does not have the checkpoint, or the list of arrays in the checkpoint is damaged.
    """

    def __init__(self, path: Path, step: int | None = None, *, module: str = "", field: str = "run"):
        self.dir, self.path = RunDir(path), path
        self.config = self.dir.saved_config(field=field, module=module)
        self._reader = CheckpointReader(self.dir.checkpoints, step, field="step" if field == "run" else field)
        self.step = self._reader.step

    @cached_property
    def model(self) -> FunctionalModel:
        """The model as pure functions of its parameters. The first access traces the construction of the model.

        Raises:
            ConfigError: If the model cannot be built.
        """
        return functional_model(self.config)

    def read(self, name: str) -> np.ndarray:
        """Reads one parameter. Collective: every process must call this method with the same name.

        Args:
            name: Path of the parameter in the model's own tree, for example "blocks/0/up/kernel".

        Returns:
            The whole parameter as a numpy array on the host of every process, in the dtype of the checkpoint.

        Raises:
            KeyError: If the model has no parameter of this name.
            CheckpointError: If the data of the parameter is damaged, or the checkpoint does not have the parameter.
        """
        return self._reader.read(self._leaves[name])

    def read_merged(self, name: str) -> np.ndarray:
        """Reads one parameter of the model without adapters, and adds its adapter if it has one. Collective, like `read`.

        Args:
            name: Path of the parameter in the tree of the model without adapters.

        Returns:
            The whole parameter, on the host. With an adapter, the sum in float32.

        Raises:
            KeyError: If the model has no parameter of this name.
            CheckpointError: If the data of the parameter is damaged, or the checkpoint does not have the parameter.
        """
        weight = self.read(name)
        if not isinstance(self.model, AdaptedModel) or name not in self.model.adapters:
            return weight
        arrays = weight.astype(np.float32), self.read(name + A), self.read(name + B)
        return np.asarray(self.model.merged(name, *map(jnp.asarray, arrays)))

    def read_tree(self, **like: Tree) -> dict[str, Tree]:
        """Reads `params`, `carried`, `observed` or `opt_state` to the shardings of trees of shapes, in the saved dtypes.

        A leaf without a sharding goes to the first device. Collective: every process must call it with the same shapes.
        """
        paths, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [f".{path[0].key}{jax.tree_util.keystr(path[1:])}" for path, _ in paths]
        found = self._reader.place({name: leaf for name, (_, leaf) in zip(names, paths, strict=True)})
        return structure.unflatten([found[name] for name in names])

    def place(self, **like: Tree) -> dict[str, Tree]:
        """Reads parts of the saved state as `read_tree` does, and casts them to the dtypes of `like`."""
        return jax.tree.map(lambda array, leaf: in_turn(array.astype(leaf.dtype)), self.read_tree(**like), like)

    def close(self) -> None:
        """Closes the checkpoint and ends the threads that read it. No array can be read afterwards."""
        self._reader.close()

    @cached_property
    def _leaves(self) -> dict[str, str]:
        """The names of the parameters in the checkpoint."""
        paths, _ = jax.tree_util.tree_flatten_with_path(self.model.shapes)
        return {path_name(path): f".params{jax.tree_util.keystr(path)}" for path, _ in paths}
