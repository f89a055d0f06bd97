"""Products in FP8 in a pipeline: which of a layer's, a rank's weights, and where its layers are in the histories of all.

All ranks run one program, so a product is in FP8 in every layer or in none. Histories lie on every rank as one device has them,
in the order of the products in the whole model. A rank picks its layers' entries out of them and takes the maximum of what its
dgrads give; at the end of the step the ranks put theirs together.
"""

# P ranks, C chunks, N places of a stage, L layers, S entries of a layer in a history

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError
from jgraph.kernels import amax
from jgraph.mesh import Axis
from jgraph.pipeline.partition import StageAssignment
from jgraph.precision.config import FP8Config
from jgraph.precision.product import Weight
from jgraph.precision.scaling import History
from jgraph.precision.transform import FP8Function, Plan
from jgraph.strategies import sharding as fsdp

Tree = Any


@dataclass(frozen=True, eq=False)
class StagePrecision:
    """Says which products of a layer are in FP8.

    Attributes:
        config: the recipe.
        kept: paths of a layer's parameters whose products stay as they are.
        weights: paths of a layer's parameters that are multiplied with in FP8.
        entries: int32 [L, S], which entries of the histories are a layer's.
        is_stacked: whether the model has a weight of all layers in one array, which has one scale.
        num_losses: Number of losses that are averaged into a batch's loss.
    """

    config: FP8Config
    kept: tuple[str, ...]
    weights: frozenset[str]
    entries: np.ndarray
    is_stacked: bool
    num_losses: int

    @classmethod
    def of(cls, layer: Callable[..., Any], own: Tree, whole: Plan, args: Sequence[Tree]) -> Self:
        """Finds the products of a layer.

        Args:
            layer: `layer(own, *args)`.
            own, args: of a layer, as shapes.
            whole: of all layers, one after another.

        Raises:
            ConfigError: the recipe's `keep` or `blocks` mean only some of the layers.
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
        """Returns a stage of so many layers in FP8; its first argument is a pair of their parameters and others."""
        names = [f"0/{j}/{path}".rstrip("/") for j in range(layers) for path in self.kept]
        return FP8Function(stage, replace(self.config, keep=tuple(map(glob.escape, names))), self.num_losses)

    def state(self, layers: int) -> Tree:
        """Returns the state of a stage of so many layers before the first step."""
        return {} if self.config.recipe == "current" else History.zeros(layers * self.entries.shape[1], self.config.history)

    def pick(self, history: Tree, layers_CN: Array) -> list[Tree]:
        """Returns the state of the stages whose layers are in a table."""
        entries = jnp.asarray(self.entries)[layers_CN]
        return [jax.tree.map(lambda leaf, of=of: jnp.take(leaf, of.ravel(), axis=-2), history) for of in entries]

    def finish(self, states: Sequence[Tree], axes: Sequence[str], layout: StageAssignment) -> Tree:
        """Returns the histories of all layers, from those of every chunk of this rank; the maximum over mesh axes."""
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

    def quantize(
        self, plan: Plan, stages: Sequence[Tree], states: Sequence[Tree], shards: Sequence[Tree], axes: Sequence[str]
    ) -> list[list[Weight | None]]:
        """Returns the weights of every chunk in FP8, whole.

        Args:
            plan: of a stage.
            stages, shards: for each chunk, this device's parts of its layers' parameters, and how they are sharded.
            states: of the chunks.
            axes: mesh axes that parts are spread over.
        """
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
