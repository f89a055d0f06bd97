"""The strategy `Pipelined`: each rank holds the layers of its stages, and all ranks share embedding and head."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jgraph.errors import ConfigError, check_choice
from jgraph.mesh import Axis, checked, num_data_ranks, refused_axes, with_batch_axes
from jgraph.packing import Packing
from jgraph.pipeline._layer_state import LayerState
from jgraph.pipeline._placement import without_ranks
from jgraph.pipeline._stage_function import Remat
from jgraph.pipeline.dispatched import Dispatched, dispatched
from jgraph.pipeline.memory import bytes_per_rank
from jgraph.pipeline.partition import PipelineModel, Tree
from jgraph.pipeline.program import Pipeline
from jgraph.precision.loss import count, describe
from jgraph.precision.transform import FP8Function, Product
from jgraph.schedule import Costs, Schedule, files, simulate
from jgraph.strategies import sharding
from jgraph.strategies.base import GradientProgram, Options, Pools, summary
from jgraph.strategies.batches import BatchLayout, by_microbatch
from jgraph.strategies.objective import Carry, Loss, Objective
from jgraph.strategies.sharding import FSDPChoices, chosen_axes
from jgraph.tree import is_matrix, leaf_names, path_name
from jgraph.xla.explain import Memory

Engine = Literal["program", "dispatch"]


@dataclass(frozen=True, eq=False)
class Pipelined(FSDPChoices):
    """Assigns the layers of a model to the ranks of a pipeline. The loss of the step must be a `PipelineModel`.

    Attributes:
        mesh: A mesh with the axis `pipe`; may also have the axes `data` and `fsdp`.
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s, in the model's own tree.
        schedule: A schedule for the ranks of `pipe` and the microbatches of the step, e.g. from `jgraph.schedule.generate`.
        remat: Activations to recompute in the backward pass: `nothing` beyond the choices of `split_backward`, the results of
            `wide` matmuls such as the first matmul of an MLP, or the whole `layer` except its input.
        engine: `program` compiles the schedule into one program over all ranks (SPMD). `dispatch` compiles separate executables
            for each rank, which the host starts (MPMD).
        compute_dtype: Matrices are cast to this dtype once per step. None does not cast.
        shard_rules: As in `FullySharded`, for the axis `fsdp`.
        annotations: As in `FullySharded`.
        experts: As in `FullySharded`.
        shards: As in `FullySharded`.
    """

    mesh: Mesh
    shapes: Tree
    schedule: Schedule
    remat: Remat = "nothing"
    engine: Engine = "program"

    def __repr__(self) -> str:
        return f"Pipelined({summary(self.mesh, self.shapes)}, {self.schedule!r})"

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.PIPE,), allows=(Axis.DATA, Axis.FSDP)))
        super().__post_init__()
        if not isinstance(self.schedule, Schedule):
            must = "must be a jgraph.Schedule, e.g. jgraph.schedule.generate('1f1b', pp=2, microbatches=4)"
            raise ConfigError(f"`schedule` is {self.schedule!r}: {must}", field="schedule")

    def bind(self, objective: Objective) -> "BoundPipeline":
        """Binds an objective with a `PipelineModel` as its loss.

        Raises:
            ConfigError: If the loss is not a `PipelineModel`, or a pipeline does not support a setting of the step.
            OrderError: If the model has fewer layers than the schedule has stages.
        """
        _check_model(objective.loss)
        if objective.num_microbatches != self.schedule.num_microbatches:
            found, must = objective.num_microbatches, f"{self.schedule.num_microbatches}, as in the schedule"
            raise ConfigError(f"`num_microbatches` is {found}: must be {must}", field="num_microbatches")
        if objective.grads_dtype != jnp.float32:
            raise ConfigError(f"`grads_dtype` is {objective.grads_dtype}: must be float32 with Pipelined", field="grads_dtype")
        check_choice("engine", self.engine, get_args(Engine))
        pipeline, products = self.pipeline(objective)
        params = pipeline.stacked_shapes(self.shapes)
        layers = without_ranks(params["layers"])
        # Sharded parameters are not packed, because a pack would have to be gathered before it is unpacked.
        alone = leaf_names(layers) if Axis.FSDP in self.mesh.axis_names else ()
        return BoundPipeline(objective, pipeline, products, Packing.of(layers, alone=alone), params, self.engine)

    def pipeline(self, objective: Objective) -> tuple[Pipeline, tuple[Product, ...]]:
        """Builds the SPMD program of the schedule. Also returns the matmuls with parameters if the step is in FP8, else ()."""
        _check_model(objective.loss)
        shapes, model = self.shapes, self._reducing(objective.loss)
        num_layers = len(jax.eval_shape(model.split, shapes)[1])
        carried = LayerState.of(model, objective.carried, objective.reductions, num_layers)
        choices = {"compute_dtype": self.compute_dtype, "remat": self.remat, "carried": carried}
        pipeline, products = Pipeline.of(model, self.schedule, self.mesh, num_layers=num_layers, **choices), ()
        if objective.fp8 is not None:
            BatchLayout(self.mesh, objective.num_microbatches).microbatch(objective.batch)  # raises ShapeError
            batch_M = jax.eval_shape(partial(by_microbatch, num_microbatches=objective.num_microbatches), objective.batch)
            x, *context = pipeline.inputs(pipeline.stacked_shapes(shapes), batch_M)
            args = (x, tuple(context), *objective.loss_args)
            # The head returns the mean over a microbatch on a data rank.
            num_losses = objective.num_microbatches * num_data_ranks(self.mesh)
            whole = FP8Function(pipeline.layers, objective.fp8, num_losses, "loss").plan(shapes, *args)
            pipeline, products = pipeline.with_precision(shapes, whole, args), whole.products
        if Axis.FSDP not in self.mesh.axis_names:
            return pipeline, products
        axes, experts = chosen_axes(shapes, self.mesh.shape[Axis.FSDP], self)
        sharded = pipeline.shard_as(shapes, axes | experts)
        return replace(sharded, experts=self.experts, shards=self.shards), products

    def _reducing(self, model: PipelineModel) -> PipelineModel:
        """Allows the functions of a model to reduce over batch axes.

        With the engine `dispatch` and several replicas, a reduction raises ConfigError, because an executable has one device.
        """
        is_split = self.engine == "dispatch" and num_data_ranks(self.mesh) > 1
        wrap = _on_one_replica if is_split else with_batch_axes
        return replace(model, embed=wrap(model.embed), layer=wrap(model.layer), head=wrap(model.head))


def _on_one_replica(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wraps a function of a model so that it raises ConfigError if it reduces over a mesh axis."""

    def refused(axis: str) -> ConfigError:
        must = f"must be program for a model that reduces over the mesh axis {axis!r}"
        return ConfigError(f"`engine` is dispatch: {must}", field="engine")

    @functools.wraps(fn)
    def piece(*args: Tree) -> Tree:
        with refused_axes(refused):
            return fn(*args)

    return piece


