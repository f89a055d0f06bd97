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
from jgraph.pipeline._stage import StageExecutor, StageGrads
from jgraph.pipeline.partition import AXIS
from jgraph.schedule.action import FORWARD
from jgraph.schedule.tables import ScheduleTables
from jgraph.scopes import scope
from jgraph.types import Carried, Params

_T = TypeVar("_T")

Row: TypeAlias = dict[str, Array]


@partial(jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["slots"])
@dataclass(frozen=True)
class Pool:
    """Slots for arrays with the same lifetime.

    A pool with one slot has no axis of slots, so that a write replaces the arrays without a copy.

    Attributes:
        leaves: One array per leaf, [slots, ...]; [...] if there is one slot.
        slots: Number of slots; 0 for an empty pool.
    """

    leaves: tuple[Array, ...]
    slots: int

    @classmethod
    def of(cls, avals: Sequence[jax.ShapeDtypeStruct], slots: int) -> "Pool":
        """Allocates a pool of uninitialized arrays.

        Args:
            avals: Shape and dtype of each leaf in one slot.
            slots: Number of slots.

        Returns:
            The pool. It has no leaves if `slots` is 0.
        """
        lead = () if slots == 1 else (slots,)
        # On a GPU, `lax.empty` only allocates. Zeros would take 1% of the step of a large model.
        return cls(tuple(lax.empty((*lead, *aval.shape), aval.dtype) for aval in avals) if slots else (), slots)

    @scope("copies")
    def read(self, slot: Array) -> tuple[Array, ...]:
        """Returns the leaves in a slot, without the axis of slots; () if the pool is empty.

        Args:
            slot: Index of the slot, an int32 scalar. Ignored if the pool has one slot.
        """
        if self.slots == 1:
            return self.leaves
        return tuple(lax.dynamic_index_in_dim(leaf, slot, keepdims=False) for leaf in self.leaves)

    @scope("copies")
    def write(self, slot: Array, values: Sequence[Array]) -> "Pool":
        """Returns a pool with other values in a slot. XLA updates the arrays in place if it can.

        Args:
            slot: Index of the slot, an int32 scalar. Ignored if the pool has one slot.
            values: One array per leaf, without the axis of slots.

        Returns:
            The new pool; `self` if the pool is empty.
        """
        if not self.slots:
            return self
        if self.slots == 1:
            return Pool(tuple(values), 1)
        written = [lax.dynamic_update_index_in_dim(leaf, v, slot, 0) for leaf, v in zip(self.leaves, values, strict=True)]
        return Pool(tuple(written), self.slots)


@partial(jax.tree_util.register_dataclass, data_fields=["pools", "grads", "outer", "loss", "carried"], meta_fields=[])
@dataclass(frozen=True)
class State:
    """The state of a rank between two ticks. Immutable; methods return a new state.

    Attributes:
        pools: The pools by name: `forward_dgrad` and `forward_wgrad` (residuals for dgrad and wgrad), `stash` (from dgrad to
            wgrad), `activation` and `gradient` (received arrays), `loss` (gradients from the loss).
        grads: For each chunk, the gradients over microbatches.
        outer: Gradients of embedding and head, float32 sums over microbatches.
        loss: Sum of the losses of microbatches, a float32 scalar; zero except on the rank of the last stage.
        carried: Carried state of all chunks, merged over microbatches, leaves [chunks, places, ...].
    """

    pools: dict[str, Pool]
    grads: tuple[StageGrads, ...]
    outer: Params
    loss: Array
    carried: Carried

    def write(self, pool: str, slot: Array, values: Sequence[Array]) -> "State":
        """Returns a state with other values in a slot of a pool.

        Args:
            pool: Name of the pool.
            slot: Index of the slot, an int32 scalar.
            values: One array per leaf of the pool.

        Returns:
            The new state.
        """
        return replace(self, pools=self.pools | {pool: self.pools[pool].write(slot, values)})

    @scope("wgrad")
    def add_outer(self, gradients: Params) -> "State":
        """Returns a state with `gradients`, a tree like `outer`, added to the gradients of embedding and head in float32."""
        return replace(self, outer=jax.tree.map(lambda a, g: a + g.astype(a.dtype), self.outer, gradients))


