"""Gradients with data parallelism: every device computes the whole model on its part of the batch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.mesh import Axis, batch_axes, num_data_ranks, on_ranks, with_batch_axes
from jgraph.packing import Packing
from jgraph.precision.loss import FP8Loss, StepLoss
from jgraph.strategies import sharding
from jgraph.strategies.accumulate import MicrobatchFunction, accumulate
from jgraph.strategies.base import GradientProgram, Options, Pools
from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.checks import check_function, check_split
from jgraph.strategies.objective import Carry, Loss, Objective, Tree, finished, is_mean, summed
from jgraph.strategies.sharding import ShardSpec
from jgraph.tree import is_router, leaf_names, merged, only
from jgraph.xla.explain import Memory


@dataclass(frozen=True, eq=False)
class DataParallel:
    """The `BoundStrategy` of `Replicated` and `FullySharded`. Each device computes the whole model on its part of the batch.

    With sharded parameters, each microbatch gathers parameters and reduce-scatters gradients over the axis `fsdp`, so no device
    holds all summed gradients. Gradients are summed over the axis `data` once per step. Both sums are in the `grads_dtype` of
    the objective.

    Attributes:
        mesh: The devices; None for one device.
        objective: The loss and the choices of the step.
        loss: The loss function, with its FP8 matmuls if the objective has an FP8 recipe.
        packing: Which parameters share an array. The arrays of a step are named; `shards` shards these arrays.
        shards: How each array is sharded over the axis `fsdp`, by name; empty without this axis.
        compute_dtype: Matrices other than those of routers are cast to this dtype before they are gathered. None does not cast.
        reshard_after_forward: Whether parameters are gathered a second time for the backward pass, instead of staying gathered.
    """

    mesh: Mesh | None
    objective: Objective
    loss: StepLoss
    packing: Packing
    shards: Mapping[str, ShardSpec]
    compute_dtype: Any = None
    reshard_after_forward: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mesh | None,
        shapes: Tree,
        objective: Objective,
        *,
        shard: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, ShardSpec]] | None = None,
        alone: Collection[str] = (),
        **choices: Any,
    ) -> Self:
        """Binds a loss function. With FP8, traces the loss to find the matmuls.

        Args:
            mesh: The devices; None for one device.
            shapes: Shapes of the parameters, in the model's own tree.
            objective: The loss function and the choices of the step.
            shard: A function from a dict of the shapes of the packed arrays by name to a dict of their shardings by name.
                Called once. None replicates all arrays.
            alone: Names of parameters that must not be packed with others. Not read if `shard` is None.
            **choices: Values of the attributes `compute_dtype` and `reshard_after_forward`; their defaults if left out.

        Returns:
            The bound strategy.

        Raises:
            ConfigError: If the loss is not a function, or `fp8` is set and the loss has no matmul that can be in FP8.
            ShapeError: If `fp8` is set, and microbatches and data ranks cannot share the rows of the batch.
        """
        check_function(objective.loss)
        check_split(mesh, objective.split)
        loss = _step_loss(objective, shapes, mesh)
        if objective.packing == "nothing":
            packing = Packing.of(shapes, alone=leaf_names(shapes))
        else:
            alone = {*objective.split, *(() if shard is None else (*alone, *loss.prepared))}
            packing = Packing.of(shapes, alone=alone, frozen=objective.frozen)
        shards = {} if shard is None else shard(jax.eval_shape(packing.pack, shapes))
        return cls(mesh, objective, loss, packing, shards, **choices)

    # --- Layout ---

    @property
    def is_matrix(self) -> Tree:
        """A dict from the name of each array of a step to a bool, True if the array holds matrices."""
        return self.packing.decay_mask()

    @property
    def trained(self) -> Tree:
        """A dict from the name of each array of a step to a bool, False if the array holds frozen parameters."""
        names = leaf_names(self.packing.treedef.unflatten(self.packing.leaves))
        return {name: names[indices[0]] not in self.objective.frozen for name, indices in self.packing.groups}

    @property
    def batches(self) -> BatchLayout:
        """An object that assigns the rows of a batch to microbatches and to the devices of the mesh."""
        return BatchLayout(self.mesh, self.objective.num_microbatches)

    @property
    def observed(self) -> Tree:
        """Shapes of the amax histories of FP8, a tree of `jax.ShapeDtypeStruct`; {} without FP8 or without histories."""
        return self.loss.observed

    @property
    def xla_options(self) -> tuple[str, ...]:
        """XLA options as `name=value`. () without FP8, and without an axis `fsdp`, `context` or `tensor` of several devices."""
        return sharding.xla_options(self.mesh, self.objective.fp8)

    def on(self, mesh: Mesh) -> Self:
        """Returns a copy of the strategy for another mesh with the same shape and axis names. Moves no arrays."""
        return replace(self, mesh=mesh)

    def pack(self, tree: Tree) -> Tree:
        """Packs small parameters into shared arrays, and pads sharded axes with zeros.

        Args:
            tree: Arrays with the structure and shapes of the model's own tree.

        Returns:
            A dict of arrays by name. A large parameter is an array with the name of the parameter, such as `blocks/0/kernel`.
            Small parameters share arrays with names such as `small matrices (float32)`.
        """
        return {name: self._shard(name).pad(leaf) for name, leaf in self.packing.pack(tree).items()}

    def unpack(self, params: Tree) -> Tree:
        """Removes the padding and unpacks small parameters. Inverts `pack` bit for bit.

        Args:
            params: The dict of arrays by name, as `pack` returns it.

        Returns:
            Arrays in the model's own tree.
        """
        return self.packing.unpack({name: self._shard(name).unpad(leaf) for name, leaf in params.items()})

    def shardings(self, params: Tree) -> Tree:
        """Returns a dict with the NamedSharding of each array by name. The values are None if the mesh is None.

        Args:
            params: The dict of arrays or shapes by name, as `pack` returns it.
        """
        if self.mesh is None:
            return jax.tree.map(lambda _: None, params)
        return {name: NamedSharding(self.mesh, spec) for name, spec in self._specs.items()}

    @cached_property
    def _specs(self) -> dict[str, PartitionSpec]:
        return {name: self._shard(name).spec() for name, _ in self.packing.groups}

    def _shard(self, name: str) -> ShardSpec:
        return self.shards.get(name, ShardSpec(None))

    # --- Gradients ---

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        """Compiles nothing, because the program of the update computes the gradients. Reads only `batch`.

        Returns:
            A `GradientProgram` without executables and with `batch` as its `inputs`.
        """
        return GradientProgram(self, batch)

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        """Computes the sums and the gradient, under `jax.shard_map` if there is a mesh. A pure function, to be jitted.

        Args:
            params: Dict of arrays by name, as `pack` returns it.
            batch: Leaves [M, B/M, ...] for M microbatches of a batch of B rows, also if the mesh is None. On a mesh, the second
                axis is sharded over the data ranks (devices with their own rows).
            key: Random key of the step. Every data rank and microbatch gets its own key, folded from this one.
            carry: Carried and observed state (`TrainState.carry`) before the step.

        Returns:
            (sums, gradient). `sums` is a `Loss`: total, weight (never None) and metrics are float32 sums over the whole batch,
            and `carried` is the `Carry` after the batch. `gradient` is the gradient of the mean loss, a dict with the names and
            shapes of `params`, and None for frozen arrays. Its dtype is `grads_dtype` of the objective; with one microbatch and
            no mesh, it is the dtype of `params` instead.
        """
        if self.mesh is None:
            return self._on_device(params, batch, key, carry)
        in_specs = self._specs, PartitionSpec(None, batch_axes(self.mesh)), PartitionSpec(), PartitionSpec()
        run = on_ranks(self._on_device, self.mesh, in_specs, (PartitionSpec(), only(self.trained, self._specs)))
        return run(params, batch, key, carry)

    def _on_device(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        """Computes the sums and gradients on one device, and reduces them over the data ranks."""
        objective, num_microbatches = self.objective, self.objective.num_microbatches
        axes, devices = ((), 1) if self.mesh is None else (batch_axes(self.mesh), num_data_ranks(self.mesh))
        if axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        reductions = objective.reductions_with(self.observed)
        run = self._microbatch_function(params, batch, key, carry)
        # Pairs of microbatches: the exchanges of experts of one run beside the matmuls of the other.
        at_once = 2 if any(spec.groups > 1 for spec in self.shards.values()) else 1
        over_batch = accumulate(run, num_microbatches, dtype=objective.grads_dtype, reductions=reductions, at_once=at_once)
        sums, grads = over_batch(params, batch, key)
        sums = finished(reductions, sums, num_microbatches, axes, devices)
        if axes:
            # Sharded gradients are already summed over `fsdp`, microbatch by microbatch.
            grads = jax.tree.map(lambda g: g.astype(objective.grads_dtype), grads)
            grads = jax.lax.psum(grads, tuple(a for a in axes if a != Axis.FSDP or not self.shards))
        return sums, jax.tree.map(lambda g: (g / sums.weight).astype(g.dtype), grads)

    def _microbatch_function(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> MicrobatchFunction:
        """Returns the function of a microbatch. Prepares weights in FP8 once for all microbatches."""
        objective, shards = self.objective, self.shards
        state = (carry.model,) if jax.tree.leaves(carry.model) else ()
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        tree = self.packing.unpack(params) if not shards else None
        # Without shards, an FP8 matmul may return a weight gradient in bfloat16, which halves the bytes that the cast reads.
        # If the gradients of a single microbatch are summed over devices, the matmul returns the dtype of the sum.
        is_summed_directly = self.mesh is not None and objective.num_microbatches == 1 and objective.grads_dtype == jnp.float32
        prepared = self.loss.prepare(
            jax.eval_shape(self._whole, params),
            params if shards else dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)),
            carry.observed,
            (first, key, *state),
            over_devices=(lambda _, amax: jax.lax.pmax(amax, sharding.AXIS)) if shards else None,
            uncast=bool(shards) or is_summed_directly,
        )

        def loss(whole: Tree, observed: Tree, *args: Tree) -> Any:
            gathered = {name: shards[name].gather(part) for name, part in prepared.parts.items()}
            return prepared.apply(whole, observed, gathered, *args, *state)

        run = self.loss.traced(self._differentiated(loss, prepared.parts))

        def sums_and_grads(params: Tree, batch: Tree, key: Array) -> tuple[Loss, Tree]:
            sums, grads, observed = run(params, carry.observed, batch, key)
            return replace(sums, carried=Carry(sums.carried, observed)), grads

        return sums_and_grads

    def _differentiated(
        self, loss: Callable[..., Any], replaced: Collection[str]
    ) -> Callable[[Tree, Tree, Tree, Array], tuple[Loss, Tree, Tree]]:
        """Returns a function that computes the sums, gradients and observed state of a microbatch.

        Args:
            loss: `loss(params, observed, batch, key)`.
            replaced: Names of the parameters that the loss gathers itself. Their gradients have the dtype of the sums.

        Returns:
            The function of (params, observed, batch, key).
        """
        sums_dtype, trained = self.objective.grads_dtype, self.trained

        def differentiate(params: Tree, observed: Tree, batch: Tree, key: Array) -> tuple[Loss, Tree, Tree]:
            def of(arrays: Tree, observed: Tree) -> tuple[Array, Loss]:
                return summed(loss)(self.packing.unpack(arrays), observed, batch, key)

            if self.shards:
                dtypes = self._gathered_dtypes(params)
                return sharding.value_and_grads(
                    of,
                    params,
                    trained,
                    self.shards,
                    dtypes | {name: jnp.promote_types(dtypes[name], sums_dtype) for name in replaced},
                    observed,
                    grads_dtype=sums_dtype,
                    reshard_after_forward=self.reshard_after_forward,
                    # FP8 wgrads are too short to hide reductions. bfloat16 wgrads hide them, and barriers cost 2 to 4%
                    # (notes/develop/measurements/sharding.md).
                    reduce="in buckets" if replaced else "scheduled",
                )

            def of_trained(arrays: Tree, observed: Tree) -> tuple[Array, Loss]:
                return of(merged(trained, arrays, params), observed)

            differentiated = jax.value_and_grad(of_trained, argnums=(0, 1), has_aux=True)
            (_, sums), (grads, after) = differentiated(only(trained, params), observed)
            return sums, grads, after

        return differentiate

    def _gathered_dtypes(self, params: Tree) -> dict[str, Any]:
        """Returns the dtypes in which arrays are gathered."""
        cast, matrices = self.compute_dtype, self.is_matrix
        return {name: cast if cast and matrices[name] and not is_router(name) else part.dtype for name, part in params.items()}

    def _whole(self, params: Tree) -> Tree:
        """Returns the gathered parameters in the model's own tree."""
        if not self.shards:
            return self.packing.unpack(params)
        return self.packing.unpack(sharding.gathered(params, self.shards, self._gathered_dtypes(params)))

    # --- Reports ---

    def predict_memory(self, batch: Tree) -> Pools:
        """Predicts the bytes of main_grad (the summed gradient on one device) only. Does not read `batch`.

        Returns:
            Pools with one entry in `sizes`, `main_grad`, and with `covers` set to `some`: there are other temporary arrays.
        """
        arrays = jax.eval_shape(self.pack, self.packing.treedef.unflatten(self.packing.leaves))
        arrays = {name: leaf for name, leaf in arrays.items() if self.trained[name]}
        ranks = self.mesh.shape.get(Axis.FSDP, 1) if self.mesh else 1
        size = sum(leaf.size // (1 if self._shard(name).axis is None else ranks) for name, leaf in arrays.items())
        return Pools({"main_grad": size * jnp.dtype(self.objective.grads_dtype).itemsize}, "some")

    def describe(
        self, batch: Tree, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Returns a list with one line that describes the FP8 matmuls, or [] without FP8. Reads only `executables`."""
        note = "; weights in FP8 stay gathered for the backward" * self.reshard_after_forward
        return [line + note for line in self.loss.describe(executables)]

    def profile_facts(self) -> dict[str, Any]:
        """Returns {}: there are no facts about this strategy in the report of a profile."""
        return {}


def _step_loss(objective: Objective, shapes: Tree, mesh: Mesh | None) -> StepLoss:
    """Returns the loss function of an objective, in FP8 if the objective has a recipe."""
    fn = with_batch_axes(objective.loss)
    if objective.fp8 is None:
        return StepLoss(fn)
    microbatch = BatchLayout(mesh, objective.num_microbatches).microbatch(objective.batch)
    loss = FP8Loss.of(fn, objective.fp8, shapes, (microbatch, *objective.loss_args))
    return loss.averaged(objective.num_microbatches * num_data_ranks(mesh)) if is_mean(loss.result) else loss
