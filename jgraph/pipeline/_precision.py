"""One interface for pipeline stages with and without FP8 matmuls.

All ranks run one program, so a matmul is in FP8 in every layer or in no layer. Each rank holds the amax histories of all
layers, in the order of the matmuls of the whole model. A rank selects the entries of its layers, and takes the maximum over its
dgrads. At the end of the step, the ranks combine their entries.
"""

# P ranks, C chunks, N places (layers of the longest stage), L layers, S entries of a layer in a history

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError
from jgraph.kernels import amax
from jgraph.layout import Shard
from jgraph.pipeline.partition import AXIS, StageAssignment
from jgraph.precision.config import FP8Config
from jgraph.precision.loss import quantized
from jgraph.precision.scaling import AmaxHistory
from jgraph.precision.transform import FP8Function, FP8Trace, Weights
from jgraph.types import Carried, Observed, Params, Tree, TreeOf

Trees: TypeAlias = Sequence[Tree]  # one tree for each argument, or for each chunk
Axes: TypeAlias = Sequence[str]
StageFunction: TypeAlias = Callable[..., tuple[Array, Carried]] | FP8Function
Fact = TypeVar("Fact")
Function = TypeVar("Function", bound=StageFunction)


@dataclass(frozen=True, eq=False, kw_only=True)
class StagePrecision(Generic[Function]):
    """Makes the stage functions, the observed state and the prepared weights of a pipeline; here for a model without FP8.

    Prepared weights are the FP8 copies of parameters for all microbatches of a step. A stage function takes them with its
    parameters. Letters in shapes: C chunks of a rank, N places (layers of the longest stage).

    Attributes:
        weights: Paths of the parameters of a layer that are quantized once per step, with `/` between keys; empty without FP8.
    """

    weights: frozenset[str] = frozenset()

    def function(self, stage: Callable[..., tuple[Array, Carried]], layers: int) -> StageFunction:
        """Converts a stage to a function that also takes the observed state and the prepared weights.

        Args:
            stage: `stage(given, *args)`, where `given` is the pair (list of the parameters of each layer, other inputs).
            layers: Number of layers of the stage.

        Returns:
            A function of `((given, observed, weights), *args)`, for `split_backward`. Here it ignores `observed` and `weights`.
        """
        return lambda params, *args: stage(params[0], *args)

    def named_function(self, stage: Callable[..., tuple[Array, Carried]], layers: int, names: Sequence[str]) -> StageFunction:
        """Converts a stage with parameters in a tree with the key `layers` to a function that also takes state and weights.

        Args:
            stage: `stage(given, *args)`, where `given` is a tree of parameters.
            layers: Number of layers of the stage.
            names: Names of all parameters in `given`. Parameter PATH of layer j is named `layers/j/PATH`; packed parameters
                have other names.

        Returns:
            A function of `((given, observed, weights), *args)`. Here it ignores `observed` and `weights`.
        """
        return self.function(stage, layers)

    def state(self, layers: int) -> Observed:
        """Returns the observed state of `layers` layers before the first step; here {}."""
        return {}

    def pick(self, observed: Observed, layers_CN: Array) -> list[Observed]:
        """Selects the observed state of each chunk of a rank from the state of all layers.

        Args:
            observed: The observed state of all layers.
            layers_CN: Index of the layer at every place of a rank, int32 [C, N].

        Returns:
            A list with the state of each chunk; here {} for each.
        """
        return [{}] * len(layers_CN)

    def finish(self, states: Sequence[Observed], axes: Axes, layout: StageAssignment) -> Observed:
        """Combines the observed state of all ranks. Call it under `jax.shard_map`: collective over `axes` and the axis `pipe`.

        Args:
            states: The observed state of each chunk of this rank, merged over microbatches.
            axes: Names of the mesh axes of the data ranks, to reduce over by maximum; empty without them.
            layout: The assignment of layers to ranks.

        Returns:
            The observed state of all layers, the same on all ranks; here {}, without a collective.
        """
        return {}

    def prepare(
        self,
        function: Function,
        args: Trees,
        stages: Sequence[list[Params]],
        states: Sequence[Observed],
        shards: Sequence[list[TreeOf[Shard]]],
        axes: Axes,
    ) -> Sequence[Weights | None]:
        """Quantizes and gathers the weights of every chunk, once per step. Call it under `jax.shard_map`.

        Args:
            function: The stage function, from `function`.
            args: Arrays or shapes of the arguments of a stage for one microbatch. The first is the pair of parameters and other
                inputs of a stage, without observed state and weights.
            stages: Local shards of the parameters of each chunk, one tree per layer.
            states: Observed state of each chunk.
            shards: The `Shard` of the parameters of each chunk; not read if `axes` is empty.
            axes: Mesh axes that the parameters are sharded over; empty if they are not sharded.

        Returns:
            The weights of each chunk; here None for each.
        """
        return [None] * len(stages)

    def weight_shapes(self, function: Function, args: Trees, observed: Observed) -> Weights | None:
        """Returns the shapes of the prepared weights of one chunk.

        Args:
            function: The stage function, as the method `function` returns it.
            args: Shapes of the arguments of a stage for one microbatch. The first is the pair of unsharded parameters and other
                inputs of a stage, without observed state and weights.
            observed: Shapes of the observed state of the chunk.

        Returns:
            A tree of shapes; here None.
        """
        return None

    def first_weights(
        self, function: Function, args: Trees, weights: Sequence[Fact] | None, share: Fraction
    ) -> Sequence[Fact | None] | None:
        """Selects the weights of the first layers of a chunk, for a stage with fewer layers or with an embedding.

        Args:
            function: The stage, from `named_function`.
            args: Shapes of the arguments of the stage. The first are its parameters, without observed state and weights.
            weights: The weights of the chunk from `prepare`, or anything in their place, such as numbers.
            share: Number of layers of the stage divided by the number of layers of the chunk.

        Returns:
            The weights in the order of the matmuls of the stage; here None.
        """
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class FP8Precision(StagePrecision[FP8Function]):
    """The precision of layers with matmuls in FP8.

    Attributes:
        config: The recipe.
        kept: Paths of the parameters of a layer that are not quantized, with `/` between keys.
        entries: Indices of the entries of each layer in the amax histories of the model, int32 [L, S] for L layers with S
            matmuls in FP8 (a matmul in a scan counts once per iteration).
        is_stacked: True if one array holds a weight of all layers, which then has one scale.
        num_losses: Number of losses that are averaged into the loss of a batch: microbatches times data ranks.
    """

    config: FP8Config
    kept: tuple[str, ...]
    entries: np.ndarray
    is_stacked: bool
    num_losses: int

    @classmethod
    def of(cls, layer: Callable[..., Tree], params: Params, whole: FP8Trace, args: Trees) -> Self:
        """Finds the matmuls of a layer.

        Args:
            layer: `layer(params, *args)` of one layer. It is traced.
            params: Shapes of the parameters of a layer.
            whole: The trace of all layers in order, which has the recipe.
            args: Shapes of the other arguments of a layer.

        Returns:
            The precision of all layers.

        Raises:
            ConfigError: If `keep` or `blocks` of the recipe select a matmul only in some of the layers, or no matmul can be in
                FP8.
        """
        config = replace(whole.config, keep=(), blocks="all", first=1, last=1)
        trace = FP8Function(layer, config).plan(params, *args)
        products, num = whole.products, len(trace.products)
        assert len(products) % num == 0, "layers have the same matmuls"
        kept, repeats, firsts = [], [], []
        for i, product in enumerate(trace.products):
            alike = products[i::num]
            if len({bool(p.kept) for p in alike}) > 1:
                some, other = next(p for p in alike if p.kept), next(p for p in alike if not p.kept)
                name = "fp8.blocks" if "fp8.blocks" in some.kept else "fp8.keep"
                must = "must select the same matmuls in all layers of a pipeline"
                raise ConfigError(f"`{name}` keeps {some.name} but not {other.name}: {must}", field=name)
            if not alike[0].kept:
                repeats.append(product.repeats)
                firsts.append(i)
            elif not product.kept:
                kept.append(trace.weight_of(i))
        weights = frozenset(map(trace.weight_of, firsts))
        layers = len(products) // num
        is_stacked = len({whole.weight_of(firsts[0] + num * i) for i in range(layers)}) < layers
        entry, each = np.arange(sum(repeats)), np.arange(layers)[:, None]
        if is_stacked:  # Like in a scan, the entries of a matmul are consecutive for all layers.
            start, count = np.repeat(np.cumsum([0, *repeats[:-1]]), repeats), np.repeat(repeats, repeats)
            entries = layers * start + entry - start + count * each
        else:
            entries = entry + len(entry) * each
        return cls(
            weights=weights,
            config=config,
            kept=tuple(kept),
            entries=entries.astype(np.int32),
            is_stacked=is_stacked,
            num_losses=whole.num_losses,
        )

    def function(self, stage: Callable[..., tuple[Array, Carried]], layers: int) -> FP8Function:
        """Converts a stage to an FP8 function that does not quantize the parameters in `kept`.

        Args:
            stage: `stage(given, *args)`, where `given` is the pair (list of the parameters of each layer, other inputs).
            layers: Number of layers of the stage.

        Returns:
            The function, for `split_backward`. Its first argument is (given, observed, weights).
        """
        names = [f"0/{j}/{path}".rstrip("/") for j in range(layers) for path in self.kept]
        return FP8Function(stage, replace(self.config, keep=tuple(map(glob.escape, names))), self.num_losses)

    def state(self, layers: int) -> Observed:
        """Returns the observed state of `layers` layers before the first step.

        This is an `AmaxHistory` of zeros, with leaves float32 [H, layers * S, 3] and [layers * S, 3] for H steps and S matmuls
        of a layer; {} for current scaling.
        """
        return {} if self.config.recipe != "delayed" else AmaxHistory.zeros(layers * self.entries.shape[1], self.config.history)

    def pick(self, observed: Observed, layers_CN: Array) -> list[Observed]:
        """Returns a list with the amax history of each chunk: the entries of its layers.

        Args:
            observed: The amax history of all layers; {} for current scaling, which is returned for each chunk.
            layers_CN: Index of the layer at every place of a rank, int32 [C, N].
        """
        entries = jnp.asarray(self.entries)[layers_CN]
        return [jax.tree.map(lambda leaf, of=of: jnp.take(leaf, of.ravel(), axis=-2), observed) for of in entries]

    def finish(self, states: Sequence[Observed], axes: Axes, layout: StageAssignment) -> Observed:
        """Takes the maximum over `axes`, all-gathers the entries of all ranks over `pipe`, and drops padding.

        Args:
            states: The amax history of each chunk of this rank.
            axes: Names of the mesh axes of the data ranks; empty without them.
            layout: The assignment of layers to ranks.

        Returns:
            The amax history of all layers, the same on all ranks; {} for current scaling.
        """
        width = self.entries.shape[1]
        source = np.zeros(self.entries.size, np.int32)
        for entries, (rank, chunk, place) in zip(self.entries, layout.places(), strict=True):
            first = ((rank * layout.num_chunks + chunk) * layout.layers_per_stage + place) * width
            source[entries] = first + np.arange(width)

        def whole(*leaves: Array) -> Array:
            of_rank = jnp.stack([jnp.moveaxis(leaf, -2, 0) for leaf in leaves])
            gathered = lax.all_gather(lax.pmax(of_rank, tuple(axes)) if axes else of_rank, AXIS)
            return jnp.moveaxis(gathered.reshape(-1, *gathered.shape[3:])[source], 0, -2)

        return jax.tree.map(whole, *states)

    def prepare(
        self,
        function: FP8Function,
        args: Trees,
        stages: Sequence[list[Params]],
        states: Sequence[Observed],
        shards: Sequence[list[TreeOf[Shard]]],
        axes: Axes,
    ) -> Sequence[Weights]:
        """Quantizes the local shards before they are gathered over `axes`. Call it under `jax.shard_map`.

        Collective over `axes`, and also over `pipe` if `is_stacked`: a stacked weight of all layers has one scale.

        Args:
            function: The stage function, from `function`.
            args: Arrays or shapes of the arguments of a stage for one microbatch, without observed state and weights.
            stages: Local shards of the parameters of each chunk, one tree per layer.
            states: The amax history of each chunk; {} for current scaling.
            shards: The `Shard` of the parameters of each chunk; not read if `axes` is empty.
            axes: Mesh axes that the parameters are sharded over; empty if they are not sharded.

        Returns:
            For each chunk, a list with the quantized weight of each matmul; None for a matmul that is not in FP8.
        """
        plan = function.plan(*args)
        named = [dict(zip(plan.traced.names, jax.tree.leaves(stage), strict=False)) for stage in stages]
        leaves = len(named[0]) // len(stages[0])
        of_all: dict[int, Array] = {}

        def over_layers(name: str, _: Array) -> Array:
            i = plan.traced.names.index(name) % leaves
            if i not in of_all:
                local = [amax(parts[other]) for parts in named for other in list(parts)[i::leaves]]
                of_all[i] = lax.pmax(jnp.max(jnp.stack(local)), (AXIS, *axes))
            return of_all[i]

        over = over_layers if self.is_stacked else (lambda _, local: lax.pmax(local, tuple(axes))) if axes else None
        weights = []
        for parts, state, of_stage in zip(named, states, shards, strict=True):
            sharded = dict(zip(parts, jax.tree.leaves(of_stage), strict=True)) if axes else {}
            weights.append(quantized(plan, parts, state, sharded, over)())
        return weights

    def weight_shapes(self, function: FP8Function, args: Trees, observed: Observed) -> Weights:
        """Returns the shapes of the quantized weight of each matmul of a chunk, without computing them.

        Args:
            function: The stage function, as the method `function` returns it.
            args: Shapes of the arguments of a stage for one microbatch, without observed state and weights.
            observed: Shapes of the amax history of the chunk; {} for current scaling.

        Returns:
            A list with the shapes of each weight; None for a matmul that is not in FP8.
        """
        return jax.eval_shape(function.quantize, args[0], observed, *args[1:])

    def named_function(self, stage: Callable[..., tuple[Array, Carried]], layers: int, names: Sequence[str]) -> FP8Function:
        """Converts a stage to an FP8 function that quantizes only the parameters `layers/j/PATH` with PATH in `weights`.

        Args:
            stage: `stage(given, *args)`, where `given` is a tree of parameters with the key `layers`.
            layers: Number of layers of the stage.
            names: Names of all parameters in `given`.

        Returns:
            The function, for `split_backward`. Its first argument is (given, observed, weights).
        """
        weights = {f"layers/{j}/{path}".rstrip("/") for j in range(layers) for path in self.weights}
        config = replace(self.config, keep=tuple(glob.escape(name) for name in names if name not in weights))
        return FP8Function(stage, config, self.num_losses)

    def first_weights(
        self, function: FP8Function, args: Trees, weights: Sequence[Fact] | None, share: Fraction
    ) -> Sequence[Fact | None]:
        """Selects the weights of the first layers of a chunk, with None for each matmul of an embedding in front.

        The matmuls of an embedding come first and are not in FP8.

        Args:
            function: The stage, from `named_function`.
            args: Shapes of the arguments of the stage, without observed state and weights.
            weights: One entry per matmul of the chunk, from `prepare`, or anything in its place.
            share: Number of layers of the stage divided by the number of layers of the chunk.

        Returns:
            One entry per matmul of the stage.
        """
        assert weights is not None, "`prepare` returns weights"
        first = weights[: int(len(weights) * share)]
        return [*[None] * (len(function.plan(*args).traced.sites) - len(first)), *first]
