"""The aligned runtime: in a tick all ranks do the same, so the program says what that is and needs no branch on it.

Equal rounds are one `lax.scan`. Two kinds of tick have a `lax.cond` on the rank: those in which some ranks fill in a pending
wgrad while the others do a forward or a dgrad, and wgrads that not all ranks have. What idle ranks make goes to free slots.
"""

from dataclasses import replace

import numpy as np
from jax import lax

from jgraph.pipeline.machine import Machine, Row, State
from jgraph.schedule.action import DGRAD, FORWARD, KINDS, WGRAD
from jgraph.schedule.table import phases


def play(machine: Machine) -> State:
    """All phases, one after another."""
    state = machine.start()
    for phase in phases(machine.columns.table):
        size = len(phase.kinds)
        ticks = phase.first_tick + np.arange(phase.rounds * size).reshape(phase.rounds, size)
        kinds = [KINDS.index(of_tick[0]) for of_tick in phase.kinds]

        def run(state: State, rows: Row, kinds=kinds, ticks=ticks) -> State:
            for j, kind in enumerate(kinds):
                state = _tick(machine, state, kind, {name: row[j] for name, row in rows.items()}, ticks[:, j])
            return state

        rows = {name: row[ticks[0, 0] : ticks[-1, -1] + 1].reshape(ticks.shape) for name, row in machine.rows.items()}
        if phase.rounds == 1:
            state = run(state, {name: row[0] for name, row in rows.items()})
        else:
            state, _ = lax.scan(lambda state, rows, run=run: (run(state, rows), None), state, rows)
    return state


def _tick(machine: Machine, state: State, kind: int, row: Row, ticks: np.ndarray) -> State:
    """One tick, in which ranks do `kind`, or a wgrad, or nothing; `ticks` are all those that this code is run for."""
    kinds = machine.columns.table.kind[ticks]
    does, fills_in = row["kind"] == kind, row["kind"] == WGRAD
    if kind == WGRAD:
        if (kinds == WGRAD).all():
            _, grads = machine.wgrad(state, row)
        else:
            grads = lax.cond(fills_in, lambda: machine.wgrad(state, row)[1], lambda: state.grads)
        return replace(state, grads=grads)

    if kind == FORWARD:
        x = machine.x(state, row, ticks)

        def act():
            return machine.forward(state, row, x)
    else:
        dy = machine.dy(state, row)
        counts = None if (kinds == DGRAD).all() else does

        def act():
            return machine.dgrad(state, row, dy, counts)

    made, grads = lax.cond(fills_in, lambda: machine.wgrad(state, row), act) if (kinds == WGRAD).any() else act()
    state = replace(state, grads=grads)
    if kind == FORWARD:
        state = state.write("forward_dgrad", row["write forward_dgrad"], made.forward_dgrad)
        state = state.write("forward_wgrad", row["write forward_wgrad"], made.forward_wgrad)
        state = machine.leave(state, row, made.out, ticks, does)
        return machine.send(state, row, made.out, ["activation"])
    state = state.write("stash", row["write stash"], made.stash)
    state = machine.back(state, row, made.out, ticks, does)
    return machine.send(state, row, made.out, ["gradient"])
