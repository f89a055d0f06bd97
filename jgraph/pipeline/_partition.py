"""Describes a model as embedding, layers and head, and assigns its layers to the stages of a pipeline."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgraph.errors import OrderError
from jgraph.mesh import Axis, summable
from jgraph.schedule.schedule import Schedule
from jgraph.types import Batch, Carried, Params, Tree

AXIS = Axis.PIPE.value

# P ranks, C chunks (stages of a rank), N places (layers of the longest stage)


@dataclass(frozen=True)
class PipelineModel:
    """Describes a model to `Pipelined` as three pure functions of a microbatch: `embed`, then every `layer`, then `head`.

    Every rank runs `embed` and `head`, under `jax.shard_map` over the axis `pipe`. Only the result of `embed` on the rank of
    the first stage and the loss of `head` on the rank of the last stage are used. Results and gradients of other ranks are
    dropped, so functions without collectives are correct. To share the work among ranks, use collectives over `pipe`, as
    `split_embedding` and `jgraph.cross_entropy(axis="pipe")` do. A `head` with such collectives gets x on the rank of the last
    stage, and zeros in place of x on other ranks. It must begin with `jax.lax.psum(x, "pipe")`, before any function that has no
    derivative at zero.

    If the number of stages does not divide the number of layers, shorter stages compute their first layer a second time and
    discard the result.

    The argument `batch` of the functions is the part of a microbatch on one data rank. All functions are traced, so they must
    be pure. Carried state is mutable state of the model, such as running statistics, that a step passes to the next one.

    Attributes:
        embed: `embed(outer, batch) -> x`, a floating array. `outer` has the parameters of embedding and head, in float32.
        layer: `layer(params, x) -> x`. The result has the shape and dtype of the argument x. `params` are the parameters of one
            layer; matrices, except weights of routers, are cast to `compute_dtype` of the strategy. The full form is
            `layer(params, x, context, key, state) -> (x, state)`, all positional. `context` is passed only if the attribute
            `context` is set, `key` only if `takes_key` is True, and `state` only if layers carry state. `state` is the layer's
            carried state before and after the microbatch; without it, `layer` returns x alone.
        head: `head(outer, x, batch) -> loss`, a float32 scalar, the mean over `batch`. Matrices in `outer` are cast to
            `compute_dtype`.
        sharded: Leaves of `outer` that are sharded over the ranks: maps the path of the leaf, with `/` between names, to the
            sharded axis, whose length must be a multiple of the number of ranks. `embed` and `head` get the local shards.
        split: `split(params) -> (outer, layers)` returns the parameters outside the layers, and a list with a tree for each
            layer, from the first to the last. All layers have the same tree and shapes. Also called with shapes in place of
            arrays, under `jax.eval_shape`. The default expects params to be this pair.
        join: `join(outer, layers) -> params` inverts `split`. The default returns the pair.
        takes_key: True if `layer` takes a random key in a training step. The key differs between steps, data ranks,
            microbatches and layers.
        context: `context(batch)` returns an additional input of every layer, such as segment ids: a tree of integers. It has no
            gradient. None if layers take no context.
        split_carried: `split_carried(carried) -> layers` takes the carried state of the model, and returns a list with the
            carried state of each layer. All layers carry arrays of the same shapes; embedding and head carry no state. The
            default expects this list.
        join_carried: `join_carried(layers) -> carried` inverts `split_carried`. The default returns the list.

    Examples:
        The parameters are (outer, [layer, layer, ...]). Pass `split` and `join` for a different tree.

        >>> model = jgraph.PipelineModel(
        ...     embed=lambda outer, batch: batch @ outer["embed"],
        ...     layer=lambda params, x: jnp.tanh(x @ params["kernel"]),
        ...     head=lambda outer, x, batch: jnp.mean((x @ outer["head"]) ** 2),
        ... )
    """

    embed: Callable[..., jax.Array]
    layer: Callable[..., jax.Array]
    head: Callable[..., jax.Array]
    sharded: dict[str, int] = field(default_factory=dict)
    split: Callable[..., tuple[Params, list[Params]]] = lambda params: params
    join: Callable[..., Params] = lambda outer, layers: (outer, layers)
    takes_key: bool = False
    context: Callable[..., Tree] | None = None
    split_carried: Callable[..., list[Carried]] = lambda carried: carried
    join_carried: Callable[..., Carried] = lambda layers: layers

    def context_of(self, batch: Batch) -> tuple[Tree, ...]:
        """Returns the tuple `(context(batch),)` for a microbatch; empty if layers take no context."""
        return () if self.context is None else (self.context(batch),)


@dataclass(frozen=True)
class StageAssignment:
    """Assigns layers to ranks: consecutive layers form a stage, and the schedule assigns stages to ranks.

    If the number of stages does not divide the number of layers, the first stages have one more layer than the others. The last
    place of every other stage is then padding, which does not change the results.
    """

    placement: tuple[tuple[int, ...], ...]  # the stage of each chunk of each rank
    num_layers: int

    def __post_init__(self):
        if self.num_layers < self.num_stages:
            raise OrderError(
                f"the model has {self.num_layers} layers for {self.num_stages} stages ({len(self.placement)} ranks x "
                f"{self.num_chunks} chunks): every stage needs a layer; use fewer ranks or chunks, or more layers"
            )

    @classmethod
    def from_schedule(cls, schedule: Schedule, num_layers: int) -> "StageAssignment":
        if len(set(map(len, schedule.placement))) > 1:
            counts = ", ".join(str(len(stages)) for stages in schedule.placement)
            raise OrderError(f"the ranks have {counts} stages: must be the same number on every rank")
        return cls(schedule.placement, num_layers)

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.placement))

    @property
    def num_chunks(self) -> int:
        return len(self.placement[0])

    @property
    def layers_per_stage(self) -> int:
        """Number of layers of the longest stage."""
        return -(-self.num_layers // self.num_stages)

    @property
    def is_even(self) -> bool:
        return self.num_layers % self.num_stages == 0

    def layers(self) -> np.ndarray:
        """Returns the layer at every place, int32 [P, C, N]. Padding has the first layer of its stage."""
        first = np.array([[self._bounds(stage)[0] for stage in stages] for stages in self.placement], np.int32)
        return first[..., None] + np.arange(self.layers_per_stage, dtype=np.int32) * self.active()

    def active(self) -> np.ndarray:
        """Returns a mask of the places, bool [P, C, N]: False for padding."""
        bounds = np.array([[self._bounds(stage) for stage in stages] for stages in self.placement])
        return np.arange(self.layers_per_stage) < (bounds[..., 1] - bounds[..., 0])[..., None]

    def places(self) -> list[tuple[int, int, int]]:
        """Returns the (rank, chunk, place) of each layer."""
        home = {stage: (rank, chunk) for rank, stages in enumerate(self.placement) for chunk, stage in enumerate(stages)}
        bounds = [(*home[stage], *self._bounds(stage)) for stage in range(self.num_stages)]
        return [(rank, chunk, place) for rank, chunk, first, end in bounds for place in range(end - first)]

    def _bounds(self, stage: int) -> tuple[int, int]:
        """Returns the half-open range of layers of a stage."""
        least, longer = divmod(self.num_layers, self.num_stages)
        first = stage * least + min(stage, longer)
        return first, first + least + (stage < longer)


def split_embedding(table_VD: jax.Array, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Looks up tokens in an embedding table that is sharded by rows over the axis `pipe`.

    Equivalent to `table[tokens].astype(dtype)` with the unsharded table. Every rank holds V/P consecutive rows. Collective over
    `pipe`: call it on every rank with the same tokens, for example in `embed` of a `PipelineModel`, which runs under
    `jax.shard_map`. Declare the table in `PipelineModel.sharded` with axis 0.

    Args:
        table_VD: The local shard [V/P, D], float32, for V tokens, P ranks and width D: rank r has the rows from r * V/P.
            Gradients of repeated tokens are summed in float32.
        tokens: Integer ids in [0, V), of any shape, over the whole vocabulary. The result for other ids is zero.
        dtype: Dtype of the result. Rows are cast before a sum over the ranks. The sum is exact, because only one rank has a
            nonzero row for a token.

    Returns:
        The embeddings [*tokens.shape, D], the same on all ranks.
    """
    index = tokens - jax.lax.axis_index(AXIS) * len(table_VD)
    is_local = (index >= 0) & (index < len(table_VD))
    rows = table_VD[jnp.clip(index, 0, len(table_VD) - 1)].astype(dtype)
    # Only one rank adds a nonzero value, so the sum is exact in any dtype.
    return jax.lax.psum(summable(jnp.where(is_local[..., None], rows, 0)), AXIS).astype(dtype)
