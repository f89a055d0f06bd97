"""Initial weights of a run from a Hugging Face folder or from another run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jgraph.errors import ConfigError
from jgraph.interop.folder import Folder
from jgraph.interop.load import load
from jgraph.step.state import TrainState
from jgraph.train import origin
from jgraph.train.config import TrainConfig
from jgraph.train.optimizer import restart_schedule
from jgraph.train.rundir import RunDir
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup


@dataclass(frozen=True)
class InitialWeights:
    """Weights for the first state of a run.

    Attributes:
        about: The source, for the line that the run prints.
        step: Step of the other run's checkpoint; None for a folder.
        load: Returns the first state, on the devices of the run and in its dtypes.
        close: Releases the files.
    """

    about: str
    step: int | None
    load: Callable[[TrainSetup], TrainState]
    close: Callable[[], None] = lambda: None


def initial_weights(config: TrainConfig, run_dir: RunDir) -> InitialWeights | None:
    """Opens the source of the initial weights.

    Args:
        config: The configuration of the run.
        run_dir: The directory of the run.

    Returns:
        The weights; None if they are random, or if the run resumes from its own checkpoint.

    Raises:
        ConfigError: If there is no such folder or run, or its model differs from that of the configuration.
        CheckpointError: If the other run has no such checkpoint.
    """
    asked = config.initial
    if run_dir.resumes(config.output) or not (asked.init_from or asked.continue_from):
        return None
    if asked.init_from:
        folder, names = Folder(Path(asked.init_from), field="init_from"), origin.names_of(config.module, field="init_from")
        theirs = folder.settings(names, config.model)
        origin.check_alike(config.model, theirs, f"as `init_from` {asked.init_from} has it")
        folder.check(names, config.model)
        return InitialWeights(asked.init_from, None, partial(_of_folder, folder))
    path, step = origin.run_of(asked.continue_from)
    theirs = RunDir(path).saved_config(field="continue_from", module=config.module)
    if path.resolve() == Path(config.output.run_dir).resolve():
        raise ConfigError(
            f"`run_dir` is {config.output.run_dir}: must be another directory than `continue_from`", field="run_dir"
        )
    origin.check_alike(config.model, theirs.model, f"as `continue_from` {asked.continue_from} has it")
    saved = SavedRun(path, step, module=config.module, field="continue_from")
    about = f"{path} after {saved.step} steps"
    return InitialWeights(about, saved.step, partial(_of_run, saved), saved.close)


def _of_folder(folder: Folder, setup: TrainSetup) -> TrainState:
    """Returns the first state with the parameters of a folder. The carried state is the model's initial one."""
    parts = origin.names_of(setup.config.module, field="init_from").parts(setup.config.model)
    return setup.step.init(load(folder, parts, setup.step.canonical.shapes().params), setup.new_carried())


def _of_run(saved: SavedRun, setup: TrainSetup) -> TrainState:
    """Returns the first state with the weights of another run, and with its optimizer state if the configuration says so.

    Takes over the FP8 amax histories if the recipe is the same. Otherwise the histories start empty. Adam's count for bias
    correction is taken over with its moments. The count of the learning rate starts at 0.
    """
    config, like = setup.config, setup.step.canonical.shapes()
    same = config.is_delayed and saved.config.is_delayed and config.fp8 == saved.config.fp8
    parts = {"params": like.params, "carried": like.carried} | ({"observed": like.observed} if same else {})
    if config.initial.continue_with == "weights":
        return setup.step.init(**saved.place(**parts))
    found = saved.place(**parts, opt_state=like.opt_state)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    found.setdefault("observed", jax.tree.map(zeros, like.observed))
    found["opt_state"] = restart_schedule(found["opt_state"])
    return setup.step.canonical.back(TrainState(zeros(like.step), zeros(like.skipped), **found))
