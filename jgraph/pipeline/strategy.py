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
from jgraph.mesh import PARTITIONED_AXES, Axis, checked, num_data_ranks, refused_axes, with_batch_axes
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
from jgraph.strategies.checks import check_split
from jgraph.strategies.objective import Carry, Loss, Objective
from jgraph.strategies.sharding import FSDPChoices, chosen_axes
from jgraph.tree import is_matrix, leaf_names, path_name
from jgraph.xla.explain import Memory

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
    shapes: Tree
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
            raise ConfigError(f"`schedule` is {self.schedule!r}: {must}", field="schedule")

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
        _check_model(objective.loss)
        if objective.num_microbatches != self.schedule.num_microbatches:
            found, must = objective.num_microbatches, f"{self.schedule.num_microbatches}, as in the schedule"
            raise ConfigError(f"`num_microbatches` is {found}: must be {must}", field="num_microbatches")
        if objective.grads_dtype != jnp.float32:
            raise ConfigError(f"`grads_dtype` is {objective.grads_dtype}: must be float32 with Pipelined", field="grads_dtype")
        check_choice("engine", self.engine, get_args(Engine))
        split = [axis for axis in PARTITIONED_AXES if self.mesh.shape.get(axis, 1) > 1]
        if self.engine == "dispatch" and split:
            raise ConfigError(f"`engine` is dispatch: must be program on a mesh with the axis {split[0]}", field="engine")
        check_split(self.mesh, objective.split)
        pipeline, products = self.pipeline(objective)
        params = pipeline.stacked_shapes(self.shapes)
        layers = without_ranks(params["layers"])
        frozen = {name.removeprefix("layers/") for name in pipeline.frozen}
        # Sharded parameters are not packed, because a pack would have to be gathered before it is unpacked.
        alone = leaf_names(layers) if Axis.FSDP in self.mesh.axis_names or objective.split else ()
        return BoundPipeline(objective, pipeline, products, Packing.of(layers, alone=alone, frozen=frozen), params, self.engine)

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
        pipeline = pipeline.split_as(shapes, objective.split).freeze(shapes, objective.frozen)
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
    """A `BoundStrategy` that computes gradients by a pipeline schedule. Made by `Pipelined.bind`.

    The parameters of a step are the dict {"outer": tree of the parameters of embedding and head, "layers": {name: array}}. The
    first axis of an array in `layers` is the rank. Row r holds one or several parameters of the layers of rank r.

    Attributes:
        objective: The loss and the settings of the step.
        pipeline: The model with its schedule. It also computes the gradients with the engine `program`.
        products: A `Product` for every matmul of a layer with a parameter if the step is in FP8, else ().
        packing: Converts the parameters of the layers of one rank to and from a dict of arrays by name.
        shapes: Shapes of the parameters, the result of `Pipeline.stacked_shapes`.
        engine: `program` computes the gradients in one SPMD program. `dispatch` computes them with separate executables for
            each rank, which the host starts (MPMD).
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
        """The mesh of the pipeline, with the axis `pipe` and optionally `data`, `fsdp`, `context` and `tensor`."""
        return self.pipeline.mesh

    @property
    def is_matrix(self) -> Tree:
        """A tree with one bool for each array in the result of `pack`. Weight decay applies to an array that has True.

        True means that the parameters in the array are matrices.
        """
        outer = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), self.shapes["outer"])
        return {"outer": outer, "layers": self.packing.decay_mask()}

    @property
    def trained(self) -> Tree:
        """A tree with one bool for each array in the result of `pack`, False if all its parameters are frozen."""
        trained = self.pipeline.trained(self.shapes)
        flags = jax.tree.leaves(trained["layers"])
        return trained | {"layers": {name: flags[indices[0]] for name, indices in self.packing.groups}}

    @property
    def batches(self) -> BatchLayout:
        """The layout of a batch: rows are sharded over `data` and `fsdp`, and all ranks of `pipe` hold the same rows."""
        return BatchLayout(self.mesh, self.objective.num_microbatches)

    @property
    def observed(self) -> Tree:
        """Shapes of the observed state of all layers: an `AmaxHistory`, or {} without FP8 or without delayed scaling."""
        return jax.eval_shape(partial(self.pipeline.precision.state, self.pipeline.layout.num_layers))

    @property
    def xla_options(self) -> tuple[str, ...]:
        """The XLA options that this strategy needs, each a string `name=value`.

        There are options for a mesh with an axis `fsdp`, `context` or `tensor` longer than 1, and options for FP8. () if
        neither applies.
        """
        return sharding.xla_options(self.mesh, self.objective.fp8)

    def on(self, mesh: Mesh) -> Self:
        """Returns a copy that uses another mesh with the same axis names and lengths but other devices.

        An example is a mesh of devices that are not attached, to compile for them ahead of time.
        """
        return replace(self, pipeline=replace(self.pipeline, mesh=mesh))

    def pack(self, tree: Tree) -> Tree:
        """Converts parameters from the model's own tree to the dict that a step uses. A pure function.

        Layers are stacked over the ranks, missing layers of shorter stages are filled with zeros, and small parameters of a
        rank are packed into one array.

        Args:
            tree: Parameters in the model's own tree, or a tree of the same structure and shapes, such as optimizer moments.

        Returns:
            {"outer": tree of the parameters of embedding and head, "layers": {name: array [P, ...]}} for P ranks.
        """
        return self._packed(self.pipeline.stack(*self.pipeline.model.split(tree)))

    def unpack(self, params: Tree) -> Tree:
        """Inverts `pack`: converts its result to the model's own tree, bit for bit. Padding is dropped. A pure function."""
        return self.pipeline.model.join(*self.pipeline.unstack(self._unpacked(params)))

    def shardings(self, params: Tree) -> Tree:
        """Returns the NamedSharding of every array, in a tree like `params`.

        Layers are sharded over `pipe` on their first axis, and the parameters in `PipelineModel.sharded` over `pipe` on the
        axis that it gives. If the mesh has the axis `fsdp`, all parameters are also sharded over `fsdp`; if `shards` of the
        strategy is `experts`, only experts are. Other parameters are replicated.

        Args:
            params: Arrays or shapes in the tree that `pack` returns.
        """
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
        """Computes the loss and the gradients with the SPMD program. A pure function; call it under `jax.jit`.

        The engine `dispatch` does not use this method.

        Args:
            params: The parameters in the tree that `pack` returns.
            batch: Leaves [M, B/M, ...] for M microbatches of B rows in all, with the second axis sharded over the data ranks.
            key: Random key of the step. Ignored if layers take no key.
            carry: Carried and observed state before the step.

        Returns:
            A pair. The first is a `Loss`: `total` is the mean loss, a float32 scalar, `weight` is 1.0, `aux` is {}, and
            `carried` is the `Carry` after the step. The second has the gradients of the mean loss, in float32, in a tree like
            `params`.
        """
        pipeline = self.pipeline
        key_of_step = key if pipeline.model.takes_key else None
        layers = pipeline.model.split_carried(carry.model) if jax.tree.leaves(carry.model) else []
        return self.sums(carry, *pipeline.step(self._unpacked(params), batch, key_of_step, layers, carry.observed))

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        """Compiles the executables of the ranks with the engine `dispatch`; compiles nothing with the engine `program`.

        Args:
            params: Shapes and shardings of the parameters, in the tree that `pack` returns.
            carry: Shapes and shardings of the carried and observed state.
            batch: Shapes and shardings of a placed batch, leaves [M, B/M, ...] for M microbatches.
            key: Random key of the whole training. Only `dispatch` uses it, as a constant of its programs.
            options: XLA options by name. Only `dispatch` uses them.

        Returns:
            A `GradientProgram`. With `dispatch`, its `run` launches the executables, and its `gradients` reduces their results
            over all devices. With `program`, it has no executables: `run` returns the batch unchanged, and `gradients` traces
            `loss_and_grads`.

        Raises:
            ConfigError: With `dispatch`, if the mesh has the axis `fsdp` or devices of other processes, or the model reduces
                over batch axes and there are several data ranks.
        """
        if self.engine == "program":
            return GradientProgram(self, batch)
        program = dispatched(self.pipeline, params, carry, self._unpacked, batch, key, options)
        return _HostProgram(self, program.results, program)

    def sums(self, carry: Carry, loss: Array, grads: Tree, layers: list[Tree], observed: Tree) -> tuple[Loss, Tree]:
        """Converts the four results of `Pipeline.step` to the results of `loss_and_grads`. A pure function.

        Args:
            carry: Carried and observed state at the beginning of the step. If `layers` is empty, its carried state is also the
                carried state after the step.
            loss: The mean loss, a float32 scalar.
            grads: The mean gradients, in the tree of `Pipeline.stack`.
            layers: Carried state of every layer after the step; empty if layers carry no state.
            observed: Observed state after the step.

        Returns:
            A pair: a `Loss` with `loss` as its `total`, a weight of 1.0 and the `Carry` after the step in `carried`; and the
            gradients in the tree that `pack` returns.
        """
        model = self.pipeline.model.join_carried(layers) if layers else carry.model
        return Loss(loss, jnp.ones((), jnp.float32), {}, Carry(model, observed)), self._packed(grads)

    # --- Reports ---

    def predict_memory(self, batch: Tree) -> Pools:
        """Predicts the memory of a rank during a step of the SPMD engine, without parameters and optimizer state.

        Args:
            batch: Shapes of a whole batch, leaves [B, ...].

        Returns:
            `Pools` with `covers` set to `whole`. `sizes` has the bytes by name: the pools of the schedule (`forward_dgrad`,
            `forward_wgrad`, `stash`, `activation`, `gradient`, `loss`); `in flight`, results of an action before they are
            written to a pool; `main_grad`, float32 sums of gradients; `cast`, parameters in `compute_dtype` and FP8 weights;
            and `gathered`, other parameters that are gathered over `fsdp`.
        """
        batch_M = jax.eval_shape(partial(by_microbatch, num_microbatches=self.objective.num_microbatches), batch)
        return Pools(bytes_per_rank(self.pipeline, self.shapes, batch_M), "whole")

    def describe(
        self, batch: Tree, gradients: GradientProgram, executables: Sequence[jax.stages.Compiled], memory: Memory | None
    ) -> list[str]:
        """Returns lines for the log about a compiled step.

        Args:
            batch: Shapes of a whole batch, leaves [B, ...].
            gradients: The compiled gradients, from `compile_gradients`.
            executables: All executables of the step. They are searched for FP8 matmuls.
            memory: Memory of the step, as reported by XLA; None if unknown, which omits the memory.

        Returns:
            A list of one line, or of two lines if the step is in FP8, without line ends. The first has the name of the
            schedule, its numbers of ranks, chunks and ticks, the idle fraction of the ranks' time if all actions take the same
            time, and, if `memory` is given, the predicted and the compiled memory in GiB. The second is about FP8 matmuls.
        """
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
        """Returns facts about the pipeline for the report of a profile. All values can be written as JSON.

        Returns:
            A dict with the single key `pipeline`. Its value is a dict with three keys. `runtime` is `aligned` or `general`.
            `schedule` is the schedule as a string, in the JSON format of `jgraph.schedule.write`. `devices` is a list with an
            integer per rank, the number of the rank's device in the first replica: on a GPU the number within its host, else
            `jax.Device.id`.
        """
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
