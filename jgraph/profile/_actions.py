"""Compares the measured actions of a pipeline step with the simulated ones. Does not use JAX.

A trace has the kernels of forwards, dgrads and wgrads of a rank, but not their microbatches. The order of the schedule gives
the microbatches, because all actions of a kind run the same code and therefore the same number of kernels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from jgraph.errors import ProfileError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, KINDS, WGRAD
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.simulate import Costs, Execution, Simulation, simulate
from jgraph.schedule.tables import tick_table

# T ticks, P ranks

Runtime = Literal["aligned", "general"]
Kernels: TypeAlias = Mapping[int, np.ndarray]
"""By kind (FORWARD, DGRAD, WGRAD): start and end in ms of a rank's kernels in one step, [n, 2], sorted by start."""

# In the aligned runtime all ranks run a tick in lockstep. In the general one a tick ends with permutes, so a rank waits for
# the ranks that it exchanges arrays with.
_EXECUTION: Mapping[Runtime, Execution] = {"aligned": "lockstep", "general": "neighbours"}
_PARTS = {FORWARD: (FORWARD,), DGRAD: (DGRAD, BACKWARD), WGRAD: (WGRAD, BACKWARD)}
_MOST_SLOW = 10


def measured(schedule: Schedule, ranks: Sequence[Kernels], runtime: Runtime) -> Simulation:
    """Computes the start and end of every action in ms, from its first and last kernel. `ranks` has the kernels of each rank.

    `schedule` is the one that the SPMD engine runs (`Pipeline.schedule`): its wgrads may have another order than requested.
    """
    if len(ranks) != schedule.num_ranks:
        raise ProfileError(f"the trace has {len(ranks)} ranks, the schedule {schedule.num_ranks}: must be equal")
    kinds_TP = tick_table(schedule).kind
    lead_T = kinds_TP.min(1)  # another kind than wgrad, if any rank runs one
    starts, ends = [], []
    for r, (kernels, ticks) in enumerate(zip(ranks, schedule.ticks, strict=True)):
        kinds_T = kinds_TP[:, r]
        start_T, end_T = np.full(len(kinds_T), np.inf), np.full(len(kinds_T), -np.inf)
        for kind, parts in _PARTS.items():
            runs = np.isin(kinds_T, parts)
            # A rank that is idle in a tick also runs the tick's forward or dgrad. In the general runtime it runs nothing.
            if runtime == "aligned" and kind != WGRAD:
                runs = (lead_T == kind) & (kinds_T != WGRAD)
            runs = np.flatnonzero(runs)
            times = np.asarray(kernels.get(kind, ()), float).reshape(-1, 2)
            if len(times) % max(len(runs), 1) or (len(times) == 0) != (len(runs) == 0):
                raise ProfileError(
                    f"rank {r} ran {len(times)} kernels of {KINDS[kind]} in {len(runs)} actions of that kind: must be a whole "
                    "multiple, because all of them run the same kernels; XLA may have merged or split some"
                )
            if len(runs):
                times = times.reshape(len(runs), -1, 2)
                start_T[runs] = np.minimum(start_T[runs], times[:, :, 0].min(1))
                end_T[runs] = np.maximum(end_T[runs], times[:, :, 1].max(1))
        starts.append(start_T[ticks])
        ends.append(end_T[ticks])
    first = min(row.min() for row in starts)
    return Simulation(schedule, tuple(row - first for row in starts), tuple(row - first for row in ends), 0.0)


def costs(run: Simulation) -> dict[str, float]:
    """Returns the median time in ms of an action, by kind. Kinds that the schedule lacks are absent."""
    kinds = np.concatenate([order.kinds for order in run.schedule])
    took = np.concatenate(run.ends) - np.concatenate(run.starts)
    return {KINDS[kind]: float(np.median(took[kinds == kind])) for kind in np.unique(kinds)}


def planned(schedule: Schedule, costs_ms: Mapping[str, float], runtime: Runtime) -> Simulation:
    """Simulates a step. Every action takes the cost of its kind, and transfers take no time."""
    return simulate(schedule, Costs(**costs_ms), execution=_EXECUTION[runtime])


def report(schedule: Schedule, run: Simulation, runtime: Runtime) -> dict[str, Any]:
    """Returns `pipeline` of profile.json: the measured step, and the step simulated with the median costs."""
    costs_ms = costs(run)
    plan = planned(schedule, costs_ms, runtime)
    actions: list[dict[str, Any]] = []
    for r, order in enumerate(schedule):
        columns = (plan.starts[r], plan.ends[r], run.starts[r], run.ends[r])
        for action, *times in zip(order, *columns, strict=True):
            action_ms: dict[str, float] = dict(
                zip(("planned_start_ms", "planned_end_ms", "start_ms", "end_ms"), times, strict=True)
            )
            # The time above the median of the kind.
            action_ms["slow_ms"] = action_ms["end_ms"] - action_ms["start_ms"] - costs_ms[action.kind]
            fields = {"rank": r, "kind": action.kind, "chunk": action.chunk, "microbatch": action.microbatch}
            actions.append(fields | {name: round(float(ms), 4) for name, ms in action_ms.items()})
    slowest = sorted(range(len(actions)), key=lambda i: -actions[i]["slow_ms"])[:_MOST_SLOW]
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": len(schedule.placement[0]),  # per rank
        "costs_ms": {kind: round(ms, 4) for kind, ms in costs_ms.items()},
        "planned": {"step_ms": round(plan.makespan, 4), "bubble": plan.bubble},
        "measured": {"step_ms": round(run.makespan, 4), "bubble": run.bubble},
        "actions": actions,
        # Indices into `actions`.
        "slow": [i for i in slowest if actions[i]["slow_ms"] > 0],
    }
