"""`Pipeline`: the SPMD program of a model and a schedule, as a pure function of parameters and microbatches."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias, TypedDict, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from jgraph.autodiff import split_backward
from jgraph.errors import ConfigError, OrderError
from jgraph.layout import Layout, Shard, StackedTree
from jgraph.mesh import Axis, batch_axes, on_ranks
from jgraph.pipeline._layer_state import LayerState
from jgraph.pipeline._placement import Placement, place, without_ranks
from jgraph.pipeline._play import play_aligned, play_general
from jgraph.pipeline._precision import StagePrecision
from jgraph.pipeline._runtime import RankRuntime, State
from jgraph.pipeline._stage import Given, StageExecutor, StageInputs, StageParams
from jgraph.pipeline._stage_function import Remat, StageFunctions
from jgraph.pipeline.partition import AXIS, PipelineModel
from jgraph.schedule.action import BACKWARD
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.tables import ScheduleTables, phases, tabulate
from jgraph.strategies.sharding import FSDPChoices, gathered
from jgraph.tree import only
from jgraph.types import Batch, Carried, Key, Leaf, Observed, Params, Registered, Specs, Tree, TreeOf

_T = TypeVar("_T")
Runtime = Literal["auto", "aligned", "general"]

PipelineParams: TypeAlias = StackedTree[Leaf | Registered]
"""The parameters of a pipeline, gradients like them, or their shapes."""

StepResult: TypeAlias = tuple[Array, PipelineParams, list[Carried], Observed]
"""Loss, gradients, carried state of every layer and observed state after a step."""


class PipelineChoices(TypedDict, total=False):
    """Attributes of a `Pipeline` with defaults."""

    remat: Remat
    carried: LayerState
    precision: StagePrecision
    runtime: Runtime


@dataclass(frozen=True, eq=False, kw_only=True)
class Pipeline(Placement, StageFunctions):
    """Computes the loss and gradients of a step as one SPMD program over the mesh axes `data`, `fsdp` and `pipe`.

    The axis `fsdp` shards the batch like `data`. Between steps, parameters are sharded over `fsdp`. In each step, a rank
    gathers the parameters of its stages once, and reduce-scatters their gradients once. Construct it with `Pipeline.of`. A data
    rank is an index along `data` and `fsdp` together; every data rank has its own rows of a batch.

    Attributes:
        model: The model, as embedding, layers and head.
        assignment: The assignment of layers to ranks.
        mesh: A mesh with the axis `pipe`, and optionally `data`, `fsdp`, `context` and `tensor`.
        layout: The layout of the arrays: stacked over the ranks, and sharded over `fsdp`.
        named: The layout of the tree of parameters.
        compute_dtype: Matrices of the layers and of the head, except weights of routers, are cast to this dtype once per step.
            None does not cast.
        remat: Activations to recompute in the backward pass. `nothing` recomputes only elementwise operations, `wide` also the
            results of matmuls that widen their input, such as the first matmul of an MLP, and `layer` the whole layer from its
            input.
        carried: Shapes of the carried state (mutable state of the model) of a layer, and its reductions over microbatches.
        precision: Which matmuls of layers are in FP8, and how. By default none are.
        schedule: The order of the actions of every rank. It has one rank per index along the mesh axis `pipe`.
        runtime: The part of the program that runs the ticks of the schedule. `aligned` runs only schedules in which all ranks
            run the same kind of action in a tick, or a wgrad, and it runs the wgrad of the newest pending dgrad first.
            `general` runs schedules without this restriction. `auto` is only an argument of `of`, which replaces it.
    """

    schedule: Schedule
    runtime: Runtime = "auto"

    @classmethod
    def of(
        cls,
        model: PipelineModel,
        schedule: Schedule,
        mesh: Mesh,
        given: Layout[Params],
        fsdp: FSDPChoices | None = None,
        **choices: Unpack[PipelineChoices],
    ) -> "Pipeline":
        """Makes a pipeline. With the runtime `auto`, the default, it selects `aligned` if this can run the schedule.

        Args:
            model: The model.
            schedule: The schedule.
            mesh: A mesh with the axis `pipe`, and optionally other axes. The pipeline gets a mesh with the same devices
                and names, and all axes of the type `jax.sharding.AxisType.Auto`.
            given: The layout of the parameters that the model gets, for example `jgraph.layout.named` of their shapes.
            fsdp: How parameters are sharded over `fsdp`, and `compute_dtype`; None for the defaults.
            **choices: Values of the attributes `remat`, `carried`, `precision` and `runtime`.

        Returns:
            The pipeline. Its `runtime` is `aligned` or `general`. With `aligned`, its `schedule` is the result of
            `newest_first` of the argument `schedule`.

        Raises:
            OrderError: If there are fewer layers than stages, ranks have different numbers of stages, or `runtime` is `aligned`
                and the schedule has full backwards, ticks in which all ranks are idle, ticks with different actions other than
                wgrad, or consecutive stages on ranks that are not neighbors.
            ConfigError: If the axis `pipe` and the schedule have different numbers of ranks, or a parameter cannot be sharded
                as requested.
        """
        ranks = mesh.shape[AXIS]
        if ranks != schedule.num_ranks:
            raise ConfigError(f"`pp` is {ranks}: must be the {schedule.num_ranks} ranks of the schedule", field="pp")
        # The explicit axes of `jax.make_mesh` would require the caller to shard the arguments.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        placed = place(model, schedule, mesh, given, fsdp or FSDPChoices())
        pipeline = cls(**vars(placed), schedule=schedule, **choices)
        if pipeline.runtime != "general":
            try:
                _check_aligned(schedule)
            except OrderError:
                if pipeline.runtime == "aligned":
                    raise
            else:
                return replace(pipeline, schedule=schedule.newest_first(), runtime="aligned")
        return replace(pipeline, runtime="general")

    def loss_and_grads(self, params: PipelineParams, inputs: Batch, key: Key | None = None) -> tuple[Array, PipelineParams]:
        """Computes the loss and the gradients of a batch. A pure function; call it under `jax.jit`.

        Only for a model without carried state and a pipeline without FP8. Use `step` in all other cases. Raises the same errors
        as `step`.

        Args:
            params: The tree of parameters (`tree`), with the NamedShardings `shardings`.
            inputs: Microbatches with leaves [M, B, ...]: M microbatches of B rows; B is sharded over `data` and `fsdp`.
            key: Random key of the step; None if layers take no key. Each data rank, microbatch and layer gets a key folded from
                it.

        Returns:
            A pair: the mean loss over microbatches and data ranks, a float32 scalar; and its gradients in float32, in a tree
            and with shardings like `params`.
        """
        return self.step(params, inputs, key)[:2]

    def step(
        self, params: Params, inputs: Batch, key: Key | None = None, carried: Sequence[Tree] = (), observed: Observed = None
    ) -> StepResult:
        """Computes the loss, the gradients and the state after a step. A pure function; call it under `jax.jit`.

        Args:
            params: The tree of parameters (`tree`), with the NamedShardings `shardings`.
            inputs: Microbatches with leaves [M, B, ...]: M microbatches of B rows; B is sharded over `data` and `fsdp`.
            key: Random key of the step; None if layers take no key. Each data rank, microbatch and layer gets a key folded from
                it.
            carried: Carried state of every layer at the beginning of the step, one tree per layer; empty if layers carry no
                state.
            observed: Observed state (amax histories of FP8) of all layers at the beginning of the step; None before the first
                step.

        Returns:
            A tuple of four: the mean loss over microbatches and data ranks, a float32 scalar; its gradients in float32, in a
            tree and with shardings like `params`, with None for frozen parameters; a list with the carried state of every layer
            after the step, reduced over microbatches and data ranks, empty if `carried` is empty; and the observed state after
            the step, {} without amax histories.

        Raises:
            OrderError: If consecutive stages are on ranks that are not neighbors in the ring.
            ShapeError: If a layer changes the shape or dtype of x, or returns carried state of other shapes or dtypes.
            ConfigError: If `PipelineModel.sharded` names no parameter of embedding and head, or the number of ranks does not
                divide the sharded axis.
        """
        shards, impl = self.shards, None if key is None else jax.random.key_impl(key)
        trained = self.each(lambda param: param.is_trained)
        out_specs = (PartitionSpec(), only(trained, self.specs), PartitionSpec(), PartitionSpec())
        data = None if key is None else jax.random.key_data(key)
        if observed is None:
            observed = self.precision.state(self.assignment.num_layers)
        run = self._on_mesh(partial(self._on_rank, shards=shards, trained=trained, impl=impl), out_specs)
        return run(params, inputs, data, list(carried), observed)

    # --- The program of a rank, under `jax.shard_map` ---

    def _on_rank(
        self,
        params: PipelineParams,
        inputs: Batch,
        key: Array | None,
        carried: list[Carried],
        observed: Observed,
        *,
        shards: StackedTree[Shard],
        trained: StackedTree[bool],
        impl: Hashable,
    ) -> StepResult:
        """Computes `step` on one rank."""
        batch, layout = batch_axes(self.mesh), self.assignment
        outer = gathered(shards.outer, params.outer)
        if key is not None and any(self.mesh.shape[axis] > 1 for axis in batch):
            key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=impl), lax.axis_index(batch)))
        table_CN = self.own(layout.layers())
        chunks, given = self._chunks(params.layers, carried, table_CN, shards.layers, has_key=key is not None)
        function, head_outer = self.stage(impl, layout.layers_per_stage), self.cast(outer)
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        x = jax.eval_shape(self.model.embed, outer, first)
        context = jax.eval_shape(self.model.context_of, first)
        states = self.precision.pick(observed, table_CN)
        args = (given[0], x, *context, *([] if key is None else [key]))
        over = tuple(axis for axis in batch if axis == Axis.FSDP and self.mesh.shape[axis] > 1)
        weights = self.precision.prepare(function, args, chunks, states, shards.layers, over)
        stages = list(zip(given, states, weights, strict=True))
        split = split_backward(function, has_aux=True, recompute=self.recompute)
        rank = StageExecutor(self.model, split, self.carried, outer, head_outer, stages, inputs, key, impl, trained)
        runtime = RankRuntime(rank, self.tables(), layout.num_stages)
        state = play_aligned(runtime) if self.runtime == "aligned" else play_general(runtime)
        count = self.schedule.num_microbatches
        grads = self._mean_grads(state, shards)
        loss = lax.pmean(lax.psum(state.loss, AXIS), batch) / count
        after = self.carried.finish(state.carried, count, batch, layout) if carried else []
        return loss, grads, after, self.precision.finish([own for _, own in state.grads], batch, layout)

    def _chunks(
        self,
        layers: list[list[Params]],
        carried: list[Carried],
        table_CN: Array,
        shards: list[list[TreeOf[Shard]]],
        *,
        has_key: bool,
    ) -> tuple[list[list[Params]], list[Given]]:
        """Returns the parameters of each chunk of this rank.

        Returns:
            The `fsdp` shards of the parameters, and the gathered parameters with the other inputs of the stage.
        """
        layout = self.assignment
        chunks, given = jax.tree.map(lambda leaf: leaf[0], layers), []
        states = self.carried.pick(carried, table_CN) if carried else {}
        for c, own in enumerate(chunks):
            bits, active = jax.tree.map(lambda leaf, c=c: leaf[c], states), None
            if not layout.is_even:
                active = self.own(layout.active()[:, c, -1])
                # Padding computes with the parameters of the stage's first layer. With zeros, a derivative may be NaN, and a
                # masked NaN is still NaN.
                own = chunks[c] = [*own[:-1], jax.tree.map(partial(jnp.where, active), own[-1], own[0])]
            first = table_CN[c, 0] if has_key else None
            given.append((gathered(shards[c], own), StageInputs(active, bits, first)))
        return chunks, given

    def _mean_grads(self, state: State, shards: StackedTree[Shard]) -> PipelineParams:
        """Returns the mean gradients over microbatches and data ranks, in the tree of the parameters of `step`."""
        batch = batch_axes(self.mesh)
        is_whole = self.each(lambda param: param.axis_of(AXIS) is None).outer
        summed = jax.tree.map(lambda is_whole, g: g if g is None or not is_whole else lax.psum(g, AXIS), is_whole, state.outer)
        grads = StackedTree([_without_padding(*given) for given, _ in state.grads], summed)
        if Axis.FSDP in batch:
            ranks = self.mesh.shape[Axis.FSDP]
            grads = jax.tree.map(lambda shard, g: None if g is None else shard.scatter(g) / ranks, shards, grads)
        # Divided last, because amax histories and attached losses of layers need the unscaled loss of a microbatch.
        data, count = tuple(axis for axis in batch if axis != Axis.FSDP), self.schedule.num_microbatches
        grads = jax.tree.map(lambda g: lax.pmean(g, data) / count, grads)
        return grads._replace(layers=jax.tree.map(lambda g: g[None], grads.layers))

    def own(self, table: np.ndarray) -> Array:
        """Returns the row of the calling rank, [...], from a table with one row per rank, [P, ...].

        Call it inside a function that `jax.shard_map` maps over the axis `pipe`, on which the rank is the index.
        """
        return lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(AXIS), keepdims=False)

    def _on_mesh(self, run: Callable[..., _T], out_specs: Specs) -> Callable[..., _T]:
        in_specs = self.specs, PartitionSpec(None, batch_axes(self.mesh)), *[PartitionSpec()] * 3
        return on_ranks(run, self.mesh, in_specs, out_specs)

    def tables(self) -> ScheduleTables:
        """Returns the actions and slots of the schedule by tick and rank.

        The result of `tabulate`, with `writing` set to `makers` for the runtime `aligned` and to `all` for `general`.
        """
        return tabulate(self.schedule, writing="makers" if self.runtime == "aligned" else "all")

    # --- Shapes ---

    def inputs(self, inputs: Batch) -> tuple[jax.ShapeDtypeStruct, *tuple[Tree, ...]]:
        """Computes the shapes of x and of the context, the inputs of a stage, for one microbatch on one data rank.

        x is the array that `PipelineModel.embed` returns and that a stage passes to the next one. Computes nothing on a device.

        Args:
            inputs: Shapes of the microbatches, leaves [M, B, ...]: M microbatches, each with B rows over all data ranks.

        Returns:
            The tuple (x, context) if layers take a context, else (x,). `x` is a `jax.ShapeDtypeStruct` and `context` a tree of
            them, both without shardings.
        """
        args: list[Tree] = []
        shards = self.shards.outer

        # Traced on the mesh, because an embedding may use the mesh axes.
        def embed(params: PipelineParams, inputs: Batch, *_: Tree) -> None:
            first = jax.tree.map(lambda leaf: leaf[0], inputs)
            outer = gathered(shards, params.outer)
            args.extend((jax.eval_shape(self.model.embed, outer, first), *jax.eval_shape(self.model.context_of, first)))

        jax.eval_shape(self._on_mesh(embed, None), self.shapes, inputs, None, [], None)
        # Without shardings, because these shapes are used outside the mesh.
        return tuple(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), args))

    def layer_shapes(self, inputs: Batch) -> tuple[StageParams, tuple[jax.ShapeDtypeStruct, *tuple[Tree, ...]]]:
        """Returns the shapes of the arguments of a stage of one layer: `stage_shapes`, and the result of `inputs`."""
        return self.stage_shapes(without_ranks(self.shapes.layers[0][:1])), self.inputs(inputs)

    def stage_shapes(self, layers: list[Params]) -> StageParams:
        """Computes the shapes of the first argument of a stage, for a stage of these layers.

        Args:
            layers: Shapes of the parameters of each layer, without the axis of ranks.

        Returns:
            Trees of `jax.ShapeDtypeStruct`, with the dtypes after the cast to `compute_dtype`. None is in the place of the FP8
            weights, whose shapes `StagePrecision.weight_shapes` computes.
        """
        given = jax.eval_shape(self.cast, layers), StageInputs(None, self.carried.bits(len(layers)), None)
        return given, jax.eval_shape(partial(self.precision.state, len(layers))), None


def _without_padding(grads: list[Params], extra: StageInputs) -> list[Params]:
    """Replaces the gradients of a padding layer by zeros."""
    if (active := extra.active) is None:
        return grads
    return [*grads[:-1], jax.tree.map(lambda g: jnp.where(active, g, jnp.zeros((), g.dtype)), grads[-1])]


def _check_aligned(schedule: Schedule) -> None:
    """Raises OrderError if the aligned runtime cannot play a schedule."""
    phases(tabulate(schedule, writing="makers").table)
    if any((order.kinds == BACKWARD).any() for order in schedule):
        raise OrderError(f"{schedule.name} has combined backwards: must have dgrads and wgrads for the aligned runtime")
