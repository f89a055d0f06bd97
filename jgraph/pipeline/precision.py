"""The precision of a pipeline's stages: as the model computes, or with matmuls in FP8, behind one interface.

All ranks run one program, so a matmul is in FP8 in every layer or in none. Each rank holds the amax histories of all layers,
in the order of the matmuls in the whole model. A rank selects the entries of its layers, and takes the maximum over its
dgrads. At the end of the step, the ranks combine their entries.
"""

# P ranks, C chunks, N places of a stage, L layers, S entries of a layer in a history

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError
from jgraph.kernels import amax
from jgraph.mesh import Axis
from jgraph.pipeline.partition import StageAssignment
from jgraph.precision.config import FP8Config
from jgraph.precision.scaling import AmaxHistory, FP8Array
from jgraph.precision.transform import FP8Function, FP8Trace
from jgraph.strategies import sharding as fsdp

Tree = Any


class StagePrecision(Protocol):
    """Makes stage functions of `(given, observed, weights)`, the work of a step before the schedule, and the observed state.

    Attributes:
        weights: Paths of the parameters of a layer that are quantized once per step.
    """

    @property
    def weights(self) -> frozenset[str]: ...

    def function(self, stage: Callable[..., Tree], layers: int) -> Any:
        """Returns a stage of so many layers for `split_backward`; its first argument is `(given, observed, weights)`."""
        ...

    def state(self, layers: int) -> Tree:
        """Returns the observed state of so many layers before the first step."""
        ...

    def pick(self, observed: Tree, layers_CN: Array) -> list[Tree]:
        """Returns the observed state of each chunk of a rank, from the state of all layers and a table of its layers."""
        ...

    def finish(self, states: Sequence[Tree], axes: Sequence[str], layout: StageAssignment) -> Tree:
        """Returns the observed state of all layers, from the states of a rank's chunks; reduced over mesh axes too."""
        ...

    def prepare(
        self,
        function: Any,
        args: Sequence[Tree],
        stages: Sequence[Tree],
        states: Sequence[Tree],
        shards: Sequence[Tree],
        axes: Sequence[str],
    ) -> list[Any]:
        """Returns the weights of every chunk, gathered.

        Args:
            function: The stage function.
            args: Its arguments for one microbatch; the first is the pair of parameters and other inputs of a stage.
            stages: For each chunk, this device's parts of the parameters of its layers.
            states: For each chunk, the observed state.
            shards: For each chunk, the shard specs of the parameters.
            axes: Mesh axes that the parts are spread over.
        """
        ...

    def weight_shapes(self, function: Any, args: Sequence[Tree], observed: Tree) -> Any:
        """Returns the shapes of the weights of one chunk. Takes the arguments of `prepare` for one chunk, as shapes."""
        ...

    def named_function(self, stage: Callable[..., Tree], layers: int, names: Sequence[str]) -> Any:
        """Returns a stage of so many layers as `function` does, for parameters with these names.

        The leaf of parameter `path` of layer j is `layers/j/path`.
        """
        ...

    def first_weights(self, function: Any, args: Sequence[Tree], weights: Any, share: Fraction) -> Any:
        """Returns the weights of the first layers of a chunk, in the order of the matmuls of a shorter stage.

        Args:
            function: The shorter stage, from `named_function`.
            args: Shapes of its arguments.
            weights: Weights of the chunk, as `prepare` returns them for a chunk without an embedding.
            share: Number of layers of the shorter stage over that of the chunk.
        """
        ...


@dataclass(frozen=True)
class ModelPrecision:
    """The `StagePrecision` of a model that computes as it is written."""

    weights: frozenset[str] = frozenset()

    def function(self, stage: Callable[..., Tree], layers: int) -> Callable[..., Tree]:
        return lambda params, *args: stage(params[0], *args)

    def state(self, layers: int) -> Tree:
        return {}

    def pick(self, observed: Tree, layers_CN: Array) -> list[Tree]:
        return [{}] * len(layers_CN)

    def finish(self, states: Sequence[Tree], axes: Sequence[str], layout: StageAssignment) -> Tree:
        return {}

    def prepare(
        self,
        function: Any,
        args: Sequence[Tree],
        stages: Sequence[Tree],
        states: Sequence[Tree],
        shards: Sequence[Tree],
        axes: Sequence[str],
    ) -> list[Any]:
        return [None] * len(stages)

    def weight_shapes(self, function: Any, args: Sequence[Tree], observed: Tree) -> None:
        return None

    def named_function(self, stage: Callable[..., Tree], layers: int, names: Sequence[str]) -> Callable[..., Tree]:
        return self.function(stage, layers)

    def first_weights(self, function: Any, args: Sequence[Tree], weights: Any, share: Fraction) -> None:
        return None


