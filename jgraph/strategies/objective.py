"""The objective of a training step: `loss(params, batch, key)` returns a mean, or a sum with its weight and metrics.

With carried state, such as running statistics or the bias of a router, it is `loss(params, batch, key, carried)`, and its
result has the state after the microbatch. Every microbatch starts from the state before the step. The resulting states are
reduced over microbatches and devices, and replace the state if the update is applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.layout import Layout
from jgraph.precision.config import FP8Config
from jgraph.types import Arrays, Batch, Carried, Leaf, Observed, Params, Reduction, Reductions, Tree


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
    carried: Carried = field(default_factory=dict)


LossFunction: TypeAlias = Callable[..., Array | Loss]
"""`loss(params, batch, key)`, with parameters in the model's own tree, a microbatch and a random key. With carried state,
`loss(params, batch, key, carried)`. Returns a scalar, the mean over the rows of the microbatch, or a `Loss`."""


class LossInParts(Protocol):
    """A loss as the parts of a model that a strategy computes on different devices: a `jgraph.PipelineModel`."""

    @property
    def embed(self) -> Callable[..., Array]: ...

    @property
    def layer(self) -> Callable[..., Array]: ...

    @property
    def head(self) -> Callable[..., Array]: ...


Offload: TypeAlias = Literal["nothing", "optimizer"]
"""The part of the state that is in host memory."""


class Carry(NamedTuple):
    """State other than parameters and optimizer state."""

    model: Carried
    # Amax histories of FP8, which the backward pass computes. The step differentiates the loss with respect to this state, and
    # the resulting "gradient" is the new state. Over microbatches and devices, new states are reduced by maximum.
    observed: Observed


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The loss and the choices of a step that its strategy depends on. Made by `train_step`, which checks the values."""

    loss: LossFunction | LossInParts
    # From the tree that the loss gets: the model's own, unless a strategy around the strategy changes it.
    layout: Layout[Params]
    num_microbatches: int = 1
    grads_dtype: DTypeLike = jnp.float32  # of sums over microbatches and devices
    carried: Carried = field(default_factory=dict)  # arrays or shapes
    reductions: Reductions = field(default_factory=dict)  # a tree like `carried`
    fp8: FP8Config | None = None
    batch: Batch = None  # arrays or shapes, leaves [B, ...]; required with `fp8`
    offload: Offload = "nothing"

    def tree(self, arrays: Arrays) -> Params:
        """Returns the parameters that the loss gets as a tree, from `layout.params` by name."""
        return self.layout.own.unpack(arrays)

    def reductions_with(self, observed: Observed) -> Reductions:
        """Returns the reductions of a `Carry`. Observed state is reduced by maximum."""
        structure = jax.tree.structure(Carry(self.carried, observed))
        return structure.unflatten([*jax.tree.leaves(self.reductions), *["max"] * len(jax.tree.leaves(observed))])

    @property
    def loss_args(self) -> tuple[Leaf, *tuple[Carried, ...]]:
        """Shapes of the arguments of the loss function after the batch. The leaves of `carried` are the given ones."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        return (key, self.carried) if jax.tree.leaves(self.carried) else (key,)


def is_mean(found: Array | Loss) -> bool:
    """True if the result of a loss function is a mean over the rows of its batch, False if it is a sum with a weight."""
    return not isinstance(found, Loss) or found.weight is None


def summed(loss: LossFunction) -> Callable[..., tuple[Array, Loss]]:
    """Returns the float32 total and a `Loss` of float32 sums, for `jax.value_and_grad(has_aux=True)`."""

    def evaluate(*args: Tree) -> tuple[Array, Loss]:
        found = loss(*args)
        sums = found if isinstance(found, Loss) else Loss(found)
        total, weight, aux = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (sums.total, sums.weight, sums.aux))
        return total, Loss(total, *jax.lax.stop_gradient((weight, aux, sums.carried)))

    return evaluate


def merge(reductions: Reductions, a: Loss, b: Loss) -> Loss:
    """Adds the sums of two microbatches, the earlier one first, and merges their carried state."""
    total, weight, aux = jax.tree.map(jnp.add, (a.total, a.weight, a.aux), (b.total, b.weight, b.aux))
    return Loss(total, weight, aux, jax.tree.map(merged, reductions, a.carried, b.carried))


def merged(kind: Reduction, a: Array, b: Array) -> Array:
    """Merges a leaf of the carried state of two microbatches. Means are summed, and divided by `reduced` later."""
    functions = {"max": jnp.maximum, "halt": jnp.maximum, "sum": jnp.add, "mean": jnp.add, "last": lambda a, b: b}
    return functions[kind](a, b)


def before_any(reductions: Reductions, shapes: Carried) -> Carried:
    """Returns the carried state to start an accumulation from: merged with another state, it gives the other state."""

    def fill(kind: Reduction, leaf: Leaf) -> Array:
        if kind not in ("max", "halt") or leaf.dtype == jnp.bool_:
            return jnp.zeros(leaf.shape, leaf.dtype)
        lowest = -jnp.inf if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.iinfo(leaf.dtype).min
        return jnp.full(leaf.shape, lowest, leaf.dtype)

    return jax.tree.map(fill, reductions, shapes)


def finished(reductions: Reductions, sums: Loss, count: int, axes: Sequence[str] = (), devices: int = 1) -> Loss:
    """Reduces sums and carried state of `count` microbatches over all devices, under `jax.shard_map` unless `axes` is empty."""
    total, weight, aux = sums.total, sums.weight, sums.aux
    if axes:
        total, weight, aux = jax.lax.psum((total, weight, aux), axes)
    carried = reduced(reductions, sums.carried, count, axes)
    return Loss(total, jnp.float32(count * devices) if weight is None else weight, aux, carried)


def reduced(reductions: Reductions, carried: Carried, count: int, axes: Sequence[str]) -> Carried:
    """Divides means by the number of microbatches, and reduces carried state over mesh axes, if there are any."""
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
            # The state of the device with the highest index along `axes`, which has the last rows of the microbatch.
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                data = _reduce(kind, jax.random.key_data(leaf), axes)
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            is_last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
            # The sum of bools is an integer.
            return jax.lax.psum(jnp.where(is_last, leaf, jnp.zeros_like(leaf)), axes).astype(leaf.dtype)


def raised(reductions: Reductions, flags: Carried, carried: Carried) -> Carried:
    """Takes the elementwise maximum of two carried states in the leaves with the reduction `halt`; else those of `carried`."""
    return jax.tree.map(lambda kind, a, b: jnp.maximum(a, b) if kind == "halt" else b, reductions, flags, carried)


def halted(reductions: Reductions, carried: Carried) -> Array | None:
    """Returns the largest number in the leaves with the reduction `halt`, an int32 scalar; None if there are no such leaves."""
    pairs = zip(jax.tree.leaves(reductions), jax.tree.leaves(carried), strict=True)
    found = [jnp.max(leaf, initial=0).astype(jnp.int32) for kind, leaf in pairs if kind == "halt"]
    return jnp.max(jnp.stack(found)) if found else None