def _check_model(loss: Any) -> None:
    if not isinstance(loss, PipelineModel):
        raise ConfigError(f"`loss` is {loss!r}: must be a jgraph.PipelineModel with the strategy Pipelined", field="loss")


@dataclass(frozen=True, eq=False)
class BoundPipeline:
    """A `BoundStrategy` that plays a pipeline schedule.

    Attributes:
        objective: The settings of the step.
        pipeline: The SPMD program of the schedule.
        products: Matmuls of the layers with parameters if the step is in FP8, else empty.
        packing: The packing of the layers of a rank.
        shapes: Shapes of the parameters in the tree of `Pipeline.stack`.
        engine: As in `Pipelined`.
    """

    objective: Objective
    pipeline: Pipeline
    products: tuple[Product, ...]
    packing: Packing
    shapes: Tree
    engine: Engine

    # --- Layout ---

    @property
    def mesh(self) -> Mesh:
        """The mesh of the pipeline."""
        return self.pipeline.mesh

    @property
    def is_matrix(self) -> Tree:
        """True for matrices, in the packed tree of the parameters."""
        outer = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), self.shapes["outer"])
        return {"outer": outer, "layers": self.packing.decay_mask()}

    @property
    def batches(self) -> BatchLayout:
        """The layout of a batch, which is the same on all ranks of `pipe`."""
        return BatchLayout(self.mesh, self.objective.num_microbatches)

    @property
    def observed(self) -> Tree:
        """Shapes of the observed state of all layers."""
        return jax.eval_shape(partial(self.pipeline.precision.state, self.pipeline.layout.num_layers))

    @property
    def xla_options(self) -> tuple[str, ...]:
        """XLA options for the axis `fsdp` and for FP8."""
        return sharding.xla_options(self.mesh, self.objective.fp8)

    def on(self, mesh: Mesh) -> Self:
        """Returns a copy for a mesh of the same shape."""
        return replace(self, pipeline=replace(self.pipeline, mesh=mesh))

    def pack(self, tree: Tree) -> Tree:
        """Splits the model into `outer` and layers, stacks the layers of all ranks, and packs them."""
        return self._packed(self.pipeline.stack(*self.pipeline.model.split(tree)))

    def unpack(self, params: Tree) -> Tree:
        """Inverts `pack`."""
        return self.pipeline.model.join(*self.pipeline.unstack(self._unpacked(params)))

    def shardings(self, params: Tree) -> Tree:
        """Shards layers over `pipe`, all parameters over `fsdp`, and the parameters in `PipelineModel.sharded` over `pipe`."""
        if Axis.FSDP not in self.pipeline.mesh.axis_names:
            return self.pipeline.shardings(params)
        shardings = self.pipeline.shardings(self.shapes)
        leaves = jax.tree.leaves(shardings["layers"])
        return shardings | {"layers": dict(zip(params["layers"], leaves, strict=True))}

    def _packed(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.pack)(params["layers"])}

    def _unpacked(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.unpack)(params["layers"])}

    # --- Gradients ---

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        """Plays the schedule in the SPMD program."""
        pipeline = self.pipeline
        key_of_step = key if pipeline.model.takes_key else None
        layers = pipeline.model.split_carried(carry.model) if jax.tree.leaves(carry.model) else []
        return self.sums(carry, *pipeline.step(self._unpacked(params), batch, key_of_step, layers, carry.observed))

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        """Compiles the executables of the ranks with the engine `dispatch`; nothing with the engine `program`."""
        if self.engine == "program":
            return GradientProgram(self, batch)
        program = dispatched(self.pipeline, params, carry, self._unpacked, batch, key, options)
        return _HostProgram(self, program.results, program)

    def sums(self, carry: Carry, loss: Array, grads: Tree, layers: list[Tree], observed: Tree) -> tuple[Loss, Tree]:
        """Converts the results of `Pipeline.step` to the layout of the state.

        Args:
            carry: Carried and observed state at the beginning of the step.
            loss: The mean loss, a float32 scalar.
            grads: The mean gradients, in the tree of `Pipeline.stack`.
            layers: Carried state of every layer after the step; empty if layers carry no state.
            observed: Observed state after the step.

        Returns:
            The loss of weight 1 with the new carry, and the packed gradients.
        """
        model = self.pipeline.model.join_carried(layers) if layers else carry.model
        return Loss(loss, jnp.ones((), jnp.float32), {}, Carry(model, observed)), self._packed(grads)

    # --- Reports ---

    def predict_memory(self, batch: Tree) -> Pools:
        """Predicts the memory of a rank with `bytes_per_rank`."""
        batch_M = jax.eval_shape(partial(by_microbatch, num_microbatches=self.objective.num_microbatches), batch)
        return Pools(bytes_per_rank(self.pipeline, self.shapes, batch_M), "whole")

    def describe(
        self, batch: Tree, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Describes the schedule, its bubble and its memory, and the FP8 matmuls if there are any."""
        schedule, chunks = self.pipeline.schedule, self.pipeline.layout.num_chunks
        player = str(gradients) if gradients.executables else f"{self.pipeline.runtime} runtime"
        idle = simulate(schedule, Costs(), execution="lockstep").bubble
        line = (
            f"pipeline: {schedule.name} ({player}), {schedule.num_ranks} ranks x "
            f"{chunks} chunks, {schedule.num_ticks} ticks, {idle:.1%} idle if all actions take the same time"
        )
        if memory is not None:
            predicted = sum(self.predict_memory(batch).sizes.values())
            line += f"; a step takes {predicted / 2**30:.2f} GiB predicted, {memory.temporaries / 2**30:.2f} compiled"
        if self.objective.fp8 is None:
            return [line]
        return [line, describe(self.products, self.objective.fp8, count(executables), loops="microbatches")]

    def profile_facts(self) -> dict[str, Any]:
        """Returns the runtime, the schedule and the devices of the ranks, for the profile page."""
        schedule = self.pipeline.schedule
        ranks = self.mesh.devices[0].reshape(schedule.num_ranks, -1)[:, 0]
        devices = [device.local_hardware_id or 0 if device.platform == "gpu" else device.id for device in ranks]
        return {"pipeline": {"runtime": self.pipeline.runtime, "schedule": files.to_json(schedule), "devices": devices}}


@dataclass(frozen=True, eq=False)
class _HostProgram(GradientProgram):
    """The `GradientProgram` of `engine="dispatch"`.

    Attributes:
        strategy: The bound pipeline.
        dispatched: The compiled engine.
    """

    strategy: BoundPipeline
    dispatched: Dispatched

    def __str__(self) -> str:
        return str(self.dispatched)

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        return self.dispatched.executables

    def run(self, params: Tree, carry: Carry, step: Array, batch: Tree) -> Tree:
        return self.dispatched(params, carry, step, batch)

    def gradients(self, params: Tree, carry: Carry, key: Array, inputs: Tree) -> tuple[Loss, Tree]:
        return self.strategy.sums(carry, *self.dispatched.collect(inputs))
