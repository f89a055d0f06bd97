"""A model in the pieces that a pipeline needs, and which layer lies where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.schedule import Schedule

Tree = Any


@dataclass(frozen=True)
class PipelineModel:
    """Describes a model to `Pipelined` as three pure functions of a microbatch: `embed`, then every `layer`, then `head`.

    >>> model = jgraph.PipelineModel(
    ...     embed=lambda outer, batch: batch @ outer["embed"],
    ...     layer=lambda params, x: jnp.tanh(x @ params["kernel"]),
    ...     head=lambda outer, x, batch: jnp.mean((x @ outer["head"]) ** 2),
    ... )  # for parameters (outer, [layer, layer, ...]); `split` and `join` take others apart

    Every rank runs `embed` and `head`, under `jax.shard_map` over the axis `pipe`. The result of `embed` counts on the rank of
    the first stage, the loss of `head` on that of the last; other results are dropped, with their gradients. So plain functions
    work as they are. To share the work, use collectives over `pipe`, as `split_embedding` and
    `jgraph.cross_entropy(axis="pipe")` do. Such a `head` gets the last stage's x on its rank and zeros on the others: it begins
    with a psum of x, before anything that has no derivative at zero.

    Where stages are uneven, the shorter ones do their first layer once more and drop the result.

    Attributes:
        embed: `embed(outer, batch) -> x`, a floating array; `outer` are the parameters of embedding and head, in float32.
        layer: `layer(params, x) -> x` of the same shape and dtype; `layer(params, x, context)` with `context`,
            `layer(params, x, key)` with `takes_key`, in this order. With carried state it takes its own as a last argument and
            returns the pair of x and the state after the microbatch.
        head: `head(outer, x, batch) -> loss`, scalar float32, the mean over the microbatch; `outer` cast as the layers are.
        sharded: axis, by the path of a leaf of `outer` (`/` between names), along which each of P ranks holds 1/P of it.
        split: `split(params) -> (outer, layers)`: parameters outside the layers, and a list of one tree a layer.
        join: `join(outer, layers) -> params` inverts `split`.
        takes_key: whether `layer` takes a random key as its next argument in a training step.
        context: `context(batch)` returns what every layer takes besides x, such as where documents begin: a tree of integers,
            or None. No gradient goes through it. None: layers take nothing.
        split_carried, join_carried: the same for carried state, `split_carried(carried) -> layers` and its inverse: one tree a
            layer, all alike. Embedding and head carry nothing.
    """

    embed: Callable[[Tree, Tree], jax.Array]
    layer: Callable[..., jax.Array]
    head: Callable[[Tree, jax.Array, Tree], jax.Array]
    sharded: dict[str, int] = field(default_factory=dict)
    split: Callable[[Tree], tuple[Tree, list[Tree]]] = lambda params: params
    join: Callable[[Tree, list[Tree]], Tree] = lambda outer, layers: (outer, layers)
    takes_key: bool = False
    context: Callable[[Tree], Tree] | None = None
    split_carried: Callable[[Tree], list[Tree]] = lambda carried: carried
    join_carried: Callable[[list[Tree]], Tree] = lambda layers: layers

    def context_of(self, batch: Tree) -> tuple[Tree, ...]:
        """Returns what a layer takes after x of a microbatch: its context, or nothing."""
        return () if self.context is None else (self.context(batch),)


@dataclass(frozen=True)
class StageAssignment:
    """Says which layer is where: consecutive layers make a stage, and the schedule says on which rank a stage is.

    Where the layers do not divide evenly, the first stages have one more; the others are padded with a layer of zeros, which
    counts for nothing, so that all ranks run one program.

    Attributes:
        placement: stages of each rank.
        num_layers: of the model.
    """

    placement: tuple[tuple[int, ...], ...]
    num_layers: int

    def __post_init__(self):
        if self.num_layers < self.num_stages:
            raise OrderError(
                f"{self.num_layers} layers do not make {self.num_stages} stages ({len(self.placement)} ranks x "
                f"{self.num_chunks} chunks); take fewer ranks or chunks, or more layers"
            )

    @classmethod
    def of(cls, schedule: Schedule, num_layers: int) -> "StageAssignment":
        """Makes the assignment for the stages of a schedule."""
        if len(set(map(len, schedule.placement))) > 1:
            counts = ", ".join(str(len(stages)) for stages in schedule.placement)
            raise OrderError(f"the ranks have {counts} stages; a pipeline program needs as many on every rank")
        return cls(schedule.placement, num_layers)

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.placement))

    @property
    def num_chunks(self) -> int:
        return len(self.placement[0])

    @property
    def layers_per_stage(self) -> int:
        """Of the longest stage."""
        return -(-self.num_layers // self.num_stages)

    @property
    def is_even(self) -> bool:
        return self.num_layers % self.num_stages == 0

    def layers(self) -> np.ndarray:
        """int32 [P, C, n]: the layer of every place; of padding, the first of its stage."""
        first = np.array([[self._bounds(stage)[0] for stage in stages] for stages in self.placement], np.int32)
        return first[..., None] + np.arange(self.layers_per_stage, dtype=np.int32) * self.active()

    def active(self) -> np.ndarray:
        """bool [P, C, n]: which places hold a layer."""
        bounds = np.array([[self._bounds(stage) for stage in stages] for stages in self.placement])
        return np.arange(self.layers_per_stage) < (bounds[..., 1] - bounds[..., 0])[..., None]

    def stack(self, layers: Sequence[Tree]) -> list[list[Tree]]:
        """Returns `[chunk][place]` trees whose leaves have the ranks as their first axis, of one tree a layer."""
        assert len(layers) == self.num_layers
        zeros = jax.tree.map(jnp.zeros_like, layers[0])

        def at(stages: tuple[int, ...], chunk: int, place: int) -> Tree:
            first, end = self._bounds(stages[chunk])
            return layers[first + place] if first + place < end else zeros

        return [
            [
                jax.tree.map(lambda *leaves: jnp.stack(leaves), *(at(stages, chunk, place) for stages in self.placement))
                for place in range(self.layers_per_stage)
            ]
            for chunk in range(self.num_chunks)
        ]

    def unstack(self, stacked: Sequence[Sequence[Tree]]) -> list[Tree]:
        """Inverts `stack`."""
        return [jax.tree.map(lambda leaf, p=p: leaf[p], stacked[chunk][place]) for p, chunk, place in self.places()]

    def place_of(self, layer: int) -> tuple[int, int]:
        """Returns the chunk of a layer, and its place in it."""
        return self.places()[layer][1:]

    def places(self) -> list[tuple[int, int, int]]:
        """Returns rank, chunk and place of each layer."""
        where = {stage: (rank, chunk) for rank, stages in enumerate(self.placement) for chunk, stage in enumerate(stages)}
        bounds = [(*where[stage], *self._bounds(stage)) for stage in range(self.num_stages)]
        return [(rank, chunk, place) for rank, chunk, first, end in bounds for place in range(end - first)]

    def _bounds(self, stage: int) -> tuple[int, int]:
        """Returns the first layer of a stage, and the one after its last."""
        least, longer = divmod(self.num_layers, self.num_stages)
        first = stage * least + min(stage, longer)
        return first, first + least + (stage < longer)


def split_embedding(table_VD: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Looks tokens up in an embedding of which each rank of `pipe` holds V/P rows, in order; as `table_VD[tokens]` of all.

    Args:
        table_VD: this rank's rows, float32; their gradient is summed over repeated tokens in float32.
        tokens: integer ids of any shape.
        dtype: of the result.

    Returns:
        [*tokens.shape, D], the same on all ranks.
    """
    own = tokens - jax.lax.axis_index("pipe") * len(table_VD)
    is_own = (own >= 0) & (own < len(table_VD))
    rows = table_VD[jnp.clip(own, 0, len(table_VD) - 1)].astype(dtype)
    # All but one rank add zeros, so the sum is exact in any dtype.
    return jax.lax.psum(jnp.where(is_own[..., None], rows, 0), "pipe")
