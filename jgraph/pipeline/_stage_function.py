"""Makes the function of a pipeline stage from layers, with casts, recomputation, random keys, carried state and FP8."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jgraph.autodiff import Recompute, Split, split_backward
from jgraph.layout import Param
from jgraph.pipeline._layer_state import Bits, LayerState
from jgraph.pipeline._partition import PipelineModel
from jgraph.pipeline._precision import FP8Precision, StageFunction, StagePrecision
from jgraph.pipeline._stage import Given
from jgraph.precision.transform import FP8Trace
from jgraph.tree import path_name
from jgraph.types import Carried, Key, Leaf, Params, Tree

Remat = Literal["nothing", "wide", "layer"]
Cast = TypeVar("Cast", bound=Tree)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageFunctions:
    """Makes functions of consecutive layers of a model."""

    model: PipelineModel
    # Matrices of the layers and of the head, except weights of routers, are cast to it once per step; None casts nothing
    compute_dtype: DTypeLike | None = None
    remat: Remat = "nothing"  # as in `Pipelined`
    carried: LayerState = field(default_factory=LayerState)
    precision: StagePrecision = field(default_factory=StagePrecision)

    def with_precision(
        self, tree: Params, whole: FP8Trace, args: tuple[Leaf, tuple[Tree, ...], Leaf, *tuple[Carried, ...]]
    ) -> Self:
        """Returns a copy with FP8 matmuls in layers. `whole` is the trace of `layers` for parameters `tree` and `args`."""
        params = jax.eval_shape(self.model.split, tree)[1][0]
        x, context, key, *carried = args
        states = (jax.eval_shape(self.model.split_carried, state)[0] for state in carried)
        keys = (key,) if self.model.takes_key else ()

        def layer(params: Params, *args: Tree) -> Tree:
            return self.model.layer(self.cast(params), *args)

        precision = FP8Precision.from_trace(layer, params, whole, (x, *context, *keys, *states))
        return replace(self, precision=precision)

    def layers(self, tree: Params, x: Array, context: tuple[Tree, ...], key: Key, *carried: Carried) -> Array:
        """Computes all layers in order, for `with_precision`. Recomputes nothing, and drops new carried state."""
        states = [self.model.split_carried(state) for state in carried]
        for i, params in enumerate(self.model.split(tree)[1]):
            keys = (jax.random.fold_in(key, i),) if self.model.takes_key else ()
            y = self.model.layer(self.cast(params), x, *context, *keys, *(state[i] for state in states))
            x = y[0] if states else y
        return x

    def split(self, impl: Hashable, layers: int = 1) -> Split:
        return split_backward(self.stage(impl, layers), has_aux=True, recompute=self.recompute)

    # `impl` is the result of `jax.random.key_impl`; None for layers without keys.
    def stage(self, impl: Hashable, layers: int) -> StageFunction:
        """Makes `stage(params, x, *context, *key_data) -> (x, carried)`, with `StageParams`, for `split_backward`."""
        num_context = 0 if self.model.context is None else 1
        wrap = partial(jax.random.wrap_key_data, impl=impl)

        def stage(params: Given, x: Array, *args: Tree) -> tuple[Array, Carried]:
            layers, extra = params
            context = args[:num_context]
            keys = jax.tree.map(wrap, args[num_context:])
            first = 0 if extra.first is None else extra.first
            return self.through(layers, x, context, keys, first, extra.carried, extra.active)

        return self.precision.function(stage, layers)

    def through(
        self,
        layers: Sequence[Params],  # already cast
        x: Array,
        context: Sequence[Tree],  # from `PipelineModel.context_of`
        key: Sequence[Array],  # the random key of the microbatch; empty if layers take no key
        first: Array | int,  # index of the first layer in the model, for the keys of layers
        bits: Bits,  # at the beginning of the step, leaves [layers, ...]
        active: Array | None = None,  # False if the last layer is padding; its result is then discarded
    ) -> tuple[Array, Carried]:
        """Computes consecutive layers. Returns x and the carried state after the microbatch, leaves [layers, ...]."""
        layer = jax.checkpoint(self.model.layer) if self.remat == "layer" else self.model.layer
        after = []
        for j, params in enumerate(layers):
            keys = [jax.random.fold_in(k, first + j) for k in key]
            counts = active if j == len(layers) - 1 else None
            # A layer may attach losses to its output. Their gradients must not leave a padding layer.
            given = x if counts is None else jnp.where(counts, x, lax.stop_gradient(x))
            y = layer(params, given, *context, *keys, *(state := self.carried.at(bits, j)))
            if state:
                y, layer_after = self.carried.taken(y)
                after.append(layer_after)
            x = y if counts is None else jnp.where(counts, y, x)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *after) if after else {}

    def cast(self, tree: Cast) -> Cast:
        """Casts matrices to `compute_dtype`, except weights of routers."""
        if self.compute_dtype is None:
            return tree

        def of(path: KeyPath, p: Array) -> Array:
            return p.astype(self.compute_dtype) if Param.describe(path_name(path), p).is_cast else p

        return jax.tree_util.tree_map_with_path(of, tree)

    def of_rank(self, layers: Cast) -> Cast:
        """Drops the axis of ranks, which has length 1 under `jax.shard_map`, and casts the layers."""
        return self.cast(jax.tree.map(lambda leaf: leaf[0], layers))

    @property
    def recompute(self) -> Recompute:
        return "wide" if self.remat == "wide" else "elementwise"
