"""The update of a training step: clipping, an optax transform, and the check for finite values. Pure functions of a state.

Look for: `Update.apply`, where `jnp.where` skips an update in the program, so that the host does not wait for the loss; and
`Optimizer`, which shows the transform the model's own tree or the arrays of the step.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgraph.autodiff.host import back, in_host_memory, in_order
from jgraph.checkpoint.canonical import spread
from jgraph.layout import Layout
from jgraph.step.state import StepMetrics, TrainState
from jgraph.step.transform import Masters, Transform, apply_transform, state_shardings
from jgraph.strategies import checks
from jgraph.strategies.objective import Carry, Loss, Objective, halted, raised
from jgraph.types import Arrays, Avals, Carried, Observed, OptState, Params, Shardings, Tree

# The arguments of a transform: the model's own tree, or the arrays of the step.
Seen = TypeVar("Seen", bound=Tree)


@dataclass(frozen=True, eq=False)
class Optimizer(Generic[Seen]):
    """An optax transform, which sees the trained parameters in the model's own tree or as the arrays of the step."""

    transform: Transform
    layout: Layout[Seen]  # of the trained parameters, from the tree that the transform sees
    about: str  # what the transform sees, and why
    moments: Layout[Params] | None = None  # in the optimizer state; None if they are in the model's own tree already

    def init(self, params: Arrays) -> OptState:
        return self.transform.init(self.layout.unpack(params))

    def update(self, grads: Arrays, opt_state: OptState, params: Arrays, loss: Array) -> tuple[Arrays, OptState]:
        seen_grads, seen_params = self.layout.unpack(grads), self.layout.unpack(params)
        updates, opt_state = apply_transform(self.transform, seen_grads, opt_state, seen_params, value=loss)
        return self.layout.pack(updates), opt_state

    def shardings(self, mesh: Mesh, params: Avals, opt_state: OptState) -> Shardings:
        """Places moments like their arrays if `moments` describes them, else each array over as many devices as possible."""
        if self.moments is None:
            return spread(mesh, params, opt_state)
        return state_shardings(self.transform, opt_state, self.moments, mesh)


