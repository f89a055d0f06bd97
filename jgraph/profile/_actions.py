"""Compares a pipeline step as it ran with the step as planned, action by action. Does not use JAX.

A trace has the kernels of forwards, dgrads and wgrads of a rank, but not their microbatches. Those follow from the schedule's
order, because all actions of a kind run the same code and therefore the same number of kernels.
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
# A gap before an action that is a smaller share of its time is due to copies and launches, not to waiting: on four H200s the
# median gap was 0.17 ms between actions of 7 ms (benchmarks/results/pipeline_trace.json).
_GAP = 0.05
_MOST_LATE = 10


def measured(schedule: Schedule, ranks: Sequence[Kernels], runtime: Runtime) -> Simulation:
    """Returns start and end of every action as it ran, in ms from the start of the first.

    An action lasts from the start of its first kernel to the end of its last.

    Args:
        schedule: The schedule as the runtime runs it (`Pipeline.schedule`).
        ranks: The kernels of each rank.
        runtime: In the `aligned` runtime a rank also runs a tick's forward or dgrad if it is idle in that tick.

    Raises:
        ProfileError: If the number of ranks differs, or the kernels of a kind cannot be divided equally among its actions.
    """
    if len(ranks) != schedule.num_ranks:
        raise ProfileError(f"the trace has {len(ranks)} ranks, the schedule {schedule.num_ranks}: must be equal")
    kinds_TP = tick_table(schedule).kind
    lead_T = kinds_TP.min(1)  # another kind than wgrad, if any rank runs one
    starts, ends = [], []
    for r, (kernels, ticks) in enumerate(zip(ranks, schedule.ticks, strict=True)):
        own_T = kinds_TP[:, r]
        start_T, end_T = np.full(len(own_T), np.inf), np.full(len(own_T), -np.inf)
        for kind, parts in _PARTS.items():
            runs = np.isin(own_T, parts)
            if runtime == "aligned" and kind != WGRAD:
                runs = (lead_T == kind) & (own_T != WGRAD)
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
    """Returns the median time in ms of an action, by kind."""
    kinds, took = np.concatenate([order.kinds for order in run.schedule]), np.concatenate(run.ends) - np.concatenate(run.starts)
    return {KINDS[kind]: float(np.median(took[kinds == kind])) for kind in np.unique(kinds)}


def planned(schedule: Schedule, costs_ms: Mapping[str, float], runtime: Runtime) -> Simulation:
    """Simulates the step, with the cost of its kind for every action, and no time for transfers.

    Args:
        schedule: The schedule.
        costs_ms: Time of an action in ms by kind.
        runtime: Determines the ranks that wait for each other.
    """
    return simulate(schedule, Costs(**costs_ms), execution=_EXECUTION[runtime])


def late(run: Simulation, costs_ms: Mapping[str, float]) -> list[np.ndarray]:
    """Returns the delay in ms that each action adds by itself, per rank. Negative if it is faster than its cost.

    The reference is an action that begins as soon as its dependencies end and takes the cost of its kind.

    Args:
        run: The step.
        costs_ms: Time of an action in ms by kind.
    """
    ready, _ = _waits(run, costs_ms)
    return _by_rank(run.schedule, np.concatenate(run.ends) - ready - _costs_of(run.schedule, costs_ms))


def critical(run: Simulation) -> list[np.ndarray]:
    """Returns a mask of the critical path, per rank.

    The path leads from the action that ended last to the dependency that ended last, and so on back to the start.
    """
    _, before = _waits(run, costs(run))
    at, path = int(np.argmax(np.concatenate(run.ends))), np.zeros(len(before), bool)
    while at >= 0:
        path[at], at = True, before[at]
    return _by_rank(run.schedule, path)


def report(schedule: Schedule, run: Simulation, runtime: Runtime) -> dict[str, Any]:
    """Returns `pipeline` of profile.json: the step as planned, with the measured costs, and as it ran.

    Args:
        schedule: The schedule as the runtime runs it.
        run: The step, from `measured`.
        runtime: The runtime.
    """
    costs_ms = costs(run)
    plan = planned(schedule, costs_ms, runtime)
    times = {"planned_start_ms": plan.starts, "planned_end_ms": plan.ends, "start_ms": run.starts, "end_ms": run.ends}
    flat = {name: np.concatenate(rows).round(4).tolist() for name, rows in (times | {"late_ms": late(run, costs_ms)}).items()}
    flat["critical"] = np.concatenate(critical(run)).tolist()
    actions = [
        {"rank": r, "kind": action.kind, "chunk": action.chunk, "microbatch": action.microbatch}
        for r, order in enumerate(schedule)
        for action in order
    ]
    for i, action in enumerate(actions):
        action |= {name: column[i] for name, column in flat.items()}
    latest = sorted(range(len(actions)), key=lambda i: -flat["late_ms"][i])[:_MOST_LATE]
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": len(schedule.placement[0]),
        "costs_ms": {kind: round(ms, 4) for kind, ms in costs_ms.items()},
        "planned": {"step_ms": round(plan.makespan, 4), "bubble": plan.bubble},
        "measured": {"step_ms": round(run.makespan, 4), "bubble": run.bubble},
        "actions": actions,
        "late": [i for i in latest if flat["late_ms"][i] > 0],
    }


def _waits(run: Simulation, costs_ms: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns when each action was ready, and which of its dependencies ended last, for the actions of all ranks in a row.

    An action depends on the previous one of its rank, on one of another stage, and a wgrad on its dgrad. Permutes, and the
    embedding and head that all ranks run together, add dependencies: if there is a gap before an action, on the action of an
    earlier tick that ended last before it began.

    Returns:
        Times in ms, at the latest the action's start, and indices into the row, -1 for none.
    """
    schedule = run.schedule
    starts, ends, ticks = (np.concatenate(rows) for rows in (run.starts, run.ends, schedule.ticks))
    gradients, (all_needs, all_makes) = schedule.num_stages * schedule.num_microbatches, schedule.links
    makes = np.concatenate(all_makes)
    maker = np.full(len(schedule.home), -1)
    maker[makes] = np.arange(len(makes))
    maker[-1] = -1  # shared by all wgrads; also the index of no dependency
    needs = [
        np.where(order.kinds == WGRAD, gradients + stages * schedule.num_microbatches + order.microbatches, need)
        for order, stages, need in zip(schedule, schedule.stages, all_needs, strict=True)
    ]
    previous = np.arange(len(starts)) - 1
    previous[np.cumsum([0, *map(len, schedule.orders[:-1])])] = -1
    candidates = np.stack([previous, maker[np.concatenate(needs)]])
    end_of = np.append(ends, -np.inf)
    before = np.take_along_axis(candidates, end_of[candidates].argmax(0)[None], 0)[0]
    for i in np.flatnonzero(starts - end_of[before] > _GAP * _costs_of(schedule, costs_ms)):
        others = np.where((ticks < ticks[i]) & (ends <= starts[i]), ends, -np.inf)
        if others.max() > end_of[before[i]]:
            before[i] = others.argmax()
    return np.where(before < 0, starts, np.minimum(starts, end_of[before])), before


def _costs_of(schedule: Schedule, costs_ms: Mapping[str, float]) -> np.ndarray:
    """Returns the cost of each action, for the actions of all ranks in a row."""
    return np.array([costs_ms[action.kind] for order in schedule for action in order])


def _by_rank(schedule: Schedule, row: np.ndarray) -> list[np.ndarray]:
    return np.split(row, np.cumsum([len(order) for order in schedule.orders])[:-1])