@dataclass(frozen=True, eq=False)
class FP8Precision:
    """The `StagePrecision` of layers with matmuls in FP8.

    Attributes:
        config: The recipe.
        kept: Paths of the parameters of a layer that are multiplied with as they are.
        weights: Paths of the parameters of a layer that are multiplied with in FP8.
        entries: For each layer, the indices of its entries in the histories, int32 [L, S].
        is_stacked: True if one array holds a weight of all layers. It has one scale.
        num_losses: Number of losses that are averaged into the loss of a batch.
    """

    config: FP8Config
    kept: tuple[str, ...]
    weights: frozenset[str]
    entries: np.ndarray
    is_stacked: bool
    num_losses: int

    @classmethod
    def of(cls, layer: Callable[..., Any], own: Tree, whole: FP8Trace, args: Sequence[Tree]) -> Self:
        """Finds the matmuls of a layer.

        Args:
            layer: `layer(own, *args)`.
            own: Shapes of the parameters of a layer.
            whole: The plan of all layers, one after another.
            args: Shapes of the other arguments.

        Raises:
            ConfigError: If `keep` or `blocks` of the recipe select only some of the layers.
        """
        config = replace(whole.config, keep=(), blocks="all")
        one = FP8Function(layer, config).plan(own, *args)
        of_layer, num = whole.products, len(one.products)
        assert len(of_layer) % num == 0, "layers have the same products"
        kept, repeats, firsts = [], [], []
        for i, product in enumerate(one.products):
            alike = of_layer[i::num]
            if len({bool(p.kept) for p in alike}) > 1:
                some, other = next(p for p in alike if p.kept), next(p for p in alike if not p.kept)
                name = "fp8.blocks" if "fp8.blocks" in some.kept else "fp8.keep"
                raise ConfigError(
                    f"`{name}` keeps {some.name} and not {other.name}: must mean all layers alike in a pipeline", field=name
                )
            if not alike[0].kept:
                repeats.append(product.repeats)
                firsts.append(i)
            elif not product.kept:
                kept.append(one.weight_of(i))
        weights = frozenset(map(one.weight_of, firsts))
        layers = len(of_layer) // num
        is_stacked = len({whole.weight_of(firsts[0] + num * i) for i in range(layers)}) < layers
        own, each = np.arange(sum(repeats)), np.arange(layers)[:, None]
        if is_stacked:  # as a scan has them: a product's entries of all layers are side by side
            start, count = np.repeat(np.cumsum([0, *repeats[:-1]]), repeats), np.repeat(repeats, repeats)
            entries = layers * start + own - start + count * each
        else:
            entries = own + len(own) * each
        return cls(config, tuple(kept), weights, entries.astype(np.int32), is_stacked, whole.num_losses)

    def function(self, stage: Callable[..., Tree], layers: int) -> FP8Function:
        names = [f"0/{j}/{path}".rstrip("/") for j in range(layers) for path in self.kept]
        return FP8Function(stage, replace(self.config, keep=tuple(map(glob.escape, names))), self.num_losses)

    def state(self, layers: int) -> Tree:
        return {} if self.config.recipe == "current" else AmaxHistory.zeros(layers * self.entries.shape[1], self.config.history)

    def pick(self, history: Tree, layers_CN: Array) -> list[Tree]:
        entries = jnp.asarray(self.entries)[layers_CN]
        return [jax.tree.map(lambda leaf, of=of: jnp.take(leaf, of.ravel(), axis=-2), history) for of in entries]

    def finish(self, states: Sequence[Tree], axes: Sequence[str], layout: StageAssignment) -> Tree:
        width = self.entries.shape[1]
        where = np.zeros(self.entries.size, np.int32)
        for own, (rank, chunk, place) in zip(self.entries, layout.places(), strict=True):
            first = ((rank * layout.num_chunks + chunk) * layout.layers_per_stage + place) * width
            where[own] = first + np.arange(width)

        def whole(*leaves: Array) -> Array:
            of_rank = jnp.stack([jnp.moveaxis(leaf, -2, 0) for leaf in leaves])
            every = lax.all_gather(lax.pmax(of_rank, tuple(axes)) if axes else of_rank, Axis.PIPE)
            return jnp.moveaxis(every.reshape(-1, *every.shape[3:])[where], 0, -2)

        return jax.tree.map(whole, *states)

    def prepare(
        self,
        function: FP8Function,
        args: Sequence[Tree],
        stages: Sequence[Tree],
        states: Sequence[Tree],
        shards: Sequence[Tree],
        axes: Sequence[str],
    ) -> list[list[FP8Array | None]]:
        return self.quantize(function.plan(*args), stages, states, shards, axes)

    def weight_shapes(self, function: FP8Function, args: Sequence[Tree], observed: Tree) -> list[FP8Array | None]:
        return jax.eval_shape(function.quantize, args[0], observed, *args[1:])

    def named_function(self, stage: Callable[..., Tree], layers: int, names: Sequence[str]) -> FP8Function:
        weights = {f"layers/{j}/{path}".rstrip("/") for j in range(layers) for path in self.weights}
        config = replace(self.config, keep=tuple(glob.escape(name) for name in names if name not in weights))
        return FP8Function(stage, config, self.num_losses)

    def first_weights(self, function: FP8Function, args: Sequence[Tree], weights: list[Any], share: Fraction) -> list[Any]:
        own = weights[: int(len(weights) * share)]
        # The matmuls of an embedding come first. They are not in FP8.
        return [None] * (len(function.plan(*args).sites) - len(own)) + own

    def quantize(
        self, plan: FP8Trace, stages: Sequence[Tree], states: Sequence[Tree], shards: Sequence[Tree], axes: Sequence[str]
    ) -> list[list[FP8Array | None]]:
        """Returns the weights of every chunk in FP8, gathered. Takes the plan of a stage, and arguments of `prepare`."""
        named = [dict(zip(plan.names, jax.tree.leaves(stage), strict=False)) for stage in stages]
        leaves = len(named[0]) // len(stages[0])
        of_all: dict[int, Array] = {}

        def over_layers(name: str, _: Array) -> Array:
            i = plan.names.index(name) % leaves
            if i not in of_all:
                found = [amax(parts[other]) for parts in named for other in list(parts)[i::leaves]]
                of_all[i] = lax.pmax(jnp.max(jnp.stack(found)), (Axis.PIPE, *axes))
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
