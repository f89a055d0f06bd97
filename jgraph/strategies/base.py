"""The interface of strategies: placement of parameters and batches, computation and compilation of gradients.

A strategy is the user's choice of mesh, parameters and rules. `Strategy.bind` combines it with an `Objective`. The result, a
`BoundStrategy`, owns everything that depends on the strategy. `train_step` uses these protocols only, so a new strategy is a
new file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import jax
from jax import Array
from jax.sharding import Mesh

from jgraph.layout import Layout
from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.objective import Carry, Loss, Objective
from jgraph.types import Arrays, Batch, Json, Key, Observed, Params, Tree
from jgraph.xla.explain import Memory
from jgraph.xla.options import OptionValue

Options: TypeAlias = Mapping[str, OptionValue]
"""XLA options by name."""


@dataclass(frozen=True, eq=False)
class GradientProgram:
    """Computes the gradients of a batch in two phases.

    In the first phase, `run` calls separate executables. In the second phase, `gradients` is traced into the program of the
    update (the program that also clips gradients and updates the state), and completes the results of `run`. This class has no
    executables: `run` returns the batch, and `gradients` computes everything. A subclass with executables overrides every
    method.

    Attributes:
        strategy: The bound strategy.
        inputs: Shapes and shardings of the arrays that `run` returns, a tree of `jax.ShapeDtypeStruct`. None if unknown.
    """

    strategy: "BoundStrategy"
    inputs: Tree

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        """The executables that `run` calls, in order. In this class, ()."""
        return ()

    def run(self, params: Arrays, carry: Carry, step: Array, batch: Batch) -> Tree:
        """Calls the executables. In this class, calls nothing and returns `batch` itself.

        Args:
            params: The parameters, `TrainState.params`; not donated.
            carry: Carried and observed state (`TrainState.carry`) before the step; not donated.
            step: Number of steps done, int32 scalar.
            batch: A batch from `TrainStep.place`. On a mesh, leaves [M, B/M, ...] for M microbatches of a batch of B rows. If
                the mesh is None, leaves [B, ...].

        Returns:
            The argument `inputs` of `gradients`, a tree of arrays.
        """
        return batch

    def gradients(self, params: Arrays, carry: Carry, key: Key, inputs: Tree) -> tuple[Loss, Arrays]:
        """Computes the sums over the batch and the gradient of the mean loss. Traced into the program of the update.

        In this class, calls `loss_and_grads` of the strategy.

        Args:
            params: The arrays of the step, `TrainState.params`.
            carry: Carried and observed state (`TrainState.carry`) before the step.
            key: Random key of the step.
            inputs: The result of `run`.

        Returns:
            (sums, gradient). `sums` is a `Loss`: total, weight (never None) and metrics are float32 sums over the whole batch,
            and `carried` is the `Carry` after the batch. `gradient` is the gradient of the mean loss: the arrays of the trained
            parameters. Its dtype is `Objective.grads_dtype`; with one
            microbatch and no mesh, it may be the dtype of `params` instead.
        """
        return self.strategy.loss_and_grads(params, self.strategy.batches.by_microbatch(inputs), key, carry)


class Pools(NamedTuple):
    """Predicted memory of one device during a step, besides parameters and optimizer state.

    Attributes:
        sizes: Bytes by the name of a pool. A pool is a group of arrays with the same lifetime. An example is `main_grad`, the
            summed gradients.
        covers: `whole` if the pools are all temporary arrays of the step, `some` if there are others.
    """

    sizes: dict[str, int]
    covers: Literal["whole", "some"]


class Reports:
    """What a bound strategy tells about itself. The methods of this class tell nothing; a strategy overrides some."""

    def predict_memory(self, batch: Batch) -> Pools:
        """Predicts the memory of one device during a step, besides parameters and optimizer state. Compiles nothing.

        Args:
            batch: Arrays or shapes of a whole batch, leaves [B, ...], where B is the number of rows.

        Returns:
            The bytes of each pool (`sizes`), and whether the pools are all temporary arrays of the step (`covers`).
        """
        return Pools({}, "some")

    def describe(
        self, batch: Batch, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
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
        return []

    def profile_facts(self) -> dict[str, Json]:
        """Returns facts about the strategy to be written into the report of a profile.

        Returns:
            A dict of JSON values by name; {} if there are none. A pipeline returns one entry `pipeline`, whose value is a dict
            with the keys `runtime`, `schedule` and `devices`.
        """
        return {}


class BoundStrategy(Protocol):
    """A strategy bound to an objective (a loss and the choices of a step).

    Stores parameters as the *arrays of a step*, which may be packed, padded, stacked and sharded, and computes gradients.
    """

    @property
    def batches(self) -> BatchLayout:
        """The mesh of the step, and how the rows of a batch are shared by microbatches and devices."""
        ...

    @property
    def layout(self) -> Layout[Params]:
        """Maps the model's own tree to the arrays of a step, and describes each array.

        The description decides where an array is placed, whether weight decay applies, and which of its elements are trained.
        """
        ...

    @property
    def observed(self) -> Observed:
        """Shapes of the observed state (amax histories of FP8), a tree of `jax.ShapeDtypeStruct`; {} if there is none."""
        ...

    @property
    def xla_options(self) -> tuple[str, ...]:
        """XLA options that the step needs, as `name=value`. May have options that the installed XLA does not have.

        `TrainStep.options` leaves those out.
        """
        ...

    @property
    def reports(self) -> Reports:
        """What the strategy tells about memory, compiled steps and profiles."""
        ...

    def on(self, mesh: Mesh) -> "BoundStrategy":
        """Returns a copy of the strategy for another mesh with the same shape and axis names. Moves no arrays."""
        ...

    def loss_and_grads(self, params: Arrays, batch: Batch, key: Key, carry: Carry) -> tuple[Loss, Arrays]:
        """Computes the sums over a batch and the gradient of the mean loss, as a pure function to be jitted.

        Args:
            params: The arrays of the step, as `layout.pack` returns them.
            batch: Leaves [M, B/M, ...] for M microbatches of a batch of B rows, also if the mesh is None. On a mesh, the second
                axis is sharded over the data ranks (devices with their own rows).
            key: Random key of the step. Keys of microbatches and data ranks are folded from it.
            carry: Carried and observed state (`TrainState.carry`) before the step.

        Returns:
            (sums, gradient). `sums` is a `Loss`: total, weight (never None) and metrics are float32 sums over the whole batch,
            and `carried` is the `Carry` after the batch. `gradient` is the gradient of the mean loss: the arrays of
            `layout.trained`. Its dtype is `Objective.grads_dtype`; with one microbatch and no mesh, it may be the dtype of
            `params` instead.
        """
        ...

    def compile_gradients(self, params: Arrays, carry: Carry, batch: Batch, key: Key, options: Options) -> GradientProgram:
        """Compiles the separate executables of the gradients, if the strategy has any. Does not run them.

        Args:
            params: Shapes and shardings of the arrays of a step, `jax.ShapeDtypeStruct`s by name.
            carry: Shapes and shardings of the carried and observed state, a `Carry` of `jax.ShapeDtypeStruct`s.
            batch: Shapes and shardings of a batch from `TrainStep.place`, a tree of `jax.ShapeDtypeStruct`.
            key: Random key of the run. The key of each step is folded from it.
            options: XLA options, values by name.

        Returns:
            An object that runs the executables. If there are none, a plain `GradientProgram` with `batch` as its `inputs`.

        Raises:
            CompilerOptionError: If XLA refuses an option.
            DonationError: If an executable copies a buffer that it must update in place.
        """
        ...


class Strategy(Protocol):
    """How to place parameters and computation on devices. The argument `strategy` of `train_step`.

    Attributes:
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
    """

    @property
    def shapes(self) -> Params:
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


def summary(mesh: Mesh | None, shapes: Params) -> str:
    """Returns a text for `repr`, such as `fsdp=4, 1,024 parameters`; without a mesh, `one device, 1,024 parameters`."""
    devices = "one device" if mesh is None else ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{devices}, {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters"
