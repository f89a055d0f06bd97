"""Increases the expert capacity of a run after a step halted because a device received too many rows.

A halted step changes nothing, nor do the steps dispatched after it. The run compiles a step with a larger capacity and
continues from the step before, with the same batches: they are a pure function of seed and step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jgraph.errors import ConfigError
from jgraph.moe.config import capacity_of, rows_per_pair
from jgraph.step.state import StepMetrics
from jgraph.train.config import TrainConfig

Numbered = tuple[int, StepMetrics]


class Halt(NamedTuple):
    """A step that halted because a device received too many expert rows.

    Attributes:
        number: Number of the first halted step, from 1.
        needed: Largest number of expert rows that a device must send to one other device.
    """

    number: int
    needed: int


def is_halted(metrics: StepMetrics) -> bool:
    """True if a step halted. Waits for the step if it can halt."""
    return metrics.halted is not None and int(metrics.halted) > 0


def happened(steps: Sequence[Numbered]) -> tuple[list[Numbered], Halt | None]:
    """Separates the steps before a halt from the halted ones.

    Args:
        steps: Numbers and metrics of consecutive steps.

    Returns:
        The finished steps, and the halt; None if no step halted.
    """
    done = [step for step in steps if not is_halted(step[1])]
    if len(done) == len(steps):
        return done, None
    needed = steps[-1][1].halted  # never decreases, so the last step has the largest number
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
    moe: Any = getattr(config.model, "moe", None)
    devices = config.parallel.ep
    tokens = config.input.tokens_per_step // (config.input.num_microbatches * config.parallel.data_ranks)
    rows = tokens * getattr(moe, "experts_per_token", 1)  # per device, layer and microbatch
    allowed = rows_per_pair(moe.capacity, rows, devices) if hasattr(moe, "capacity") else rows
    if halt.needed <= allowed:
        must = "halt a step only if a device needs more rows than `model.moe.capacity` allows"
        raise ConfigError(f"`module` is {config.module}: must {must} (step {halt.number} needs {halt.needed})", field="module")
    capacity = capacity_of(halt.needed, rows, devices)
    overflow = f"a device sends {halt.needed} expert rows to another, but the capacity allows {allowed}"
    line = f"step {halt.number}: {overflow}; repeating the step with `model.moe.capacity` {capacity:g}"
    return config.changed(model=replace(config.model, moe=replace(moe, capacity=capacity))), line
