"""A compiled training step: the executables of the gradients, if any, and the program of the update.

Look for: `CompiledStep.__call__`, all the host does in a step; and `__str__`, the report of captured operations and of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, NonFiniteError, ShapeError, of_type
from jgraph.step.state import StepMetrics, TrainState
from jgraph.strategies import checks
from jgraph.strategies.base import GradientProgram
from jgraph.tree import was_donated
from jgraph.types import Batch
from jgraph.xla import CaptureReport
from jgraph.xla.donation import alias_map
from jgraph.xla.explain import Memory


@dataclass(frozen=True, eq=False)
class CompiledStep:
    """A compiled training step that updates its state in place. Made by `TrainStep.compile`. `print` shows a report.

    Attributes:
        executable: The compiled program of the update, `(state, inputs) -> (state, metrics)`. `inputs` is the result of
            `gradients.run`. If `gradients` has no executables, this program also computes the gradients, and `inputs` is the
            placed batch.
        capture: Report on the command buffers (CUDA graphs) of `executable`; None if the platform has none, or XLA gave no
            report.
        batch: Shapes and shardings of the batch that the step takes (the result of `TrainStep.place`), a tree of
            `jax.ShapeDtypeStruct`.
        gradients: The separate executables that compute the gradients before `executable` runs. Only some pipelines have any.
        optimizer: The arrays that the optax transform updates, packed parameters or the model's own tree, and the reason.
    """

    executable: jax.stages.Compiled
    capture: CaptureReport | None
    batch: Batch
    gradients: GradientProgram
    optimizer: str

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Runs a step. On GPUs, returns before the devices finish; on several CPU devices, waits for the results.

        Args:
            state: The state before the step. Donated: do not use it again, because its buffers hold the new state.
            batch: A batch from `TrainStep.place`, with the shapes that the step was compiled for. Not donated. On one device,
                `place` returns the batch itself.

        Returns:
            (state, metrics): the new state in the same buffers, and the metrics of the step as arrays on the devices.

        Raises:
            NonFiniteError: If `jax_debug_nans` is set, and the step returns NaN. JAX does not donate the state then.
            ConfigError: If `state` is no `TrainState`, or was donated to another call.
            ShapeError: If the structure, shapes or dtypes of `state` or `batch` differ from the compiled ones, or the step runs
                on a mesh and `batch` is not from `TrainStep.place`.
            ValueError: By JAX, if the shardings of the state differ from the compiled ones.
        """
        try:
            # A program on several CPU devices that gets a donated array ends the process. NumPy arrays are not donated.
            is_donated = getattr(state.step, "is_deleted", None)
            if is_donated is not None and is_donated():
                raise RuntimeError("the state was donated")
            inputs = self.gradients.run(state.params, state.carry, state.step, batch)
            return in_turn(self.executable(state, inputs))
        except Exception as e:
            self._explain(state, batch, e)
            raise

    def _explain(self, state: TrainState, batch: Batch, error: Exception) -> None:
        """Raises an error that explains the one of a call. Returns if the arguments fit."""
        if type(error).__name__ == "InternalFloatingPointError":
            kind = error.args[-1]  # nan or inf
            remedy = "call step.jitted()(state, step.place(batch)) to find the operation, or unset it to skip such steps"
            message = f"the step returns {kind}, and `jax_debug_{kind}s` is set: {remedy}"
            raise NonFiniteError(message, step=int(state.step) + 1)
        if not isinstance(state, TrainState):
            swapped = "; `state` and `batch` are swapped" if isinstance(batch, TrainState) else ""
            must = f"must be a TrainState, from step.init(params) or the last call{swapped}"
            raise ConfigError(f"`state` is {of_type(state)}: {must}", field="state")
        if was_donated(state):
            must = "must be the state that this call returned, as in state, metrics = run(state, batch)"
            raise ConfigError(f"`state` was donated by another call: {must}", field="state")
        checks.check_tree("`state`", state, self.executable.args_info[0][0], like="the state of this step", field="state")
        _check_placed(batch, self.batch)

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        """New list of the executables that a step runs, in order: those of the gradients, if any, then `executable`."""
        return [*self.gradients.executables, self.executable]

    @property
    def memory(self) -> Memory | None:
        """Device memory of the step in bytes, as XLA reports it.

        None if XLA reports no memory, or if the gradients have executables of their own.
        """
        return None if self.gradients.executables else Memory.read(self.executable)

    def as_text(self) -> str:
        """Returns the optimized HLO text of `executable`, without other executables. "" if the platform provides no text."""
        return self.executable.as_text() or ""

    def __str__(self) -> str:
        lines = [str(self.capture)] if self.capture else []
        in_place = alias_map(self.executable)
        lines.append("state: " + ("every leaf is updated in place" if in_place else "copied, because jax_debug_nans is set"))
        lines.append(f"optimizer: {self.optimizer}")
        if self.memory:
            lines.append(str(self.memory))
        text = "\n".join(lines)
        return f"{self.gradients}\nupdate: {text}" if self.gradients.executables else text


def _check_placed(batch: Batch, expected: Batch) -> None:
    """Checks that a batch has the shapes that the step was compiled for, and on a mesh that it is from `TrainStep.place`."""
    checks.check_batch(batch)
    is_alike = jax.tree.structure(batch) == jax.tree.structure(expected)
    for found, like in zip(jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True) if is_alike else ():
        has = f"`batch` has an array of shape {list(np.shape(found))}"
        is_on_mesh = like.sharding is not None
        is_placed = is_on_mesh and isinstance(found, jax.Array) and found.sharding.is_equivalent_to(like.sharding, found.ndim)
        if is_on_mesh and not is_placed and np.shape(found) != like.shape:
            rows = like.shape[0] * like.shape[1]
            must = f"must have shape {list(like.shape)}, from {rows} rows; call `step.place(batch)`"
            raise ShapeError(f"{has}: {must}", field="batch")
        if is_on_mesh and not is_placed:
            raise ShapeError(f"{has} with another sharding than the step: call `step.place(batch)`", field="batch")
    try:
        checks.check_tree("`batch`", batch, expected, like="the batch of `step.compile`", field="batch")
    except ShapeError as e:
        raise ShapeError(f"{e}; call `step.compile` again for another batch", field="batch") from None
