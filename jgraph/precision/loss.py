"""One interface for the loss function of a step, with and without FP8 matmuls. Describes the FP8 matmuls for the log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

import jax
from jax import Array, lax

from jgraph.autodiff.linear import Result
from jgraph.errors import ConfigError
from jgraph.layout import Shard
from jgraph.mesh import Axis
from jgraph.precision._fuse import fused
from jgraph.precision.config import FP8Config
from jgraph.precision.transform import FP8Function, FP8Trace, Product, Weights
from jgraph.types import Arrays, Observed, Params, Tree
from jgraph.xla.explain import FP8Products

_Args: TypeAlias = Sequence[Tree]
_Loops: TypeAlias = Literal["none", "microbatches"]
GradsOfCast: TypeAlias = Literal["rounded", "parameter"]


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The loss function `fn(params, *args)` of a step, here without FP8 matmuls.

    Observed state is arrays that the backward pass computes, such as the amax history of FP8. The gradient of the loss with
    respect to it is the state after the microbatch.
    """

    fn: Callable[..., Any]

    @property
    def observed(self) -> Observed:
        """Shapes of the observed state; {} here."""
        return {}

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that matmuls read in a working copy other than a cast; () here."""
        return ()

    def in_step(
        self,
        whole: Params,  # shapes of the unsharded parameters, in the model's own tree
        parts: Arrays,  # this device's shards of the parameters
        shards: Mapping[str, Shard],  # over `fsdp`; empty without this axis
        observed: Observed,  # before the step
        args: _Args,  # arrays or shapes of the other arguments for one microbatch
    ) -> Callable[..., Any]:
        """Makes the working copy of the weights once per step. Returns `loss(params, observed, *args)`, which gathers it."""
        return lambda params, observed, *args: self.fn(params, *args)

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Transforms the function that computes the loss and its gradients; the same function here."""
        return part

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Returns lines for the log. `executables` has an entry for each run of a step."""
        return []


@dataclass(frozen=True, eq=False)
class FP8Loss(StepLoss):
    """A loss function with FP8 matmuls. The observed state is the amax history of delayed scaling."""

    function: FP8Function  # `fn` with FP8 matmuls
    trace: FP8Trace  # of `function`, for the shapes of a microbatch
    # Dtype of the gradient of a parameter that `fn` casts before an FP8 matmul, e.g. from float32 to bfloat16: that of the
    # parameter, or first `rounded` to that of the cast
    grads: GradsOfCast

    @classmethod
    def trace_loss(cls, fn: Callable[..., Any], config: FP8Config, params: Params, args: _Args, grads: GradsOfCast) -> Self:
        """Selects the FP8 matmuls of a loss function, from the shapes of its arguments for one microbatch."""
        function = FP8Function(fn, config, argument="loss")
        return cls(fn, function, function.plan(params, *args), grads)

    @property
    def observed(self) -> Observed:
        return jax.eval_shape(self.trace.init)

    @property
    def weights(self) -> tuple[str, ...]:
        return self.trace.weights

    @property
    def result(self) -> Any:
        """The tree that the loss function returns, with 0 for each array."""
        return jax.tree.map(lambda _: 0, self.trace.traced.out)

    def averaged(self, num_losses: int) -> Self:
        """Returns a copy for a step that averages this number of losses, such as one per microbatch and data rank."""
        # Each is differentiated separately, so delayed scaling divides the amax of its output gradients by the number.
        return replace(self, function=replace(self.function, num_losses=num_losses))

    def in_step(
        self, whole: Params, parts: Arrays, shards: Mapping[str, Shard], observed: Observed, args: _Args
    ) -> Callable[..., Any]:
        trace = self.function.plan(whole, *args)
        self._check_visible(trace)
        over_devices = (lambda _, local: lax.pmax(local, Axis.FSDP)) if shards else None
        weights = quantized(trace, parts, observed, shards, over_devices)
        uncast = self.grads == "parameter"
        return lambda params, state, *args: trace.apply(params, state, weights(), *args, uncast=uncast)

    def _check_visible(self, trace: FP8Trace) -> None:
        hidden = self._selected(self.trace) - self._selected(trace)
        if hidden:
            name = min(hidden)
            must = f"must be kept in full precision: add {name} to `fp8.keep`"
            message = f"{name} is multiplied under `jgraph.mesh.per_shard`, where matmuls cannot be in FP8: {must}"
            raise ConfigError(message, field="fp8.keep")

    @staticmethod
    def _selected(trace: FP8Trace) -> set[str]:
        return {product.name for product in trace.products if not product.kept}

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Fuses elementwise functions, such as GELU, into the kernels that quantize their results."""
        return fused(part)

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        return [describe(self.trace.products, self.function.config, count(executables))]


def quantized(
    trace: FP8Trace,
    parts: Mapping[str, Array],
    observed: Observed,
    shards: Mapping[str, Shard],
    over_devices: Callable[[str, Array], Array] | None,
) -> Callable[[], Weights]:
    """Makes the working copy of the weights of FP8 matmuls, once per step. Calling the result gathers it.

    `over_devices(name, amax)` returns the maximum of an amax over the devices that hold parts of a weight.
    """
    # Shards are quantized before they are gathered, so devices exchange FP8.
    scales = trace.scales(parts, observed, over_devices)
    if not shards:
        weights = trace.views(parts, scales)
        return lambda: weights
    cast = trace.cast(parts, scales)
    return lambda: trace.views({name: shards[name].gather(part) for name, part in cast.items()}, scales)


def describe(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, loops: _Loops = "none") -> str:
    """Describes the FP8 matmuls of a step in one line for the log. `loops` is `microbatches` if `compiled` counts several."""
    quantized = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(quantized)} of {len(products)} matmuls with parameters{others}"
    if config.calibrates:
        return f"{line}; calibration: only observed, not in FP8"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if loops == "microbatches":  # or stages, so that their number differs from that in `products`
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    expected = sum(3 if product.wgrad == "fp8" else 2 for product in quantized)
    return (
        f"{line}, {expected} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"
    )


def count(executables: Sequence[jax.stages.Compiled]) -> FP8Products | None:
    """Counts FP8 matmuls and XLA's transposes in the HLO of a step's executables; None if FP8 is emulated (not on a GPU)."""
    if jax.default_backend() != "gpu":
        return None
    counts = {id(executable): FP8Products.count(executable) for executable in executables}
    runs = [counts[id(executable)] for executable in executables]
    return FP8Products(sum(run.products for run in runs), sum(run.transposes for run in runs))
