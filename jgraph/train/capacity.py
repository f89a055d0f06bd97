"""Increases the expert capacity of a run after a step halted because a device received too many rows.

A halted step changes nothing, nor do the steps dispatched after it. The run compiles a step with a larger capacity and
continues from the step before, with the same batches: they are a pure function of seed and step.
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
    """The number of the first halted step, and the largest number of rows that a device needed to send to another."""

    number: int
    needed: int


def is_halted(metrics: StepMetrics) -> bool:
    """True if a step halted. Waits for the step if it can halt."""
    return metrics.halted is not None and int(metrics.halted) > 0


def happened(steps: Sequence[Numbered]) -> tuple[list[Numbered], Halt | None]:
    """Splits consecutive steps into the finished ones and the first halted one, if any."""
    done = [step for step in steps if not is_halted(step[1])]
    if len(done) == len(steps):
        return done, None
    needed = steps[-1][1].halted  # it never decreases
    assert needed is not None, "only a step with this metric can halt"
    return done, Halt(steps[len(done)][0], int(needed))


def grown(config: TrainConfig, halt: Halt) -> tuple[TrainConfig, str]:
    """Increases the expert capacity until the rows of the halted step fit.

    Args:
        config: The configuration of the run.
        halt: The halted step.

    Returns:
        The new configuration, and a line that describes the change.

    Raises:
        ConfigError: If the model halted for another reason.
    """
    told = f"step {halt.number}: "
    if (moe := _settings(config)) is None:
        must = "halt only for want of `model.moe.capacity`, which it does not have"
        raise ConfigError(f"`module` is {config.module}: must {must} ({told}halted with {halt.needed})", field="module")
    rows, devices = _rows(config), config.parallel.ep
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
    """Returns the configuration with the capacity stored in the run directory, if it is larger than the configured one."""
    if not config.output.resume or (moe := _settings(config)) is None:
        return config
    # Process 0 has written the file.
    kept = all_gather_scalar(_kept(run_dir))[0] / 100
    return _with(config, kept) if kept > moe.capacity else config


def _kept(run_dir: RunDir) -> int:
    """Returns the stored capacity in hundredths, or 0."""
    try:
        return round(100 * float(json.loads(run_dir.capacity.read_text())["capacity"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return 0


def _settings(config: TrainConfig) -> Any:
    """Returns the settings of the experts, or None for a model without a capacity."""
    moe = getattr(config.model, "moe", None)
    return moe if hasattr(moe, "capacity") else None


def _with(config: TrainConfig, capacity: float) -> TrainConfig:
    model = config.model
    return config.changed(model=replace(model, moe=replace(model.moe, capacity=capacity)))


def _rows(config: TrainConfig) -> int:
    """Returns the number of expert rows per device, layer and microbatch."""
    tokens = config.input.tokens_per_step // (config.input.num_microbatches * config.parallel.data_ranks)
    return tokens * config.model.moe.experts_per_token
