"""Gradients with data parallelism: every device computes the whole model on its part of the batch.

Look for: `bind`, which chains the layouts of a strategy; `loss_and_grads`, a pure function that `train_step` traces;
`_on_device`, the program of a device, with its reductions; and `_microbatch_function`, where the arrays become the model's own
tree and FP8 weights are quantized. One device without a mesh is the same program without collectives.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jgraph.layout import Layout, Shard, alone, packed, sharded
from jgraph.mesh import Axis, batch_axes, num_data_ranks, on_ranks, with_batch_axes
from jgraph.precision.loss import FP8Loss, StepLoss
from jgraph.strategies import sharding
from jgraph.strategies._accumulate import MicrobatchFunction, accumulate
from jgraph.strategies._order import by_layer, is_offloaded, vjp
from jgraph.strategies.base import GradientProgram, Options, Pools, Reports
from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.checks import check_function, check_split
from jgraph.strategies.objective import Carry, Loss, LossFunction, Objective, finished, is_mean, summed
from jgraph.strategies.sharding import FSDPChoices, GatherPer, wanted
from jgraph.types import Arrays, Batch, Key, Observed, Params, Tree
from jgraph.xla.explain import Memory


@dataclass(frozen=True, eq=False)
class DataParallel:
    """The `BoundStrategy` of `Replicated` and `FullySharded`. Each device computes the whole model on its part of the batch.

    With sharded parameters, each microbatch gathers parameters and reduce-scatters gradients over the axis `fsdp`, so no device
    holds all summed gradients. Gradients are summed over the axis `data` once per step. Both sums are in `grads_dtype`.
    """

    objective: Objective
    batches: BatchLayout
    loss: StepLoss
    packing: Layout[Arrays]  # of the gathered arrays on a device, from the parameters of the loss
    layout: Layout[Params]  # of the arrays of the step
    shards: Mapping[str, Shard]  # over `fsdp`, with the dtypes of the working copies; empty without this axis
    gather_per: GatherPer = "step"

    @classmethod
    def bind(
        cls,
        mesh: Mesh | None,
        objective: Objective,
        choices: FSDPChoices | None = None,
        *,
        gather_per: GatherPer = "step",
    ) -> Self:
        """Binds a loss function. With FP8, traces the loss to find the matmuls. Without choices, replicates all arrays."""
        fn = check_function(objective.loss)
        check_split(mesh, objective.layout.params)
        batches = BatchLayout(mesh, objective.num_microbatches)
        loss = _step_loss(objective, fn, batches, is_sharded=choices is not None)
        if choices is None:
            packing = packed()(objective.layout.params)
            return cls(objective, batches, loss, packing, objective.layout.then(packed()), {})
        assert mesh is not None, "a sharded strategy has a mesh"
        ranks = mesh.shape[Axis.FSDP]
        # Weights in FP8 are quantized before they are gathered, so they have arrays of their own.
        chosen = objective.layout.then(wanted(choices, ranks)).then(alone(loss.weights))
        packing = packed()(chosen.params)
        layout = chosen.then(packed()).then(sharded(ranks))
        shards = {name: Shard.from_param(param, compute_dtype=choices.compute_dtype) for name, param in layout.params.items()}
        return cls(objective, batches, loss, packing, layout, shards, gather_per)

    @property
    def observed(self) -> Observed:
        return self.loss.observed

    @property
    def xla_options(self) -> tuple[str, ...]:
        return sharding.xla_options(self.batches.mesh, self.objective.fp8)

    @property
    def reports(self) -> Reports:
        return _Reports(self)

    def on(self, mesh: Mesh) -> Self:
        return replace(self, batches=replace(self.batches, mesh=mesh))

    # --- Gradients ---

    def compile_gradients(self, params: Arrays, carry: Carry, batch: Batch, key: Key, options: Options) -> GradientProgram:
        return GradientProgram(self, batch)

    def loss_and_grads(self, params: Arrays, batch: Batch, key: Key, carry: Carry) -> tuple[Loss, Arrays]:
        """Computes the sums and the gradient, under `jax.shard_map` if there is a mesh."""
        mesh = self.batches.mesh
        if mesh is None:
            return self._on_device(params, batch, key, carry)
        specs, out_specs = (
            {name: param.rank_spec for name, param in layout.params.items()} for layout in (self.layout, self.layout.trained)
        )
        in_specs = specs, PartitionSpec(None, batch_axes(mesh)), PartitionSpec(), PartitionSpec()
        run = on_ranks(self._on_device, mesh, in_specs, (PartitionSpec(), out_specs))
        return run(params, batch, key, carry)

    def _on_device(self, params: Arrays, batch: Batch, key: Key, carry: Carry) -> tuple[Loss, Arrays]:
        """Computes the sums and gradients on one device, and reduces them over the data ranks."""
        objective = self.objective
        num_microbatches = objective.num_microbatches
        mesh = self.batches.mesh
        axes, devices = ((), 1) if mesh is None else (batch_axes(mesh), num_data_ranks(mesh))
        if axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        reductions = objective.reductions_with(self.observed)
        run = self._microbatch_function(params, batch, key, carry)
        # Pairs of microbatches: the exchanges of experts of one run beside the matmuls of the other.
        at_once = 2 if any(shard.groups > 1 for shard in self.shards.values()) else 1
        over_batch = accumulate(
            run,
            num_microbatches,
            dtype=objective.grads_dtype,
            reductions=reductions,
            at_once=at_once,
            once="casts" if self.gather_per == "pass" else "casts and gathers",
        )
        sums, grads = over_batch(params, batch, key)
        sums = finished(reductions, sums, num_microbatches, axes, devices)
        if axes:
            # Sharded gradients are already summed over `fsdp`, microbatch by microbatch.
            grads = jax.tree.map(lambda g: g.astype(objective.grads_dtype), grads)
            grads = jax.lax.psum(grads, tuple(a for a in axes if a != Axis.FSDP or not self.shards))
        return sums, jax.tree.map(lambda g: (g / sums.weight).astype(g.dtype), grads)

    def _microbatch_function(self, params: Arrays, batch: Batch, key: Key, carry: Carry) -> MicrobatchFunction:
        """Returns the function of a microbatch. Makes the working copy of FP8 weights once for all microbatches."""
        shards = self.shards
        state = (carry.model,) if jax.tree.leaves(carry.model) else ()
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        whole = jax.eval_shape(lambda: self._tree(sharding.gathered(shards, params) if shards else params))
        parts = params if shards else self.packing.unpack(params)
        in_step = self.loss.in_step(whole, parts, shards, carry.observed, (first, key, *state))

        def loss(whole: Params, observed: Observed, *args: Tree) -> Array | Loss:
            return in_step(whole, observed, *args, *state)

        run = self.loss.traced(self._differentiated(loss))

        def sums_and_grads(params: Arrays, batch: Batch, key: Key) -> tuple[Loss, Arrays]:
            sums, grads, observed = run(params, carry.observed, batch, key)
            return replace(sums, carried=Carry(sums.carried, observed)), grads

        return sums_and_grads

    def _differentiated(self, loss: LossFunction) -> Callable[[Arrays, Observed, Batch, Key], tuple[Loss, Arrays, Observed]]:
        """Returns a function that computes the sums, gradients and observed state of a microbatch."""
        sums_dtype = self.objective.grads_dtype
        fp8 = self.objective.fp8
        trained = list(self.layout.trained.params)
        in_fp8 = self.loss.weights if fp8 is not None and not fp8.calibrates else ()

        def widened(params: Arrays) -> dict[str, Shard]:
            """Gives the gradients of FP8 weights, which the loss gathers itself, the dtype of the sums."""
            shards = dict(self.shards)
            for name in in_fp8:
                copied = shards[name].dtype or params[name].dtype
                shards[name] = replace(shards[name], dtype=jnp.promote_types(copied, sums_dtype))
            return shards

        def differentiate(params: Arrays, observed: Observed, batch: Batch, key: Key) -> tuple[Loss, Arrays, Observed]:
            def sums_of(arrays: Arrays, observed: Observed) -> tuple[Array, Loss]:
                return summed(loss)(self._tree(arrays), observed, batch, key)

            if self.shards:
                return sharding.value_and_grads(
                    sums_of,
                    params,
                    trained,
                    widened(params),
                    observed,
                    grads_dtype=sums_dtype,
                    gather_per=self.gather_per,
                    # FP8 wgrads are too short to hide reductions. bfloat16 wgrads hide them, and barriers cost 2 to 4%
                    # (notes/develop/measurements/sharding.md).
                    reduce="in buckets" if in_fp8 else "scheduled",
                )

            def of_trained(arrays: Arrays, observed: Observed) -> tuple[Array, Loss]:
                return sums_of(params | arrays, observed)

            arrays = {name: params[name] for name in trained}
            value, pull_back, sums = vjp(of_trained, arrays, observed)
            # Without collectives and copies to the host, XLA orders the backward pass by memory itself.
            copies = self.objective.offload != "nothing" or is_offloaded(pull_back)
            orders = copies or sharding.hides_collectives(self.batches.mesh)
            seed = jnp.ones_like(value)
            grads, after = by_layer(pull_back, seed) if orders else pull_back(seed)
            return sums, grads, after

        return differentiate

    def _tree(self, arrays: Arrays) -> Params:
        """Returns gathered arrays as the tree that the loss gets."""
        return self.objective.tree(self.packing.unpack(arrays))


@dataclass(frozen=True, eq=False)
class _Reports(Reports):
    bound: DataParallel

    def predict_memory(self, batch: Batch) -> Pools:
        """Predicts the bytes of main_grad only."""
        bound = self.bound
        ranks = mesh.shape.get(Axis.FSDP, 1) if (mesh := bound.batches.mesh) else 1
        sizes = {name: math.prod(param.shape) for name, param in bound.layout.trained.params.items()}
        sharded = {name for name, shard in bound.shards.items() if shard.axis is not None}
        size = sum(size // (ranks if name in sharded else 1) for name, size in sizes.items())
        return Pools({"main_grad": size * jnp.dtype(bound.objective.grads_dtype).itemsize}, "some")

    def describe(
        self, batch: Batch, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        note = "; weights in FP8 stay gathered for the backward" if self.bound.gather_per == "pass" else ""
        return [line + note for line in self.bound.loss.describe(executables)]


def _step_loss(objective: Objective, loss: LossFunction, batches: BatchLayout, *, is_sharded: bool) -> StepLoss:
    """Returns the loss function of an objective, in FP8 if the objective has a recipe."""
    fn = with_batch_axes(loss)
    if objective.fp8 is None:
        return StepLoss(fn)
    args = (batches.microbatch(objective.batch), *objective.loss_args)
    # An FP8 matmul may return a weight gradient in bfloat16, which halves the bytes that the cast reads. If the gradients of a
    # single microbatch are summed over devices, the matmul returns the dtype of the sum.
    is_summed_directly = batches.mesh is not None and objective.num_microbatches == 1 and objective.grads_dtype == jnp.float32
    grads = "parameter" if is_sharded or is_summed_directly else "rounded"
    in_fp8 = FP8Loss.trace_loss(fn, objective.fp8, objective.layout.own.tree_shapes(), args, grads)
    return in_fp8.averaged(objective.num_microbatches * num_data_ranks(batches.mesh)) if is_mean(in_fp8.result) else in_fp8
