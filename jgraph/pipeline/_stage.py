"""Computes the actions of a rank: forward, dgrad and wgrad of its chunks, embedding and head. Runs under `jax.shard_map`."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.autodiff import Residuals, Spec, Split, Stash
from jgraph.errors import ShapeError
from jgraph.layout import StackedTree
from jgraph.pipeline._layer_state import Bits, LayerState
from jgraph.pipeline.partition import AXIS, PipelineModel
from jgraph.precision.transform import Weights
from jgraph.scopes import scope
from jgraph.strategies.objective import merged
from jgraph.tree import only
from jgraph.types import Batch, Carried, Key, Leaf, Observed, Params, Reduction, Tree

_T = TypeVar("_T")

Index: TypeAlias = Array | int


class StageInputs(NamedTuple):
    """Inputs of a stage that are not parameters, for all microbatches.

    Attributes:
        active: Bool scalar, False if the last layer is padding; None if no stage has padding.
        carried: Carried state of the layers as bits; {} if layers carry no state.
        first: Index of the first layer in the model; None if layers take no key.
    """

    active: Array | None
    carried: Bits
    first: Array | None


Given: TypeAlias = tuple[list[Params], StageInputs]
"""The parameters of each layer of a stage, and its other inputs."""

StageParams: TypeAlias = tuple[Given, Observed, Weights | None]
"""The first argument of a stage function. Weights are those in FP8; None without FP8."""

StageGrads: TypeAlias = tuple[Given, Observed]
"""Gradients of a stage: float32 sums, with None for frozen parameters. The gradient of the observed state is the next state."""


@dataclass(frozen=True, eq=False)
class StageExecutor:
    """Computes the actions of a rank on its stages and its shard of the batch. Stateless: every method is a pure function.

    Methods are traced under `jax.shard_map`. x is the input of a stage and y its output, of the same shape and dtype; dx and dy
    are their gradients. A microbatch index `m` is an integer or an int32 scalar.

    Attributes:
        model: The model.
        split: The split backward of a stage.
        carried: The carried state of a layer.
        outer: Parameters of embedding and head in float32, for the embedding.
        head_outer: The same parameters in the compute dtype, for the head.
        stages: First argument of the stage function for each chunk.
        inputs: The microbatches on this data rank, leaves [M, ...].
        key: Key data of the random key of the step, an integer array; None if layers take no key.
        impl: Implementation of the key, as returned by `jax.random.key_impl`; None if layers take no key.
        trained: Bools for the parameters, False for frozen ones, which have None in place of a gradient.
    """

    model: PipelineModel
    split: Split
    carried: LayerState
    outer: Params
    head_outer: Params
    stages: Sequence[StageParams]
    inputs: Batch
    key: Key | None
    impl: Hashable
    trained: StackedTree[bool]

    @cached_property
    def shapes(self) -> Spec:
        """Shapes of the arrays between actions, traced once.

        `y` is the shape of x, `residuals` and `stash` are the arrays of one microbatch in these pools, and `aux` is the shape
        of the carried state after a forward.

        Raises:
            ShapeError: If a layer changes the shape or dtype of x.
        """
        x = jax.eval_shape(self.model.embed, self.outer, self._microbatch(0))
        spec = self.split.spec(self.stages[0], x, *self._stage_args(0))
        if (spec.y.shape, spec.y.dtype) != (x.shape, x.dtype):
            must = "must return the shape and dtype of x"
            raise ShapeError(f"`layer` returns {spec.y.dtype}{spec.y.shape} for x of {x.dtype}{x.shape}: {must}")
        return spec

    @cached_property
    def _shares_head(self) -> bool:
        """True if the head has collectives over the ranks, False if each rank computes a separate head."""
        effects = jax.make_jaxpr(self.model.head)(self.head_outer, self.shapes.y, self._microbatch(0)).effects
        return any(getattr(effect, "name", None) == AXIS for effect in effects)

    @property
    def num_chunks(self) -> int:
        """Number of chunks (stages) of the rank."""
        return len(self.stages)

    @scope("wgrad")
    def zero_grads(self) -> tuple[StageGrads, ...]:
        """Returns the initial gradients: for each chunk, float32 zeros in the shapes of (given, observed) of `stages`.

        Leaves that are not floating are returned unchanged. Frozen parameters are replaced by None.
        """
        stages = []
        for ((layers, extra), observed, _), trained in zip(self.stages, self.trained.layers, strict=True):
            stages.append(((only(trained, layers), extra), observed))
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32) if _is_float(p) else p, tuple(stages))

    @scope("wgrad")
    def zero_outer(self) -> Params:
        """Returns the initial gradients of embedding and head: float32 zeros in the shapes of `outer`, None for frozen ones."""
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), only(self.trained.outer, self.outer))

    # --- Stages. `chunk` is an integer, or a traced int32 scalar. ---

    def forward(self, chunk: Array, x: Array, m: Index) -> tuple[Array, Residuals, Carried]:
        """Computes a forward of a chunk.

        Args:
            chunk: Index of the chunk on this rank.
            x: The input of the stage.
            m: Index of the microbatch.

        Returns:
            y, the residuals for dgrad and wgrad, and the carried state after the microbatch (leaves [layers, ...]; {} if layers
            carry no state).
        """
        return self._by_chunk(chunk, lambda c: self.split.forward(self.stages[c], x, *self._stage_args(m)))

    def dgrad(self, chunk: Array, residuals: Residuals, dy: Array) -> tuple[Array, list[Array | None], Stash]:
        """Computes a dgrad of a chunk.

        Args:
            chunk: Index of the chunk on this rank.
            residuals: Residuals of the microbatch, from `forward`.
            dy: Gradient of the output.

        Returns:
            dx; the early gradients, which dgrad computes: a list in the order of the leaves of (given, observed), with None for
            gradients that wgrad computes and for leaves that are not floating; and the stash for wgrad.
        """

        def of(c: int):
            dx, early, stash = self.split.dgrad(self.stages[c], residuals, dy)
            leaves, tree = jax.tree.flatten(self.stages[c][:2])
            kept = [g if _is_float(p) else None for g, p in zip(tree.flatten_up_to(early[:2]), leaves, strict=True)]
            return dx, kept, stash

        return self._by_chunk(chunk, of)

    def wgrad(self, chunk: Array, grads: tuple[StageGrads, ...], residuals: Residuals, stash: Stash) -> tuple[StageGrads, ...]:
        """Computes a wgrad of a chunk, and adds the delayed gradients: the gradients that dgrad does not compute.

        Args:
            chunk: Index of the chunk on this rank.
            grads: Sums of the gradients of each chunk, like the result of `zero_grads`.
            residuals: Residuals of the microbatch, after dgrad.
            stash: Stash of the microbatch, from `dgrad`.

        Returns:
            The new sums, like `grads`.
        """

        def of(c: int, total: StageGrads) -> StageGrads:
            return self.split.accumulate((*total, None), self.stages[c], residuals, stash)[:2]

        if self.num_chunks == 1:
            return (of(0, grads[0]),)
        return tuple(act_where(jnp.equal(chunk, c), partial(of, c), total) for c, total in enumerate(grads))

    @scope("wgrad")
    def add_early(
        self, chunk: Array, grads: tuple[StageGrads, ...], early: Sequence[Array | None], counts: Array | None
    ) -> tuple[StageGrads, ...]:
        """Adds the early gradients of a chunk to the sums.

        The gradient of the observed state is the state after the microbatch. It is merged by maximum.

        Args:
            chunk: Index of the chunk on this rank.
            grads: Sums of the gradients of each chunk, like the result of `zero_grads`.
            early: The early gradients, from `dgrad`.
            counts: Bool scalar, False to add nothing. None adds them.

        Returns:
            The new sums, like `grads`.
        """
        added = len(jax.tree.leaves(self.stages[0][0]))
        kinds: list[Reduction] = ["sum" if i < added else "max" for i in range(len(early))]

        def add(kind: Reduction, total: Array | None, new: Array | None, where: Array | None) -> Array | None:
            if new is None or total is None:
                return total
            return merged(kind, total, (new if where is None else jnp.where(where, new, 0)).astype(jnp.float32))

        out = []
        for c, tree in enumerate(grads):
            where = counts
            if self.num_chunks > 1:
                is_chunk = jnp.equal(chunk, c)
                where = is_chunk if counts is None else counts & is_chunk
            structure = jax.tree.structure(self.stages[c][:2])
            sums = zip(kinds, structure.flatten_up_to(tree), early, strict=True)
            out.append(structure.unflatten(add(*args, where) for args in sums))
        return tuple(out)

    # --- Embedding and head, by all ranks together ---

    @scope("forward")
    def embed(self, m: Index) -> Array:
        """Computes the input of the first stage for microbatch `m`. All ranks call it, because `embed` may have collectives."""
        return self.model.embed(self.outer, self._microbatch(m))

    @scope("wgrad")
    def embed_backward(self, m: Index, dx: Array) -> Params:
        """Computes the gradients of the embedding. All ranks call it, because the embedding may have collectives.

        Args:
            m: Index of the microbatch.
            dx: Gradient of the input of the first stage. It must be zero except on the rank of the first stage.

        Returns:
            The gradients, a tree like `outer` with None for frozen parameters.
        """
        _, pull_back = jax.vjp(lambda outer: self.model.embed(outer, self._microbatch(m)), self.outer)
        return only(self.trained.outer, pull_back(dx)[0])

    @scope("loss")
    def head(self, m: Index, y: Array, here: Array) -> tuple[Array, Params, Array]:
        """Computes the loss of a microbatch and its gradients. All ranks call it, because the head may have collectives.

        Args:
            m: Index of the microbatch.
            y: Output of the last stage on the rank of the last stage; any values on other ranks.
            here: Bool scalar, True on the rank of the last stage.

        Returns:
            The loss, a scalar, which is 0 on other ranks; the gradients of embedding and head, a tree like `head_outer` with
            None for frozen parameters; and dy, the gradient of y, which is meaningful on the rank of the last stage.
        """
        if self._shares_head:
            y = jnp.where(here, y, jnp.zeros((), y.dtype))
        loss, pull_back = jax.vjp(lambda outer, y: self.model.head(outer, y, self._microbatch(m)), self.head_outer, y)
        d_outer, dy = pull_back(here.astype(loss.dtype))
        if not self._shares_head:
            # A zero cotangent is not enough, because the derivative at y may be infinite on other ranks.
            d_outer = jax.tree.map(lambda g: jnp.where(here, g, jnp.zeros((), g.dtype)), d_outer)
        return jnp.where(here, loss, 0), only(self.trained.outer, d_outer), dy

    def _by_chunk(self, chunk: Array, compute: Callable[[int], _T]) -> _T:
        if self.num_chunks == 1:
            return compute(0)
        return lax.switch(chunk, [lambda c=c: compute(c) for c in range(self.num_chunks)])

    def _microbatch(self, m: Index) -> Batch:
        """Returns the inputs of a microbatch."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, m, keepdims=False), self.inputs)

    def _stage_args(self, m: Index) -> tuple[Tree, ...]:
        """Returns the arguments of a stage after x: the context of a microbatch, and its key data."""
        context = self.model.context_of(self._microbatch(m))
        if self.key is None:
            return context
        return (*context, jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=self.impl), m)))


def act_where(does: Array, act: Callable[[_T], _T], before: _T) -> _T:
    """Returns `act(before)` if `does` is True on this rank, else `before`. Updates buffers in place.

    Uses a loop with at most one iteration, because XLA updates the carry of a loop in place, but copies the results of a
    conditional. The barrier orders the loop after the previous one, which reads the buffers that this one overwrites.

    Args:
        does: Bool scalar. It may differ between ranks.
        act: Computes a tree with the structure, shapes and dtypes of its argument. Must have no collectives, because ranks
            with False do not run it.
        before: A tree of arrays.

    Returns:
        A tree like `before`.
    """
    return lax.fori_loop(0, does.astype(jnp.int32), lambda _, carry: act(carry), lax.optimization_barrier(before))


def _is_float(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
