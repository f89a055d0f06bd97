"""The interface of strategies: placement of parameters and batches, computation and compilation of gradients.

A strategy is the user's choice of mesh, parameters and rules. `Strategy.bind` combines it with an `Objective`. The result, a
`BoundStrategy`, owns everything that depends on the strategy. `train_step` uses these protocols only, so a new strategy is a
new file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import jax
from jax import Array
from jax.sharding import Mesh

from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.objective import Carry, Loss, Objective, Tree
from jgraph.xla.explain import Memory
from jgraph.xla.options import OptionValue

Options: TypeAlias = Mapping[str, OptionValue]


@dataclass(frozen=True, eq=False)
class GradientProgram:
    """Computes the gradients of a batch in two phases: executables called by the host, and a part of the update's program.

    This class has no executables: `run` returns the batch, and the update's program computes everything. A subclass with
    executables overrides every method.

    Attributes:
        strategy: The bound strategy.
        inputs: Shapes and shardings of the arrays that `run` returns, a tree of `jax.ShapeDtypeStruct`; None if unknown.
    """

    strategy: "BoundStrategy"
    inputs: Tree

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        """The executables that `run` calls, in order. In this class, none."""
        return ()

    def run(self, params: Tree, carry: Carry, step: Array, batch: Tree) -> Tree:
        """Calls the executables on the host. In this class, calls nothing and returns `batch` itself.

        Args:
            params: The arrays of the state; not donated.
            carry: Carried and observed state before the step; not donated.
            step: Number of steps done, int32 scalar.
            batch: A placed batch, leaves [M, B/M, ...] for M microbatches of a batch of B rows; on one device [B, ...].

        Returns:
            The inputs of the update's program, a tree of arrays.
        """
        return batch

    def gradients(self, params: Tree, carry: Carry, key: Array, inputs: Tree) -> tuple[Loss, Tree]:
        """Computes the sums over the batch and the gradient of their mean. Traced in the update's program.

        In this class, calls `loss_and_grads` of the strategy.

        Args:
            params: The arrays of the state.
            carry: Carried and observed state before the step.
            key: Random key of the step.
            inputs: The result of `run`.

        Returns:
            (sums, gradient). The sums are a `Loss` over the whole batch, in float32 and with a weight; `carried` is the `Carry`
            after the batch. The gradient is laid out like `params`, in `grads_dtype`; if nothing is summed over microbatches or
            devices, it may be in the dtype of `params`.
        """
        return self.strategy.loss_and_grads(params, self.strategy.batches.by_microbatch(inputs), key, carry)


class Pools(NamedTuple):
    """Predicted memory of one device during a step, besides parameters and optimizer state.

    Attributes:
        sizes: Bytes by the name of a pool (arrays with the same lifetime), such as `main_grad`.
        covers: Whether the pools are the `whole` step, or `some` of its temporary arrays.
    """

    sizes: dict[str, int]
    covers: Literal["whole", "some"]


class BoundStrategy(Protocol):
    """A strategy bound to an objective: converts between the model's own tree and the arrays of a step, computes gradients.

    Attributes:
        mesh: The devices; None for one device.
        is_matrix: A tree of bools like the arrays, True for arrays that hold matrices. Weight decay applies to these.
        batches: The layout of a batch.
        observed: Shapes of the observed state (amax histories of FP8); {} if there is none.
        xla_options: XLA options that the step needs, as `name=value`. Options that the installed XLA lacks are left out.
    """

    @property
    def mesh(self) -> Mesh | None:
        """The devices; None for one device."""
        ...

    @property
    def is_matrix(self) -> Tree:
        """A tree of bools like the arrays, True for arrays that hold matrices. Weight decay applies to these."""
        ...

    @property
    def batches(self) -> BatchLayout:
        """The layout of a batch."""
        ...

    @property
    def observed(self) -> Tree:
        """Shapes of the observed state (amax histories of FP8), a tree of `jax.ShapeDtypeStruct`; {} if there is none."""
        ...

    @property
    def xla_options(self) -> tuple[str, ...]:
        """XLA options that the step needs, as `name=value`. The caller leaves out options that the installed XLA lacks."""
        ...

    def on(self, mesh: Mesh) -> "BoundStrategy":
        """Returns the same strategy on another mesh with the same shape and axis names. Moves no arrays."""
        ...

    def pack(self, tree: Tree) -> Tree:
        """Converts parameters from the model's own tree to the arrays of a step. A pure function, to be jitted.

        Args:
            tree: Arrays in the model's own tree; also gradients, moments or bool masks.

        Returns:
            A tree of arrays, packed, padded and stacked as the strategy stores them. Padding is zero.
        """
        ...

    def unpack(self, params: Tree) -> Tree:
        """Inverts `pack`, bit for bit. A pure function, to be jitted.

        Args:
            params: The arrays, as `pack` returns them.

        Returns:
            Arrays in the model's own tree.
        """
        ...

    def shardings(self, params: Tree) -> Tree:
        """Returns the placement of the arrays of a step.

        Args:
            params: The arrays or their shapes, as `pack` returns them.

        Returns:
            A tree like `params` with the NamedSharding of every array; None in place of each on one device.
        """
        ...

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        """Computes the sums over a batch and the gradient of their mean, as a pure function to be jitted.

        Args:
            params: The arrays, as `pack` returns them.
            batch: Leaves [M, B/M, ...] for M microbatches of a batch of B rows. On a mesh, the second axis is sharded over the
                data ranks.
            key: Random key of the step.
            carry: Carried and observed state before the step.

        Returns:
            (sums, gradient). The sums are a `Loss` over the whole batch, in float32 and with a weight; `carried` is the `Carry`
            after the batch. The gradient is laid out like `params`, in `grads_dtype`; if nothing is summed over microbatches or
            devices, it may be in the dtype of `params`.
        """
        ...

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        """Compiles the executables of the gradients, if there are any. Does not run them.

        Args:
            params: Shapes and shardings of the arrays.
            carry: Shapes and shardings of the carried and observed state.
            batch: Shapes and shardings of a placed batch.
            key: Random key of the run.
            options: XLA options, values by name.

        Returns:
            The gradients, compiled. Without executables, a `GradientProgram` that only describes its inputs.

        Raises:
            CompilerOptionError: If XLA refuses an option.
            DonationError: If an executable copies a buffer that it must update in place.
        """
        ...

    def predict_memory(self, batch: Tree) -> Pools:
        """Predicts the memory of one device during a step, besides parameters and optimizer state. Compiles nothing.

        Args:
            batch: Shapes of a whole batch, leaves [B, ...].

        Returns:
            Bytes by pool, and whether the pools are the whole step.
        """
        ...

    def describe(
        self, batch: Tree, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Describes a compiled step for the log. Prints nothing.

        Args:
            batch: Shapes of a whole batch, leaves [B, ...].
            gradients: The compiled gradients.
            executables: All executables of the step.
            memory: Memory of the step, as reported by XLA; None if unknown.

        Returns:
            The lines, without line ends. Empty if there is nothing to report.
        """
        ...

    def profile_facts(self) -> dict[str, Any]:
        """Returns facts about the strategy for the report of a profile.

        Returns:
            A dict of JSON values by name, such as {"pipeline": {"runtime", "schedule", "devices"}} of a pipeline. {} if there
            are none.
        """
        ...


class Strategy(Protocol):
    """Places parameters on devices, and assigns computation to devices. The argument `strategy` of `train_step`.

    Attributes:
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
    """

    @property
    def shapes(self) -> Tree:
        """The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree. Only shapes and dtypes are read."""
        ...

    def bind(self, objective: Objective) -> BoundStrategy:
        """Binds the strategy to a loss and the choices of a step.

        Args:
            objective: The loss and the choices.

        Returns:
            The bound strategy.

        Raises:
            ConfigError: If the strategy cannot compute the objective, for example because of the kind of the loss.
            ShapeError: If the objective has an FP8 recipe, and microbatches and devices cannot share the rows of its batch.
            OrderError: If the layers of a pipeline do not make the stages of its schedule.
        """
        ...


def summary(mesh: Mesh | None, shapes: Tree) -> str:
    """Describes a mesh and the size of a model in a few words, for `repr`.

    Args:
        mesh: The devices; None for one device.
        shapes: Arrays or shapes of the parameters.

    Returns:
        A text such as `fsdp=4, 1,024 parameters`; without a mesh, `one device, 1,024 parameters`.
    """
    devices = "one device" if mesh is None else ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{devices}, {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters"
