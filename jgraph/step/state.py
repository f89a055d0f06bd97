"""Holds what a training step updates, and the small results that it gives besides."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array

from jgraph.strategies.objective import WithHistory

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step updates. It is donated, and given back leaf for leaf in the same buffers.

    Attributes:
        step: int32 scalar, steps done, skipped ones included.
        skipped: int32 scalar, steps whose update was not applied.
        params: arrays, as the strategy lays them out.
        opt_state: optax's.
        carried: the model's other state, such as running statistics.
    """

    step: Array
    skipped: Array
    params: Tree
    opt_state: Tree
    carried: Tree = field(default_factory=dict)

    @property
    def model_state(self) -> Tree:
        """The model's own carried state, without histories of FP8."""
        return self.carried.model if isinstance(self.carried, WithHistory) else self.carried


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Small results of a step.

    Attributes:
        loss: float32 scalar, the mean over the batch.
        grad_norm: float32 scalar, global norm before clipping.
        grad_square_sums: float32, one per array of the parameters in tree order; not finite where its gradient is not.
        aux: the loss function's own metrics, means over the batch.
        halted: int32 scalar, the largest number in carried arrays that halt; if it is positive, the step changed nothing. None
            where no array halts.
    """

    loss: Array
    grad_norm: Array
    grad_square_sums: Array
    aux: Tree = field(default_factory=dict)
    halted: Array | None = None
