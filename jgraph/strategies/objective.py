"""The objective of a training step: `loss(params, batch, key)` returns a mean, or a sum with its weight and metrics.

With carried state, such as running statistics or the bias of a router, it is `loss(params, batch, key, carried)`, and its
result has the state after the microbatch. Every microbatch starts from the state before the step. The resulting states are
reduced over microbatches and devices, and replace the state if the update is applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.precision.config import FP8Config

Tree: TypeAlias = Any  # a pytree of arrays, or of their shapes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """The result of a loss function: a sum with its weight, metrics and carried state. A pytree.

    A mean of means is wrong if microbatches or devices differ in the number of tokens with a loss, for example because of
    padding. A step sums totals and weights over microbatches and devices, and minimizes their quotient. These sums are also a
    `Loss`, in float32.

    Attributes:
        total: Floating scalar, the sum of the losses, or their mean if `weight` is None.
        weight: Scalar, the number of losses in the sum. Not differentiated. None declares `total` a mean over the rows of the
            microbatch; all microbatches then have the same weight.
        aux: Tree of scalars, sums like `total` (means if `weight` is None). Not differentiated. `metrics.aux` of a step has the
            sums over microbatches and devices, divided by the weight.
        carried: Carried state (mutable state of the model) after the microbatch, with the structure, shapes and dtypes of the
            state before it. Not differentiated. {} if there is none.

    Examples:
        >>> def loss(params, batch, key):
        ...     error = batch["weight"] * (batch["x"] @ params["w"] - batch["y"]) ** 2
        ...     return jgraph.Loss(jnp.sum(error), jnp.sum(batch["weight"]), aux={"error": jnp.sum(error)})
    """

    total: Array
    weight: Array | float | None = None
    aux: Tree = field(default_factory=dict)
    carried: Tree = field(default_factory=dict)


LossFunction: TypeAlias = Callable[..., "Array | Loss"]
Reduction: TypeAlias = Literal["max", "sum", "mean", "last", "halt"]


class Carry(NamedTuple):
    """State other than parameters and optimizer state. A tree of reductions may also have this structure.

    Attributes:
        model: The carried state of the model. A loss function returns it. {} if there is none.
        observed: State from the backward pass: amax histories of FP8; {} without them. The cotangent of the state before a
            microbatch is the state after it. Reduced by maximum.
    """

    model: Tree
    observed: Tree


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss and the choices of a step that its strategy depends on. Made by `train_step`, which checks the values.

    Attributes:
        loss: `loss(params, batch, key, *carried)`, or a `PipelineModel`.
        num_microbatches: Number of microbatches of a batch.
        grads_dtype: Floating dtype of sums of gradients over microbatches and devices.
        packing: Whether `small` parameters share an array, or `nothing` does.
        carried: Arrays or shapes of the model's carried state; {} if there is none.
        reductions: Reductions of the carried state over microbatches and devices (`max`, `sum`, `mean`, `last` or `halt`), a
            tree of names like `carried`.
        fp8: Recipe for matmuls in FP8; None for none.
        batch: Arrays or shapes of a whole batch, leaves [B, ...]; required with `fp8`, may be None without.
    """

    loss: Any
    num_microbatches: int = 1
    grads_dtype: Any = jnp.float32
    packing: Literal["small", "nothing"] = "small"
    carried: Tree = field(default_factory=dict)
    reductions: Tree = field(default_factory=dict)
    fp8: FP8Config | None = None
    batch: Tree = None

    def reductions_with(self, observed: Tree) -> Carry:
        """Returns the reductions of carried and observed state.

        Args:
            observed: Shapes of the observed state.

        Returns:
            A `Carry`: `model` has `reductions`, and `observed` the name `max` for every leaf.
        """
        return Carry(self.reductions, jax.tree.map(lambda _: "max", observed))

    @property
    def loss_args(self) -> tuple[Tree, ...]:
        """Shapes of the arguments of the loss function after the batch: (key,), or (key, carried) if there is carried state."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return (key, self.carried) if jax.tree.leaves(self.carried) else (key,)


def is_mean(found: Any) -> bool:
    """True if the result of a loss function is a mean over its rows, False if it is a sum with a weight.

    Args:
        found: The result: a scalar, or a `Loss`. A `Loss` without weight is a mean.
    """
    return not isinstance(found, Loss) or found.weight is None


def summed(loss: LossFunction) -> Callable[..., tuple[Array, Loss]]:
    """Converts a loss function for `jax.value_and_grad(has_aux=True)`. Calls nothing itself.

    Args:
        loss: A function that returns a scalar or a `Loss`.

    Returns:
        `f(*args) -> (total, sums)`. `total` is a float32 scalar. `sums` is a `Loss` with total, weight and metrics in float32,
        and only `total` is differentiable. The weight of a mean is None.
    """

    def of(*args: Any) -> tuple[Array, Loss]:
        found = loss(*args)
        sums = found if isinstance(found, Loss) else Loss(found)
        total, weight, aux = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (sums.total, sums.weight, sums.aux))
        return total, Loss(total, *jax.lax.stop_gradient((weight, aux, sums.carried)))

    return of


def merge(reductions: Tree, a: Loss, b: Loss) -> Loss:
    """Adds the sums of two microbatches, and merges their carried state.

    Args:
        reductions: A tree of names like the carried state: `max`, `sum`, `mean`, `last` or `halt`.
        a: Sums of the earlier microbatch.
        b: Sums of the later microbatch.

    Returns:
        The sums of both, and the merged carried state. Leaves with the reduction `mean` are sums, which `reduced` divides.
    """
    total, weight, aux = jax.tree.map(jnp.add, (a.total, a.weight, a.aux), (b.total, b.weight, b.aux))
    return Loss(total, weight, aux, jax.tree.map(merged, reductions, a.carried, b.carried))


def merged(kind: Reduction, a: Array, b: Array) -> Array:
    """Merges a leaf of the carried state of two microbatches.

    Args:
        kind: The reduction of the leaf: `max`, `halt` (the maximum, too), `sum`, `mean` or `last`.
        a: The leaf after the earlier microbatch.
        b: The leaf after the later microbatch.

    Returns:
        The merged leaf: the maximum, the sum, or `b` for `last`. For `mean` it is the sum, which `reduced` divides.
    """
    functions = {"max": jnp.maximum, "halt": jnp.maximum, "sum": jnp.add, "mean": jnp.add, "last": lambda a, b: b}
    return functions[kind](a, b)


def before_any(reductions: Tree, shapes: Tree) -> Tree:
    """Returns the identity of `merge` for carried state, the initial value of an accumulation.

    Args:
        reductions: A tree of names like the carried state: `max`, `sum`, `mean`, `last` or `halt`.
        shapes: Shapes and dtypes of the carried state.

    Returns:
        Arrays of these shapes: zeros; for `max` and `halt`, minus infinity or the lowest integer of the dtype.
    """

    def of(kind: Reduction, leaf: Any) -> Array:
        lowest = -jnp.inf if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).min
        return jnp.full(leaf.shape, lowest if kind in ("max", "halt") else 0, leaf.dtype)

    return jax.tree.map(of, reductions, shapes)


def finished(reductions: Tree, sums: Loss, count: int, axes: Sequence[str] = (), devices: int = 1) -> Loss:
    """Reduces the sums and the carried state over all devices. Under `jax.shard_map` if there are axes.

    Args:
        reductions: A tree of names like the carried state: `max`, `sum`, `mean`, `last` or `halt`.
        sums: Loss over the microbatches of this device.
        count: Number of microbatches.
        axes: Mesh axes to reduce over; empty on one device.
        devices: Number of devices along these axes.

    Returns:
        The sums over all devices, and the reduced carried state, the same on all devices. The weight of means is
        `count * devices`.
    """
    total, weight, aux = sums.total, sums.weight, sums.aux
    if axes:
        total, weight, aux = jax.lax.psum((total, weight, aux), axes)
    carried = reduced(reductions, sums.carried, count, axes)
    return Loss(total, jnp.float32(count * devices) if weight is None else weight, aux, carried)


def reduced(reductions: Tree, carried: Tree, count: int, axes: Sequence[str]) -> Tree:
    """Divides means by the number of microbatches, and reduces carried state over mesh axes.

    Args:
        reductions: A tree of names like the carried state: `max`, `sum`, `mean`, `last` or `halt`.
        carried: Carried state, merged over the microbatches of this device.
        count: Number of microbatches.
        axes: Mesh axes to reduce over, under `jax.shard_map`. Empty on one device.

    Returns:
        The carried state, the same on all devices: the maximum, sum or mean over the axes; for `last`, the state of the device
        with the highest index along `axes`.
    """
    carried = jax.tree.map(lambda kind, leaf: leaf / count if kind == "mean" else leaf, reductions, carried)
    return jax.tree.map(lambda kind, leaf: _reduce(kind, leaf, axes), reductions, carried) if axes else carried


def _reduce(kind: Reduction, leaf: Array, axes: Sequence[str]) -> Array:
    match kind:
        case "sum":
            return jax.lax.psum(leaf, axes)
        case "mean":
            return jax.lax.pmean(leaf, axes)
        case "max" | "halt":
            return jax.lax.pmax(leaf, axes)
        case "last":
            # The last device has the last rows of the microbatch.
            is_last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
            return jax.lax.psum(jnp.where(is_last, leaf, jnp.zeros_like(leaf)), axes)


def raised(reductions: Tree, flags: Tree, carried: Tree) -> Tree:
    """Raises the leaves with the reduction `halt` to at least the values in another state. Does not change its arguments.

    Args:
        reductions: A tree of names like the carried state.
        flags: Carried state with the lower bounds.
        carried: The carried state.

    Returns:
        `carried`, with the maximum of `carried` and `flags` in leaves with the reduction `halt`.
    """
    return jax.tree.map(lambda kind, a, b: jnp.maximum(a, b) if kind == "halt" else b, reductions, flags, carried)


def halted(reductions: Tree, carried: Tree) -> Array | None:
    """Returns the largest number in the leaves with the reduction `halt`.

    Args:
        reductions: A tree of names like the carried state.
        carried: The carried state.

    Returns:
        An int32 scalar, at least 0. If it is positive, the step must leave all other state unchanged. None if no leaf has this
        reduction.
    """
    pairs = zip(jax.tree.leaves(reductions), jax.tree.leaves(carried), strict=True)
    found = [jnp.max(leaf, initial=0).astype(jnp.int32) for kind, leaf in pairs if kind == "halt"]
    return jnp.max(jnp.stack(found)) if found else None
