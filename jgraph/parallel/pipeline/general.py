"""The general runtime: any schedule, tick by tick; what a rank does is a `lax.switch` over the actions that there are.

Pools are read inside the switch and written outside: returned through it, XLA would copy every one of them in every branch.
Permutes are outside too, in every tick: a collective in one branch would wait for ranks that are in another.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax

from jgraph.parallel.pipeline.runtime import RankRuntime, Row, State
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD


def play(runtime: RankRuntime) -> State:
    """All ticks, one after another."""
    kinds = runtime.tables.table.kind
    ticks = np.arange(len(kinds))
    present = [int(kind) for kind in np.unique(kinds)]
    branch_of = np.searchsorted(present, np.arange(IDLE + 1)).astype(np.int32)

    def tick(state: State, row: Row) -> tuple[State, None]:
        x, dy = runtime.x(state, row, ticks), runtime.dy(state, row)
        actions = {
            FORWARD: lambda: runtime.forward(state, row, x),
            DGRAD: lambda: runtime.dgrad(state, row, dy),
            WGRAD: lambda: runtime.wgrad(state, row),
            BACKWARD: lambda: runtime.backward(state, row, dy),
            IDLE: lambda: (runtime.nothing(), state.grads),
        }
        made, grads = lax.switch(jnp.asarray(branch_of)[row["kind"]], [actions[kind] for kind in present])
        after = replace(state, grads=grads)
        for pool in runtime.tables.writes:
            if pool != "loss":
                after = after.write(pool, row[f"write {pool}"], getattr(made, pool))
        is_forward = row["kind"] == FORWARD
        after = runtime.carry(after, row, made, is_forward)
        after = runtime.leave(after, row, made.out, ticks, is_forward)
        is_dgrad = (row["kind"] == DGRAD) | (row["kind"] == BACKWARD)
        after = runtime.back(after, row, made.out, ticks, is_dgrad)
        return runtime.send(after, row, made.out, ["activation", "gradient"]), None

    return lax.scan(tick, runtime.start(), runtime.rows)[0]
