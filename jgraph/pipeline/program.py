"""`Pipeline`: a model and a schedule as one function from parameters and microbatches to loss and gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.autodiff import Recompute, Split, split_backward
from jgraph.errors import ConfigError, OrderError
from jgraph.mesh import batch_axes
from jgraph.pipeline import aligned, general, sharding
from jgraph.pipeline.carried import Carried
from jgraph.pipeline.partition import PipelineModel, StageAssignment
from jgraph.pipeline.precision import FP8Precision, ModelPrecision, StagePrecision
from jgraph.pipeline.runtime import RankRuntime
from jgraph.pipeline.stage import AXIS, StageExecutor
from jgraph.precision.transform import FP8Trace
from jgraph.schedule.action import BACKWARD
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.tables import ScheduleTables, phases, tabulate
from jgraph.strategies import sharding as fsdp
from jgraph.strategies.sharding import ShardSpec
from jgraph.tree import expert_axis, is_router, leaf_names, path_name

Tree = Any
Runtime = Literal["auto", "aligned", "general"]
Remat = Literal["nothing", "wide", "layer"]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Plays a whole iteration but for the optimizer, as one SPMD program over the axes `data` and `pipe` of a mesh.

    With an axis `fsdp`, which shares the batch as `data` does, parameters come in and gradients go out sharded over it. Within
    a step a rank has its stages whole: they are gathered once and their gradients summed once, not for every microbatch.

    Attributes:
        model: in the pieces of a pipeline.
        schedule: what runs when; as many ranks as the mesh's `pipe` axis has. The aligned runtime takes wgrads newest first.
        layout: which layer is where.
        mesh: with the axes `data`, `pipe` and perhaps `fsdp`.
        compute_dtype: matrices of the layers, and those that the head reads, are cast to it once a step; None: no cast.
        runtime: `aligned` needs a schedule in whose ticks all ranks do the same; `general` plays any; `auto` takes the first
            where it can.
        remat: what of a layer is made again in its backward: `nothing`, `wide` products, the whole `layer` but for its input.
        axes: the axis that the axis `fsdp` shards of some parameters, as `shard_as` finds it.
        experts, shards: over how many devices of `fsdp` experts are spread, and what else is sharded.
        carried: what a layer carries.
        precision: Precision of the stages.
    """

    model: PipelineModel
    schedule: Schedule
    layout: StageAssignment
    mesh: Mesh
    compute_dtype: Any = None
    runtime: Runtime = "auto"
    remat: Remat = "nothing"
    axes: Mapping[str, int] = field(default_factory=dict)
    experts: int = 1
    shards: fsdp.Sharded = "everything"
    carried: Carried = field(default_factory=Carried)
    precision: StagePrecision = field(default_factory=ModelPrecision)

    @classmethod
    def of(cls, model: PipelineModel, schedule: Schedule, mesh: Mesh, *, num_layers: int, **choices: Any) -> "Pipeline":
        """Makes a pipeline of what goes together.

        Raises:
            OrderError: too few layers for the stages, or the schedule cannot be played by the runtime asked for.
            ConfigError: the mesh has another number of ranks than the schedule.
        """
        ranks = mesh.shape[AXIS]
        if ranks != schedule.num_ranks:
            raise ConfigError(f"the schedule has {schedule.num_ranks} ranks, but `pp` is {ranks}: must be equal", field="pp")
        # With the explicit axes of jax.make_mesh, arguments would have to lie where they belong before the call.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        pipeline = cls(model, schedule, StageAssignment.of(schedule, num_layers), mesh, **choices)
        if pipeline.runtime != "general":
            try:
                _check_aligned(schedule)
            except OrderError:
                if pipeline.runtime == "aligned":
                    raise
            else:
                return replace(pipeline, schedule=schedule.newest_first(), runtime="aligned")
        return replace(pipeline, runtime="general")

    def shard_as(self, tree: Tree, axes: Mapping[str, int]) -> Self:
        """Returns the pipeline with parameters sharded over `fsdp` along the axes that are asked for.

        Args:
            tree: the model's parameters, as shapes.
            axes: by the names of this tree, as `fsdp.asked_axes` gives them.

        Raises:
            ConfigError: one of them cannot be sharded along its axis in a pipeline.
        """
        ranks = self.mesh.shape.get(fsdp.AXIS, 1)
        return replace(self, axes=sharding.by_place(self.model, self.layout, tree, axes, ranks)) if ranks > 1 else self

    def with_precision(self, tree: Tree, whole: FP8Trace, args: Sequence[Tree]) -> Self:
        """Returns the pipeline with products of its layers in FP8.

        Args:
            tree: the model's parameters, as shapes.
            whole: of `layers`, with the recipe.
            args: what `layers` takes besides, as shapes.

        Raises:
            ConfigError: the recipe's `keep` or `blocks` mean only some of the layers.
        """
        own, (x, context, key, *carried) = jax.eval_shape(self.model.split, tree)[1][0], args
        more = [
            *context,
            *[key] * self.model.takes_key,
            *(jax.eval_shape(self.model.split_carried, state)[0] for state in carried),
        ]
        return replace(
            self, precision=FP8Precision.of(lambda own, *args: self.model.layer(self.cast(own), *args), own, whole, (x, *more))
        )

    def layers(self, tree: Tree, x: Array, context: tuple[Tree, ...], key: Array, *carried: Tree) -> Array:
        """Returns what all layers make of x, one after another, from the model's own parameters and carried state."""
        states = [self.model.split_carried(state) for state in carried]
        for i, own in enumerate(self.model.split(tree)[1]):
            keys = [jax.random.fold_in(key, i)] * self.model.takes_key
            y = self.model.layer(self.cast(own), x, *context, *keys, *(state[i] for state in states))
            x = y[0] if states else y
        return x

    def stack(self, outer: Tree, layers: list[Tree]) -> Tree:
        """Returns the parameters as the program takes them, from `outer` and one tree a layer."""
        return {"outer": outer, "layers": self.layout.stack(layers)}

    def unstack(self, params: Tree) -> tuple[Tree, list[Tree]]:
        """Inverts `stack`."""
        return params["outer"], self.layout.unstack(params["layers"])

    def specs(self, params: Tree) -> Tree:
        """Returns the PartitionSpec of every parameter. Raises ConfigError where `sharded` does not fit them."""
        names = leaf_names(params["outer"])
        for name in self.model.sharded:
            if name not in names:
                raise ConfigError(f"PipelineModel.sharded has {name!r}: must be one of {', '.join(names)}", field="pp")
        jax.tree_util.tree_map_with_path(self._check_divides, params["outer"])
        shards = self._shards(params)

        def of_outer(path: Any, shard: ShardSpec) -> PartitionSpec:
            names = {self._axis(path): AXIS, shard.axis: fsdp.AXIS}
            return PartitionSpec(*[names.get(i) for i in range(1 + max((i for i in names if i is not None), default=-1))])

        return {
            "outer": jax.tree_util.tree_map_with_path(of_outer, shards["outer"]),
            "layers": jax.tree.map(lambda shard: shard.spec(lead=(AXIS,)), shards["layers"]),
        }

    def shardings(self, params: Tree) -> Tree:
        """Returns the NamedSharding of every parameter."""
        return jax.tree.map(
            partial(NamedSharding, self.mesh), self.specs(params), is_leaf=lambda s: isinstance(s, PartitionSpec)
        )

    def loss_and_grads(self, params: Tree, inputs: Tree, key: Array | None = None) -> tuple[Array, Tree]:
        """Returns mean loss and mean gradients over all microbatches, as `step` does without carried state."""
        return self.step(params, inputs, key)[:2]

    def step(
        self, params: Tree, inputs: Tree, key: Array | None = None, carried: Sequence[Tree] = (), history: Tree = None
    ) -> tuple[Array, Tree, list[Tree], Tree]:
        """Returns mean loss, mean gradients, carried state and histories after all microbatches. Pure; to be jitted.

        Args:
            params: as `stack` gives them, sharded as `specs` says.
            inputs: leaves [M, B, ...]; B is spread over the axes `data` and `fsdp`.
            key: a random key of this step, folded for each microbatch and layer; layers then take a third argument.
            carried: the layers' state as the step begins.
            history: amax histories of products in FP8 as the step begins, of all layers; None for those before any step.

        Returns:
            Float32 scalar; float32 gradients as `params`; the layers' state, reduced; the histories.
        """
        run = partial(self._local, shards=self._shards(params), impl=None if key is None else jax.random.key_impl(key))
        out_specs = (PartitionSpec(), self.specs(params), PartitionSpec(), PartitionSpec())
        data = None if key is None else jax.random.key_data(key)
        if history is None:
            history = self.precision.state(self.layout.num_layers)
        return self._mapped(run, params, out_specs)(params, inputs, data, list(carried), history)

    def bytes_per_rank(self, params: Tree, inputs: Tree) -> dict[str, int]:
        """Predicts what a rank holds during a step besides parameters and optimizer state.

        Args:
            params, inputs: as `loss_and_grads` takes them; shapes are enough.

        Returns:
            Bytes of each pool; of `in flight`, what an action has made before it is in a pool; of `main_grad`; of `cast`, the
            parameters in `compute_dtype`, else those that padding computes with, and weights in FP8, as rows and columns; of
            `gathered`, those that an axis `fsdp` makes whole besides.
        """
        slots, sizes = self._tables().slots, self.slot_bytes(params, inputs)
        pools = {pool: slots[pool] * size for pool, size in sizes.items()}
        pools["in flight"] = sum(sizes[pool] for pool in ("forward_dgrad", "forward_wgrad", "stash"))
        ranks = self.mesh.shape[AXIS]

        def of(tree: Tree, dtype: Any) -> int:
            return sum(leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))

        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
        outer = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct((leaf.size // (1 if self._axis(path) is None else ranks),), leaf.dtype),
            params["outer"],
        )
        stages = [self._by_precision(layer) for stage in own for layer in stage]
        quantized, rest = ([part[i] for part in stages] for i in range(2))
        matrices = [leaf for leaf in jax.tree.leaves(rest) if leaf.ndim > 1]
        is_cast = self.compute_dtype not in (None, jnp.float32)
        cast = of([matrices, outer], self.compute_dtype) if is_cast else 0
        gathered = 0 if self.mesh.shape.get(fsdp.AXIS, 1) == 1 else of(outer if is_cast else [rest, outer], None)
        if not (is_cast or self.layout.is_even):
            cast = of([self._by_precision(stage[-1])[1] for stage in own], None)
        cast += 2 * of(quantized, jnp.int8)
        return pools | {"main_grad": of([own, outer], jnp.float32), "cast": cast, "gathered": gathered}

    def slot_bytes(self, params: Tree, inputs: Tree, *, layers: int | None = None) -> dict[str, int]:
        """Returns bytes of one slot of each pool, for a stage or so many layers."""
        x, *context = self.inputs(params, inputs)
        stage = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"][0])
        stage = [stage[0]] * layers if layers else stage
        spec = self.split(None, len(stage)).spec(self._stage_shapes(stage), x, *context)
        size = x.size * x.dtype.itemsize
        return spec.nbytes() | {"activation": size, "gradient": size, "loss": size}

    def layer_shapes(self, params: Tree, inputs: Tree) -> tuple[Tree, tuple[Any, ...]]:
        """Returns shapes of what a stage of one layer takes as its parameters, and of its inputs."""
        layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"][0][0])
        return self._stage_shapes([layer]), self.inputs(params, inputs)

    def _stage_shapes(self, layers: list[Tree]) -> Tree:
        """Returns shapes of the first argument of a stage, without prepared weights."""
        given = jax.eval_shape(self.cast, layers), {"carried": self.carried.bits(len(layers))}
        return given, jax.eval_shape(partial(self.precision.state, len(layers))), None

    def inputs(self, params: Tree, inputs: Tree) -> tuple[Any, ...]:
        """Returns shapes of what passes between stages, and of the context where layers take one."""
        # Embedding may use the axis, so it is traced as the program traces it.
        found: list[Any] = []
        outer_shards = self._shards(params)["outer"]

        def embed(params: Tree, inputs: Tree, *_: Any) -> None:
            first = jax.tree.map(lambda leaf: leaf[0], inputs)
            outer = jax.tree.map(lambda shard, part: shard.gather(part), outer_shards, params["outer"])
            found.extend((jax.eval_shape(self.model.embed, outer, first), *jax.eval_shape(self.model.context_of, first)))

        jax.eval_shape(self._mapped(embed, params, None), params, inputs, None, [], None)
        # Without the mesh, whose axes are not there where these are used.
        return tuple(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), found))

    def _mapped(self, run: Any, params: Tree, out_specs: Any) -> Any:
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(self.specs(params), PartitionSpec(None, batch_axes(self.mesh)), *[PartitionSpec()] * 3),
            out_specs=out_specs,
            # Idle ranks compute with what they have and throw it away, which the types of varying values cannot say.
            check_vma=False,
        )

    def _tables(self) -> ScheduleTables:
        return tabulate(self.schedule, writing="makers" if self.runtime == "aligned" else "all")

    def _local(
        self, params: Tree, inputs: Tree, key: Array | None, carried: list[Tree], history: Tree, *, shards: Tree, impl: Any
    ) -> tuple[Array, Tree, list[Tree], Tree]:
        """Plays the schedule on one rank."""
        batch, layout = batch_axes(self.mesh), self.layout
        data = tuple(axis for axis in batch if axis != fsdp.AXIS)
        layers = jax.tree.map(lambda leaf: leaf[0], params["layers"])
        outer = jax.tree.map(lambda shard, part: shard.gather(part), shards["outer"], params["outer"])
        if key is not None and any(self.mesh.shape[axis] > 1 for axis in batch):
            key = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=impl), lax.axis_index(batch)))
        table_CN = self.own(layout.layers())
        stages, states = [], self.carried.pick(carried, table_CN) if carried else {}
        for c, own in enumerate(layers):
            extra = {"carried": jax.tree.map(lambda leaf, c=c: leaf[c], states)}
            if not layout.is_even:
                extra["active"] = self.own(layout.active()[:, c, -1])
                # Zeros may have no derivative, and 0 times that is NaN: padding computes with the first layer's parameters.
                own = layers[c] = [*own[:-1], jax.tree.map(partial(jnp.where, extra["active"]), own[-1], own[0])]
            if key is not None:
                extra["first"] = table_CN[c, 0]
            whole = jax.tree.map(lambda shard, part: shard.gather(part), shards["layers"][c], self.cast(own))
            stages.append((whole, extra))
        function, head_outer = self.stage(impl, layout.layers_per_stage), self.cast(outer)
        first = jax.tree.map(lambda leaf: leaf[0], inputs)
        x = jax.eval_shape(self.model.embed, outer, first)
        context = jax.eval_shape(self.model.context_of, first)
        observed = self.precision.pick(history, table_CN)
        over = tuple(axis for axis in batch if axis == fsdp.AXIS and self.mesh.shape[axis] > 1)
        args = (stages[0], x, *context, *([] if key is None else [key]))
        weights = self.precision.prepare(function, args, layers, observed, shards["layers"], over)
        stages = list(zip(stages, observed, weights, strict=True))
        split = split_backward(function, has_aux=True, recompute=self.recompute)
        rank = StageExecutor(self.model, split, self.carried, outer, head_outer, stages, inputs, key, impl)
        runtime = RankRuntime(rank, self._tables(), layout.num_stages)
        state = (aligned if self.runtime == "aligned" else general).play(runtime)
        summed = jax.tree_util.tree_map_with_path(
            lambda path, g: g if self._axis(path) is not None else lax.psum(g, AXIS), state.outer
        )
        grads = {"outer": summed, "layers": [_without_padding(*given) for given, _ in state.grads]}
        if fsdp.AXIS in batch:
            grads = jax.tree.map(lambda shard, g: shard.scatter(g) / self.mesh.shape[fsdp.AXIS], shards, grads)
        # The mean is taken last: so a microbatch's loss is differentiated as it is, which histories and attached losses need.
        count = self.schedule.num_microbatches
        grads = jax.tree.map(lambda g: lax.pmean(g, data) / count, grads)
        loss = lax.pmean(lax.psum(state.loss, AXIS), batch) / count
        after = self.carried.finish(state.carried, self.schedule.num_microbatches, batch, layout) if carried else []
        histories = self.precision.finish([after for _, after in state.grads], batch, layout)
        return loss, grads | {"layers": jax.tree.map(lambda g: g[None], grads["layers"])}, after, histories

    def _shards(self, params: Tree) -> Tree:
        """Returns how every parameter is sharded over the axis `fsdp`."""
        ranks = self.mesh.shape.get(fsdp.AXIS, 1)
        if ranks == 1:
            return jax.tree.map(lambda _: ShardSpec(None), params)
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
        leaves, structure = jax.tree.flatten(params | {"layers": own})
        shapes = dict(zip(leaf_names(params), leaves, strict=True))
        taken = {f"outer/{name}": axis for name, axis in self.model.sharded.items()}
        experts = {name: self.experts for name, leaf in shapes.items() if expert_axis(name, leaf.ndim) is not None}
        choices: dict[str, Any] = {"experts": experts, "shards": self.shards}
        return structure.unflatten(fsdp.shard_specs(shapes, ranks, self.axes, taken=taken, pads=False, **choices).values())

    def split(self, impl: Any, layers: int = 1) -> Split:
        """Returns a stage of so many layers, split; `impl` is the kind of the keys, None where there are none."""
        return split_backward(self.stage(impl, layers), has_aux=True, recompute=self.recompute)

    def stage(self, impl: Any, layers: int) -> Any:
        """Returns the function of a stage for `split_backward`."""

        has_context = self.model.context is not None

        def stage(params: Tree, x: Array, *args: Tree) -> tuple[Array, Tree]:
            own, extra = params
            context, keys = args[:has_context], [jax.random.wrap_key_data(data, impl=impl) for data in args[has_context:]]
            return self.through(own, x, context, keys, extra.get("first"), extra["carried"], extra.get("active"))

        return self.precision.function(stage, layers)

    def _by_precision(self, layer: Tree) -> tuple[list[Any], list[Any]]:
        """Returns the parameters of a layer that are quantized once per step, and the others."""
        weights = self.precision.weights
        named = list(zip(leaf_names(layer), jax.tree.leaves(layer), strict=True))
        return [leaf for name, leaf in named if name in weights], [leaf for name, leaf in named if name not in weights]

    def of_rank(self, layers: Tree) -> Tree:
        """Returns a rank's layers as it computes with them, from arrays whose first axis is that of ranks."""
        return self.cast(jax.tree.map(lambda leaf: leaf[0], layers))

    def through(
        self,
        layers: Sequence[Tree],
        x: Array,
        context: Sequence[Tree],
        key: Sequence[Array],
        first: Any,
        bits: Tree,
        active: Array | None = None,
    ) -> tuple[Array, Tree]:
        """Returns x after consecutive layers, and their carried state with a first axis of layers.

        Args:
            layers: their parameters.
            x: the input of the first.
            context: of the microbatch, as `PipelineModel.context_of` gives it.
            key: of the microbatch, or nothing.
            first: number of the first layer, where there is a key.
            bits: the carried state before the step, as `Carried.pick` gives it.
            active: whether the last of them counts; None: it does.
        """
        after = []
        for j, own in enumerate(layers):
            keys = [jax.random.fold_in(one, first + j) for one in key]
            counts = active if j == len(layers) - 1 else None
            # Padding may have gradients even where nothing goes on from what it makes: of losses that it attaches.
            given = x if counts is None else jnp.where(counts, x, lax.stop_gradient(x))
            y = self._layer(own, given, *context, *keys, *(state := self.carried.at(bits, j)))
            if state:
                y, own_after = self.carried.taken(y)
                after.append(own_after)
            x = y if counts is None else jnp.where(counts, y, x)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *after) if after else {}

    def cast(self, tree: Tree) -> Tree:
        """Returns parameters as layers and head take them."""
        if self.compute_dtype is None:
            return tree

        def of(path: Any, p: Array) -> Array:
            return p.astype(self.compute_dtype) if p.ndim > 1 and not is_router(path_name(path)) else p

        return jax.tree_util.tree_map_with_path(of, tree)

    @property
    def recompute(self) -> Recompute:
        """Returns what the split of a stage makes again."""
        return "wide" if self.remat == "wide" else "elementwise"

    @property
    def _layer(self) -> Any:
        return jax.checkpoint(self.model.layer) if self.remat == "layer" else self.model.layer

    def own(self, table: Any) -> Array:
        """Returns this rank's row of a table."""
        return lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(AXIS), keepdims=False)

    def _axis(self, path: Any) -> int | None:
        return self.model.sharded.get(path_name(path))

    def _check_divides(self, path: Any, leaf: Any) -> None:
        axis, ranks = self._axis(path), self.mesh.shape[AXIS]
        if axis is not None and leaf.shape[axis] % ranks:
            raise ConfigError(
                f"axis {axis} of {path_name(path)} has {leaf.shape[axis]} rows for {ranks} ranks: must be divisible; see `pp`",
                field="pp",
            )


def _without_padding(grads: list[Tree], extra: Tree) -> list[Tree]:
    """Returns the gradients of a stage's layers, zeros for padding."""
    if "active" not in extra:
        return grads
    return [*grads[:-1], jax.tree.map(lambda g: jnp.where(extra["active"], g, jnp.zeros((), g.dtype)), grads[-1])]


def _check_aligned(schedule: Schedule) -> None:
    """Raises OrderError where the aligned runtime cannot play a schedule."""
    phases(tabulate(schedule, writing="makers").table)
    if any((order.kinds == BACKWARD).any() for order in schedule):
        raise OrderError(f"{schedule.name} has backwards that are not split; the aligned runtime plays dgrads and wgrads")
