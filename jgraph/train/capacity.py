"""A run whose step halts because experts sent more rows than fit: what of it counts, what is compiled next, kept with the run.

A step that halts changes nothing, nor do those that were handed over after it. So the run goes on from the step before it, with
a program of a larger capacity, and reads the same batches again: they are a pure function of seed and step.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jgraph.errors import ConfigError
from jgraph.moe.config import capacity_of, rows_per_pair
from jgraph.processes import all_gather_scalar
from jgraph.step.state import StepMetrics
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir, replace_json

Numbered = tuple[int, StepMetrics]


class Halt(NamedTuple):
    """The first step that changed nothing, and the most places that a pair of devices needed in it or after it."""

    number: int
    needed: int


def is_halted(metrics: StepMetrics) -> bool:
    """Returns whether a step changed nothing; waits for it where it can halt."""
    return metrics.halted is not None and int(metrics.halted) > 0


def happened(steps: Sequence[Numbered]) -> tuple[list[Numbered], Halt | None]:
    """Returns the steps that were done, of consecutive ones that were handed over, and the first that halted, if one did."""
    done = [step for step in steps if not is_halted(step[1])]
    if len(done) == len(steps):
        return done, None
    needed = steps[-1][1].halted  # it never falls
    assert needed is not None, "a step without such arrays does not halt"
    return done, Halt(steps[len(done)][0], int(needed))


def grown(config: TrainConfig, halt: Halt) -> tuple[TrainConfig, str]:
    """Returns the run with places for what was needed, and a line that says so.

    Raises:
        ConfigError: the model halted for another reason, which no capacity changes.
    """
    told = f"step {halt.number}: "
    if (moe := _settings(config)) is None:
        must = "halt only for want of `model.moe.capacity`, which it does not have"
        raise ConfigError(f"`module` is {config.module}: must {must} ({told}halted with {halt.needed})", field="module")
    rows, devices = _rows(config), config.ep
    had = rows_per_pair(moe.capacity, rows, devices)
    if halt.needed <= had:
        must = f"halt only where more than the {had} places of a pair are needed"
        raise ConfigError(f"`module` is {config.module}: must {must} ({told}halted with {halt.needed})", field="module")
    capacity = capacity_of(halt.needed, rows, devices)
    told += f"experts sent more rows than fit (needed {halt.needed}, had {had} a pair)"
    return _with(config, capacity), f"{told}: goes on from there with `model.moe.capacity` {capacity:g}"


def keep(config: TrainConfig, run_dir: RunDir) -> None:
    """Writes the capacity to the run directory."""
    replace_json(run_dir.capacity, {"capacity": _settings(config).capacity})


def remembered(config: TrainConfig, run_dir: RunDir) -> TrainConfig:
    """Returns the run with the capacity that it grew to before, if that is larger than what is asked for."""
    if not config.resume or (moe := _settings(config)) is None:
        return config
    # The first process's word: it has written the file.
    kept = all_gather_scalar(_kept(run_dir))[0] / 100
    return _with(config, kept) if kept > moe.capacity else config


def _kept(run_dir: RunDir) -> int:
    """Returns the capacity in the run directory in hundredths; 0 where there is none."""
    try:
        return round(100 * float(json.loads(run_dir.capacity.read_text())["capacity"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return 0


def _settings(config: TrainConfig) -> Any:
    """Returns the settings of a model's mixtures; None where it has none."""
    moe = getattr(config.model, "moe", None)
    return moe if hasattr(moe, "capacity") else None


def _with(config: TrainConfig, capacity: float) -> TrainConfig:
    model = config.model
    return replace(config, model=replace(model, moe=replace(model.moe, capacity=capacity)))


def _rows(config: TrainConfig) -> int:
    """Returns how many rows a device has for experts, of a layer and microbatch."""
    tokens = config.tokens_per_step // (config.num_microbatches * config.dp * config.fsdp)
    return tokens * config.model.moe.experts_per_token
