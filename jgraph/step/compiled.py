"""A compiled training step: one program, or the executables of a pipeline and the update after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jgraph.dispatch import in_turn
from jgraph.errors import ShapeError
from jgraph.pipeline.dispatched import Dispatched
from jgraph.step.state import StepMetrics, TrainState
from jgraph.xla import CaptureReport
from jgraph.xla.explain import Memory

Tree = Any


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled training step, proven to update its state in place; `print` it for the report. Made by `TrainStep.compile`.

    Attributes:
        executable: jax's.
        capture: what became command buffers; None where the platform has none.
        batch: Shapes and shardings of the batch that the step takes.
    """

    executable: jax.stages.Compiled
    capture: CaptureReport | None
    batch: Tree

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepMetrics]:
        """Runs a step.

        Args:
            state: Donated: do not use it again, its buffers hold the new state.
            batch: A batch from `TrainStep.place`, of the size that the step was compiled for.

        Returns:
            The new state and the metrics of the step.

        Raises:
            ShapeError: If the step runs on a mesh and `batch` is not from `TrainStep.place`, or has another size.
        """
        try:
            return in_turn(self._run(state, batch))
        except (TypeError, ValueError) as e:  # jax's, of an argument that does not fit
            if message := _misplaced(batch, self.batch):
                raise ShapeError(message) from e
            raise

    def _run(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepMetrics]:
        return self.executable(state, batch)

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

    def _run(self, state: TrainState, batch: Tree) -> tuple[TrainState, StepMetrics]:
        return self.executable(state, self.gradients(state.params, state.carried, state.step, batch))

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        return [*self.gradients.executables, self.executable]

    @property
    def memory(self) -> Memory | None:
        return None

    def __str__(self) -> str:
        return f"{self.gradients}\nupdate: {super().__str__()}"


def _misplaced(batch: Tree, expected: Tree) -> str:
    """Returns why a batch is not from `TrainStep.place`. Returns an empty string if it is, or on one device."""
    if jax.tree.structure(batch) != jax.tree.structure(expected):
        return ""
    for found, wanted in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True):
        if wanted.sharding is None:
            continue
        has = f"an array of shape {list(np.shape(found))}"
        rows = f"{wanted.shape[0] * wanted.shape[1]} rows"
        if np.shape(found) != wanted.shape:
            must = f"shape {list(wanted.shape)}, as `place` of the step returns it for a batch of {rows}"
            return f"`batch` has {has}: must have {must}; call `step.place(batch)`"
        if isinstance(found, jax.Array) and not found.sharding.is_equivalent_to(wanted.sharding, found.ndim):
            return f"`batch` has {has} with another sharding than `place` of the step gives: call `step.place(batch)`"
    return ""
