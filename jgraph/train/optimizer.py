"""Optimizers of optax by name, learning rate schedules, and AdamW with a dtype for each moment."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jgraph.errors import ConfigError
from jgraph.step import elementwise
from jgraph.step.transform import Elementwise
from jgraph.train._muon import muon
from jgraph.train._optimizer_config import OPTIMIZERS, OptimizerConfig
from jgraph.tree import expert_axis, is_matrix, is_router, leaf_names, matching, path_name
from jgraph.types import Mask, Params, Tree, TreeOf

WhereDecays: TypeAlias = Mask | Callable[[Params], Mask]
"""The parameters with weight decay: a bool for each, or a function of the parameters."""

# Arguments of optax constructors that have flags of their own. A constructor has at most one name of each row.
_KEYWORDS = {
    "beta1": ("b1", "adam_b1"),
    "beta2": ("b2", "adam_b2"),
    "eps": ("eps",),
    "weight_decay": ("weight_decay", "weight_decay_rate"),
    "first_moment_dtype": ("mu_dtype",),
}
_MASKS = ("mask", "weight_decay_mask")
_SET_HERE = ("learning_rate", "adam_learning_rate", "muon_weight_dimension_numbers", *_MASKS, *sum(_KEYWORDS.values(), ()))


def optimizer(
    config: OptimizerConfig, steps: int, shapes: Tree, *, stacked: bool = False, compute_dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformation | Elementwise:
    """Returns the optimizer of a configuration, as the argument `transform` of `train_step`. Does not clip the gradient.

    It is declared `elementwise` if it updates every element independently and there are no groups. Muon reads the last two
    arguments: `stacked` is True if the parameters of the layers have a leading axis for the layers.
    """
    schedule = learning_rate(config, steps)
    _check_arguments(config)
    matrix_dtype = _matrix_dtype(config, compute_dtype)

    def make(mask: WhereDecays, rate: float = 1.0, decay: float | None = None) -> optax.GradientTransformation:
        scaled = schedule if rate == 1 else lambda count: rate * schedule(count)
        return _transform(config, scaled, config.weight_decay if decay is None else decay, mask, stacked, matrix_dtype)

    if config.args:
        try:
            jax.eval_shape(lambda params: (trial := make(_matrices)).update(params, trial.init(params), params), shapes)
        except Exception as e:  # optax raises any exception for a wrong value
            problem = next(iter(str(e).splitlines()), "") or type(e).__name__
            must = f"must be arguments that {config.name} takes ({problem})"
            raise ConfigError(f"`optimizer.args` is {' '.join(config.args)}: {must}", field="optimizer.args") from e
    if config.groups:
        names = leaf_names(shapes)
        label_of = dict[str, str]()
        for i, group in enumerate(config.parameter_groups):
            for name in matching(group.pattern, names, field="optimizer.groups"):
                label_of.setdefault(name, str(i))
        parts: dict[Any, Any] = {"rest": make(_matrices)}
        parts |= {str(i): make(_matrices, group.rate, group.decay) for i, group in enumerate(config.parameter_groups)}

        def labels(params: Params) -> TreeOf[str]:
            return jax.tree.map_with_path(lambda path, _: label_of.get(path_name(path), "rest"), params)

        return optax.partition(parts, labels)
    return elementwise(make) if OPTIMIZERS[config.name].updates == "elements" else make(_matrices)


def adamw(config: OptimizerConfig, steps: int, *, decay_mask: WhereDecays) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov & Hutter, arXiv:1711.05101) with a learning rate schedule. Does not clip the gradient.

    Weight decay applies where `decay_mask` is True. The update takes float32 gradients, and the moments have the dtypes of
    `config`.
    """
    return _adamw(config, learning_rate(config, steps), config.weight_decay, decay_mask)


def _adamw(config: OptimizerConfig, schedule: optax.Schedule, decay: float, mask: WhereDecays) -> optax.GradientTransformation:
    moments = optax.scale_by_adam(float(config.beta1), float(config.beta2), float(config.eps), **config.keywords)
    return optax.chain(
        moments_in(moments, config.first_moment_dtype, config.second_moment_dtype),
        optax.add_decayed_weights(float(decay), mask=mask),
        optax.scale_by_learning_rate(schedule),
    )


def _transform(
    config: OptimizerConfig, schedule: optax.Schedule, decay: float, mask: WhereDecays, stacked: bool, matrix_dtype: DTypeLike
) -> optax.GradientTransformation:
    if config.name == "adamw":
        return _adamw(config, schedule, decay, mask)
    constructor = _constructor(config.name)
    takes = inspect.signature(constructor).parameters
    values = {name: getattr(config, field) for field, names in _KEYWORDS.items() for name in names}
    values = {name: value if isinstance(value, str) else float(value) for name, value in values.items()}
    values |= dict.fromkeys(_KEYWORDS["weight_decay"], float(decay)) | dict.fromkeys(_MASKS, mask)
    values |= {"learning_rate": schedule, "muon_weight_dimension_numbers": lambda params: _muon_axes(params, stacked)}
    values = {name: value for name, value in values.items() if name in takes} | config.keywords
    made = muon(matrix_dtype, values) if config.name == "muon" else constructor(**values)
    # The moments are float32, even if the parameters are not, because updates are computed in float32.
    return optax.GradientTransformationExtraArgs(lambda params: made.init(optax.tree.cast(params, jnp.float32)), made.update)


