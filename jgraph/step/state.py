"""The state that a training step updates, and the metrics that it returns."""

from dataclasses import dataclass, field

import jax
from jax import Array

from jgraph.strategies.objective import Carry
from jgraph.types import Arrays, Carried, Observed, OptState, Tree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a step updates, a pytree. A step donates it and returns every leaf in the same buffer.

    Attributes:
        step: Number of steps done, int32 scalar. Skipped steps count, halted steps do not (see `StepMetrics.halted`).
        skipped: Number of steps that applied no update because the loss or the gradient was not finite, int32 scalar.
        params: Parameters as the strategy stores them: arrays in `params_dtype`, packed, padded and sharded. Arrays with frozen
            parameters only are in `frozen_dtype`. `TrainStep.canonical` converts the state to the model's own tree.
        opt_state: State of the optax transform.
        carried: Carried state of the model (mutable state that the loss function returns, such as running statistics); {} if
            there is none.
        observed: State that the backward pass computes: amax histories if matmuls are in FP8 with delayed scaling; otherwise
            {}.
    """

    step: Array
    skipped: Array
    params: Arrays
    opt_state: OptState
    carried: Carried = field(default_factory=dict)
    observed: Observed = field(default_factory=dict)

    @property
    def carry(self) -> Carry:
        """`Carry(model=carried, observed=observed)`: both kinds of state in one tree. Does not copy the arrays."""
        return Carry(self.carried, self.observed)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, a pytree of arrays. On a mesh, every array is replicated.

    Attributes:
        loss: Mean loss over the batch, computed with the parameters before the update, float32 scalar. If it is NaN or
            infinite, the step is skipped: it applies no update.
        grad_norm: Global L2 norm of the gradient before clipping, without frozen parameters, float32 scalar. If it is NaN or
            infinite, the step is skipped.
        grad_square_sums: For each trained array of `TrainState.params`, the sum of the squares of its gradient before clipping,
            float32 [number of arrays], in the order of `jax.tree.leaves`. Frozen elements count as 0. NaN or infinite if the
            gradient of the array is not finite.
        aux: The metrics of the loss function, float32 scalars in the tree `Loss.aux`: sums over the batch, divided by the sum
            of `Loss.weight` (or by the number of microbatches and devices if `Loss.weight` is None). {} if the loss function
            returns no `aux`.
        halted: Largest number in the carried arrays with the reduction `halt`, int32 scalar. If it is positive, the step
            changed only these arrays. None if there is no such array.
    """

    loss: Array
    grad_norm: Array
    grad_square_sums: Array
    aux: Tree = field(default_factory=dict)
    halted: Array | None = None
