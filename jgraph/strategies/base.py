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
    """Computes the gradients of a batch in two phases: executables that the host calls, and a part of the update's program.

    This class has no executables: `run` returns the batch, and the update's program computes everything. A subclass with
    executables overrides every method.

    Attributes:
        strategy: The bound strategy.
        inputs: Shapes and shardings of the arrays that `run` returns.
    """

    strategy: "BoundStrategy"
    inputs: Tree

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        """The executables that `run` calls, in order."""
        return ()

    def run(self, params: Tree, carry: Carry, step: Array, batch: Tree) -> Tree:
        """Calls the executables on the host.

        Args:
            params: The arrays of the state; not donated.
            carry: Carried and observed state as the step begins; not donated.
            step: Number of steps done, int32.
            batch: A placed batch.

        Returns:
            The inputs of the update's program.
        """
        return batch

    def gradients(self, params: Tree, carry: Carry, key: Array, inputs: Tree) -> tuple[Loss, Tree]:
        """Computes the sums over the batch and the gradient of their mean. Traced in the update's program.

        Args:
            params: The arrays of the state.
            carry: Carried and observed state as the step begins.
            key: Random key of the step.
            inputs: The result of `run`.

        Returns:
            The sums, and the gradient in `grads_dtype`, laid out like `params`.
        """
        return self.strategy.loss_and_grads(params, self.strategy.batches.by_microbatch(inputs), key, carry)


class Pools(NamedTuple):
    """Predicted memory of one device during a step, besides parameters and optimizer state.

    Attributes:
        sizes: Bytes by the name of a pool.
        covers: Whether the pools are the `whole` step, or `some` of its temporary arrays.
    """

    sizes: dict[str, int]
    covers: Literal["whole", "some"]


class BoundStrategy(Protocol):
    """A strategy with an objective: converts between a model's own tree and the arrays of a step, and computes gradients.

    Attributes:
        mesh: The devices; None for one device.
        is_matrix: A tree of bools like the arrays, True for arrays that hold matrices. Weight decay applies to these.
        batches: The layout of a batch.
        observed: Shapes of the observed state.
        xla_options: XLA options that the step needs, as `name=value`. Options that the installed XLA lacks are left out.
    """

    @property
    def mesh(self) -> Mesh | None: ...
    @property
    def is_matrix(self) -> Tree: ...
    @property
    def batches(self) -> BatchLayout: ...
    @property
    def observed(self) -> Tree: ...
    @property
    def xla_options(self) -> tuple[str, ...]: ...

    def on(self, mesh: Mesh) -> "BoundStrategy":
        """Returns the same strategy over other devices."""
        ...

    def pack(self, tree: Tree) -> Tree:
        """Returns the arrays of a model's tree."""
        ...

    def unpack(self, params: Tree) -> Tree:
        """Inverts `pack`, bit for bit."""
        ...

    def shardings(self, params: Tree) -> Tree:
        """Returns the NamedSharding of every array; None on one device."""
        ...

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        """Computes the sums over a batch and the gradient of their mean, as a pure function to be jitted.

        Args:
            params: The arrays, as `pack` returns them.
            batch: Leaves [M, B/M, ...]. On a mesh, the second axis is sharded over the data ranks.
            key: Random key of the step.
            carry: Carried and observed state as the step begins.

        Returns:
            The sums, and the gradient in `grads_dtype`, laid out like `params`.
        """
        ...

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        """Compiles the executables of the gradients, if there are any.

        Args:
            params: Shapes and shardings of the arrays.
            carry: Shapes and shardings of the carried and observed state.
            batch: Shapes and shardings of a placed batch.
            key: Random key of the run.
            options: XLA options.
        """
        ...

    def predict_memory(self, batch: Tree) -> Pools:
        """Predicts the memory of a step with batches of these shapes, [B, ...]."""
        ...

    def describe(
        self, batch: Tree, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Returns lines for the log about a compiled step.

        Args:
            batch: Shapes of a whole batch, [B, ...].
            gradients: The compiled gradients.
            executables: All executables of the step.
            memory: Memory of the step by XLA's account; None if unknown.
        """
        ...

    def profile_facts(self) -> dict[str, Any]:
        """Returns facts about the strategy for the report of a profile, as JSON."""
        ...


class Strategy(Protocol):
    """Places parameters on devices, and assigns computation to devices.

    Attributes:
        shapes: Shapes of the parameters, in the model's own tree.
    """

    @property
    def shapes(self) -> Tree: ...

    def bind(self, objective: Objective) -> BoundStrategy:
        """Combines the strategy with a loss and the choices of a step.

        Raises:
            ConfigError: If the strategy cannot compute the objective.
        """
        ...


def summary(mesh: Mesh | None, shapes: Tree) -> str:
    """Returns a mesh and the size of a tree of parameters in a few words."""
    devices = "one device" if mesh is None else ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{devices}, {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters"
