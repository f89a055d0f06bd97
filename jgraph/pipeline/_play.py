"""The two runtimes of the SPMD engine. Each plays all ticks of a schedule, under `jax.shard_map` over the axis `pipe`.

In the aligned runtime, all ranks compute the same action in a tick, so the program has no branches on the kind of action. Equal
rounds are iterations of one `lax.scan`. Two kinds of tick use `act_where`: ticks with a wgrad on some ranks and a forward or
dgrad on others, and ticks with a wgrad on only some ranks. In other ticks, idle ranks compute too, and write their results to
free slots. The general runtime plays any schedule.
"""

from collections.abc import Callable

import numpy as np
from jax import Array, lax

from jgraph.pipeline._runtime import RankRuntime, Row, State
from jgraph.pipeline._stage import act_where
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD
from jgraph.schedule.tables import Phase, phases


def play_general(runtime: RankRuntime) -> State:
    """Plays any schedule tick by tick, in one `lax.scan`. Needs tables with `writing="all"`."""
    kinds = runtime.tables.table.kind
    ticks = np.arange(len(kinds))

    def tick(state: State, row: Row) -> tuple[State, None]:
        x, dy = runtime.x(state, row, ticks), runtime.dy(state, row)

        def backward(state: State) -> tuple[State, Array]:
            state, dx, stash = runtime.dgrad(state, row, dy, keeps=False)
            return runtime.wgrad(state, row, stash), dx

        actions = {
            FORWARD: lambda state, _: runtime.forward(state, row, x),
            DGRAD: lambda state, _: runtime.dgrad(state, row, dy)[:2],
            WGRAD: lambda state, out: (runtime.wgrad(state, row), out),
            BACKWARD: lambda state, _: backward(state),
        }
        after = state, runtime.nothing()
        for kind in sorted(set(np.unique(kinds)) - {IDLE}):
            after = act_where(row["kind"] == kind, lambda carry, act=actions[kind]: act(*carry), after)
        state, out = after
        after = runtime.leave(state, row, out, ticks, row["kind"] == FORWARD)
        after = runtime.back(after, row, out, ticks, (row["kind"] == DGRAD) | (row["kind"] == BACKWARD))
        # After the actions, because a collective inside an action would wait for ranks with a different action.
        return runtime.send(after, row, out, ["activation", "gradient"]), None

    return lax.scan(tick, runtime.start(), runtime.rows)[0]


def play_aligned(runtime: RankRuntime) -> State:
    """Plays an aligned schedule: the rounds of a phase are iterations of one `lax.scan`. Needs `writing="makers"`."""
    state = runtime.start()
    for phase in phases(runtime.tables.table):
        size = len(phase.kinds)
        ticks = phase.first_tick + np.arange(phase.rounds * size).reshape(phase.rounds, size)

        def run(state: State, rows: Row, phase: Phase = phase, ticks: np.ndarray = ticks) -> State:
            return _round(runtime, state, phase, rows, ticks)

        rows = {name: row[ticks[0, 0] : ticks[-1, -1] + 1].reshape(ticks.shape) for name, row in runtime.rows.items()}
        if phase.rounds == 1:
            state = run(state, {name: row[0] for name, row in rows.items()})
        else:
            state, _ = lax.scan(lambda state, rows, run=run: (run(state, rows), None), state, rows)
    return state


def _round(runtime: RankRuntime, state: State, phase: Phase, rows: Row, ticks: np.ndarray) -> State:
    """Plays one round. `ticks` [rounds, ticks per round] are the ticks of all rounds that share this code."""
    stashed = None
    for j, kinds in enumerate(phase.kinds):
        row = {name: row[j] for name, row in rows.items()}
        if kinds[0] == "forward":
            state = _forward(runtime, state, row, ticks[:, j])
        elif kinds[0] == "wgrad":
            state = _wgrad(runtime, state, row, ticks[:, j], stashed)
        else:
            state, stash = _dgrad(runtime, state, row, ticks[:, j], phase.is_handed)
            stashed = stash if phase.is_handed else None
    return state


def _forward(runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray) -> State:
    x = runtime.x(state, row, ticks)
    state, y = _or_wgrad(runtime, state, row, ticks, lambda state: runtime.forward(state, row, x))
    state = runtime.leave(state, row, y, ticks, row["kind"] == FORWARD)
    return runtime.send(state, row, y, ["activation"])


def _dgrad(
    runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray, is_handed: bool
) -> tuple[State, tuple[Array, ...] | None]:
    """Plays a tick of dgrads. Returns the stash if `is_handed`, so that it is not written to its pool; else None."""
    dy = runtime.dy(state, row)
    does = row["kind"] == DGRAD
    stash = None
    counts = None if (runtime.tables.table.kind[ticks] == DGRAD).all() else does
    if is_handed:
        state, dx, stash = runtime.dgrad(state, row, dy, keeps=False)
    else:
        state, dx = _or_wgrad(runtime, state, row, ticks, lambda state: runtime.dgrad(state, row, dy, counts=counts)[:2])
    state = runtime.back(state, row, dx, ticks, does)
    return runtime.send(state, row, dx, ["gradient"]), stash


def _wgrad(runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray, stashed: tuple[Array, ...] | None = None) -> State:
    if (runtime.tables.table.kind[ticks] == WGRAD).all():
        return runtime.wgrad(state, row, stashed)
    return act_where(row["kind"] == WGRAD, lambda state: runtime.wgrad(state, row), state)


def _or_wgrad(
    runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray, act: Callable[[State], tuple[State, Array]]
) -> tuple[State, Array]:
    """Calls `act`. If some ranks have a wgrad in these ticks, each rank computes a wgrad, `act` or nothing."""
    kinds = runtime.tables.table.kind[ticks]
    if not (kinds == WGRAD).any():
        return act(state)
    state = _wgrad(runtime, state, row, ticks)
    does = (row["kind"] != WGRAD) & (row["kind"] != IDLE)
    return act_where(does, lambda carry: act(carry[0]), (state, runtime.nothing()))
