"""The loss function of a step, with or without FP8 matmuls, behind one interface. Describes the FP8 matmuls for the log."""

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
    """The result of the work that a step does once for all microbatches.

    Attributes:
        parts: Arrays that replace parameters, by parameter name. They are sharded like the parameters.
        apply: `apply(params, observed, parts, *args)` computes the loss from unsharded parameters and unsharded `parts`.
    """

    parts: _Parts
    apply: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class StepLoss:
    """A loss function `fn(params, *args)`. Subclasses add work that is done once per step, and state from the backward pass.

    Attributes:
        fn: The function.
    """

    fn: Callable[..., Any]

    @property
    def observed(self) -> PyTree:
        """Shapes of the state. The cotangent of the state is the new state."""
        return {}

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the parameters that `prepare` may replace by other arrays."""
        return ()

    def prepare(
        self, whole: PyTree, parts: _Parts, observed: PyTree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        """Does the work of a step before its microbatches.

        Args:
            whole: Shapes of the parameters as the loss function takes them, in the model's own tree.
            parts: The parameters by name, or their local shards.
            observed: State at the beginning of the step.
            args: Arguments of the loss function for one microbatch, arrays or shapes.
            over_devices: Returns the amax of a parameter from its name and the amax of the local shard. None if `parts` are not
                sharded.
            uncast: Whether a matmul returns the gradient of its parameter in the dtype of the parameter, without casts to the
                dtype that the loss function takes.
        """
        return Prepared({}, lambda params, observed, parts, *args: self.fn(params, *args))

    def traced(self, part: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns a differentiated function with the fusions that the loss needs."""
        return part

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Returns lines for the log about a step with these executables."""
        return []


@dataclass(frozen=True, eq=False)
class FP8Loss(StepLoss):
    """A loss function with FP8 matmuls. It quantizes weights once per step. Its state is the amax history of delayed scaling.

    Attributes:
        function: The function with FP8 matmuls.
        trace: Its trace for the shapes of a microbatch.
    """

    function: FP8Function
    trace: FP8Trace

    @classmethod
    def of(cls, fn: Callable[..., Any], config: FP8Config, params: PyTree, args: _Args) -> Self:
        """Finds the matmuls of a loss function.

        Args:
            fn: `fn(params, *args)`.
            config: The recipe.
            params: Shapes of the parameters.
            args: Shapes of the other arguments.

        Raises:
            ConfigError: If no matmul can be in FP8, or the recipe does not fit the parameters.
        """
        function = FP8Function(fn, config, argument="loss")
        return cls(fn, function, function.plan(params, *args))

    @property
    def observed(self) -> PyTree:
        return jax.eval_shape(self.trace.init)

    @property
    def prepared(self) -> tuple[str, ...]:
        return self.trace.weights

    @property
    def result(self) -> Any:
        """The result of the function, with zeros in place of arrays."""
        return jax.tree.unflatten(self.trace.structure, [0] * self.trace.structure.num_leaves)

    def averaged(self, num_losses: int) -> Self:
        """Returns the loss for a step that averages `num_losses` losses."""
        return replace(self, function=replace(self.function, num_losses=num_losses))

    def prepare(
        self, whole: PyTree, parts: _Parts, observed: PyTree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        trace = self.function.plan(whole, *args)
        scales = trace.scales(parts, observed, over_devices)
        if over_devices is None:
            weights = trace.views(parts, scales)
            return Prepared({}, lambda params, state, _, *args: trace.apply(params, state, weights, *args, uncast=uncast))

        def apply(params: PyTree, state: PyTree, gathered: Mapping[str, Array], *args: PyTree) -> Any:
            return trace.apply(params, state, trace.views(gathered, scales), *args, uncast=uncast)

        return Prepared(trace.cast(parts, scales), apply)

    def traced(self, part: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return fused(part)

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        return [describe(self.trace.products, self.function.config, count(executables))]


def describe(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, loops: _Loops = "none") -> str:
    """Describes the FP8 matmuls of a step in one line for the log.

    Args:
        products: All matmuls with a parameter, from `FP8Trace.products`.
        config: The recipe.
        compiled: The matmuls of the compiled step, from `count`. None if the device emulates FP8.
        loops: Whether the compiled step has loops over `microbatches` and stages. The traced and compiled counts then differ.

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
    """Counts the FP8 matmuls of the executables that a step runs. Returns None if the device emulates FP8."""
    if jax.default_backend() != "gpu":
        return None
    counts = {id(executable): FP8Products.of(executable) for executable in executables}
    found = [counts[id(executable)] for executable in executables]
    return FP8Products(sum(one.products for one in found), sum(one.transposes for one in found))
