"""Pools of arrays, the state of a rank between two ticks, and the operations of a tick, for the runtimes of the SPMD engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.autodiff import Residuals, Stash
from jgraph.pipeline._partition import AXIS
from jgraph.pipeline._stage import StageExecutor, StageGrads
from jgraph.schedule.action import FORWARD
from jgraph.schedule.tables import ScheduleTables
from jgraph.scopes import scope
from jgraph.types import Carried, Params

_T = TypeVar("_T")

Row: TypeAlias = dict[str, Array]


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["slots"])
@dataclass(frozen=True)
class Pool:
    """Slots for arrays with the same lifetime."""

    leaves: tuple[Array, ...]  # [slots, ...]; [...] if there is one slot, so that a write replaces the arrays without a copy
    slots: int

    @classmethod
    def allocate(cls, avals: Sequence[jax.ShapeDtypeStruct], slots: int) -> "Pool":
        lead = () if slots == 1 else (slots,)
        # On a GPU, `lax.empty` only allocates. Zeros would take 1% of the step of a large model.
        return cls(tuple(lax.empty((*lead, *aval.shape), aval.dtype) for aval in avals) if slots else (), slots)

    @scope("copies")
    def read(self, slot: Array) -> tuple[Array, ...]:
        """Returns the leaves in a slot; () if the pool is empty."""
        if self.slots == 1:
            return self.leaves
        return tuple(lax.dynamic_index_in_dim(leaf, slot, keepdims=False) for leaf in self.leaves)

    @scope("copies")
    def write(self, slot: Array, values: Sequence[Array]) -> "Pool":
        """Returns a pool with other values in a slot. XLA updates the arrays in place if it can."""
        if not self.slots:
            return self
        if self.slots == 1:
            return Pool(tuple(values), 1)
        written = [lax.dynamic_update_index_in_dim(leaf, v, slot, 0) for leaf, v in zip(self.leaves, values, strict=True)]
        return Pool(tuple(written), self.slots)


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "grads", "outer", "loss", "carried"], meta_fields=[])
@dataclass(frozen=True)
class State:
    """The state of a rank between two ticks. Immutable; methods return a new state."""

    # The pools of `jgraph.schedule._slots`, and `loss`: gradients from the loss for the output of the last stage
    pools: dict[str, Pool]
    grads: tuple[StageGrads, ...]  # of each chunk, summed over microbatches
    outer: Params  # gradients of embedding and head, float32 sums over microbatches
    loss: Array  # sum over microbatches, a float32 scalar; zero except on the rank of the last stage
    carried: Carried  # of all chunks, merged over microbatches, leaves [C, N, ...]

    def write(self, pool: str, slot: Array, values: Sequence[Array]) -> "State":
        return replace(self, pools=self.pools | {pool: self.pools[pool].write(slot, values)})

    @scope("wgrad")
    def add_outer(self, gradients: Params) -> "State":
        return replace(self, outer=jax.tree.map(lambda a, g: a + g.astype(a.dtype), self.outer, gradients))


class RankRuntime:
    """The operations of a tick on a rank. All methods are traced under `jax.shard_map` over the axis `pipe`.

    Methods take a `row`, the entries of `rows` for one tick, and often `ticks`, the indices of all ticks that share the traced
    code (for example, the iterations of a scan). Code for microbatches that none of these ticks has is left out.
    """

    def __init__(self, rank: StageExecutor, tables: ScheduleTables, num_stages: int):
        self.rank = rank
        self.tables = tables
        self._last = num_stages - 1
        table = tables.table
        shared = {"enter": tables.enter, "leave": tables.leave, "back": tables.back}
        by_rank = {"kind": table.kind, "stage": table.stage, "chunk": np.maximum(table.chunk, 0)}
        by_rank["microbatch"] = np.maximum(table.microbatch, 0)
        by_rank |= {f"read {pool}": column for pool, column in tables.reads.items()}
        by_rank |= {f"write {pool}": column for pool, column in tables.writes.items()}
        by_rank |= {f"arrive {source} {pool}": column for (source, pool), column in tables.arrivals.items()}
        # An idle tick has chunk and microbatch 0. Stacked, so that a rank selects its columns with one operation.
        index = lax.axis_index(AXIS) if table.kind.shape[1] > 1 else 0
        picked = lax.dynamic_index_in_dim(jnp.asarray(np.stack(list(by_rank.values()))), index, 2, keepdims=False)
        # The columns of this rank, int32 [ticks] by name. Methods take one row: int32 scalars by name.
        self.rows = {name: picked[i] for i, name in enumerate(by_rank)} | {k: jnp.asarray(v) for k, v in shared.items()}

    def start(self) -> State:
        shapes = self.rank.shapes
        slots = self.tables.slots
        of_pool = {
            "forward_dgrad": shapes.residuals.dgrad,
            "forward_wgrad": shapes.residuals.wgrad,
            "stash": shapes.stash.arrays,
            "activation": (shapes.y,),
            "gradient": (shapes.y,),
            "loss": (shapes.y,),
        }
        pools = {pool: Pool.allocate(avals, slots[pool]) for pool, avals in of_pool.items()}
        carried = self.rank.carried.start(self.rank.num_chunks, shapes.aux)
        return State(pools, self.rank.zero_grads(), self.rank.zero_outer(), jnp.zeros((), jnp.float32), carried)

    def nothing(self) -> Array:
        """Returns an uninitialized array like x, the result of an action, for ticks without an action."""
        return lax.empty(self.rank.shapes.y.shape, self.rank.shapes.y.dtype)

    # --- Inputs of a tick ---

    @scope("copies")
    def x(self, state: State, row: Row, ticks: np.ndarray) -> Array:
        """Returns the input of a forward; any values on ranks without one. All ranks compute an embedding together."""
        received = state.pools["activation"].read(row["read activation"])
        zeros = jnp.zeros(self.rank.shapes.y.shape, self.rank.shapes.y.dtype)
        if not (self.tables.enter[ticks] >= 0).any():
            return received[0]
        x = _where_any(self.tables.enter[ticks], row["enter"], self.rank.embed, zeros)
        return jnp.where(row["stage"] == 0, x, received[0]) if received else x

    @scope("copies")
    def dy(self, state: State, row: Row) -> Array:
        """Returns the output gradient of a dgrad, from the loss or received; any values on ranks without a dgrad."""
        from_loss = state.pools["loss"].read(row["read loss"])[0]
        received = state.pools["gradient"].read(row["read gradient"])
        return jnp.where(row["stage"] == self._last, from_loss, received[0]) if received else from_loss

    # --- Actions. Each returns the new state and the array to send. Early gradients are the parameter gradients that a dgrad
    # computes; a wgrad computes the others, the delayed gradients. ---

    def forward(self, state: State, row: Row, x: Array) -> tuple[State, Array]:
        y, residuals, carried = self.rank.forward(row["chunk"], x, row["microbatch"])
        state = state.write("forward_dgrad", row["write forward_dgrad"], residuals.dgrad)
        state = state.write("forward_wgrad", row["write forward_wgrad"], residuals.wgrad)
        with scope("forward"):
            added = self.rank.carried.add(state.carried, carried, row["chunk"], row["kind"] == FORWARD)
        return replace(state, carried=added), y

    def dgrad(
        self,
        state: State,
        row: Row,
        dy: Array,
        *,
        counts: Array | None = None,  # False drops the early gradients, for example on an idle rank
        keeps: bool = True,  # False if the caller passes the stash to `wgrad`
    ) -> tuple[State, Array, tuple[Array, ...]]:
        """Computes a dgrad, and adds the early gradients, those of parameters. Also returns the arrays of the stash."""
        dx, early, stash = self.rank.dgrad(row["chunk"], self._residuals(state, row), dy)
        state = replace(state, grads=self.rank.add_early(row["chunk"], state.grads, early, counts))
        return state.write("stash", row["write stash"], stash.arrays) if keeps else state, dx, stash.arrays

    def wgrad(self, state: State, row: Row, stashed: tuple[Array, ...] | None = None) -> State:
        """Computes a wgrad, and adds the delayed gradients. Reads the stash from its pool if `stashed` is None."""
        residuals = self._residuals(state, row).after_dgrad()
        arrays = state.pools["stash"].read(row["read stash"]) if stashed is None else stashed
        stash = Stash(arrays, self.rank.shapes.stash.trace)
        return replace(state, grads=self.rank.wgrad(row["chunk"], state.grads, residuals, stash))

    # --- Outputs of a tick ---

    @scope("copies")
    def leave(self, state: State, row: Row, y: Array, ticks: np.ndarray, is_forward: Array) -> State:
        """Computes the head after a forward of the last stage, on all ranks together. Writes dy to the pool `loss`."""
        numbers = self.tables.leave[ticks]
        if not (numbers >= 0).any():
            return state
        is_last = (row["stage"] == self._last) & is_forward
        none = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.outer), jnp.zeros_like(y))

        def head(m: Array):
            loss, d_outer, dy = self.rank.head(m, y, is_last)
            return loss.astype(jnp.float32), jax.tree.map(lambda g: g.astype(jnp.float32), d_outer), dy

        loss, d_outer, dy = _where_any(numbers, row["leave"], head, none)
        state = replace(state.add_outer(d_outer), loss=state.loss + loss)
        return state.write("loss", row["write loss"], (dy,))

    @scope("copies")
    def back(self, state: State, row: Row, dx: Array, ticks: np.ndarray, is_dgrad: Array) -> State:
        """Adds the gradient of the embedding after a dgrad of the first stage, on all ranks together."""
        numbers = self.tables.back[ticks]
        if not (numbers >= 0).any():
            return state
        dx = jnp.where((row["stage"] == 0) & is_dgrad, dx, jnp.zeros((), dx.dtype))
        zeros = jax.tree.map(jnp.zeros_like, state.outer)

        def embed_backward(m: Array) -> Params:
            # In the dtype of the sums: parameters in bfloat16 have gradients in bfloat16.
            return jax.tree.map(lambda g: g.astype(jnp.float32), self.rank.embed_backward(m, dx))

        return state.add_outer(_where_any(numbers, row["back"], embed_backward, zeros))

    def send(self, state: State, row: Row, out: Array, pools: Sequence[str]) -> State:
        """Sends the result of the tick to its reader, and writes received arrays to `pools`. All ranks send and receive."""
        received: dict[str, Array] = {}
        for source, pool in self.tables.arrivals:
            if pool in pools:
                if source not in received:
                    received[source] = out if source == "same" else lax.ppermute(out, AXIS, self.tables.hops[source])
                state = state.write(pool, row[f"arrive {source} {pool}"], (received[source],))
        return state

    def _residuals(self, state: State, row: Row) -> Residuals:
        pools = state.pools
        return Residuals(
            pools["forward_dgrad"].read(row["read forward_dgrad"]),
            pools["forward_wgrad"].read(row["read forward_wgrad"]),
            self.rank.shapes.residuals.trace,
        )


def _where_any(numbers: np.ndarray, m: Array, compute: Callable[[Array], _T], none: _T) -> _T:
    """Returns `compute(m)` if the tick has a microbatch (m >= 0), else `none`. `numbers` has m for all ticks of this code."""
    if (numbers >= 0).all():
        return compute(m)
    # All ranks take the same branch.
    return lax.cond(m >= 0, compute, lambda _: none, m)
