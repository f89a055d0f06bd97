"""The aligned runtime: in a tick all ranks do the same, so the program says what that is and needs no branch on it.

Equal rounds are one `lax.scan`. Two kinds of tick have a `lax.cond` on the rank: those in which some ranks fill in a pending
wgrad while the others do a forward or a dgrad, and wgrads that not all ranks have. What idle ranks make goes to free slots.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jax import Array, lax

from jgraph.parallel.pipeline.runtime import Made, RankRuntime, Row, State
from jgraph.schedule.action import DGRAD, FORWARD, KINDS, WGRAD
from jgraph.schedule.tables import phases


def play(runtime: RankRuntime) -> State:
    """All phases, one after another."""
    state = runtime.start()
    for phase in phases(runtime.tables.table):
        size = len(phase.kinds)
        ticks = phase.first_tick + np.arange(phase.rounds * size).reshape(phase.rounds, size)
        kinds = [KINDS.index(of_tick[0]) for of_tick in phase.kinds]

        def run(state: State, rows: Row, kinds=kinds, ticks=ticks) -> State:
            return _round(runtime, state, kinds, rows, ticks)

        rows = {name: row[ticks[0, 0] : ticks[-1, -1] + 1].reshape(ticks.shape) for name, row in runtime.rows.items()}
        if phase.rounds == 1:
            state = run(state, {name: row[0] for name, row in rows.items()})
        else:
            state, _ = lax.scan(lambda state, rows, run=run: (run(state, rows), None), state, rows)
    return state


def _round(runtime: RankRuntime, state: State, kinds: list[int], rows: Row, ticks: np.ndarray) -> State:
    """A round; `ticks` [rounds, ticks of a round] are all those that this code is run for."""
    table, stashed = runtime.tables.table, None
    for j, kind in enumerate(kinds):
        row = {name: row[j] for name, row in rows.items()}
        if kind == FORWARD:
            state = _forward(runtime, state, row, ticks[:, j])
        elif kind == WGRAD:
            state = _wgrad(runtime, state, row, ticks[:, j], stashed)
        else:
            # A wgrad that follows its dgrad at once on every rank takes the stash from its hands.
            same = (np.array_equal(column[ticks[:, j]], column[ticks[:, j + 1]]) for column in (table.stage, table.microbatch))
            is_handed = kinds[j + 1 :] == [WGRAD] and (table.kind[ticks[:, j + 1]] == WGRAD).all() and all(same)
            state, made = _dgrad(runtime, state, row, ticks[:, j])
            if is_handed:
                stashed = made.stash
            else:
                state = state.write("stash", row["write stash"], made.stash)
    return state


def _forward(runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray) -> State:
    x = runtime.x(state, row, ticks)
    made, state = _or_wgrad(runtime, state, row, ticks, lambda: runtime.forward(state, row, x))
    state = state.write("forward_dgrad", row["write forward_dgrad"], made.forward_dgrad)
    state = state.write("forward_wgrad", row["write forward_wgrad"], made.forward_wgrad)
    is_forward = row["kind"] == FORWARD
    state = runtime.carry(state, row, made, is_forward)
    state = runtime.leave(state, row, made.out, ticks, is_forward)
    return runtime.send(state, row, made.out, ["activation"])


def _dgrad(runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray) -> tuple[State, Made]:
    dy, does = runtime.dy(state, row), row["kind"] == DGRAD
    counts = None if (runtime.tables.table.kind[ticks] == DGRAD).all() else does
    made, state = _or_wgrad(runtime, state, row, ticks, lambda: runtime.dgrad(state, row, dy, counts))
    state = runtime.back(state, row, made.out, ticks, does)
    return runtime.send(state, row, made.out, ["gradient"]), made


def _wgrad(runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray, stashed: tuple[Array, ...] | None) -> State:
    if (runtime.tables.table.kind[ticks] == WGRAD).all():
        return replace(state, grads=runtime.wgrad(state, row, stashed)[1])
    return replace(state, grads=lax.cond(row["kind"] == WGRAD, lambda: runtime.wgrad(state, row)[1], lambda: state.grads))


def _or_wgrad(
    runtime: RankRuntime, state: State, row: Row, ticks: np.ndarray, act: Callable[[], tuple[Made, Any]]
) -> tuple[Made, State]:
    """What `act` makes; in a tick in which some ranks do a wgrad instead, those do."""
    has_wgrad = (runtime.tables.table.kind[ticks] == WGRAD).any()
    made, grads = lax.cond(row["kind"] == WGRAD, lambda: runtime.wgrad(state, row), act) if has_wgrad else act()
    return made, replace(state, grads=grads)
