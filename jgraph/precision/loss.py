"""One interface for the loss function of a step, with and without FP8 matmuls. Describes the FP8 matmuls for the log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import jax
from jax import Array

from jgraph.precision.config import FP8Config
from jgraph.precision.fuse import fused
from jgraph.precision.transform import FP8Function, FP8Trace, Product
from jgraph.tree import PyTree
from jgraph.xla.explain import FP8Products

_Parts: TypeAlias = Mapping[str, Array]
_Args: TypeAlias = Sequence[PyTree]
_Amax: TypeAlias = Callable[[str, Array], Array] | None
_Loops: TypeAlias = Literal["none", "microbatches"]


class Prepared(NamedTuple):
    """Results that `StepLoss.prepare` computes once per step, for all microbatches.

    Attributes:
        parts: Arrays that replace parameters, by parameter name. They are sharded like the parameters.
        apply: `apply(params, observed, parts, *args)` computes the loss of a microbatch from unsharded parameters and `parts`.
    """

    parts: _Parts
    apply: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class StepLoss:
    """A loss function `fn(params, *args)`. Subclasses add work that runs once per step, and state from the backward pass.

    Attributes:
        fn: The loss function.
    """

    fn: Callable[..., Any]

    @property
    def observed(self) -> PyTree:
        """Shapes and dtypes of the observed state. The cotangent of the observed state is the new state."""
        return {}

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the parameters that `prepare` may replace by other arrays."""
        return ()

    def prepare(
        self, whole: PyTree, parts: _Parts, observed: PyTree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        """Prepares a step, before its first microbatch.

        Args:
            whole: Shapes and dtypes of the parameters of the loss function, in the model's own tree.
            parts: The parameters by name, or their local shards.
            observed: Observed state at the beginning of the step.
            args: Arguments of the loss function for one microbatch, arrays or shapes.
            over_devices: `over_devices(name, amax)` reduces the amax of a parameter's local shard over devices. None if `parts`
                are not sharded.
            uncast: True if a matmul returns the gradient of its parameter in the dtype of the parameter. False if the gradient
                passes through the casts between the parameter and the matmul.

        Returns:
            The arrays and the function that every microbatch uses.
        """
        return Prepared({}, lambda params, observed, parts, *args: self.fn(params, *args))

    def traced(self, part: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Applies the fusions of the loss to a differentiated function."""
        return part

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Returns lines for the log that describe a step with the given executables."""
        return []


@dataclass(frozen=True, eq=False)
class FP8Loss(StepLoss):
    """A loss function with FP8 matmuls.

    Quantizes the weights once per step. The observed state is the amax history of delayed scaling.

    Attributes:
        function: The loss function with FP8 matmuls.
        trace: Trace of `function` for the shapes of a microbatch.
    """

    function: FP8Function
    trace: FP8Trace

    @classmethod
    def of(cls, fn: Callable[..., Any], config: FP8Config, params: PyTree, args: _Args) -> Self:
        """Traces a loss function and selects its FP8 matmuls.

        Args:
            fn: The loss function `fn(params, *args)`.
            config: The recipe.
            params: Parameters, arrays or shapes.
            args: The other arguments for one microbatch, arrays or shapes.

        Returns:
            The loss function with FP8 matmuls.

        Raises:
            ConfigError: If no matmul can be in FP8, or the recipe does not fit the parameters.
        """
        function = FP8Function(fn, config, argument="loss")
        return cls(fn, function, function.plan(params, *args))

    @property
    def observed(self) -> PyTree:
        """Shapes of the amax history; {} for current scaling."""
        return jax.eval_shape(self.trace.init)

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the parameters that are weights of FP8 matmuls."""
        return self.trace.weights

    @property
    def result(self) -> Any:
        """The result of the loss function with 0 in place of each array."""
        return jax.tree.unflatten(self.trace.structure, [0] * self.trace.structure.num_leaves)

    def averaged(self, num_losses: int) -> Self:
        """Returns a copy for a step that averages `num_losses` losses; see `observe`."""
        return replace(self, function=replace(self.function, num_losses=num_losses))

    def prepare(
        self, whole: PyTree, parts: _Parts, observed: PyTree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        """Quantizes the weights. Sharded weights are cast to FP8 before they are gathered."""
        trace = self.function.plan(whole, *args)
        scales = trace.scales(parts, observed, over_devices)
        if over_devices is None:
            weights = trace.views(parts, scales)
            return Prepared({}, lambda params, state, _, *args: trace.apply(params, state, weights, *args, uncast=uncast))

        def apply(params: PyTree, state: PyTree, gathered: Mapping[str, Array], *args: PyTree) -> Any:
            return trace.apply(params, state, trace.views(gathered, scales), *args, uncast=uncast)

        return Prepared(trace.cast(parts, scales), apply)

    def traced(self, part: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Fuses elementwise functions into the quantization kernels, see `fused`."""
        return fused(part)

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Returns one line with the numbers of traced and compiled FP8 matmuls."""
        return [describe(self.trace.products, self.function.config, count(executables))]


def describe(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, loops: _Loops = "none") -> str:
    """Describes the FP8 matmuls of a step in one line for the log.

    Args:
        products: All matmuls with a parameter, from `FP8Trace.products`.
        config: The recipe.
        compiled: The matmuls of the compiled step, from `count`. None if the device emulates FP8.
        loops: `microbatches` if the compiled step loops over microbatches and stages, so that the number of compiled matmuls
            differs from the number of traced ones; else `none`.

    Returns:
        The line.
    """
    quantized = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(quantized)} of {len(products)} matmuls with parameters{others}"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if loops == "microbatches":
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    expected = sum(3 if product.wgrad == "fp8" else 2 for product in quantized)
    return (
        f"{line}, {expected} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"
    )


def count(executables: Sequence[jax.stages.Compiled]) -> FP8Products | None:
    """Counts the compiled FP8 matmuls of a step.

    Args:
        executables: The executables that a step runs, repeated for each run.

    Returns:
        The numbers of matmuls and transposes. None if the device is not a GPU and emulates FP8.
    """
    if jax.default_backend() != "gpu":
        return None
    counts = {id(executable): FP8Products.of(executable) for executable in executables}
    runs = [counts[id(executable)] for executable in executables]
    return FP8Products(sum(run.products for run in runs), sum(run.transposes for run in runs))
