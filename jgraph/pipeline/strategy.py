"""The strategy of a pipeline: every rank has the layers of its stages, and its part of embedding and head."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jgraph.errors import ConfigError, check_choice
from jgraph.mesh import Axis, checked, num_data_ranks, refused_axes, with_batch_axes
from jgraph.packing import Packing
from jgraph.pipeline import Pipeline, PipelineModel
from jgraph.pipeline.carried import Carried
from jgraph.pipeline.dispatched import Dispatched, dispatched
from jgraph.pipeline.program import Remat
from jgraph.precision.config import FP8Config
from jgraph.precision.transform import FP8Function
from jgraph.schedule import Schedule
from jgraph.strategies import sharding as fsdp
from jgraph.strategies.accumulate import by_microbatch
from jgraph.strategies.base import Binding, summary
from jgraph.strategies.checks import check_count, float_dtype
from jgraph.strategies.objective import Sums, WithHistory
from jgraph.tree import is_matrix, leaf_names, path_name

Tree = Any
Engine = Literal["program", "dispatch"]


@dataclass(frozen=True, eq=False)
class Pipelined:
    """Gives every rank of a pipeline the layers of its stages. The loss of the step is a `PipelineModel`.

    Attributes:
        mesh: with the axis `pipe`, and perhaps `data` and `fsdp`.
        shapes: of the parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
        schedule: of as many ranks as `pipe` has and as many microbatches as the step, e.g. from `jgraph.schedule.generate`.
        compute_dtype: dtype to which matrices are cast once a step; None uses them as they are.
        engine: `program` plays the schedule as one program over all ranks, `dispatch` as executables of each rank that the host
            hands over.
        remat: `nothing` keeps what `split_backward` keeps; `wide` computes again its wide products, as the first of an MLP;
            `layer` keeps a layer's input and computes the rest again.
        shard_rules, annotations: which axis of a parameter is sharded over `fsdp`, as `FullySharded` takes them.
        experts, shards: over how many devices of `fsdp` experts are spread, and whether all else is sharded, as there.
    """

    mesh: Mesh
    shapes: Tree
    schedule: Schedule
    compute_dtype: Any = None
    remat: Remat = "nothing"
    engine: Engine = "program"
    shard_rules: tuple[str, ...] = ()
    annotations: Mapping[str, Any] = field(default_factory=dict)
    experts: int = 1
    shards: fsdp.Sharded = "everything"

    def __repr__(self) -> str:
        return f"Pipelined({summary(self.mesh, self.shapes)}, {self.schedule!r})"

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.PIPE,), allows=(Axis.DATA, Axis.FSDP)))
        check_count("experts", self.experts)
        if self.compute_dtype is not None:
            float_dtype("compute_dtype", self.compute_dtype)
        if not isinstance(self.schedule, Schedule):
            message = "must be a jgraph.Schedule, e.g. jgraph.schedule.generate('1f1b', pp=2, microbatches=4)"
            raise ConfigError(f"`schedule` is {self.schedule!r}: {message}", field="schedule")

    def bind(self, loss: PipelineModel, binding: Binding) -> "BoundPipeline":
        """Returns the strategy with a model. Raises ConfigError for another loss, or a step that a pipeline cannot do."""
        loss = _model(loss)
        if binding.num_microbatches != self.schedule.num_microbatches:
            raise ConfigError(
                f"`num_microbatches` is {binding.num_microbatches}: must be the schedule's {self.schedule.num_microbatches}",
                field="num_microbatches",
            )
        if binding.grads_dtype != jnp.float32:
            raise ConfigError(f"`grads_dtype` is {binding.grads_dtype}: must be float32 with Pipelined", field="grads_dtype")
        check_choice("engine", self.engine, get_args(Engine))
        check_choice("shards", self.shards, get_args(fsdp.Sharded))
        return BoundPipeline.of(self.pipeline(loss, binding), self.shapes, self.engine)

    def in_fp8(self, model: Any, config: FP8Config, binding: Binding, batch: Tree) -> tuple[FP8Function, tuple[Tree, ...]]:
        """Returns a model's layers with products in FP8, and shapes of what they take besides parameters; `batch` is whole."""
        pipeline = self.pipeline(_model(model), binding)
        params = jax.eval_shape(lambda tree: pipeline.stack(*model.split(tree)), self.shapes)
        x, *context = pipeline.inputs(
            params, jax.eval_shape(partial(by_microbatch, num_microbatches=binding.num_microbatches), batch)
        )
        state = (binding.carried,) if jax.tree.leaves(binding.carried) else ()
        return FP8Function(pipeline.layers, config), (x, tuple(context), jax.eval_shape(lambda: jax.random.key(0)), *state)

    def pipeline(self, model: PipelineModel, binding: Binding) -> Pipeline:
        """Returns the program that plays the schedule with a model and the carried state that a step asks for."""
        num_layers, model = len(jax.eval_shape(model.split, self.shapes)[1]), self._reducing(model)
        state, kinds = (t.model if isinstance(t, WithHistory) else t for t in (binding.carried, binding.reductions))
        carried = Carried.of(model, state, kinds, num_layers)
        choices = {"compute_dtype": self.compute_dtype, "remat": self.remat, "carried": carried}
        pipeline = Pipeline.of(model, self.schedule, self.mesh, num_layers=num_layers, **choices)
        if binding.fp8 is not None:
            whole = binding.fp8.plan(self.shapes, *binding.microbatch)
            pipeline = pipeline.in_fp8(self.shapes, whole, binding.microbatch)
        if Axis.FSDP not in self.mesh.axis_names:
            return pipeline.shard_as(self.shapes, {})
        names = leaf_names(self.shapes)
        axes = fsdp.asked_axes(names, self.shard_rules, self.annotations)
        if self.experts > 1 or self.shards == "experts":
            shapes = dict(zip(names, jax.tree.leaves(self.shapes), strict=True))
            axes |= fsdp.expert_axes(shapes, axes, self.mesh.shape[Axis.FSDP], self.experts)
        return replace(pipeline.shard_as(self.shapes, axes), experts=self.experts, shards=self.shards)

    def _reducing(self, model: PipelineModel) -> PipelineModel:
        """Lets the pieces of a model reduce over the batch axes, or refuse to where each rank's program is its own."""
        is_split = self.engine == "dispatch" and num_data_ranks(self.mesh) > 1
        wrap = _on_one_replica if is_split else with_batch_axes
        return replace(model, embed=wrap(model.embed), layer=wrap(model.layer), head=wrap(model.head))


