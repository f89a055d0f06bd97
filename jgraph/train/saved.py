"""Reads the configuration and the parameters of a run directory, on any devices."""

import contextlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.adapters import A, AdaptedModel, B
from jgraph.checkpoint import CheckpointReader
from jgraph.checkpoint.canonical import leaves_of
from jgraph.dispatch import in_turn
from jgraph.errors import CheckpointError, JgraphError
from jgraph.interop.folder import Folder
from jgraph.interop.load import load_parameters
from jgraph.modules import FunctionalModel
from jgraph.processes import all_or_raise
from jgraph.train._functional import functional_model
from jgraph.train.config import TrainConfig
from jgraph.train.hooks import model_hooks
from jgraph.train.rundir import RunDir, run_of
from jgraph.types import Params, Tree


class SavedRun:
    """One checkpoint of a saved run, which may still be training. Reads no arrays until it is asked to.

    Imports the model class. In several processes, every one creates it and calls its methods in the same order.
    """

    def __init__(self, path: Path, step: int | None = None, *, module: str = "", field: str = "run"):
        self.dir = RunDir(path)
        self.path = path
        self.config = self.dir.saved_config(field=field, module=module)
        at = "step" if field == "run" else field
        self._reader = CheckpointReader(self.dir.checkpoints, step, field=at, read_frozen=self._read_frozen)
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

    def _read_frozen(self, source: str, like: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, Array]:
        return read_frozen(self.config, self.model.shapes, source, like)

    @cached_property
    def _leaves(self) -> dict[str, str]:
        return leaves_of(self.model.shapes)


def read_frozen(
    config: TrainConfig, shapes: Params, source: str, like: Mapping[str, jax.ShapeDtypeStruct]
) -> Mapping[str, Array]:
    """Reads frozen leaves of a run from the folder or the checkpoint that it began with, in the dtypes of `like`. Collective.

    `shapes` are the parameters of the run, and `source` is an `InitialWeights.path`.
    """
    path, step = run_of(source)
    with all_or_raise():
        try:
            if config.initial.init_from:
                return _read_folder(Folder(Path(source), field="init_from"), config, shapes, like)
            run = SavedRun(path, step, module=config.module, field="continue_from")
        except JgraphError as e:
            about = "the checkpoints of this run refer to frozen weights that cannot be read"
            raise CheckpointError(f"{about}: {e}; move the files back to {source}, or put a link there") from e
    with contextlib.closing(run):
        found = run._reader.place(like)
        return {name: in_turn(found[name].astype(leaf.dtype)) for name, leaf in like.items()}


def _read_folder(
    folder: Folder, config: TrainConfig, shapes: Params, like: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    names = {name: leaf for name, leaf in leaves_of(shapes).items() if leaf in like}
    hugging_face = model_hooks(config.module).hugging_face
    assert hugging_face is not None, "checked when the run began"
    parts = {name: own for name, own in hugging_face.parts(config.model).items() if name in names}
    for own in parts.values():
        for part in own:
            folder.check_tensor(part)
    found: Any = load_parameters(folder, parts, {name: like[leaf] for name, leaf in names.items()})
    return {leaf: found[name] for name, leaf in names.items()}
