"""One interface for the loss function of a step, with and without FP8 matmuls. Describes the FP8 matmuls for the log."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import jax
from jax import Array

from jgraph.autodiff.linear import Result
from jgraph.errors import ConfigError
from jgraph.precision.config import FP8Config
from jgraph.precision.fuse import fused
from jgraph.precision.transform import FP8Function, FP8Trace, Product
from jgraph.types import Params, Tree
from jgraph.xla.explain import FP8Products

_Parts: TypeAlias = Mapping[str, Array]
_Args: TypeAlias = Sequence[Tree]
_Amax: TypeAlias = Callable[[str, Array], Array] | None
_Loops: TypeAlias = Literal["none", "microbatches"]


class Prepared(NamedTuple):
    """Results that `StepLoss.prepare` computes once per step, for all microbatches.

    Attributes:
        parts: Arrays that replace parameters, such as weights in FP8: a dict by parameter name. They are sharded like the
            parameters. Empty if nothing is replaced.
        apply: `apply(params, observed, parts, *args)` returns the loss function's result for a microbatch. `params` is the tree
            of unsharded parameters. `observed` is the observed state (see `StepLoss`). `parts` is a dict with the arrays of the
            attribute `parts`, gathered from all devices. `args` are the other arguments of the loss function. Call it once per
            microbatch, and differentiate it with respect to `params` and `observed`.
    """

    parts: _Parts
    apply: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class StepLoss:
    """A loss function without FP8 matmuls. Subclasses add work that runs once per step, and observed state.

    Observed state is a tree of arrays that the backward pass computes, such as the amax history of FP8. A step passes it to
    the loss function, and gets the next one as the gradient of the loss with respect to it. This class has none.

    Attributes:
        fn: The loss function `fn(params, *args)`.
    """

    fn: Callable[..., Any]

    @property
    def observed(self) -> Tree:
        """The observed state as a tree of `jax.ShapeDtypeStruct`; {} in this class."""
        return {}

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the parameters that `prepare` replaces by other arrays if `over_devices` is given; () in this class."""
        return ()

    def prepare(
        self, whole: Params, parts: _Parts, observed: Tree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        """Prepares a step, before its first microbatch. Called inside the jitted step.

        This class computes nothing and ignores the arguments.

        Args:
            whole: The unsharded parameters of the loss function as a tree of `jax.ShapeDtypeStruct`, in the model's own tree.
            parts: A dict with the parameters by name, such as `blocks/0/mlp/up/kernel`, or with this device's shards of them.
            observed: Observed state at the beginning of the step, a tree like the attribute `observed`.
            args: Arguments of the loss function after the parameters, for one microbatch: arrays or `jax.ShapeDtypeStruct`.
            over_devices: `over_devices(name, amax)` is called with a parameter name and the amax of this device's shard, a
                float32 scalar. It returns the maximum over the devices. None if `parts` are not sharded.
            uncast: Dtype of the gradient of a parameter that `fn` casts before an FP8 matmul, for example from float32 to
                bfloat16. True: the matmul returns it in the parameter's dtype. False: it is first rounded to the cast's dtype.

        Returns:
            The arrays and the function that every microbatch uses. In this class, the field `parts` is {}, and the field
            `apply` calls `fn(params, *args)`.
        """
        return Prepared({}, lambda params, observed, parts, *args: self.fn(params, *args))

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Transforms the function that computes the loss and its gradients. Called while the jitted step is traced.

        Args:
            part: A function of trees of arrays that returns results and gradients of the loss function.

        Returns:
            A function with the same arguments and results; `part` in this class.
        """
        return part

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Describes a step for the log. Prints nothing.

        Args:
            executables: The compiled programs that a step runs, repeated for each run.

        Returns:
            A list of lines without line breaks; an empty list in this class.
        """
        return []


@dataclass(frozen=True, eq=False)
class FP8Loss(StepLoss):
    """A loss function with FP8 matmuls.

    Quantizes the weights once per step. The observed state is the amax history of delayed scaling.

    Attributes:
        fn: The original loss function `fn(params, *args)`.
        function: The loss function with FP8 matmuls, an `FP8Function`.
        trace: Trace of `function` for the shapes of a microbatch.
    """

    function: FP8Function
    trace: FP8Trace

    @classmethod
    def of(cls, fn: Callable[..., Any], config: FP8Config, params: Params, args: _Args) -> Self:
        """Traces a loss function and selects its FP8 matmuls. Does not run the function.

        Args:
            fn: The loss function `fn(params, *args)`.
            config: The recipe.
            params: Parameters, a tree of arrays or `jax.ShapeDtypeStruct`.
            args: The other arguments of `fn` for one microbatch, a sequence of trees of arrays or `jax.ShapeDtypeStruct`.

        Returns:
            The loss function with FP8 matmuls, for a step that does not average several losses. `averaged` makes a copy for a
            step that does.

        Raises:
            ConfigError: If no matmul can be in FP8, if a pattern of `config.keep` that is not a default matches no parameter,
                or if `config.blocks` is `inner` and no parameter name has a number.
        """
        function = FP8Function(fn, config, argument="loss")
        return cls(fn, function, function.plan(params, *args))

    @property
    def observed(self) -> Tree:
        """Shapes and dtypes of the amax history, an `AmaxHistory` of `jax.ShapeDtypeStruct`; {} for current scaling."""
        return jax.eval_shape(self.trace.init)

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the parameters that are weights of FP8 matmuls, in the order of their first use.

        `prepare` replaces them by FP8 arrays if `over_devices` is given.
        """
        return self.trace.weights

    @property
    def result(self) -> Any:
        """The tree that the loss function returns, with the integer 0 in place of each array. Does not run the function."""
        return jax.tree.map(lambda _: 0, self.trace.traced.out)

    def averaged(self, num_losses: int) -> Self:
        """Returns a copy for a step that averages several losses.

        Args:
            num_losses: Number of losses that are averaged into the batch's loss, such as one per microbatch and data rank. Each
                is differentiated separately, so its gradients are `num_losses` times as large as those of the batch's loss.
                Delayed scaling divides the amax of output gradients by this number.

        Returns:
            The copy. Its attribute `trace` is the same object.
        """
        return replace(self, function=replace(self.function, num_losses=num_losses))

    def prepare(
        self, whole: Params, parts: _Parts, observed: Tree, args: _Args, over_devices: _Amax = None, uncast: bool = False
    ) -> Prepared:
        """Quantizes the weights, before the first microbatch of a step. Called inside the jitted step.

        The arguments are those of `StepLoss.prepare`. `observed` is the amax history; {} for current scaling.

        Returns:
            The arrays and the function that every microbatch uses. Without `over_devices`, the field `parts` is {}, and the
            field `apply` uses the weights that were quantized here. With `over_devices`, the field `parts` has this device's
            shards of the weights in FP8. The caller gathers them from all devices and passes them to `apply`.

        Raises:
            ConfigError: If a matmul that the recipe selects runs under `jgraph.mesh.per_shard` on the mesh of the step.
        """
        trace = self.function.plan(whole, *args)
        found, hidden = ({p.name for p in each.products if not p.kept} for each in (trace, self.trace))
        if hidden := sorted(hidden - found):
            must = f"must be kept in full precision: add {hidden[0]} to `fp8.keep`"
            message = f"{hidden[0]} is multiplied under `jgraph.mesh.per_shard`, where matmuls cannot be in FP8: {must}"
            raise ConfigError(message, field="fp8.keep")
        scales = trace.scales(parts, observed, over_devices)
        if over_devices is None:
            weights = trace.views(parts, scales)
            return Prepared({}, lambda params, state, _, *args: trace.apply(params, state, weights, *args, uncast=uncast))

        def apply(params: Params, state: Tree, gathered: _Parts, *args: Tree) -> Any:
            return trace.apply(params, state, trace.views(gathered, scales), *args, uncast=uncast)

        return Prepared(trace.cast(parts, scales), apply)

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Fuses elementwise functions, such as GELU, into the kernels that quantize their results.

        Args:
            part: A function of trees of arrays that returns results and gradients of the loss function.

        Returns:
            `fused(part)`: a function with the same arguments, and results that differ by rounding. On a device without the
            quantization kernel, it calls `part` unchanged.
        """
        return fused(part)

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Describes the FP8 matmuls of a step for the log. Prints nothing.

        Args:
            executables: The compiled programs that a step runs, repeated for each run.

        Returns:
            A list of one line: the numbers of matmuls in FP8 and of other matmuls with the reasons, and the number of compiled
            FP8 matmuls.
        """
        return [describe(self.trace.products, self.function.config, count(executables))]


def describe(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, loops: _Loops = "none") -> str:
    """Describes the FP8 matmuls of a step in one line for the log. Prints nothing.

    Args:
        products: All matmuls with a parameter, from `FP8Trace.products`.
        config: The recipe; only its fields `recipe` and `compute` are shown.
        compiled: The numbers of FP8 matmuls and transposes of the compiled step, from `count`. None if the device emulates FP8.
        loops: `microbatches` if the compiled step contains the matmuls of several microbatches or stages, so that their number
            differs from that in `products`; else `none`. Only for `none`, the line also has the expected number of compiled
            matmuls.

    Returns:
        The line, such as "fp8 (current scaling): 24 of 26 matmuls with parameters; 2 not: kept by `fp8.keep`, 72 with their
        gradients; compiled: 72, and 0 transposes by XLA", or "...; emulated in bfloat16". For calibration, "...; calibration:
        only observed, not in FP8".
    """
    quantized = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(quantized)} of {len(products)} matmuls with parameters{others}"
    if config.calibrates:
        return f"{line}; calibration: only observed, not in FP8"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if loops == "microbatches":
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    expected = sum(3 if product.wgrad == "fp8" else 2 for product in quantized)
    return (
        f"{line}, {expected} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"
    )


def count(executables: Sequence[jax.stages.Compiled]) -> FP8Products | None:
    """Counts the compiled FP8 matmuls of a step in the HLO text of its executables.

    Args:
        executables: The executables that a step runs. An executable that runs several times is repeated.

    Returns:
        An `FP8Products` with two sums over the runs: `products`, the number of matmuls with FP8 operands, and `transposes`, the
        number of transposes of FP8 arrays that XLA added. None if JAX's default backend is not a GPU, because FP8 is then
        emulated.
    """
    if jax.default_backend() != "gpu":
        return None
    counts = {id(executable): FP8Products.of(executable) for executable in executables}
    runs = [counts[id(executable)] for executable in executables]
    return FP8Products(sum(run.products for run in runs), sum(run.transposes for run in runs))
