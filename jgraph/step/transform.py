"""Declares, checks and applies the optax transform of a training step.

A transform that is elementwise updates small parameters that share one array. `jgraph.step.probe` finds this out, and checks
declarations.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import ConfigError, shown
from jgraph.layout import Layout
from jgraph.types import Leaf, Mask, OptState, Params, Shardings, Tree

Seen = TypeVar("Seen", bound=Tree)


class Transform(Protocol):
    """An `optax.GradientTransformation`, or another object with its functions, such as `optax.MultiSteps`."""

    # Any, because optax annotates its trees as any iterables.

    @property
    def init(self) -> Callable[..., Any]:
        """`init(params) -> state`."""
        ...

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]:
        """`update(updates, state, params, **extra) -> (updates, state)`."""
        ...


class Elementwise(NamedTuple):
    """An optax transform that updates every element independently. Made by `elementwise`."""

    make: Callable[[Mask], Transform]  # the argument of `elementwise`, if it was a function of the matrices


def elementwise(transform: Transform | Callable[[Mask], Transform]) -> Elementwise:
    """Declares that an optax transform updates every element independently of all others.

    Small parameters then share one array, and the update takes a few kernels instead of one per parameter. `train_step` finds
    out by itself that SGD, Adam, AdamW and Lion are elementwise. Declare a transform that treats matrices and vectors
    differently, as a function of the matrices, or one that `train_step` cannot prove. Muon, Adafactor, LAMB,
    `optax.clip_by_global_norm` and masks by path are not elementwise. This function does not check the declaration.
    `train_step` compares traces of the transform on separate and on packed parameters, and raises a ConfigError if the updates
    differ.

    Args:
        transform: An optax transform, or a function that makes one from a tree of bools. The tree has the structure of the
            arrays that the transform updates, and is True for arrays that hold matrices: parameters with at least two axes,
            except those named `scale` or `bias`. Use the function to exclude other parameters from weight decay. `train_step`
            calls the function.

    Returns:
        The declared transform. Pass it to `train_step` as `transform`.

    Raises:
        ConfigError: If `transform` has no methods `init` and `update` and is not callable.

    Examples:
        >>> adamw = jgraph.elementwise(lambda matrices: optax.adamw(3e-4, weight_decay=0.1, mask=matrices))
    """
    if _is_transform(transform):
        return Elementwise(lambda is_matrix: transform)
    if not callable(transform):
        raise _not_a_transform(transform)
    return Elementwise(transform)  # pyright: ignore[reportArgumentType]


def make_transform(declared: Elementwise, is_matrix: Mask) -> Transform:
    """Returns the optax transform of a declaration. `is_matrix` is a tree like the arrays that the transform updates."""
    transform = declared.make(is_matrix)
    if not _is_transform(transform):
        raise ConfigError(
            f"`transform` returns {shown(transform)}: must make an optax transform from a tree of bools, e.g. "
            "lambda matrices: optax.adamw(1e-3, mask=matrices)",
            field="transform",
        )
    return transform


def in_float32(transform: Transform) -> Transform:
    """Returns a transform that makes its state for float32 parameters, which `update` gets for any `params_dtype`."""

    def init(params: Any) -> Any:  # optax annotates its trees as any iterables
        return transform.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))

    return optax.GradientTransformationExtraArgs(init, transform.update)


class Masters(NamedTuple):
    """State of an optimizer with the float32 parameters that it updates. The parameters of the step are a cast copy."""

    params: Any  # a tree, as the transform sees it
    inner: OptState


def with_masters(transform: Transform) -> Transform:
    """Returns a transform that makes `Masters`. Its `update` gets `Masters.inner`, like that of `transform`."""

    def init(params: Any) -> Masters:  # optax annotates its trees as any iterables
        return Masters(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), transform.init(params))

    return optax.GradientTransformationExtraArgs(init, transform.update)  # pyright: ignore[reportArgumentType]


def check_transform(transform: Transform | Elementwise) -> None:
    """Checks that `transform` has the methods `init` and `update` of optax, or is an `Elementwise`."""
    if not isinstance(transform, Elementwise) and not _is_transform(transform):
        raise _not_a_transform(transform)


def apply_transform(
    transform: Transform, grads: Seen, opt_state: OptState, params: Seen, *, value: Array
) -> tuple[Seen, OptState]:
    """Calls the `update` of a transform, with the loss as `value` and the gradient as `grad` if it takes them."""
    takes = inspect.signature(transform.update).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    extra = {name: given for name, given in {"value": value, "grad": grads}.items() if any_name or name in takes}
    try:
        return transform.update(grads, opt_state, params, **extra)
    except (TypeError, ValueError) as e:
        if not (missing := _missing(str(e))):
            raise
        names = ", ".join(f"`{name}`" for name in missing)
        raise ConfigError(
            f"`transform` requires the keyword argument {names}: must require only `value` (the loss) and `grad` "
            "(the gradient), because a step computes the loss once",
            field="transform",
        ) from e


def _not_a_transform(value: Any) -> ConfigError:
    must = "must be an optax transform, e.g. optax.adam(1e-3), or jgraph.elementwise of one"
    if hasattr(value, "tx"):  # an nnx.Optimizer
        must += "; pass its `tx`"
    return ConfigError(f"`transform` is {shown(value)}: {must}", field="transform")


def _missing(message: str) -> list[str]:
    """Returns the keyword arguments that are missing according to Python's message or to one of optax."""
    _, found, rest = message.partition("required keyword-only argument")
    return re.findall(r"'(\w+)'", rest) if found else re.findall(r"(\w+) must be provided", message)


def _is_transform(value: Any) -> TypeGuard[Transform]:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def state_shardings(transform: Transform, opt_state: OptState, layout: Layout[Params], mesh: Mesh) -> Shardings:
    """Places the state of an elementwise transform: moments like their parameters, and the rest on every device."""

    def place(leaf: Leaf, param: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        if leaf.shape != param.shape:
            state = f"{leaf.dtype}{list(leaf.shape)} for a parameter of shape {list(param.shape)}"
            raise ConfigError(f"the optimizer state has {state}: must have the shape of the parameter", field="fsdp")
        return sharding

    rest = NamedSharding(mesh, PartitionSpec())
    placed = layout.shapes(), layout.shardings(mesh)
    state: Any = opt_state  # optax annotates its trees as any iterables
    return optax.tree_map_params(transform.init, place, state, *placed, transform_non_params=lambda _: rest)  # pyright: ignore[reportReturnType]