def _on_one_replica(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Makes a piece of a model raise a ConfigError if it reduces over a mesh axis."""

    def refused(axis: str) -> ConfigError:
        message = f"must be program for a model that reduces over the mesh axis {axis!r}"
        return ConfigError(f"`engine` is dispatch: {message}", field="engine")

    @functools.wraps(fn)
    def piece(*args: Tree) -> Tree:
        with refused_axes(refused):
            return fn(*args)

    return piece


def _model(loss: Any) -> PipelineModel:
    if not isinstance(loss, PipelineModel):
        raise ConfigError(f"`loss` is {loss!r}: must be a jgraph.PipelineModel with the strategy Pipelined", field="loss")
    return loss


@dataclass(frozen=True, eq=False)
class BoundPipeline:
    """`Pipelined` with a model.

    Attributes:
        pipeline: the program.
        packing: of a rank's layers.
        shapes: of the parameters as the program takes them.
        engine: as `Pipelined` has it.
    """

    pipeline: Pipeline
    packing: Packing
    shapes: Tree
    engine: Engine = "program"

    @classmethod
    def of(cls, pipeline: Pipeline, tree: Tree, engine: Engine = "program") -> "BoundPipeline":
        """Packs what is small, from the model's parameters as shapes."""
        params = jax.eval_shape(lambda tree: pipeline.stack(*pipeline.model.split(tree)), tree)
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
        # What is sharded is not packed: a pack of sharded parameters would be gathered to be taken apart.
        alone = leaf_names(own) if Axis.FSDP in pipeline.mesh.axis_names else ()
        return cls(pipeline, Packing.of(own, alone=alone), params, engine)

    @property
    def mesh(self) -> Mesh:
        return self.pipeline.mesh

    @property
    def is_matrix(self) -> Tree:
        outer = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), self.shapes["outer"])
        return {"outer": outer, "layers": self.packing.decay_mask()}

    def on(self, mesh: Mesh) -> "BoundPipeline":
        return replace(self, pipeline=replace(self.pipeline, mesh=mesh))

    def pack(self, tree: Tree) -> Tree:
        return self._packed(self.pipeline.stack(*self.pipeline.model.split(tree)))

    def unpack(self, params: Tree) -> Tree:
        return self.pipeline.model.join(*self.pipeline.unstack(self._unpacked(params)))

    def shardings(self, params: Tree) -> Tree:
        if Axis.FSDP not in self.pipeline.mesh.axis_names:
            return self.pipeline.shardings(params)
        shardings = self.pipeline.shardings(self.shapes)
        leaves = jax.tree.leaves(shardings["layers"])
        return shardings | {"layers": dict(zip(params["layers"], leaves, strict=True))}

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carried: Tree) -> tuple[Sums, Tree]:
        pipeline = self.pipeline
        key_of_step = key if pipeline.model.takes_key else None
        state, history = carried if isinstance(carried, WithHistory) else (carried, {})
        layers = pipeline.model.split_carried(state) if jax.tree.leaves(state) else []
        loss, grads, layers, history = pipeline.step(self._unpacked(params), batch, key_of_step, layers, history)
        return Sums(loss, jnp.ones((), jnp.float32), {}, self._joined(carried, layers, history)), self._packed(grads)

    def dispatched(self, params: Tree, carried: Tree, batch: Tree, key: Array, options: Mapping[str, Any]) -> Dispatched | None:
        if self.engine == "program":
            return None
        return dispatched(self.pipeline, params, carried, self._unpacked, batch, key, options)

    def collected(self, gradients: Dispatched, results: Tree, carried: Tree) -> tuple[Sums, Tree]:
        """Returns what `loss_and_grads` does, from what a call of the other engine left."""
        loss, grads, layers, history = gradients.collect(results)
        return Sums(loss, jnp.ones((), jnp.float32), {}, self._joined(carried, layers, history)), self._packed(grads)

    def _joined(self, before: Tree, layers: list[Tree], history: Tree) -> Tree:
        """Returns the carried state after a step, as it was before, from the layers' and the histories."""
        state = before.model if isinstance(before, WithHistory) else before
        after = self.pipeline.model.join_carried(layers) if layers else state
        return WithHistory(after, history) if isinstance(before, WithHistory) else after

    def _packed(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.pack)(params["layers"])}

    def _unpacked(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.unpack)(params["layers"])}
