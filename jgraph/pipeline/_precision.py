"""The precision of the stages of a pipeline: as the model is written, or with matmuls in FP8, behind one interface.

All ranks run one program, so a matmul is in FP8 in every layer or in no layer. Each rank holds the amax histories of all
layers, in the order of the matmuls in the whole model. A rank selects the entries of its layers, and takes the maximum over its
dgrads. At the end of the step, the ranks combine their entries.
"""

# P ranks, C chunks, N places of a stage, L layers, S entries of a layer in a history

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError
from jgraph.kernels import amax
from jgraph.pipeline.partition import AXIS, StageAssignment, Tree
from jgraph.precision.config import FP8Config
from jgraph.precision.scaling import AmaxHistory
from jgraph.precision.transform import FP8Function, FP8Trace, Weights
from jgraph.strategies import sharding as fsdp

Trees: TypeAlias = Sequence[Tree]  # one tree for each argument, or for each chunk
Axes: TypeAlias = Sequence[str]


@dataclass(frozen=True, eq=False, kw_only=True)
class StagePrecision:
    """The precision of a model without FP8. A subclass overrides every method.

    A precision makes stage functions, observed state, and the weights that a step prepares before the schedule.

    Attributes:
        weights: Paths of the parameters of a layer that are quantized once per step.
    """

    weights: frozenset[str] = frozenset()

    def function(self, stage: Callable[..., Tree], layers: int) -> Any:
        """Returns a stage for `split_backward`. Its first argument is `(given, observed, weights)`."""
        return lambda params, *args: stage(params[0], *args)

    def named_function(self, stage: Callable[..., Tree], layers: int, names: Sequence[str]) -> Any:
        """Returns a stage like `function`, for parameters with these names.

        The leaf of parameter `path` of layer j is `layers/j/path`.
        """
        return self.function(stage, layers)

    def state(self, layers: int) -> Tree:
        """Returns the initial observed state of a number of layers."""
        return {}

    def pick(self, observed: Tree, layers_CN: Array) -> list[Tree]:
        """Returns the observed state of each chunk of a rank, from the state of all layers and a table of its layers."""
        return [{}] * len(layers_CN)

    def finish(self, states: Trees, axes: Axes, layout: StageAssignment) -> Tree:
        """Returns the observed state of all layers.

        Args:
            states: The observed state of each chunk of this rank.
            axes: Mesh axes to reduce over.
            layout: The assignment of layers to ranks.
        """
        return {}

    def prepare(self, function: Any, args: Trees, stages: Trees, states: Trees, shards: Trees, axes: Axes) -> list[Any]:
        """Returns the gathered weights of every chunk.

        Args:
            function: The stage function.
            args: Its arguments for one microbatch; the first is the pair of parameters and other inputs of a stage.
            stages: For each chunk, the shards of its parameters on this device.
            states: For each chunk, the observed state.
            shards: For each chunk, the shard specs of the parameters.
            axes: Mesh axes that the parameters are sharded over.
        """
        return [None] * len(stages)

    def weight_shapes(self, function: Any, args: Trees, observed: Tree) -> Any:
        """Returns the shapes of the weights of one chunk. Takes the arguments of `prepare` for one chunk, as shapes."""
        return None

    def first_weights(self, function: Any, args: Trees, weights: Any, share: Fraction) -> Any:
        """Returns the weights of the first layers of a chunk, in the order of the matmuls of a shorter stage.

        Args:
            function: The shorter stage, from `named_function`.
            args: Shapes of its arguments.
            weights: Weights of the chunk, as `prepare` returns them for a chunk without an embedding.
            share: Number of layers of the shorter stage over that of the chunk.
        """
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class FP8Precision(StagePrecision):
    """The precision of layers with matmuls in FP8.

    Attributes:
        config: The recipe.
        kept: Paths of the parameters of a layer with matmuls that stay in their own dtype.
        entries: For each layer, the indices of its entries in the histories, int32 [L, S].
        is_stacked: True if one array holds a weight of all layers. It has one scale.
        num_losses: Number of losses that are averaged into the loss of a batch.
    """

    config: FP8Config
    kept: tuple[str, ...]
    entries: np.ndarray
    is_stacked: bool
    num_losses: int

    @classmethod
    def of(cls, layer: Callable[..., Any], own: Tree, whole: FP8Trace, args: Trees) -> Self:
        """Finds the matmuls of a layer.

        Args:
            layer: `layer(own, *args)`.
            own: Shapes of the parameters of a layer.
            whole: The plan of all layers in order.
            args: Shapes of the other arguments.

        Raises:
            ConfigError: If `keep` or `blocks` of the recipe select only some of the layers.
        """
        config = replace(whole.config, keep=(), blocks="all")
        one = FP8Function(layer, config).plan(own, *args)
        of_layer, num = whole.products, len(one.products)
        assert len(of_layer) % num == 0, "layers have the same matmuls"
        kept, repeats, firsts = [], [], []
        for i, product in enumerate(one.products):
            alike = of_layer[i::num]
            if len({bool(p.kept) for p in alike}) > 1:
                some, other = next(p for p in alike if p.kept), next(p for p in alike if not p.kept)
                name = "fp8.blocks" if "fp8.blocks" in some.kept else "fp8.keep"
                must = "must select the same matmuls in all layers of a pipeline"
                raise ConfigError(f"`{name}` keeps {some.name} and not {other.name}: {must}", field=name)
            if not alike[0].kept:
                repeats.append(product.repeats)
                firsts.append(i)
            elif not product.kept:
                kept.append(one.weight_of(i))
        weights = frozenset(map(one.weight_of, firsts))
        layers = len(of_layer) // num
        is_stacked = len({whole.weight_of(firsts[0] + num * i) for i in range(layers)}) < layers
        own, each = np.arange(sum(repeats)), np.arange(layers)[:, None]
        if is_stacked:  # As in a scan: the entries of a matmul are consecutive for all layers.
            start, count = np.repeat(np.cumsum([0, *repeats[:-1]]), repeats), np.repeat(repeats, repeats)
            entries = layers * start + own - start + count * each
        else:
            entries = own + len(own) * each
        return cls(
            weights=weights,
            config=config,
            kept=tuple(kept),
            entries=entries.astype(np.int32),
            is_stacked=is_stacked,
            num_losses=whole.num_losses,
        )

    def function(self, stage: Callable[..., Tree], layers: int) -> FP8Function:
        names = [f"0/{j}/{path}".rstrip("/") for j in range(layers) for path in self.kept]
        return FP8Function(stage, replace(self.config, keep=tuple(map(glob.escape, names))), self.num_losses)

    def state(self, layers: int) -> Tree:
        return {} if self.config.recipe == "current" else AmaxHistory.zeros(layers * self.entries.shape[1], self.config.history)

    def pick(self, observed: Tree, layers_CN: Array) -> list[Tree]:
        entries = jnp.asarray(self.entries)[layers_CN]
        return [jax.tree.map(lambda leaf, of=of: jnp.take(leaf, of.ravel(), axis=-2), observed) for of in entries]

    def finish(self, states: Trees, axes: Axes, layout: StageAssignment) -> Tree:
        width = self.entries.shape[1]
        where = np.zeros(self.entries.size, np.int32)
        for own, (rank, chunk, place) in zip(self.entries, layout.places(), strict=True):
            first = ((rank * layout.num_chunks + chunk) * layout.layers_per_stage + place) * width
            where[own] = first + np.arange(width)

        def whole(*leaves: Array) -> Array:
            of_rank = jnp.stack([jnp.moveaxis(leaf, -2, 0) for leaf in leaves])
            every = lax.all_gather(lax.pmax(of_rank, tuple(axes)) if axes else of_rank, AXIS)
            return jnp.moveaxis(every.reshape(-1, *every.shape[3:])[where], 0, -2)

        return jax.tree.map(whole, *states)

    def prepare(
        self, function: FP8Function, args: Trees, stages: Trees, states: Trees, shards: Trees, axes: Axes
    ) -> list[Weights]:
        plan = function.plan(*args)
        named = [dict(zip(plan.names, jax.tree.leaves(stage), strict=False)) for stage in stages]
        leaves = len(named[0]) // len(stages[0])
        of_all: dict[int, Array] = {}

        def over_layers(name: str, _: Array) -> Array:
            i = plan.names.index(name) % leaves
            if i not in of_all:
                found = [amax(parts[other]) for parts in named for other in list(parts)[i::leaves]]
                of_all[i] = lax.pmax(jnp.max(jnp.stack(found)), (AXIS, *axes))
            return of_all[i]

        over = over_layers if self.is_stacked else (lambda _, found: lax.pmax(found, tuple(axes))) if axes else None
        made = []
        for parts, state, own in zip(named, states, shards, strict=True):
            scales, arrays = plan.scales(parts, state, over), parts
            if axes:
                of: Mapping[str, fsdp.ShardSpec] = dict(zip(parts, jax.tree.leaves(own), strict=True))
                arrays = {name: of[name].gather(part) for name, part in plan.cast(parts, scales).items()}
            made.append(plan.views(arrays, scales))
        return made

    def weight_shapes(self, function: FP8Function, args: Trees, observed: Tree) -> Weights:
        return jax.eval_shape(function.quantize, args[0], observed, *args[1:])

    def named_function(self, stage: Callable[..., Tree], layers: int, names: Sequence[str]) -> FP8Function:
        weights = {f"layers/{j}/{path}".rstrip("/") for j in range(layers) for path in self.weights}
        config = replace(self.config, keep=tuple(glob.escape(name) for name in names if name not in weights))
        return FP8Function(stage, config, self.num_losses)

    def first_weights(self, function: FP8Function, args: Trees, weights: list[Any], share: Fraction) -> list[Any]:
        own = weights[: int(len(weights) * share)]
        # The matmuls of an embedding come first. They are not in FP8.
        return [None] * (len(function.plan(*args).sites) - len(own)) + own
