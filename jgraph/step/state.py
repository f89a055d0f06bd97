"""The state that a training step updates, and the metrics that it returns."""

from dataclasses import dataclass, field

import jax
from jax import Array

from jgraph.strategies.objective import Carry, Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a step updates, a pytree. A step donates it and returns every leaf in the same buffer.

    Attributes:
        step: Number of completed steps, including skipped ones and without halted ones, int32 scalar.
        skipped: Number of steps that applied no update, because the loss or the gradient was not finite, int32 scalar.
        params: Parameters as the strategy stores them: arrays in `params_dtype`, packed, padded and sharded.
            `TrainStep.canonical` converts the state to the model's own tree.
        opt_state: State of the optax transform.
        carried: Carried state of the model (mutable state that the loss function returns, such as running statistics); {} if
            there is none.
        observed: State that the backward pass computes: amax histories if matmuls are in FP8 with delayed scaling; otherwise
            {}.
    """

    step: Array
    skipped: Array
    params: Tree
    opt_state: Tree
    carried: Tree = field(default_factory=dict)
    observed: Tree = field(default_factory=dict)

    @property
    def carry(self) -> Carry:
        """Carried and observed state together, as `Carry(model, observed)`. Does not copy the arrays."""
        return Carry(self.carried, self.observed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, a pytree of arrays. On a mesh, every array is replicated.

    Attributes:
        loss: Mean loss over the batch before the update, float32 scalar. NaN or infinite if the step was skipped for this
            reason.
        grad_norm: Global L2 norm of the gradient before clipping, float32 scalar.
        grad_square_sums: Sum of squares of each array of the gradient, float32 [number of arrays], in the order of
            `jax.tree.leaves(TrainState.params)`. An entry is NaN or infinite if its array is not finite.
        aux: The tree `Loss.aux` of the loss function, divided by the weight: means over the batch, float32 scalars. {} if the
            loss function returns no `aux`.
        halted: Largest number in the carried arrays with the reduction `halt`, int32 scalar. If it is positive, the step
            changed only these arrays. None if there is no such array.
    """

    loss: Array
    grad_norm: Array
    grad_square_sums: Array
    aux: Tree = field(default_factory=dict)
    halted: Array | None = None
