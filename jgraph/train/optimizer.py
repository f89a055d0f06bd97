"""AdamW with linear warmup, cosine decay, and a dtype for each moment."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgraph.train.config import OptimizerConfig

Tree = Any


def adamw(config: OptimizerConfig, steps: int, *, decay_mask: Tree) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov & Hutter, arXiv:1711.05101) with a learning rate schedule. Does not clip the gradient.

    Args:
        config: The hyperparameters. `clip_norm` is not used, because the training step clips the gradient.
        steps: Number of steps of the run. The cosine decay ends there, unless `config.decay_steps` is set.
        decay_mask: Tree of bools, or a function from the parameters to one, with the structure of the parameters. Weight decay
            applies to the arrays where it is True.

    Returns:
        The optax transform. Its `update` takes float32 gradients and parameters, and returns the change to add to the
        parameters: the negative learning rate is already applied. Its state has the moments in the dtypes of `config`.
    """
    moments = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    return optax.chain(
        moments_in(moments, config.first_moment_dtype, config.second_moment_dtype),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate schedule: linear warmup, cosine decay, then a constant rate.

    Args:
        config: The hyperparameters.
        steps: Number of steps of the run. The cosine ends there, unless `config.decay_steps` is set.

    Returns:
        A function from the number of updates applied before a step (an int or an integer scalar array) to the learning rate of
        that step. The rate rises linearly from `learning_rate` / `warmup_steps` to `learning_rate`, and then falls to
        `learning_rate` x `final_learning_rate`. If `warmup_steps` is 0, the rate starts at `learning_rate`.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(1, config.warmup_steps),  # the first step has a positive rate
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.decay_steps or steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_learning_rate,
    )


def restart_schedule(opt_state: Tree) -> Tree:
    """Resets the step count of the learning rate schedule, so that the schedule starts over.

    Args:
        opt_state: State of the optax transform `adamw`, as arrays. Not changed.

    Returns:
        A copy of the tree with a count of 0 in each `optax.ScaleByScheduleState`. The moments of Adam and their count for bias
        correction are the same arrays as in `opt_state`.
    """

    def begin(state: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, state) if isinstance(state, optax.ScaleByScheduleState) else state

    return jax.tree.map(begin, opt_state, is_leaf=lambda state: isinstance(state, optax.ScaleByScheduleState))


def moments_in(adam: optax.GradientTransformation, first: Any, second: Any) -> optax.GradientTransformation:
    """Wraps Adam so that it stores its moments in other dtypes and computes in float32. Optax has this for one moment only.

    Args:
        adam: `optax.scale_by_adam` with moments in the dtype of the parameters, float32.
        first: Dtype of the first moment in the state, for example "bfloat16".
        second: Dtype of the second moment in the state.

    Returns:
        The transform. Its state is an `optax.ScaleByAdamState`. `update` casts gradients and moments to float32, and returns
        float32 updates.
    """

    def stored(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return state._replace(mu=optax.tree.cast(state.mu, first), nu=optax.tree.cast(state.nu, second))

    def init(params: Tree) -> optax.ScaleByAdamState:
        return stored(adam.init(params))  # pyright: ignore[reportArgumentType]

    def update(updates: Tree, state: Any, params: Tree = None):
        # XLA fuses the casts into the kernel that reads and writes the moments.
        state32 = state._replace(mu=optax.tree.cast(state.mu, jnp.float32), nu=optax.tree.cast(state.nu, jnp.float32))
        updates, new = adam.update(optax.tree.cast(updates, jnp.float32), state32, params)
        return updates, stored(new)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformation(init, update)
