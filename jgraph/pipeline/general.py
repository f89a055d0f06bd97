"""The general runtime: plays any schedule tick by tick. A rank selects its action by `act_where`.

Every tick permutes outside of the actions. A collective inside an action would wait for ranks that do another action.
"""

import numpy as np
from jax import Array, lax

from jgraph.pipeline.runtime import RankRuntime, Row, State
from jgraph.pipeline.stage import act_where
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD


def play(runtime: RankRuntime) -> State:
    """Plays all ticks in order. Returns the final state."""
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
        return runtime.send(after, row, out, ["activation", "gradient"]), None

    return lax.scan(tick, runtime.start(), runtime.rows)[0]
