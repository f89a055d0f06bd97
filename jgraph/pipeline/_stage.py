"""The actions of a rank: forward, dgrad and wgrad of its chunks, embedding and head. Traced under `jax.shard_map`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.autodiff import Residuals, Spec, Split, Stash
from jgraph.errors import ShapeError
from jgraph.pipeline._layer_state import LayerState
from jgraph.pipeline.partition import AXIS, PipelineModel, Tree
from jgraph.scopes import scope
from jgraph.strategies.objective import Reduction, merged

Index: TypeAlias = Array | int


@dataclass(frozen=True, eq=False)
class StageExecutor:
    """Computes the actions of a rank with its part of the model and of the batch.

    Attributes:
        model: The model.
        split: The split backward of a stage.
        carried: The carried state of a layer.
        outer: Parameters of embedding and head, as the embedding reads them.
        head_outer: The same parameters, as the head reads them.
        stages: For each chunk, the first argument of the stage function: `(given, observed, weights)`.
        inputs: The microbatches, leaves [M, ...].
        key: Data of the random key of the step; None if layers take no key.
        impl: Implementation of the key.
    """

    model: PipelineModel
    split: Split
    carried: LayerState
    outer: Tree
    head_outer: Tree
    stages: Sequence[Tree]
    inputs: Tree
    key: Array | None
    impl: Any

    @cached_property
    def shapes(self) -> Spec:
        """Shapes of the arrays that pass between actions: of x as `y`, of the carried state as `aux`.

        Raises:
            ShapeError: If a layer changes the shape or dtype of x.
        """
        x = jax.eval_shape(self.model.embed, self.outer, self._microbatch(0))
        spec = self.split.spec(self.stages[0], x, *self._stage_args(0))
        if (spec.y.shape, spec.y.dtype) != (x.shape, x.dtype):
            raise ShapeError(f"a layer makes {spec.y.dtype}{spec.y.shape} of {x.dtype}{x.shape}; it must keep them")
        return spec

    @cached_property
    def _shares_head(self) -> bool:
        """True if the head has collectives over the ranks, False if each rank computes a head of its own."""
        effects = jax.make_jaxpr(self.model.head)(self.head_outer, self.shapes.y, self._microbatch(0)).effects
        return any(getattr(effect, "name", None) == AXIS for effect in effects)

    @property
    def num_chunks(self) -> int:
        return len(self.stages)

    @scope("wgrad")
    def zero_grads(self) -> tuple[Tree, ...]:
        """Returns float32 zeros like the parameters and the observed state of each chunk. Integers are returned unchanged."""
        stages = tuple(stage[:2] for stage in self.stages)
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32) if _is_float(p) else p, stages)

    @scope("wgrad")
    def zero_outer(self) -> Tree:
        """Returns float32 zeros like the parameters of embedding and head."""
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self.outer)

    # --- Stages. `chunk` is an integer, or a traced int32 scalar. ---

    def forward(self, chunk: Array, x: Array, m: Index) -> tuple[Array, Residuals, Tree]:
        """Returns y, the residuals, and the carried state after the microbatch."""
        return self._by_chunk(chunk, lambda c: self.split.forward(self.stages[c], x, *self._stage_args(m)))

    def dgrad(self, chunk: Array, residuals: Residuals, dy: Array) -> tuple[Array, Tree, Stash]:
        """Returns dx, the early gradients and the stash.

        The early gradients are a list like the leaves of a chunk, with None for delayed gradients and integers.
        """

        def of(c: int):
            dx, early, stash = self.split.dgrad(self.stages[c], residuals, dy)
            leaves, tree = jax.tree.flatten(self.stages[c][:2])
            kept = [g if _is_float(p) else None for g, p in zip(tree.flatten_up_to(early[:2]), leaves, strict=True)]
            return dx, kept, stash

        return self._by_chunk(chunk, of)

    def wgrad(self, chunk: Array, grads: tuple[Tree, ...], residuals: Residuals, stash: Stash) -> tuple[Tree, ...]:
        """Returns `grads` after adding the delayed gradients of a chunk."""

        def of(c: int, total: Tree) -> Tree:
            return self.split.accumulate((*total, None), self.stages[c], residuals, stash)[:2]

        if self.num_chunks == 1:
            return (of(0, grads[0]),)
        return tuple(act_where(jnp.equal(chunk, c), partial(of, c), total) for c, total in enumerate(grads))

    @scope("wgrad")
    def add_early(
        self, chunk: Array, grads: tuple[Tree, ...], early: Sequence[Array | None], counts: Array | None
    ) -> tuple[Tree, ...]:
        """Returns `grads` after adding the early gradients of a chunk, if `counts` is True or None.

        The gradient of observed state is the state after the microbatch. It is merged by maximum.
        """
        added = len(jax.tree.leaves(self.stages[0][0]))
        kinds: list[Reduction] = ["sum" if i < added else "max" for i in range(len(early))]

        def add(kind: Reduction, total: Array, new: Array | None, where: Array | None) -> Array:
            if new is None:
                return total
            return merged(kind, total, (new if where is None else jnp.where(where, new, 0)).astype(jnp.float32))

        out = []
        for c, tree in enumerate(grads):
            where = counts
            if self.num_chunks > 1:
                is_it = jnp.equal(chunk, c)
                where = is_it if counts is None else counts & is_it
            leaves, structure = jax.tree.flatten(tree)
            out.append(structure.unflatten(add(*one, where) for one in zip(kinds, leaves, early, strict=True)))
        return tuple(out)

    # --- Embedding and head, by all ranks together ---

    @scope("forward")
    def embed(self, m: Index) -> Array:
        return self.model.embed(self.outer, self._microbatch(m))

    @scope("wgrad")
    def embed_backward(self, m: Index, dx: Array) -> Tree:
        """Returns gradients like `outer`. Takes dx on the rank of the first stage, and zeros on other ranks."""
        _, pull_back = jax.vjp(lambda outer: self.model.embed(outer, self._microbatch(m)), self.outer)
        return pull_back(dx)[0]

    @scope("loss")
    def head(self, m: Index, y: Array, here: Array) -> tuple[Array, Tree, Array]:
        """Returns the loss of a microbatch, its gradients like `outer`, and dy.

        Args:
            m: Index of the microbatch.
            y: Output of the last stage on its rank; any values on other ranks.
            here: True on the rank of the last stage.
        """
        if self._shares_head:
            y = jnp.where(here, y, jnp.zeros((), y.dtype))
        loss, pull_back = jax.vjp(lambda outer, y: self.model.head(outer, y, self._microbatch(m)), self.head_outer, y)
        d_outer, dy = pull_back(here.astype(loss.dtype))
        if not self._shares_head:
            # A cotangent of zero is not enough: on other ranks, the derivative at y may be infinite.
            d_outer = jax.tree.map(lambda g: jnp.where(here, g, jnp.zeros((), g.dtype)), d_outer)
        return jnp.where(here, loss, 0), d_outer, dy

    def _by_chunk(self, chunk: Array, of: Callable[[int], Any]) -> Any:
        if self.num_chunks == 1:
            return of(0)
        return lax.switch(chunk, [lambda c=c: of(c) for c in range(self.num_chunks)])

    def _microbatch(self, m: Index) -> Tree:
        """Returns the inputs of a microbatch."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, m, keepdims=False), self.inputs)

    def _stage_args(self, m: Index) -> tuple[Tree, ...]:
        """Returns the arguments of a stage after x: the context of a microbatch, and the data of its key."""
        context = self.model.context_of(self._microbatch(m))
        if self.key is None:
            return context
        return (*context, jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(self.key, impl=self.impl), m)))


def act_where(does: Array, act: Callable[[Tree], Tree], before: Tree) -> Tree:
    """Returns `act(before)` if `does` is True on this rank, else `before`. Updates buffers in place.

    A loop with at most one iteration, because XLA copies the results of a conditional and updates the carry of a loop in
    place. The barrier orders the loop after the previous one, which reads the buffers that this one writes.
    """
    return lax.fori_loop(0, does.astype(jnp.int32), lambda _, carry: act(carry), lax.optimization_barrier(before))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
