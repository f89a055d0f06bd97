"""The loss function of a step with its matmuls in FP8, or as it is, behind one interface."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import jax
from jax import Array

from jgraph.errors import ConfigError
from jgraph.precision.config import FP8Config
from jgraph.precision.fuse import fused
from jgraph.precision.report import count, describe
from jgraph.precision.transform import FP8Function, Plan, Product

Tree = Any


class Prepared(NamedTuple):
    """Work that is done once per step, for all microbatches.

    Attributes:
        parts: Arrays that `apply` reads instead of parameters, by the names of these parameters. They are sharded like them.
        apply: `apply(params, observed, parts, *args)` computes the loss from whole parameters and whole `parts`.
    """

    parts: Mapping[str, Array]
    apply: Callable[..., Any]


class StepLoss(Protocol):
    """A loss function `fn(params, *args)` with work that is done once per step, and state from its backward pass.

    Attributes:
        observed: Shapes of the state. The cotangent of the state is the new state.
        prepared: Names of the parameters that `prepare` may replace by other arrays.
    """

    @property
    def observed(self) -> Tree: ...
    @property
    def prepared(self) -> tuple[str, ...]: ...

    def prepare(
        self,
        whole: Tree,
        parts: Mapping[str, Array],
        observed: Tree,
        args: Sequence[Tree],
        *,
        over_devices: Callable[[str, Array], Array] | None = None,
        uncast: bool = False,
    ) -> Prepared:
        """Does the work of a step before its microbatches.

        Args:
            whole: Shapes of the parameters as the loss function takes them, in the model's own tree.
            parts: The parameters by name, or a device's parts of them.
            observed: State as the step begins.
            args: Arguments of the loss function for one microbatch, arrays or shapes.
            over_devices: Returns the amax of a whole parameter from its name and the amax of this device's part. None if
                `parts` are whole.
            uncast: Whether a matmul returns the gradient of its parameter in its own dtype, without casts to the dtype that
                the loss function takes.
        """
        ...

    def traced(self, part: Callable[..., Tree]) -> Callable[..., Tree]:
        """Returns a differentiated function with the fusions that the loss needs."""
        ...

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        """Returns lines for the log about a step with these executables."""
        ...


@dataclass(frozen=True, eq=False)
class PlainLoss:
    """A `StepLoss` that computes its function as it is."""

    fn: Callable[..., Any]
    observed: Tree
    prepared: tuple[str, ...] = ()

    def prepare(self, whole: Tree, parts: Mapping[str, Array], observed: Tree, args: Sequence[Tree], **_: Any) -> Prepared:
        return Prepared({}, lambda params, observed, parts, *args: self.fn(params, *args))

    def traced(self, part: Callable[..., Tree]) -> Callable[..., Tree]:
        return part

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        return []


@dataclass(frozen=True, eq=False)
class FP8Loss:
    """A `StepLoss` with matmuls in FP8: quantizes weights once per step, and has amax histories if scaling is delayed.

    Attributes:
        function: The function with its matmuls in FP8.
        products: The matmuls with parameters.
        observed: Shapes of the amax histories.
        prepared: Names of the parameters that are multiplied with in FP8.
        result: The result of the function, with zeros for arrays.
    """

    function: FP8Function
    products: tuple[Product, ...]
    observed: Tree
    prepared: tuple[str, ...]
    result: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], config: FP8Config, params: Tree, args: Sequence[Tree]) -> Self:
        """Finds the matmuls of a loss function.

        Args:
            fn: `fn(params, *args)`.
            config: The recipe.
            params: Shapes of the parameters.
            args: Shapes of the other arguments.

        Raises:
            ConfigError: If no matmul can be in FP8, or the recipe does not fit the parameters.
        """
        function = FP8Function(fn, config)
        plan = plan_of(function, params, args)
        result = jax.tree.unflatten(plan.structure, [0] * plan.structure.num_leaves)
        return cls(function, plan.products, jax.eval_shape(plan.init), plan.weights, result)

    def averaged(self, num_losses: int) -> Self:
        """Returns the loss for a step that averages `num_losses` losses."""
        return replace(self, function=replace(self.function, num_losses=num_losses))

    def prepare(
        self,
        whole: Tree,
        parts: Mapping[str, Array],
        observed: Tree,
        args: Sequence[Tree],
        *,
        over_devices: Callable[[str, Array], Array] | None = None,
        uncast: bool = False,
    ) -> Prepared:
        plan = self.function.plan(whole, *args)
        scales = plan.scales(parts, observed, over_devices)
        if over_devices is None:
            weights = plan.views(parts, scales)
            return Prepared({}, lambda params, state, _, *args: plan.apply(params, state, weights, *args, uncast=uncast))

        def apply(params: Tree, state: Tree, gathered: Mapping[str, Array], *args: Tree) -> Any:
            return plan.apply(params, state, plan.views(gathered, scales), *args, uncast=uncast)

        return Prepared(plan.cast(parts, scales), apply)

    def traced(self, part: Callable[..., Tree]) -> Callable[..., Tree]:
        return fused(part)

    def describe(self, executables: Sequence[jax.stages.Compiled]) -> list[str]:
        return [describe(self.products, self.function.config, count(executables))]


def plan_of(function: FP8Function, params: Tree, args: Sequence[Tree]) -> Plan:
    """Returns the plan of a step's function. Errors about its argument `fn` name the step's argument `loss`."""
    try:
        return function.plan(params, *args)
    except ConfigError as e:
        if e.field != "fn":
            raise
        raise ConfigError(str(e).replace("`fn`", "`loss`"), field="loss") from None
