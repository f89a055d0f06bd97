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
from jgraph.pipeline._partition import AXIS, PipelineModel
from jgraph.precision.transform import Weights
from jgraph.scopes import scope
from jgraph.strategies.objective import merged
from jgraph.tree import only
from jgraph.types import Batch, Carried, Leaf, Observed, Params, Reduction, Tree

_T = TypeVar("_T")

Index: TypeAlias = Array | int


class StageInputs(NamedTuple):
    """Inputs of a stage that are not parameters, for all microbatches."""

    active: Array | None  # False if the last layer is padding; None if no stage has padding
    carried: Bits  # of the layers; {} if layers carry no state
    first: Array | None  # index of the first layer in the model; None if layers take no key


Given: TypeAlias = tuple[list[Params], StageInputs]
"""The parameters of each layer of a stage, and its other inputs."""

StageParams: TypeAlias = tuple[Given, Observed, Weights | None]
"""The first argument of a stage function. Weights are those in FP8; None without FP8."""

StageGrads: TypeAlias = tuple[Given, Observed]
"""Gradients of a stage: float32 sums, with None for frozen parameters. The gradient of the observed state is the next state."""


@dataclass(frozen=True, eq=False)
class StageExecutor:
    """Computes the actions of a rank on its stages and its shard of the batch, with pure methods under `jax.shard_map`.

    x is the input of a stage and y its output, of the same shape and dtype; dx and dy are their gradients. m is a microbatch.
    """

    model: PipelineModel
    split: Split
    carried: LayerState
    outer: Params  # of embedding and head in float32, for the embedding
    head_outer: Params  # the same in the compute dtype, for the head
    stages: Sequence[StageParams]  # the first argument of the stage function for each chunk
    inputs: Batch  # the microbatches on this data rank, leaves [M, ...]
    key: Array | None  # key data of the random key of the step; None if layers take no key
    impl: Hashable  # of the key, from `jax.random.key_impl`
    trained: StackedTree[bool]  # frozen parameters have None in place of a gradient

    @cached_property
    def shapes(self) -> Spec:
        """Shapes for one microbatch: `y` like x, `residuals` and `stash`, and `aux`, the carried state after a forward."""
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
        return len(self.stages)

    @scope("wgrad")
    def zero_grads(self) -> tuple[StageGrads, ...]:
        """Returns float32 zeros for (given, observed) of `stages`. Leaves that are not floating are unchanged."""
        stages = []
        for ((layers, extra), observed, _), trained in zip(self.stages, self.trained.layers, strict=True):
            stages.append(((only(trained, layers), extra), observed))
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32) if _is_float(p) else p, tuple(stages))

    @scope("wgrad")
    def zero_outer(self) -> Params:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), only(self.trained.outer, self.outer))

    # --- Stages. `chunk` is an integer, or a traced int32 scalar. ---

    def forward(self, chunk: Array, x: Array, m: Index) -> tuple[Array, Residuals, Carried]:
        return self._by_chunk(chunk, lambda c: self.split.forward(self.stages[c], x, *self._stage_args(m)))

    def dgrad(self, chunk: Array, residuals: Residuals, dy: Array) -> tuple[Array, list[Array | None], Stash]:
        """Returns dx, the early gradients by leaf of (given, observed), None if wgrad computes it, and the stash."""

        def of(c: int):
            dx, early, stash = self.split.dgrad(self.stages[c], residuals, dy)
            leaves, tree = jax.tree.flatten(self.stages[c][:2])
            kept = [g if _is_float(p) else None for g, p in zip(tree.flatten_up_to(early[:2]), leaves, strict=True)]
            return dx, kept, stash

        return self._by_chunk(chunk, of)

    def wgrad(self, chunk: Array, grads: tuple[StageGrads, ...], residuals: Residuals, stash: Stash) -> tuple[StageGrads, ...]:
        """Computes a wgrad, and adds the gradients that dgrad does not compute to `grads`, which begin as `zero_grads`."""

        def of(c: int, total: StageGrads) -> StageGrads:
            return self.split.accumulate((*total, None), self.stages[c], residuals, stash)[:2]

        if self.num_chunks == 1:
            return (of(0, grads[0]),)
        return tuple(act_where(jnp.equal(chunk, c), partial(of, c), total) for c, total in enumerate(grads))

    @scope("wgrad")
    def add_early(
        self, chunk: Array, grads: tuple[StageGrads, ...], early: Sequence[Array | None], counts: Array | None
    ) -> tuple[StageGrads, ...]:
        """Adds the early gradients from `dgrad` to `grads`, unless `counts` is False. Observed state is merged by maximum."""
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

    # --- Embedding and head. All ranks call these methods together, because the functions may have collectives over them. ---

    @scope("forward")
    def embed(self, m: Index) -> Array:
        return self.model.embed(self.outer, self._microbatch(m))

    @scope("wgrad")
    def embed_backward(self, m: Index, dx: Array) -> Params:
        """Computes the gradients of the embedding. dx must be zero except on the rank of the first stage."""
        _, pull_back = jax.vjp(lambda outer: self.model.embed(outer, self._microbatch(m)), self.outer)
        return only(self.trained.outer, pull_back(dx)[0])

    @scope("loss")
    def head(self, m: Index, y: Array, here: Array) -> tuple[Array, Params, Array]:
        """Returns the loss, which is 0 except on the last stage's rank (`here`), its gradients, and dy, only valid there."""
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
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, m, keepdims=False), self.inputs)

    def _stage_args(self, m: Index) -> tuple[Tree, ...]:
        """Returns the arguments of a stage after x: the context of a microbatch, and its key data."""
        context = self.model.context_of(self._microbatch(m))
        if self.key is None:
            return context
        return (*context, jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=self.impl), m)))


def act_where(does: Array, act: Callable[[_T], _T], before: _T) -> _T:
    """Returns `act(before)` if `does` is True on this rank, else `before`. Updates buffers in place."""
    # A loop with at most one iteration, because XLA updates the carry of a loop in place, but copies the results of a
    # conditional. The barrier orders the loop after the previous one, which reads the buffers that this one overwrites. `act`
    # must have no collectives, because ranks with False do not run it.
    return lax.fori_loop(0, does.astype(jnp.int32), lambda _, carry: act(carry), lax.optimization_barrier(before))


def _is_float(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