def _matrix_dtype(config: OptimizerConfig, compute_dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of the matmuls of muon."""
    if config.matrix_dtype == "auto":
        return jnp.bfloat16 if jnp.dtype(compute_dtype) == jnp.bfloat16 else jnp.float32
    return config.matrix_dtype


def _constructor(name: str) -> Callable[..., Any]:
    """Returns the function of optax that takes the arguments in `args`."""
    if name == "adamw":
        return optax.scale_by_adam
    return getattr(optax, name, None) or getattr(optax.contrib, name)


def _check_arguments(config: OptimizerConfig) -> None:
    """Checks that the optimizer has the arguments in `args` and the dtypes of the moments."""
    takes = inspect.signature(_constructor(config.name)).parameters
    allowed = [name for name in takes if name not in _SET_HERE]
    for name in config.keywords:
        if name not in allowed:
            names = f"one of {', '.join(allowed)}" if allowed else "left out"
            raise ConfigError(
                f"`optimizer.args` has {name!r}: must be {names} with `optimizer.name` {config.name}", field="optimizer.args"
            )
    has = {"first_moment_dtype": "mu_dtype" in takes, "second_moment_dtype": config.name == "adamw"}
    for field, is_supported in has.items():
        if not is_supported and (dtype := getattr(config, field)) != "float32":
            must = f"must be float32 with `optimizer.name` {config.name}"
            raise ConfigError(f"`optimizer.{field}` is {dtype}: {must}", field=f"optimizer.{field}")


def _matrices(params: Params) -> Mask:
    """Returns a tree of bools: True for the matrices of a model's own tree, where weight decay applies."""
    return jax.tree.map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), params)


def _muon_axes(params: Params, stacked: bool) -> Tree:
    """Returns the axes of the matrices that muon orthogonalizes, and None for parameters of its Adam part.

    These are the last two axes of matrices, of each expert and of each stacked layer. Embeddings, heads, routers, vectors
    and arrays with other axes belong to the Adam part.
    """
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)

    def of(path: Any, leaf: Any) -> Any:
        name = path_name(path)
        ndim = 2 + stacked + (expert_axis(name, leaf.ndim) is not None)
        is_end = any("embed" in part or part.startswith("head_") or part in ("head", "lm_head") for part in name.split("/"))
        return axes if is_matrix(name, leaf) and leaf.ndim == ndim and not is_end and not is_router(name) else None

    return jax.tree.map_with_path(of, params)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the learning rate by the number of updates before a step: linear warmup, the schedule, a constant rate.

    `steps` ends the schedule unless `decay_steps` is set. `inverse-sqrt` at step s is the peak times sqrt(w / s), for w warmup
    steps (at least 1).
    """
    peak = config.learning_rate
    warmup = config.warmup_steps
    first = peak / max(1, warmup)  # the first step has a positive rate
    end = max(config.decay_steps or steps, warmup + 1)
    final = peak * config.final_learning_rate
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, end, final)
    length = end - warmup
    scale = max(1, warmup)
    if config.schedule == "linear":
        after = optax.linear_schedule(peak, final, length)
    elif config.schedule == "wsd":
        falls = min(length, max(1, round(config.decay_fraction * end)))
        after = optax.linear_schedule(peak, final, falls, transition_begin=length - falls)
    elif config.schedule == "inverse-sqrt":
        after = lambda count: peak * jnp.sqrt(scale / (scale + jnp.minimum(count, length)))  # noqa: E731
    else:
        after = optax.constant_schedule(peak)
    return optax.join_schedules([optax.linear_schedule(first, peak, warmup), after], [warmup])


def restart_schedule(opt_state: Tree) -> Tree:
    """Resets the count of the learning rate schedule. The moments and their count for bias correction stay."""

    def begin(state: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, state) if isinstance(state, optax.ScaleByScheduleState) else state

    return jax.tree.map(begin, opt_state, is_leaf=lambda state: isinstance(state, optax.ScaleByScheduleState))


def moments_in(adam: optax.GradientTransformation, first: Any, second: Any) -> optax.GradientTransformation:
    """Wraps Adam so that it stores its moments in other dtypes and computes in float32. Optax has this for one moment only."""

    def stored(state: optax.ScaleByAdamState) -> optax.ScaleByAdamState:
        return state._replace(mu=optax.tree.cast(state.mu, first), nu=optax.tree.cast(state.nu, second))

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        return stored(adam.init(params))  # pyright: ignore[reportArgumentType]

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[optax.Updates, optax.OptState]:
        # XLA fuses the casts into the kernel that reads and writes the moments.
        state32 = state._replace(mu=optax.tree.cast(state.mu, jnp.float32), nu=optax.tree.cast(state.nu, jnp.float32))
        updates, new = adam.update(optax.tree.cast(updates, jnp.float32), state32, params)
        return updates, stored(new)  # pyright: ignore[reportArgumentType]

    return optax.GradientTransformation(init, update)