@dataclass(frozen=True, eq=False)
class Update:
    """Initializes and updates the state of a training step."""

    optimizer: Optimizer[Params] | Optimizer[Arrays]
    layout: Layout[Params]
    shapes: Params  # in the model's own tree
    objective: Objective
    clip_norm: float | None
    params_dtype: np.dtype
    read_dtype: np.dtype | None  # the mean gradient is rounded to it before the update
    frozen_dtype: np.dtype  # of arrays with frozen parameters only
    observed: Observed  # shapes

    def initial(self, tree: Params, carried: Carried, observed: Observed = None) -> TrainState:
        """Returns the state before the first step, for parameters in the model's own tree."""
        checks.check_params(tree, self.shapes)
        checks.check_carried(carried, self.objective.carried)
        dtypes = {name: self.params_dtype if p.is_trained else self.frozen_dtype for name, p in self.layout.params.items()}
        params = {name: array.astype(dtypes[name]) for name, array in self.layout.pack(tree).items()}
        if observed is None:
            observed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.observed)
        zero = jnp.zeros((), jnp.int32)
        # Copies, because the first step donates the state.
        rest = jax.tree.map(jnp.array, (carried, observed))
        opt_state = self.optimizer.init(self._trained(params))
        return TrainState(zero, zero.copy(), params, opt_state, *rest)

    @cached_property
    def state(self) -> TrainState:
        return jax.eval_shape(self.initial, self.shapes, self.objective.carried)

    def shardings(self, mesh: Mesh) -> TrainState:
        placed = self.layout.shardings(mesh)
        state = self.state
        params = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[name]) for name, leaf in state.params.items()
        }
        opt_state = self.optimizer.shardings(mesh, params, state.opt_state)
        if self.objective.offload == "optimizer":
            opt_state = in_host_memory(opt_state, state.opt_state)
        replicated: TrainState = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)
        return replace(replicated, params=placed, opt_state=opt_state)

    def apply(self, state: TrainState, sums: Loss, grads: Arrays) -> tuple[TrainState, StepMetrics]:
        """Clips the mean gradient and applies the update of the transform if loss and gradient are finite, under `jax.jit`.

        `sums` has the weight and the `Carry` after the batch. A halted step changes only the arrays with the reduction `halt`.
        """
        before = self._trained(state.params)
        grads = self._trained(grads)
        if self.read_dtype is not None:
            grads = _cast(grads, self.read_dtype)
        grads = self._of_trained_rows(grads)
        assert sums.weight is not None, "a bound strategy returns a weight"
        loss = sums.total / sums.weight
        square_sums = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(jnp.sum(square_sums))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        reductions = self.objective.reductions
        after = sums.carried
        assert isinstance(after, Carry), "a bound strategy returns both kinds of state"
        # Arrays with the reduction `halt` become the maximum of both, also if the update is not applied.
        carried = raised(reductions, state.carried, after.model)
        as_before = raised(reductions, after.model, state.carried)
        flag = halted(reductions, carried)
        # A halted step does not count, and a step that is not finite counts and is skipped.
        counts = 1 if flag is None else jnp.where(flag == 0, 1, 0)
        applied = finite if flag is None else finite & (flag == 0)

        def chosen(new: Tree, old: Tree) -> Any:
            # Cast to the dtype of the new leaf, so that a transform that changes a dtype fails the check of donated buffers.
            return jax.tree.map(lambda new, old: jnp.where(applied, new, old).astype(new.dtype), new, old)

        def updated(opt_state: OptState) -> tuple[Arrays, OptState]:
            return chosen(self._updated(grads, norm, before, opt_state, loss), (before, opt_state))

        params, opt_state = in_order(updated, state.opt_state, start=[norm])
        opt_state = jax.tree.map(back, opt_state, state.opt_state)
        carried, observed = chosen((carried, after.observed), (as_before, state.observed))
        skipped = state.skipped + jnp.where(finite, 0, counts)
        aux = jax.tree.map(lambda leaf: leaf / sums.weight, sums.aux)
        new = TrainState(state.step + counts, skipped, state.params | params, opt_state, carried, observed)
        return new, StepMetrics(loss, norm, square_sums, aux, flag)

    def _updated(self, grads: Arrays, norm: Array, params: Arrays, opt_state: OptState, loss: Array) -> tuple[Arrays, OptState]:
        scale = 1.0 if self.clip_norm is None else jnp.minimum(1.0, self.clip_norm / norm)
        scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
        layout = self.optimizer.layout
        # In float32, because weight decay in bfloat16 would be rounded to zero.
        masters = opt_state if isinstance(opt_state, Masters) else None
        params32 = layout.pack(masters.params) if masters else _cast(params, jnp.float32)
        updates, opt_state = self.optimizer.update(scaled, masters.inner if masters else opt_state, params32, loss)
        updates = self._of_trained_rows(updates)
        new32 = jax.tree.map(jnp.add, params32, updates)
        opt_state = Masters(layout.unpack(new32), opt_state) if masters else opt_state
        return {name: new.astype(params[name].dtype) for name, new in new32.items()}, opt_state

    def _trained(self, arrays: Arrays) -> Arrays:
        return {name: arrays[name] for name, param in self.layout.params.items() if param.is_trained}

    def _of_trained_rows(self, arrays: Arrays) -> Arrays:
        """Replaces frozen rows by zeros."""
        masks = {name: self.layout.params[name].mask() for name in arrays}
        return {
            name: array if (mask := masks[name]) is None else jnp.where(mask, array, jnp.zeros((), array.dtype))
            for name, array in arrays.items()
        }


def _cast(arrays: Arrays, dtype: DTypeLike) -> Arrays:
    return {name: array.astype(dtype) for name, array in arrays.items()}
