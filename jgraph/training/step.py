"""One optimizer step as a function of (state, tokens), to be jitted with the state donated: accumulation, clipping, AdamW.

An update is applied only where the loss and the gradient are finite. That choice is made inside the program, so the state stays
good however late the host looks at the metrics.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.mesh import batch_axes
from jgraph.parallel.step import StepMetrics as StepMetrics
from jgraph.parallel.step import TrainState as TrainState
from jgraph.scopes import scope
from jgraph.training.config import OptimizerConfig

PyTree = Any

# At most so many microbatches are unrolled. Beyond, they are a loop, which XLA does not capture unless asked (--graph full).
_UNROLLED_MICROBATCHES = 8


def optimizer(config: OptimizerConfig, steps: int, *, decay_mask: PyTree) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with warm-up and cosine decay; clipping is the step's own.

    Args:
        config: learning rate, warm-up and the rest.
        steps: of the whole run; the cosine ends there.
        decay_mask: tree of the parameters with True where weight decay applies, e.g. `Packing.decay_mask()`.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(1, config.warmup_steps),  # the first step already moves
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )
    moments = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    return optax.chain(
        moments_in(moments, config.first_moment_dtype, config.second_moment_dtype),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(schedule),
    )


def moments_in(adam: optax.GradientTransformation, first: Any, second: Any) -> optax.GradientTransformation:
    """Adam whose moments are kept in these dtypes; it computes in float32. Optax has a choice for the first moment only."""

    def kept(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return state._replace(mu=optax.tree.cast(state.mu, first), nu=optax.tree.cast(state.nu, second))

    def init(params: PyTree) -> optax.ScaleByAdamState:
        return kept(adam.init(params))  # pyright: ignore[reportArgumentType]

    def update(updates: PyTree, state: Any, params: PyTree = None):
        # The casts are part of the one kernel that reads the moments and writes them.
        whole = state._replace(mu=optax.tree.cast(state.mu, jnp.float32), nu=optax.tree.cast(state.nu, jnp.float32))
        updates, new = adam.update(optax.tree.cast(updates, jnp.float32), whole, params)
        return updates, kept(new)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformation(init, update)


def init_state(params: PyTree, transform: optax.GradientTransformation) -> TrainState:
    """State before the first step. `params` become part of it: the first step donates them."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, skipped=zero.copy(), params=params, opt_state=transform.init(params))


def train_step(
    loss_and_grads: Callable[[PyTree, Array], tuple[Array, PyTree]],
    transform: optax.GradientTransformation,
    *,
    clip_norm: float = 1.0,
    read_dtype: Any = None,
    trained: Callable[[], PyTree] | None = None,
) -> Callable[[TrainState, Array], tuple[TrainState, StepMetrics]]:
    """Makes the step.

    Args:
        loss_and_grads: (params, tokens_BS) -> mean loss of a batch, scalar float32, and its gradients, shaped as params.
        transform: optax transformation of the clipped gradient, which it gets in float32, as it gets the parameters.
        clip_norm: the gradient is scaled so that its global norm is at most this.
        read_dtype: what the gradient is rounded to before anything reads it; None: it is read as it is.
        trained: makes a tree of bool arrays as params, False where a parameter stays as it is; None: all are trained.

    Returns:
        `step(state, tokens_BS) -> (state, StepMetrics)`, pure. Jit it with `donate_argnums=0, keep_unused=True`.
    """

    def step(state: TrainState, tokens_BS: Array) -> tuple[TrainState, StepMetrics]:
        loss, grads = loss_and_grads(state.params, tokens_BS)
        with scope("optimizer"):
            return update(state, loss, grads)

    def update(state: TrainState, loss: Array, grads: PyTree) -> tuple[TrainState, StepMetrics]:
        if read_dtype is not None:
            grads = optax.tree.cast(grads, read_dtype)
        mask = trained() if trained else None
        grads = _where(mask, grads)
        square_sums = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(jnp.sum(square_sums))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        scale = jnp.minimum(1.0, clip_norm / norm)
        scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, grads)
        # In float32 whatever the parameters are: a decay in bfloat16 would be rounded away.
        params32 = optax.tree.cast(state.params, jnp.float32)
        updates, opt_state = transform.update(scaled, state.opt_state, params32)
        params = jax.tree.map(lambda p, u, old: (p + u).astype(old.dtype), params32, _where(mask, updates), state.params)
        params, opt_state = jax.tree.map(
            # The dtype of the new leaf, even where `where` would widen it to the old one's: a transform that changes a dtype
            # must fail the check of the aliases, not pass unseen.
            lambda new, old: jnp.where(finite, new, old).astype(new.dtype),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        skipped = state.skipped + jnp.where(finite, 0, 1)
        state = TrainState(step=state.step + 1, skipped=skipped, params=params, opt_state=opt_state)
        return state, StepMetrics(loss=loss, grad_norm=norm, grad_square_sums=square_sums)

    return step


def _where(mask: PyTree | None, tree: PyTree) -> PyTree:
    """Zeros where the mask is False; no mask, no change."""
    return tree if mask is None else jax.tree.map(lambda m, leaf: jnp.where(m, leaf, jnp.zeros((), leaf.dtype)), mask, tree)


def accumulate(
    value_and_grads: Callable[[PyTree, Array], tuple[Array, PyTree]],
    num_microbatches: int = 1,
    *,
    dtype: Any = jnp.float32,
) -> Callable[[PyTree, Array], tuple[Array, PyTree]]:
    """Mean loss and mean gradient over microbatches as a function of (params, tokens_BS).

    Args:
        value_and_grads: (params, tokens_BS) -> mean loss of a microbatch, scalar float32, and its gradients, shaped as params.
        num_microbatches: slices of the batch, along its first axis.
        dtype: of the sums.
    """

    def loss_and_grads(params: PyTree, tokens_BS: Array) -> tuple[Array, PyTree]:
        if num_microbatches == 1:
            return value_and_grads(params, tokens_BS)

        def add(carry, tokens_BS):
            found = value_and_grads(params, tokens_BS)
            with scope("wgrad"):
                return jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry, found), None

        main_grad = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        unroll = num_microbatches if num_microbatches <= _UNROLLED_MICROBATCHES else 1
        tokens_MBS = jnp.reshape(tokens_BS, (num_microbatches, -1, *tokens_BS.shape[1:]))
        sums, _ = jax.lax.scan(add, (jnp.zeros((), jnp.float32), main_grad), tokens_MBS, unroll=unroll)
        return jax.tree.map(lambda a: a / num_microbatches, sums)

    return loss_and_grads


def by_microbatch(tokens_BS: Array, num_microbatches: int, mesh: Mesh) -> Array:
    """(M, B/M, S), every microbatch spread over the data ranks."""
    tokens_MBS = jnp.reshape(tokens_BS, (num_microbatches, -1, *tokens_BS.shape[1:]))
    # A rank's rows of the batch are whole microbatches; without this it would wait while others do theirs.
    return jax.lax.with_sharding_constraint(tokens_MBS, NamedSharding(mesh, PartitionSpec(None, batch_axes(mesh))))
