"""Increases the expert capacity of a run after a step halted because a device received too many rows.

A halted step changes nothing, nor do the steps dispatched after it. The run compiles a step with a larger capacity and
continues from the step before, with the same batches: they are a pure function of seed and step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jgraph.errors import ConfigError
from jgraph.moe.config import capacity_of, rows_per_pair
from jgraph.step.state import StepMetrics
from jgraph.train.config import TrainConfig
from jgraph.train.model import Experts

Numbered = tuple[int, StepMetrics]


class Halt(NamedTuple):
    """A step that changed nothing, because a device had to send another more expert rows than the buffer holds."""

    # number of the first halted step, from 1
    number: int
    # largest number of rows (tokens times experts per token) that a device must send to one other device, in any layer
    # and microbatch of the halted steps
    needed: int


def is_halted(metrics: StepMetrics) -> bool:
    """Returns True if a step changed nothing. Waits for a step that can halt, and not for others."""
    return metrics.halted is not None and int(metrics.halted) > 0


def happened(steps: Sequence[Numbered]) -> tuple[list[Numbered], Halt | None]:
    """Separates the steps before a halt from the halted ones, which all steps after a halted step are."""
    done = [step for step in steps if not is_halted(step[1])]
    if len(done) == len(steps):
        return done, None
    needed = steps[-1][1].halted  # never decreases, so the last step has the largest number
    assert needed is not None, "only a step with this metric can halt"
    return done, Halt(steps[len(done)][0], int(needed))


def grown(config: TrainConfig, halt: Halt) -> tuple[TrainConfig, str]:
    """Increases `model.moe.capacity` until the rows of a halted step fit. Also returns a line about the change."""
    moe = config.hooks.moe or Experts()
    devices = config.parallel.ep
    tokens = config.sequences_per_device * config.input.seq_len // config.parallel.cp
    rows = tokens * moe.experts_per_token  # per device, layer and microbatch
    allowed = rows if moe.capacity is None else rows_per_pair(moe.capacity, rows, devices)
    if halt.needed <= allowed:
        must = "halt a step only if a device needs more rows than `model.moe.capacity` allows"
        raise ConfigError(f"`module` is {config.module}: must {must} (step {halt.number} needs {halt.needed})", field="module")
    capacity = capacity_of(halt.needed, rows, devices)
    overflow = f"a device sends {halt.needed} expert rows to another, but the capacity allows {allowed}"
    line = f"step {halt.number}: {overflow}; repeating the step with `model.moe.capacity` {capacity:g}"
    return config.changed(model=replace(config.model, moe=replace(config.model.moe, capacity=capacity))), line
