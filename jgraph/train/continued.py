"""A run that begins with another run's weights: opened before anything slow, read where this one has them."""

import jax
import jax.numpy as jnp

from jgraph.step.state import TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.optimizer import begun_again
from jgraph.train.origin import check_like_run, goes_on, run_of
from jgraph.train.rundir import RunDir
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup


def opened(config: TrainConfig, run_dir: RunDir) -> SavedRun | None:
    """Opens the run named by `continue_from`. Returns None if there is none, or if this run resumes from its own checkpoint.

    Raises:
        ConfigError: If there is no such run, it has another model, or it is this run.
        CheckpointError: If it has no such checkpoint.
    """
    if not config.continue_from or goes_on(config, run_dir):
        return None
    path, step = run_of(config.continue_from)
    check_like_run(config, RunDir(path).saved_config(field="continue_from", module=config.module))
    return SavedRun(path, step, module=config.module, field="continue_from")


def load(setup: TrainSetup, saved: SavedRun) -> TrainState:
    """Returns the state before the first step of a run, with what it takes of another: over other devices, in other dtypes.

    Takes over the amax histories of FP8 if the recipe is the same and their units do not depend on the other run's layout;
    otherwise begins with empty histories. With the optimizer's moments comes the count
    by which Adam corrects their bias; the count of the rate begins at 0.
    """
    config, like = setup.config, setup.step.canonical.shapes()
    same = config.is_delayed and saved.config.is_delayed and config.fp8 == saved.config.fp8
    parts = {"params": like.params, "carried": like.carried} | ({"observed": like.observed} if same else {})
    if config.continue_with == "weights":
        return setup.step.init(**saved.place(**parts))
    found = saved.place(**parts, opt_state=like.opt_state)

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    found.setdefault("observed", jax.tree.map(zeros, like.observed))
    found["opt_state"] = begun_again(found["opt_state"])
    return setup.step.canonical.back(TrainState(zeros(like.step), zeros(like.skipped), **found))
