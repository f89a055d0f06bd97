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
from jgraph.pipeline._partition import AXIS, PipelineModel
from jgraph.pipeline._placement import Placement, place, without_ranks
from jgraph.pipeline._play import play_aligned, play_general
from jgraph.pipeline._precision import StagePrecision
from jgraph.pipeline._runtime import RankRuntime, State
from jgraph.pipeline._stage import Given, StageExecutor, StageInputs, StageParams
from jgraph.pipeline._stage_function import Remat, StageFunctions
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

    A rank gathers the parameters of its stages over `fsdp` once per step, and reduce-scatters their gradients once. A data rank
    is an index along `data` and `fsdp` together, with its own rows of a batch. Construct it with `Pipeline.build`.
    """

    schedule: Schedule  # has one rank per index along `pipe`
    runtime: Runtime = "auto"  # `build` replaces `auto`

    @classmethod
    def build(
        cls,
        model: PipelineModel,
        schedule: Schedule,
        mesh: Mesh,
        given: Layout[Params],  # of the parameters that the model gets
        fsdp: FSDPChoices | None = None,
        **choices: Unpack[PipelineChoices],
    ) -> "Pipeline":
        """Makes a pipeline. `auto` selects `aligned`, with the wgrads of `newest_first`, if this can run the schedule."""
        ranks = mesh.shape[AXIS]
        if ranks != schedule.num_ranks:
            raise ConfigError(f"`pp` is {ranks}: must be the {schedule.num_ranks} ranks of the schedule", field="pp")
        # The explicit axes of `jax.make_mesh` would require the caller to shard the arguments.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        fsdp = fsdp or FSDPChoices()
        placed = place(model, schedule, mesh, given, fsdp)
        pipeline = cls(**vars(placed), model=model, compute_dtype=fsdp.compute_dtype, schedule=schedule, **choices)
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
        """Computes the first two results of `step`, for a model without carried state and without FP8."""
        return self.step(params, inputs, key)[:2]

    def step(
        self,
        params: Params,  # placed by `shardings`
        inputs: Batch,
        key: Key | None = None,  # of the step; each data rank, microbatch and layer folds its own
        carried: Sequence[Tree] = (),  # of every layer
        observed: Observed = None,  # of all layers; None before the first step
    ) -> StepResult:
        """Computes a step on microbatches [M, B, ...], as a pure function under `jax.jit`."""
        shards = self.shards
        impl = None if key is None else jax.random.key_impl(key)
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
        batch = batch_axes(self.mesh)
        layout = self.assignment
        outer = gathered(shards.outer, params.outer)
        if key is not None and any(self.mesh.shape[axis] > 1 for axis in batch):
            key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=impl), lax.axis_index(batch)))
        table_CN = self.own(layout.layers())
        chunks, given = self._chunks(params.layers, carried, table_CN, shards.layers, has_key=key is not None)
        function = self.stage(impl, layout.layers_per_stage)
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        x = jax.eval_shape(self.model.embed, outer, first)
        context = jax.eval_shape(self.model.context_of, first)
        states = self.precision.pick(observed, table_CN)
        args = (given[0], x, *context, *([] if key is None else [key]))
        over = tuple(axis for axis in batch if axis == Axis.FSDP and self.mesh.shape[axis] > 1)
        weights = self.precision.prepared_weights(function, args, chunks, states, shards.layers, over)
        stages = list(zip(given, states, weights, strict=True))
        split = split_backward(function, has_aux=True, recompute=self.recompute)
        rank = StageExecutor(self.model, split, self.carried, outer, self.cast(outer), stages, inputs, key, impl, trained)
        runtime = RankRuntime(rank, self.tables(), layout.num_stages)
        state = play_aligned(runtime) if self.runtime == "aligned" else play_general(runtime)
        count = self.schedule.num_microbatches
        grads = self._mean_grads(state, shards)
        # Loss and gradients are float32 means over microbatches and data ranks; gradients of frozen parameters are None.
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
        """Returns for each chunk the `fsdp` shards of its parameters, and the gathered ones with the other inputs."""
        layout = self.assignment
        chunks = jax.tree.map(lambda leaf: leaf[0], layers)
        given = []
        states = self.carried.pick(carried, table_CN) if carried else {}
        for c, own in enumerate(chunks):
            bits = jax.tree.map(lambda leaf, c=c: leaf[c], states)
            active = None
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
        data = tuple(axis for axis in batch if axis != Axis.FSDP)
        grads = jax.tree.map(lambda g: lax.pmean(g, data) / self.schedule.num_microbatches, grads)
        return grads._replace(layers=jax.tree.map(lambda g: g[None], grads.layers))

    def own(self, table: np.ndarray) -> Array:
        """Returns the calling rank's row of a table [P, ...], under `jax.shard_map` over `pipe`."""
        return lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(AXIS), keepdims=False)

    def _on_mesh(self, run: Callable[..., _T], out_specs: Specs) -> Callable[..., _T]:
        in_specs = self.specs, PartitionSpec(None, batch_axes(self.mesh)), *[PartitionSpec()] * 3
        return on_ranks(run, self.mesh, in_specs, out_specs)

    def tables(self) -> ScheduleTables:
        return tabulate(self.schedule, writing="makers" if self.runtime == "aligned" else "all")

    @property
    def shards(self) -> StackedTree[Shard]:
        """The `Shard` of every parameter over `fsdp`, without the axis of ranks. Only copies of layers are cast."""
        layers = self.each(lambda param: Shard.from_param(param, lead=1, compute_dtype=self.compute_dtype)).layers
        return StackedTree(layers, self.each(Shard.from_param).outer)

    # --- Shapes ---

    def inputs(self, inputs: Batch) -> tuple[jax.ShapeDtypeStruct, *tuple[Tree, ...]]:
        """Returns the shapes of x and context for a microbatch on a data rank, from those of all, leaves [M, B, ...]."""
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

    def stage_args(self, inputs: Batch, key: Key | None = None) -> tuple[jax.ShapeDtypeStruct, *tuple[Tree, ...]]:
        """Returns the shapes of the arguments of a stage after the parameters: `inputs`, and key data if layers take a key."""

        def data() -> Array:
            return jax.random.key_data(jax.random.key(0) if key is None else key)

        keys = [jax.eval_shape(data)] if self.model.takes_key else []
        return (*self.inputs(inputs), *keys)

    def layer_shapes(self, inputs: Batch) -> tuple[StageParams, tuple[jax.ShapeDtypeStruct, *tuple[Tree, ...]]]:
        """Returns the shapes of the arguments of a stage of one layer: `stage_shapes`, and `stage_args`."""
        return self.stage_shapes(without_ranks(self.shapes.layers[0][:1])), self.stage_args(inputs)

    def stage_shapes(self, layers: list[Params]) -> StageParams:
        """Returns the cast shapes of the first argument of a stage of these layers; None for FP8 weights."""
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