class RankRuntime:
    """The operations of a tick on a rank. All methods are traced under `jax.shard_map` over the axis `pipe`.

    Methods take a `row`, the entries of `rows` for one tick, and often `ticks`, the indices of all ticks that share the traced
    code (for example, the iterations of a scan). Code for microbatches that none of these ticks has is left out.

    Args:
        rank: Computes the actions of the rank.
        tables: The schedule tables of all ranks.
        num_stages: Number of stages over all ranks.

    Attributes:
        rank: Computes the actions of the rank.
        tables: The schedule tables of all ranks.
        rows: The columns of the tables for this rank, int32 [ticks] by name: kind, stage, chunk, microbatch, enter, leave,
            back, `read POOL`, `write POOL`, `arrive SOURCE POOL`. An idle tick has chunk and microbatch 0. Methods take one
            row: int32 scalars by name.
    """

    def __init__(self, rank: StageExecutor, tables: ScheduleTables, num_stages: int):
        self.rank, self.tables, self._last = rank, tables, num_stages - 1
        table = tables.table
        shared = {"enter": tables.enter, "leave": tables.leave, "back": tables.back}
        by_rank = {"kind": table.kind, "stage": table.stage, "chunk": np.maximum(table.chunk, 0)}
        by_rank["microbatch"] = np.maximum(table.microbatch, 0)
        by_rank |= {f"read {pool}": column for pool, column in tables.reads.items()}
        by_rank |= {f"write {pool}": column for pool, column in tables.writes.items()}
        by_rank |= {f"arrive {source} {pool}": column for (source, pool), column in tables.arrivals.items()}
        # Stacked, so that a rank selects its columns with one operation.
        index = lax.axis_index(AXIS) if table.kind.shape[1] > 1 else 0
        picked = lax.dynamic_index_in_dim(jnp.asarray(np.stack(list(by_rank.values()))), index, 2, keepdims=False)
        self.rows = {name: picked[i] for i, name in enumerate(by_rank)} | {k: jnp.asarray(v) for k, v in shared.items()}

    def start(self) -> State:
        """Returns the state before the first tick: uninitialized pools, zero gradients, and the initial carried state."""
        shapes, slots = self.rank.shapes, self.tables.slots
        of = {
            "forward_dgrad": shapes.residuals.dgrad,
            "forward_wgrad": shapes.residuals.wgrad,
            "stash": shapes.stash.arrays,
            "activation": (shapes.y,),
            "gradient": (shapes.y,),
            "loss": (shapes.y,),
        }
        pools = {pool: Pool.of(avals, slots[pool]) for pool, avals in of.items()}
        carried = self.rank.carried.start(self.rank.num_chunks, shapes.aux)
        return State(pools, self.rank.zero_grads(), self.rank.zero_outer(), jnp.zeros((), jnp.float32), carried)

    def nothing(self) -> Array:
        """Returns an uninitialized array in the shape and dtype of x, the result of an action, for ticks without an action."""
        return lax.empty(self.rank.shapes.y.shape, self.rank.shapes.y.dtype)

    # --- Inputs of a tick ---

    @scope("copies")
    def x(self, state: State, row: Row, ticks: np.ndarray) -> Array:
        """Returns the input of a forward: the embedding for the first stage, a received activation for other stages.

        All ranks compute the embedding together if the tick has a forward of the first stage.

        Args:
            state: The state before the tick. Not changed.
            row: The row of the tick.
            ticks: Indices of all ticks that share this code.

        Returns:
            The array x. Its values have no meaning on a rank without a forward in this tick.
        """
        received = state.pools["activation"].read(row["read activation"])
        zeros = jnp.zeros(self.rank.shapes.y.shape, self.rank.shapes.y.dtype)
        if not (self.tables.enter[ticks] >= 0).any():
            return received[0]
        x = _where_any(self.tables.enter[ticks], row["enter"], self.rank.embed, zeros)
        return jnp.where(row["stage"] == 0, x, received[0]) if received else x

    @scope("copies")
    def dy(self, state: State, row: Row) -> Array:
        """Returns the output gradient of a dgrad: from the loss for the last stage, received for other stages.

        Args:
            state: The state before the tick. Not changed.
            row: The row of the tick.

        Returns:
            An array like x. Its values have no meaning on a rank without a dgrad or full backward in this tick.
        """
        from_loss = state.pools["loss"].read(row["read loss"])[0]
        received = state.pools["gradient"].read(row["read gradient"])
        return jnp.where(row["stage"] == self._last, from_loss, received[0]) if received else from_loss

    # --- Actions. Each returns the new state and the array to send. ---

    def forward(self, state: State, row: Row, x: Array) -> tuple[State, Array]:
        """Computes a forward. Writes the residuals to their pools, and merges the carried state.

        Args:
            state: The state before the action.
            row: The row of the tick. The carried state is merged only if its kind is forward.
            x: The input of the stage.

        Returns:
            The new state, and y, the output of the stage.
        """
        y, residuals, carried = self.rank.forward(row["chunk"], x, row["microbatch"])
        state = state.write("forward_dgrad", row["write forward_dgrad"], residuals.dgrad)
        state = state.write("forward_wgrad", row["write forward_wgrad"], residuals.wgrad)
        with scope("forward"):
            added = self.rank.carried.add(state.carried, carried, row["chunk"], row["kind"] == FORWARD)
        return replace(state, carried=added), y

    def dgrad(
        self, state: State, row: Row, dy: Array, *, counts: Array | None = None, keeps: bool = True
    ) -> tuple[State, Array, tuple[Array, ...]]:
        """Computes a dgrad, and adds the early gradients: the parameter gradients that dgrad computes.

        Args:
            state: The state before the action.
            row: The row of the tick.
            dy: The output gradient.
            counts: Bool scalar, False to drop the early gradients, for example on an idle rank; None adds them.
            keeps: True to write the stash to its pool; False if the caller passes it to `wgrad`.

        Returns:
            The new state, dx (the gradient of x), and the arrays of the stash.
        """
        dx, early, stash = self.rank.dgrad(row["chunk"], self._residuals(state, row), dy)
        state = replace(state, grads=self.rank.add_early(row["chunk"], state.grads, early, counts))
        return state.write("stash", row["write stash"], stash.arrays) if keeps else state, dx, stash.arrays

    def wgrad(self, state: State, row: Row, stashed: tuple[Array, ...] | None = None) -> State:
        """Computes a wgrad, and adds the delayed gradients: the parameter gradients that dgrad does not compute.

        Args:
            state: The state before the action.
            row: The row of the tick.
            stashed: The arrays of the stash, from `dgrad`; None reads them from their pool.

        Returns:
            The new state.
        """
        residuals = self._residuals(state, row).after_dgrad()
        arrays = state.pools["stash"].read(row["read stash"]) if stashed is None else stashed
        stash = Stash(arrays, self.rank.shapes.stash.trace)
        return replace(state, grads=self.rank.wgrad(row["chunk"], state.grads, residuals, stash))

    # --- Outputs of a tick ---

    @scope("copies")
    def leave(self, state: State, row: Row, y: Array, ticks: np.ndarray, is_forward: Array) -> State:
        """Computes the head for a microbatch after its forward of the last stage, on all ranks together.

        Adds the loss and the gradients of the head to the state. Writes dy, the gradient of y, to the pool `loss`.

        Args:
            state: The state after the action of the tick.
            row: The row of the tick.
            y: The result of the tick's action.
            ticks: Indices of all ticks that share this code.
            is_forward: Bool scalar, True if this rank runs a forward in this tick.

        Returns:
            The new state; `state` if none of `ticks` has a forward of the last stage.
        """
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
        """Adds the gradient of the embedding for a microbatch after its dgrad of the first stage, on all ranks together.

        Args:
            state: The state after the action of the tick.
            row: The row of the tick.
            dx: The result of the tick's action.
            ticks: Indices of all ticks that share this code.
            is_dgrad: Bool scalar, True if this rank runs a dgrad or full backward in this tick.

        Returns:
            The new state; `state` if none of `ticks` has a dgrad of the first stage.
        """
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
        """Sends the result of the tick to the rank that reads it, and writes the received arrays to pools.

        Collective over the axis `pipe`: every rank sends and receives, also without a result to send.

        Args:
            state: The state after the action of the tick.
            row: The row of the tick, which has the slots of the received arrays.
            out: The result of the tick's action: y of a forward, or dx of a dgrad or full backward.
            pools: Pools that may receive an array in this tick: `activation`, `gradient` or both.

        Returns:
            The new state.
        """
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
    """Returns `compute(m)` if the tick has a microbatch (m >= 0), else `none`. All ranks take the same branch.

    `numbers` has m for all ticks that share this code. There is no branch if all of them have a microbatch.
    """
    if (numbers >= 0).all():
        return compute(m)
    return lax.cond(m >= 0, compute, lambda _: none, m)
