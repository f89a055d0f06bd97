"""What one rank can do: forward, dgrad and wgrad of its chunks, embedding and head; on traced arrays, under `jax.shard_map`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.autodiff import Residuals, Split, Stash
from jgraph.errors import ShapeError
from jgraph.pipeline.carried import Carried
from jgraph.pipeline.partition import PipelineModel
from jgraph.scopes import scope
from jgraph.strategies.objective import Reduction, merged

Tree = Any
AXIS = "pipe"


@dataclass(frozen=True)
class Shapes:
    """What passes between the actions of a rank, as `jax.ShapeDtypeStruct`.

    Attributes:
        x: input and output of a stage.
        residuals, stash: as `split_backward` has them.
        carried: state after a forward, [N, ...].
    """

    x: Any
    residuals: Residuals
    stash: Stash
    carried: Tree


class StageExecutor:
    """A rank's part of the model and of the batch.

    Attributes:
        carried: what a layer carries.
        shapes: of what the actions give each other.
    """

    def __init__(
        self,
        model: PipelineModel,
        split: Split,
        carried: Carried,
        outer: Tree,
        head_outer: Tree,
        stages: Sequence[Tree],
        inputs: Tree,
        key: Array | None,
        impl: Any,
    ):
        """
        Args:
            model, split, carried: the model; one of its stages, split; what a layer carries.
            outer, head_outer: parameters of embedding and head, as they are kept and as the head reads them.
            stages: For each chunk, the first argument of the stage function: `(given, observed, weights)`.
            inputs: of the microbatches, leaves [M, ...].
            key: key data of a random key of the kind `impl`, or None.
        """
        self._model, self._split, self._inputs, self.carried = model, split, inputs, carried
        self._key, self._impl = key, impl
        self._outer, self._head_outer, self._stages = outer, head_outer, stages
        x = jax.eval_shape(model.embed, outer, self._of(0))
        effects = jax.make_jaxpr(model.head)(head_outer, x, self._of(0)).effects
        # Whether ranks work on the head together, or each for itself.
        self._shares_head = any(getattr(effect, "name", None) == AXIS for effect in effects)
        spec = split.spec(stages[0], x, *self._extra(0))
        if (spec.y.shape, spec.y.dtype) != (x.shape, x.dtype):
            raise ShapeError(f"a layer makes {spec.y.dtype}{spec.y.shape} of {x.dtype}{x.shape}; it must keep them")
        self.shapes = Shapes(x, spec.residuals, spec.stash, spec.aux)

    @property
    def num_chunks(self) -> int:
        return len(self._stages)

    @scope("wgrad")
    def zero_grads(self) -> tuple[Tree, ...]:
        """Returns float32 zeros like the parameters and the observed state of each chunk. Integers stay as they are."""
        stages = tuple(stage[:2] for stage in self._stages)
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32) if _is_float(p) else p, stages)

    @scope("wgrad")
    def zero_outer(self) -> Tree:
        """Float32 zeros as the parameters of embedding and head."""
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), self._outer)

    # What a stage does. `chunk` is a number, or an int32 scalar where it is known only at run time.

    def forward(self, chunk: Any, x: Array, m: Any) -> tuple[Array, Residuals, Tree]:
        """y, the residuals, the carried state after it."""
        return self._by_chunk(chunk, lambda c: self._split.forward(self._stages[c], x, *self._extra(m)))

    def dgrad(self, chunk: Any, residuals: Residuals, dy: Array) -> tuple[Array, Tree, Stash]:
        """dx, the early gradients (as a chunk's parameters, None for the delayed ones and integers), the stash."""

        def of(c: int):
            dx, early, stash = self._split.dgrad(self._stages[c], residuals, dy)
            leaves, tree = jax.tree.flatten(self._stages[c][:2])
            kept = [g if _is_float(p) else None for g, p in zip(tree.flatten_up_to(early[:2]), leaves, strict=True)]
            return dx, kept, stash

        return self._by_chunk(chunk, of)

    def wgrad(self, chunk: Any, grads: tuple[Tree, ...], residuals: Residuals, stash: Stash) -> tuple[Tree, ...]:
        """`grads` with the delayed gradients added to those of the chunk."""

        def of(c: int, total: Tree) -> Tree:
            return self._split.accumulate((*total, None), self._stages[c], residuals, stash)[:2]

        if self.num_chunks == 1:
            return (of(0, grads[0]),)
        return tuple(act_where(jnp.equal(chunk, c), partial(of, c), total) for c, total in enumerate(grads))

    @scope("wgrad")
    def add_early(self, chunk: Any, grads: tuple[Tree, ...], early: Sequence[Array | None], counts: Any) -> tuple[Tree, ...]:
        """`grads` with the early ones added to those of the chunk, where they count: a bool scalar, or None for always.

        The "gradient" of a history is the one after this microbatch: of these it is the maximum.
        """
        added = len(jax.tree.leaves(self._stages[0][0]))
        kinds: list[Reduction] = ["sum" if i < added else "max" for i in range(len(early))]

        def of(c: int, leaves: list[Any]) -> list[Any]:
            where = counts
            if self.num_chunks > 1:
                is_it = jnp.equal(chunk, c)
                where = is_it if where is None else where & is_it
            return [
                total
                if new is None
                else merged(kind, total, (new if where is None else jnp.where(where, new, 0)).astype(jnp.float32))
                for kind, total, new in zip(kinds, leaves, early, strict=True)
            ]

        out = []
        for c, tree in enumerate(grads):
            leaves, structure = jax.tree.flatten(tree)
            out.append(structure.unflatten(of(c, leaves)))
        return tuple(out)

    # Embedding and head, by all ranks together.

    @scope("forward")
    def embed(self, m: Any) -> Array:
        return self._model.embed(self._outer, self._of(m))

    @scope("wgrad")
    def embed_backward(self, m: Any, dx: Array) -> Tree:
        """Gradients as `outer`, from dx on the rank of the first stage and zeros elsewhere."""
        _, pull_back = jax.vjp(lambda outer: self._model.embed(outer, self._of(m)), self._outer)
        return pull_back(dx)[0]

    @scope("loss")
    def head(self, m: Any, y: Array, here: Array) -> tuple[Array, Tree, Array]:
        """This microbatch's loss, and of it the gradients as `outer`, and dy.

        Args:
            m: the microbatch.
            y: of the last stage, where it is here; anything elsewhere.
            here: whether this rank is the one whose y it is.
        """
        if self._shares_head:
            y = jnp.where(here, y, jnp.zeros((), y.dtype))
        loss, pull_back = jax.vjp(lambda outer, y: self._model.head(outer, y, self._of(m)), self._head_outer, y)
        d_outer, dy = pull_back(here.astype(loss.dtype))
        if not self._shares_head:
            # Cotangents of zero are not enough: of what lies elsewhere as y, the derivative may be infinite.
            d_outer = jax.tree.map(lambda g: jnp.where(here, g, jnp.zeros((), g.dtype)), d_outer)
        return jnp.where(here, loss, 0), d_outer, dy

    def _by_chunk(self, chunk: Any, of: Callable[[int], Any]) -> Any:
        if self.num_chunks == 1 or isinstance(chunk, int):
            return of(0 if self.num_chunks == 1 else chunk)
        return lax.switch(chunk, [lambda c=c: of(c) for c in range(self.num_chunks)])

    def _of(self, m: Any) -> Tree:
        """The microbatch's inputs."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, m, keepdims=False), self._inputs)

    def _extra(self, m: Any) -> tuple[Tree, ...]:
        """Returns what the stage takes besides x: the microbatch's context, and its key, as data, which pools can hold."""
        context = self._model.context_of(self._of(m))
        if self._key is None:
            return context
        return (*context, jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(self._key, impl=self._impl), m)))


def act_where(does: Array, act: Callable[[Tree], Tree], before: Tree) -> Tree:
    """Returns `act(before)` where a rank does it, else `before`, in place: a loop of one turn or of none.

    XLA copies what a branch returns, in jax 0.10 also what the other branch only passes on. What a loop carries stays where it
    is. The barrier says that a loop comes after the one before it, which reads what this one writes.
    """
    return lax.fori_loop(0, does.astype(jnp.int32), lambda _, carry: act(carry), lax.optimization_barrier(before))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
