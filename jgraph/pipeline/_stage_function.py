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
from jgraph.pipeline._precision import FP8Precision, StageFunction, StagePrecision
from jgraph.pipeline._stage import Given
from jgraph.pipeline.partition import PipelineModel
from jgraph.precision.transform import FP8Trace
from jgraph.tree import path_name
from jgraph.types import Carried, Key, Leaf, Params, Tree

Remat = Literal["nothing", "wide", "layer"]
Cast = TypeVar("Cast", bound=Tree)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageFunctions:
    """Makes functions of consecutive layers of a model.

    Attributes:
        model: The model, as embedding, layers and head.
        compute_dtype: Matrices of the layers and of the head, except weights of routers, are cast to this dtype once per step.
            None does not cast.
        remat: Activations to recompute in the backward pass: `nothing` beyond elementwise operations, the results of `wide`
            matmuls, or the whole `layer` except its input.
        carried: Shapes and reductions of the carried state of a layer.
        precision: Precision of the matmuls of layers: with or without FP8.
    """

    model: PipelineModel
    compute_dtype: DTypeLike | None = None
    remat: Remat = "nothing"
    carried: LayerState = field(default_factory=LayerState)
    precision: StagePrecision = field(default_factory=StagePrecision)

    def with_precision(
        self, tree: Params, whole: FP8Trace, args: tuple[Leaf, tuple[Tree, ...], Leaf, *tuple[Carried, ...]]
    ) -> Self:
        """Returns a copy that computes the matmuls of layers in FP8. Traces a layer on shapes.

        Args:
            tree: Shapes of the parameters, in the model's own tree.
            whole: The FP8 trace of the method `layers`, which has the recipe.
            args: Shapes of (x, context, key, *carried), the arguments of `layers` after the parameters.

        Returns:
            The copy.

        Raises:
            ConfigError: If `keep` or `blocks` of the recipe select a matmul only in some of the layers.
        """
        params, (x, context, key, *carried) = jax.eval_shape(self.model.split, tree)[1][0], args
        states = (jax.eval_shape(self.model.split_carried, state)[0] for state in carried)
        more = (*context, *[key] * self.model.takes_key, *states)
        precision = FP8Precision.of(lambda params, *args: self.model.layer(self.cast(params), *args), params, whole, (x, *more))
        return replace(self, precision=precision)

    def layers(self, tree: Params, x: Array, context: tuple[Tree, ...], key: Key, *carried: Carried) -> Array:
        """Computes all layers of the model, without a pipeline and without recomputation.

        Args:
            tree: Parameters in the model's own tree.
            x: Input of the first layer.
            context: Context of the microbatch, from `PipelineModel.context_of`: a tuple of one tree, or () if layers take none.
            key: Random key of the microbatch; not used if layers take no key. Layer i gets the key folded with i.
            *carried: Carried state in the model's own tree; nothing if layers carry no state.

        Returns:
            x after the last layer, of the same shape and dtype. New carried state is dropped.
        """
        states = [self.model.split_carried(state) for state in carried]
        for i, params in enumerate(self.model.split(tree)[1]):
            keys = [jax.random.fold_in(key, i)] * self.model.takes_key
            y = self.model.layer(self.cast(params), x, *context, *keys, *(state[i] for state in states))
            x = y[0] if states else y
        return x

    def split(self, impl: Hashable, layers: int = 1) -> Split:
        """Returns the split backward of a stage: the pure functions forward, dgrad and wgrad.

        Args:
            impl: Implementation of the random keys, as returned by `jax.random.key_impl`; None for layers without keys.
            layers: Number of layers of the stage.
        """
        return split_backward(self.stage(impl, layers), has_aux=True, recompute=self.recompute)

    def stage(self, impl: Hashable, layers: int) -> StageFunction:
        """Makes the function of a stage, for `split_backward`.

        Args:
            impl: Implementation of the random keys, as returned by `jax.random.key_impl`; None for layers without keys.
            layers: Number of layers of the stage.

        Returns:
            `stage(params, x, *context, *key_data) -> (x, carried state)`, with `StageParams`. `context` and `key_data` are
            empty if layers take none.
        """
        has_context, wrap = self.model.context is not None, partial(jax.random.wrap_key_data, impl=impl)

        def stage(params: Given, x: Array, *args: Tree) -> tuple[Array, Carried]:
            layers, extra = params
            context, keys = args[:has_context], jax.tree.map(wrap, args[has_context:])
            first = 0 if extra.first is None else extra.first
            return self.through(layers, x, context, keys, first, extra.carried, extra.active)

        return self.precision.function(stage, layers)

    def through(
        self,
        layers: Sequence[Params],
        x: Array,
        context: Sequence[Tree],
        key: Sequence[Array],
        first: Array | int,
        bits: Bits,
        active: Array | None = None,
    ) -> tuple[Array, Carried]:
        """Computes consecutive layers, each in `jax.checkpoint` if `remat` is `layer`.

        Args:
            layers: Parameters of each layer, already cast.
            x: Input of the first layer.
            context: Context of the microbatch, from `PipelineModel.context_of`: a tuple of one tree, or () if layers take none.
            key: A sequence with the random key of the microbatch; empty if layers take no key. The key of a layer is folded
                with its index in the model.
            first: Index of the first layer in the model, an integer scalar; only used with a key.
            bits: Carried state of these layers at the beginning of the step, leaves [layers, ...], with floats reinterpreted as
                unsigned integers; {} if layers carry no state.
            active: Bool scalar, False if the last layer is padding, whose result is discarded. None if no stage has padding.

        Returns:
            x after the last layer, and the carried state after the microbatch with leaves [layers, ...], {} if layers carry no
            state.

        Raises:
            ShapeError: If a layer with carried state does not return a pair of x and a state of the same shapes and dtypes.
        """
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
        """Casts matrices to `compute_dtype`, except weights of routers.

        Args:
            tree: Parameters of a layer, of embedding and head, or of several layers.

        Returns:
            A tree like `tree`. Other parameters are returned unchanged; `tree` itself if `compute_dtype` is None.
        """
        if self.compute_dtype is None:
            return tree

        def of(path: KeyPath, p: Array) -> Array:
            return p.astype(self.compute_dtype) if Param.describe(path_name(path), p).is_cast else p

        return jax.tree_util.tree_map_with_path(of, tree)

    def of_rank(self, layers: Cast) -> Cast:
        """Returns the layers of a rank without the axis of ranks, with matrices cast to `compute_dtype`.

        Args:
            layers: Parameters of layers as a rank sees them under `jax.shard_map`, leaves [1, ...].

        Returns:
            A tree like `layers`, with leaves [...].
        """
        return self.cast(jax.tree.map(lambda leaf: leaf[0], layers))

    @property
    def recompute(self) -> Recompute:
        """The argument `recompute` of `split_backward`: `wide` if `remat` is `wide`, else `elementwise`."""
        return "wide" if self.remat == "wide" else "elementwise"
