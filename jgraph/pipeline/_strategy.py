"""The strategy `Pipelined`: each rank holds the layers of its stages, and all ranks share embedding and head."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jgraph.errors import ConfigError, check_choice, shown
from jgraph.layout import Layout, alone, packed
from jgraph.mesh import PARTITIONED_AXES, Axis, checked, num_data_ranks, refused_axes, with_batch_axes
from jgraph.pipeline._layer_state import LayerState
from jgraph.pipeline._memory import bytes_per_rank
from jgraph.pipeline._partition import PipelineModel
from jgraph.pipeline._program import Pipeline, PipelineChoices, PipelineParams
from jgraph.pipeline._stage_function import Remat
from jgraph.pipeline.dispatched import Dispatched, Results, dispatched
from jgraph.precision.loss import count, describe
from jgraph.precision.transform import FP8Function, Product
from jgraph.schedule import Costs, Schedule, files, simulate
from jgraph.strategies import sharding
from jgraph.strategies.base import GradientProgram, Options, Pools, Reports, summary
from jgraph.strategies.batches import BatchLayout, by_microbatch
from jgraph.strategies.checks import check_split
from jgraph.strategies.objective import Carry, Loss, LossFunction, LossInParts, Objective
from jgraph.strategies.sharding import FSDPChoices
from jgraph.types import Arrays, Batch, Carried, Json, Key, Observed, Params, Tree
from jgraph.xla.explain import Memory

_T = TypeVar("_T")
Engine = Literal["program", "dispatch"]


@dataclass(frozen=True, eq=False)
class Pipelined(FSDPChoices):
    """A strategy that assigns the layers of a model to the ranks of a pipeline. The loss must be a `PipelineModel`.

    Pass it as the strategy of `jgraph.train_step`.

    Attributes:
        mesh: A mesh with the axis `pipe`; may also have the axes `data`, `fsdp`, `context` and `tensor`.
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s, in the model's own tree.
        schedule: A schedule for the ranks of `pipe` and the microbatches of the step, e.g. from `jgraph.schedule.generate`.
        remat: Activations to recompute in the backward pass. `nothing` recomputes only elementwise operations, `wide` also the
            results of wide matmuls such as the first matmul of an MLP, and `layer` the whole layer from its input.
        engine: `program` compiles the schedule into one program over all ranks (SPMD). `dispatch` compiles separate executables
            for each rank, which the host starts (MPMD); it needs a single process, a mesh without the axis `fsdp`, and one
            device on `context` and `tensor`.
        compute_dtype: Matrices other than the weights of routers are cast to this floating dtype once per step. None does not
            cast.
        shard_rules: Strings `PATTERN=AXIS`, such as `embed*=0`, with a shell pattern of parameter names. A parameter with a
            matching name is sharded over `fsdp` along the axis with the index AXIS. Without a matching rule, `annotations`
            determine the axis; without an annotation, the shape of the parameter determines it.
        annotations: Maps the name of a parameter to a PartitionSpec with the name `fsdp` at the axis to shard, or to None for
            no annotation. For a Flax model, pass `functional(...).annotations`.
        experts: Number of devices that the experts of `jgraph.MoE` are sharded over, a divisor of the size of `fsdp`.
        shards: `everything` shards all parameters over `fsdp`. `experts` shards only experts, and replicates other parameters
            over `fsdp`.

    Raises:
        ConfigError: If the mesh lacks the axis `pipe` or has an unknown axis, `schedule` is not a `Schedule`, or `experts`,
            `compute_dtype` or `shards` has another type or value.
    """

    mesh: Mesh
    shapes: Params
    schedule: Schedule
    remat: Remat = "nothing"
    engine: Engine = "program"

    def __repr__(self) -> str:
        return f"Pipelined({summary(self.mesh, self.shapes)}, {self.schedule!r})"

    def __post_init__(self):
        object.__setattr__(
            self, "mesh", checked(self.mesh, needs=(Axis.PIPE,), allows=(Axis.DATA, Axis.FSDP, Axis.CONTEXT, Axis.TENSOR))
        )
        super().__post_init__()
        if not isinstance(self.schedule, Schedule):
            must = "must be a jgraph.Schedule, e.g. jgraph.schedule.generate('1f1b', pp=2, microbatches=4)"
            raise ConfigError(f"`schedule` is {shown(self.schedule)}: {must}", field="schedule")

    def bind(self, objective: Objective) -> "BoundPipeline":
        """Binds an objective with a `PipelineModel` as its loss. Traces the model on shapes, and compiles nothing.

        Args:
            objective: The loss and the settings of the step.

        Returns:
            The bound strategy, for these parameters and this objective.

        Raises:
            ConfigError: If the loss is not a `PipelineModel`; `num_microbatches` is not the number in the schedule;
                `grads_dtype` is not float32; `engine` is unknown; `pipe` and the schedule have different numbers of ranks; the
                carried state has arrays outside of layers or differs between layers; a recipe for FP8 selects only some of the
                layers; or a parameter cannot be sharded over `fsdp` as requested.
            OrderError: If the model has fewer layers than the schedule has stages, or ranks have different numbers of stages.
            ShapeError: If the step is in FP8 and the batch cannot be divided among microbatches and data ranks.
        """
        _checked(objective.loss)
        if objective.num_microbatches != self.schedule.num_microbatches:
            must = f"must be {self.schedule.num_microbatches}, as in the schedule"
            raise ConfigError(f"`num_microbatches` is {objective.num_microbatches}: {must}", field="num_microbatches")
        if objective.grads_dtype != jnp.float32:
            raise ConfigError(f"`grads_dtype` is {objective.grads_dtype}: must be float32 with Pipelined", field="grads_dtype")
        check_choice("engine", self.engine, get_args(Engine))
        split = [axis for axis in PARTITIONED_AXES if self.mesh.shape.get(axis, 1) > 1]
        if self.engine == "dispatch" and split:
            raise ConfigError(f"`engine` is dispatch: must be program on a mesh with the axis {split[0]}", field="engine")
        check_split(self.mesh, objective.layout.params)
        pipeline, products = self.pipeline(objective)
        # Sharded parameters are not packed, because a pack would have to be gathered before it is unpacked.
        packs = alone() if Axis.FSDP in self.mesh.axis_names else packed()
        packing = packs(pipeline.layout.params)
        return BoundPipeline(objective, pipeline, products, pipeline.layout.then(packs), packing, self.engine)

    def pipeline(self, objective: Objective) -> tuple[Pipeline, tuple[Product, ...]]:
        """Builds the SPMD program of the schedule for an objective. Traces the model on shapes, and compiles nothing.

        Args:
            objective: The loss, a `PipelineModel`, and the settings of the step.

        Returns:
            A pair: the pipeline; and a tuple with a `Product` for every matmul of a layer with a parameter, over all layers.
            The tuple is empty if the step is not in FP8.

        Raises:
            ConfigError: If the loss is not a `PipelineModel`; `pipe` and the schedule have different numbers of ranks; the
                carried state has arrays outside of layers or differs between layers; a recipe for FP8 selects only some of the
                layers; or a parameter cannot be sharded over `fsdp` as requested.
            OrderError: If the model has fewer layers than the schedule has stages, or ranks have different numbers of stages.
            ShapeError: If the step is in FP8 and the batch cannot be divided among microbatches and data ranks.
        """
        model = self._reducing(_checked(objective.loss))
        num_layers = len(jax.eval_shape(model.split, self.shapes)[1])
        carried = LayerState.from_model(model, objective.carried, objective.reductions, num_layers)
        choices: PipelineChoices = {"remat": self.remat, "carried": carried}
        pipeline = Pipeline.build(model, self.schedule, self.mesh, objective.layout, self, **choices)
        if objective.fp8 is None:
            return pipeline, ()
        BatchLayout(self.mesh, objective.num_microbatches).microbatch(objective.batch)  # raises ShapeError
        batch_M = jax.eval_shape(partial(by_microbatch, num_microbatches=objective.num_microbatches), objective.batch)
        x, *context = pipeline.inputs(batch_M)
        args = (x, tuple(context), *objective.loss_args)
        # The head returns the mean over a microbatch on a data rank.
        num_losses = objective.num_microbatches * num_data_ranks(self.mesh)
        whole = FP8Function(pipeline.layers, objective.fp8, num_losses, "loss").plan(self.shapes, *args)
        return pipeline.with_precision(self.shapes, whole, args), whole.products

    def _reducing(self, model: PipelineModel) -> PipelineModel:
        """Allows the functions of a model to reduce over batch axes, except in executables for one of several replicas."""
        is_split = self.engine == "dispatch" and num_data_ranks(self.mesh) > 1
        wrap = _on_one_replica if is_split else with_batch_axes
        return replace(model, embed=wrap(model.embed), layer=wrap(model.layer), head=wrap(model.head))


def _on_one_replica(fn: Callable[..., _T]) -> Callable[..., _T]:
    """Wraps a function of a model so that it raises ConfigError if it reduces over a mesh axis."""

    def refused(axis: str) -> ConfigError:
        must = f"must be program for a model that reduces over the mesh axis {axis!r}"
        return ConfigError(f"`engine` is dispatch: {must}", field="engine")

    @functools.wraps(fn)
    def piece(*args: Tree) -> _T:
        with refused_axes(refused):
            return fn(*args)

    return piece


def _checked(loss: LossFunction | LossInParts) -> PipelineModel:
    if not isinstance(loss, PipelineModel):
        raise ConfigError(f"`loss` is {shown(loss)}: must be a jgraph.PipelineModel with the strategy Pipelined", field="loss")
    return loss


@dataclass(frozen=True, eq=False)
class BoundPipeline:
    """The `BoundStrategy` of `Pipelined`: computes gradients by a pipeline schedule."""

    objective: Objective
    pipeline: Pipeline
    products: tuple[Product, ...]  # every matmul of a layer with a parameter if the step is in FP8, else ()
    layout: Layout[Params]  # of the arrays of the step
    packing: Layout[Arrays]  # the last part of `layout`: from the arrays of the pipeline to those of the step
    engine: Engine

    @property
    def batches(self) -> BatchLayout:
        return BatchLayout(self.pipeline.mesh, self.objective.num_microbatches)

    @property
    def observed(self) -> Observed:
        return jax.eval_shape(partial(self.pipeline.precision.state, self.pipeline.assignment.num_layers))

    @property
    def xla_options(self) -> tuple[str, ...]:
        return sharding.xla_options(self.pipeline.mesh, self.objective.fp8)

    @property
    def reports(self) -> Reports:
        return _Reports(self)

    def on(self, mesh: Mesh) -> Self:
        return replace(self, pipeline=replace(self.pipeline, mesh=mesh))

    # --- Gradients ---

    def loss_and_grads(self, params: Arrays, batch: Batch, key: Key, carry: Carry) -> tuple[Loss, Arrays]:
        """Computes the gradients with the SPMD program. The engine `dispatch` does not use this method."""
        pipeline = self.pipeline
        key_of_step = key if pipeline.model.takes_key else None
        layers = pipeline.model.split_carried(carry.model) if jax.tree.leaves(carry.model) else []
        return self.sums(carry, *pipeline.step(self.tree(params), batch, key_of_step, layers, carry.observed))

    def compile_gradients(self, params: Arrays, carry: Carry, batch: Batch, key: Key, options: Options) -> GradientProgram:
        """Compiles the executables of the ranks with the engine `dispatch`; else nothing."""
        if self.engine == "program":
            return GradientProgram(self, batch)
        program = dispatched(self.pipeline, params, carry, self.tree, batch, key, options)
        return _HostProgram(self, program.results, program)

    def tree(self, params: Arrays) -> PipelineParams:
        """Returns the arrays of a step as the tree of the pipeline."""
        return self.pipeline.tree(self.packing.unpack(params))

    def sums(
        self, carry: Carry, loss: Array, grads: PipelineParams, layers: list[Carried], observed: Observed
    ) -> tuple[Loss, Arrays]:
        """Converts the four results of `Pipeline.step` to the results of `loss_and_grads`."""
        model = self.pipeline.model.join_carried(layers) if layers else carry.model
        sums = Loss(loss, jnp.ones((), jnp.float32), {}, Carry(model, observed))
        return sums, self.packing.pack(self.pipeline.arrays(grads))


@dataclass(frozen=True, eq=False)
class _Reports(Reports):
    bound: BoundPipeline

    def predict_memory(self, batch: Batch) -> Pools:
        """Predicts the memory of a rank of the SPMD engine."""
        pipeline = self.bound.pipeline
        count = self.bound.objective.num_microbatches
        batch_M = jax.eval_shape(partial(by_microbatch, num_microbatches=count), batch)
        is_partitioned = any(pipeline.mesh.shape.get(axis, 1) > 1 for axis in PARTITIONED_AXES)
        return Pools(bytes_per_rank(pipeline, batch_M), "some" if is_partitioned else "whole")

    def describe(
        self, batch: Batch, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Describes the schedule and its memory in a line, and FP8 matmuls in another."""
        pipeline = self.bound.pipeline
        schedule = pipeline.schedule
        fp8 = self.bound.objective.fp8
        player = str(gradients) if gradients.executables else f"{pipeline.runtime} runtime"
        idle = simulate(schedule, Costs(), execution="lockstep").bubble
        line = (
            f"pipeline: {schedule.name} ({player}), {schedule.num_ranks} ranks x {pipeline.assignment.num_chunks} chunks, "
            f"{schedule.num_ticks} ticks, {idle:.1%} idle if all actions take the same time"
        )
        if memory is not None:
            predicted = sum(self.predict_memory(batch).sizes.values())
            line += f"; a step takes {predicted / 2**30:.2f} GiB predicted, {memory.temporaries / 2**30:.2f} compiled"
        if fp8 is None:
            return [line]
        return [line, describe(self.bound.products, fp8, count(executables), loops="microbatches")]

    def profile_facts(self) -> dict[str, Json]:
        """Returns the schedule, and the device of each rank of the first replica as a trace names it."""
        pipeline = self.bound.pipeline
        schedule = pipeline.schedule
        ranks = pipeline.mesh.devices[0].reshape(schedule.num_ranks, -1)[:, 0]
        devices = [device.local_hardware_id or 0 if device.platform == "gpu" else device.id for device in ranks]
        return {"pipeline": {"runtime": pipeline.runtime, "schedule": files.to_json(schedule), "devices": devices}}


@dataclass(frozen=True, eq=False)
class _HostProgram(GradientProgram):
    """The `GradientProgram` of `engine="dispatch"`."""

    strategy: BoundPipeline
    dispatched: Dispatched

    def __str__(self) -> str:
        return str(self.dispatched)

    @property
    def executables(self) -> Sequence[jax.stages.Compiled]:
        return self.dispatched.executables

    def run(self, params: Arrays, carry: Carry, step: Array, batch: Batch) -> Results[Array]:
        return self.dispatched(params, carry, step, batch)

    def gradients(self, params: Arrays, carry: Carry, key: Key, inputs: Tree) -> tuple[Loss, Arrays]:
        assert isinstance(inputs, Results), "the result of `run`"
        return self.strategy.sums(carry, *self.dispatched.collect(inputs))
