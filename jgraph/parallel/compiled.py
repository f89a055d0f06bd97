"""A compiled training step: one program, or the executables of a pipeline and the update after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jgraph.dispatch import in_turn
from jgraph.parallel.pipeline.dispatched import Dispatched
from jgraph.parallel.state import StepMetrics, TrainState
from jgraph.xla import CaptureReport
from jgraph.xla.explain import Memory

Tree = Any


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled training step, proven to update its state in place; `print` it for the report. Made by `TrainStep.compile`.

    Attributes:
        executable: jax's.
        capture: what became command buffers; None where the platform has none.
    """

    executable: jax.stages.Compiled
    capture: CaptureReport | None

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepMetrics]:
        """Runs a step.

        Args:
            state: donated: do not use it again, its buffers hold the new state.
            batch: of the shapes it was compiled for, from `TrainStep.place`.
        """
        return in_turn(self.executable(state, batch))

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        """Returns what a step runs, in this order."""
        return [self.executable]

    @property
    def memory(self) -> Memory | None:
        """Bytes of device memory by XLA's own account; None where it does not tell."""
        return Memory.of(self.executable)

    def as_text(self) -> str:
        """Returns the compiled program's text."""
        return self.executable.as_text() or ""

    def __str__(self) -> str:
        lines = [str(self.capture)] if self.capture else []
        lines.append("state: every leaf is updated in place")
        if self.memory:
            lines.append(str(self.memory))
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class DispatchedStep(CompiledStep):
    """A training step of many executables, which the host hands over; `executable` is the update. Made by `TrainStep.compile`.

    Attributes:
        gradients: what comes before the update.
    """

    gradients: Dispatched

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepMetrics]:
        return in_turn(self.executable(state, self.gradients(state.params, state.carried, state.step, batch)))

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        return [*self.gradients.executables, self.executable]

    @property
    def memory(self) -> Memory | None:
        return None

    def __str__(self) -> str:
        return f"{self.gradients}\nupdate: {super().__str__()}"
