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
from jgraph.pipeline._partition import AXIS, StageAssignment
from jgraph.precision.config import FP8Config
from jgraph.precision.loss import quantized
from jgraph.precision.scaling import AmaxHistory
from jgraph.precision.transform import FP8Function, FP8Trace, Product, Weights
from jgraph.types import Carried, Observed, Params, Tree, TreeOf

Trees: TypeAlias = Sequence[Tree]  # one tree for each argument, or for each chunk
Axes: TypeAlias = Sequence[str]
StageFunction: TypeAlias = Callable[..., tuple[Array, Carried]] | FP8Function
Fact = TypeVar("Fact")
Function = TypeVar("Function", bound=StageFunction)


@dataclass(frozen=True, eq=False, kw_only=True)
class StagePrecision(Generic[Function]):
    """Makes the stage functions, the observed state and the prepared weights of a pipeline; here for a model without FP8.

    Prepared weights are the FP8 copies of parameters for all microbatches of a step.
    """

    # Paths in a layer of the parameters that are quantized once per step; empty without FP8
    weights: frozenset[str] = frozenset()

    def function(self, stage: Callable[..., tuple[Array, Carried]], layers: int) -> StageFunction:
        """Converts `stage(given, *args)` of the SPMD engine to a function of ((given, observed, weights), *args)."""
        return lambda params, *args: stage(params[0], *args)

    def named_function(
        self,
        stage: Callable[..., tuple[Array, Carried]],
        layers: int,
        names: Sequence[str],  # of `given`: `layers/j/PATH` for parameter PATH of layer j; packed parameters have other names
    ) -> StageFunction:
        """Does the same for the MPMD engine, where `given` has the keys `layers` and `outer`."""
        return self.function(stage, layers)

    def state(self, layers: int) -> Observed:
        """Returns the observed state of `layers` layers before the first step; here {}."""
        return {}

    def pick(self, observed: Observed, layers_CN: Array) -> list[Observed]:
        """Selects the observed state of each chunk of a rank. `layers_CN` has the index of the layer at every place."""
        return [{}] * len(layers_CN)

    def finish(self, states: Sequence[Observed], axes: Axes, layout: StageAssignment) -> Observed:
        """Combines the states of all ranks to that of all layers, the same on all ranks. Collective over `axes` and `pipe`."""
        return {}

    def prepared_weights(
        self,
        function: Function,  # from `function`
        args: Trees,  # arrays or shapes of (given, x, context, key), without those that layers do not take, for one microbatch
        stages: Sequence[list[Params]],  # for each chunk, local shards of the parameters of each layer
        states: Sequence[Observed],
        shards: Sequence[list[TreeOf[Shard]]],  # not read if `axes` is empty
        axes: Axes,  # mesh axes that the parameters are sharded over
    ) -> Sequence[Weights | None]:
        """Quantizes and gathers the weights of every chunk once per step, under `jax.shard_map`; here None for each."""
        return [None] * len(stages)

    def weight_shapes(self, function: Function, args: Trees, observed: Observed) -> Weights | None:
        """Returns the shapes of the prepared weights of a chunk. `args` as in `prepared_weights`, but not sharded."""
        return None

    def first_weights(
        self,
        function: Function,  # from `named_function`
        args: Trees,
        weights: Sequence[Fact] | None,  # from `prepared_weights`, or anything in their place, such as numbers
        share: Fraction,  # layers of the stage per layer of the chunk
    ) -> Sequence[Fact | None] | None:
        """Selects the weights of a stage with fewer layers than the chunk, or with an embedding, for the MPMD engine."""
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class FP8Precision(StagePrecision[FP8Function]):
    """The precision of layers with matmuls in FP8."""

    config: FP8Config
    kept: tuple[str, ...]  # paths of the parameters of a layer that are not quantized, with `/` between keys
    # The entries of each layer in the amax histories of the model, int32 [L, S]; a matmul in a scan has one per iteration
    entries: np.ndarray
    is_stacked: bool  # one array holds a weight of all layers, which then has one scale
    num_losses: int  # that are averaged into the loss of a batch: microbatches times data ranks

    @classmethod
    def from_trace(cls, layer: Callable[..., Tree], params: Params, whole: FP8Trace, args: Trees) -> Self:
        """Finds the matmuls of `layer(params, *args)`. `whole` is the trace of all layers in order, and has the recipe."""
        config = replace(whole.config, keep=(), blocks="all", first=1, last=1)
        trace = FP8Function(layer, config).plan(params, *args)
        num = len(trace.products)
        layers, rest = divmod(len(whole.products), num)
        assert rest == 0, "layers have the same matmuls"
        kept = []
        repeats = []
        firsts = []
        for i, product in enumerate(trace.products):
            alike = whole.products[i::num]
            _check_alike(alike)
            if not alike[0].kept:
                repeats.append(product.repeats)
                firsts.append(i)
            elif not product.kept:
                kept.append(trace.weight_of(i))
        is_stacked = len({whole.weight_of(firsts[0] + num * i) for i in range(layers)}) < layers
        return cls(
            weights=frozenset(map(trace.weight_of, firsts)),
            config=config,
            kept=tuple(kept),
            entries=_entries(repeats, layers, is_stacked=is_stacked),
            is_stacked=is_stacked,
            num_losses=whole.num_losses,
        )

    def function(self, stage: Callable[..., tuple[Array, Carried]], layers: int) -> FP8Function:
        names = [f"0/{j}/{path}".rstrip("/") for j in range(layers) for path in self.kept]
        return FP8Function(stage, replace(self.config, keep=tuple(map(glob.escape, names))), self.num_losses)

    def state(self, layers: int) -> Observed:
        return {} if self.config.recipe != "delayed" else AmaxHistory.zeros(layers * self.entries.shape[1], self.config.history)

    def pick(self, observed: Observed, layers_CN: Array) -> list[Observed]:
        entries = jnp.asarray(self.entries)[layers_CN]
        return [jax.tree.map(lambda leaf, at=at: jnp.take(leaf, at.ravel(), axis=-2), observed) for at in entries]

    def finish(self, states: Sequence[Observed], axes: Axes, layout: StageAssignment) -> Observed:
        """Takes the maximum over `axes`, all-gathers the entries of all ranks over `pipe`, and drops padding."""
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

    def prepared_weights(
        self,
        function: FP8Function,
        args: Trees,
        stages: Sequence[list[Params]],
        states: Sequence[Observed],
        shards: Sequence[list[TreeOf[Shard]]],
        axes: Axes,
    ) -> Sequence[Weights]:
        """Quantizes local shards before they are gathered. Collective over `axes`, and also over `pipe` if `is_stacked`."""
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
        return jax.eval_shape(function.quantize, args[0], observed, *args[1:])

    def named_function(self, stage: Callable[..., tuple[Array, Carried]], layers: int, names: Sequence[str]) -> FP8Function:
        weights = {f"layers/{j}/{path}".rstrip("/") for j in range(layers) for path in self.weights}
        config = replace(self.config, keep=tuple(glob.escape(name) for name in names if name not in weights))
        return FP8Function(stage, config, self.num_losses)

    def first_weights(
        self, function: FP8Function, args: Trees, weights: Sequence[Fact] | None, share: Fraction
    ) -> Sequence[Fact | None]:
        assert weights is not None, "`prepared_weights` returns weights"
        # The matmuls of an embedding come first and are not in FP8.
        first = weights[: int(len(weights) * share)]
        return [*[None] * (len(function.plan(*args).traced.sites) - len(first)), *first]


def _check_alike(products: Sequence[Product]) -> None:
    """Raises ConfigError if the recipe selects a matmul only in some of the layers."""
    if len({bool(product.kept) for product in products}) == 1:
        return
    some = next(product for product in products if product.kept)
    other = next(product for product in products if not product.kept)
    name = "fp8.blocks" if "fp8.blocks" in some.kept else "fp8.keep"
    must = "must select the same matmuls in all layers of a pipeline"
    raise ConfigError(f"`{name}` keeps {some.name} but not {other.name}: {must}", field=name)


def _entries(repeats: Sequence[int], layers: int, *, is_stacked: bool) -> np.ndarray:
    """Returns the entries of each layer, int32 [L, S], for matmuls that run this often in a layer."""
    entry = np.arange(sum(repeats))
    layer = np.arange(layers)[:, None]
    if not is_stacked:
        return (entry + len(entry) * layer).astype(np.int32)
    # Like in a scan, the entries of a matmul are consecutive for all layers.
    start = np.repeat(np.cumsum([0, *repeats[:-1]]), repeats)
    count = np.repeat(repeats, repeats)
    return (layers * start + entry - start + count * layer).astype(np.int32)
