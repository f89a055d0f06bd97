"""The state that a training step updates, and the metrics that it returns."""

from dataclasses import dataclass, field

import jax
from jax import Array

from jgraph.strategies.objective import Carry, Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a step updates. A step donates it and returns every leaf in the same buffer.

    Attributes:
        step: Number of steps done, including skipped ones, int32 scalar.
        skipped: Number of steps without an applied update, int32 scalar.
        params: Arrays in the layout of the strategy.
        opt_state: State of the optax transform.
        carried: Carried state of the model, such as running statistics.
        observed: State from the backward pass: amax histories if matmuls are in FP8 with delayed scaling.
    """

    step: Array
    skipped: Array
    params: Tree
    opt_state: Tree
    carried: Tree = field(default_factory=dict)
    observed: Tree = field(default_factory=dict)

    @property
    def carry(self) -> Carry:
        """Carried and observed state together."""
        return Carry(self.carried, self.observed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step.

    Attributes:
        loss: Mean loss over the batch, float32 scalar.
        grad_norm: Global norm of the gradient before clipping, float32 scalar.
        grad_square_sums: Sum of squares of each array of the gradient, float32, in the order of the leaves of
            `TrainState.params`. Not finite if the array is not.
        aux: Metrics of the loss function (`Loss.aux`), means over the batch.
        halted: Largest number in the carried arrays with the reduction `halt`, int32 scalar. If it is positive, the step
            changed nothing. None if there is no such array.
    """

    loss: Array
    grad_norm: Array
    grad_square_sums: Array
    aux: Tree = field(default_factory=dict)
    halted: Array | None = None
