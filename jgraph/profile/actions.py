"""A pipeline step as it ran, action by action, beside the step as planned.

A trace says when a rank ran the kernels of forwards, dgrads and wgrads, not of which microbatch. That follows from the sequence
in which the runtime plays the schedule: all actions of a kind are the same code, so they have equally many kernels. No jax.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jgraph.errors import ProfileError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, KINDS, WGRAD
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.simulate import Costs, Execution, Simulation, simulate
from jgraph.schedule.tables import tick_table

# N actions of a rank, T ticks, P ranks, S stages, M microbatches, n kernels

Runtime = Literal["aligned", "general"]
# For each kind (FORWARD, DGRAD, WGRAD), start and end in ms of a rank's kernels in one step, [n, 2], by start.
Products = Mapping[int, Any]

# In the aligned runtime all ranks run a tick's code together. In the general one every tick ends with permutes: a rank goes on
# when those that it exchanges with are through.
_EXECUTION: Mapping[Runtime, Execution] = {"aligned": "lockstep", "general": "neighbours"}
_PARTS = {FORWARD: (FORWARD,), DGRAD: (DGRAD, BACKWARD), WGRAD: (WGRAD, BACKWARD)}
# A gap before an action that is a smaller share of it is copies and launches, not a wait for another rank: on four H200s the
# median gap was 0.17 ms between actions of 7 ms (benchmarks/results/pipeline_trace.json).
_GAP = 0.05
_MOST_LATE = 10


def measured(schedule: Schedule, ranks: Sequence[Products], runtime: Runtime) -> Simulation:
    """Returns when every action ran: from its first kernel's start to its last one's end, in ms from the first action's start.

    Args:
        schedule, ranks: as the runtime plays it (`Pipeline.schedule`), and the kernels that each rank ran.
        runtime: in the `aligned` one a rank also runs a tick's forward or dgrad where it has nothing to do.

    Raises:
        ProfileError: the kernels of a kind cannot be shared out among the actions.
    """
    if len(ranks) != schedule.num_ranks:
        raise ProfileError(f"the trace has {len(ranks)} ranks, the schedule {schedule.num_ranks}: must be equal")
    kinds_TP = tick_table(schedule).kind
    lead_T = kinds_TP.min(1)  # a wgrad beside another kind fills in
    starts, ends = [], []
    for r, (products, ticks) in enumerate(zip(ranks, schedule.ticks, strict=True)):
        own_T = kinds_TP[:, r]
        start_T, end_T = np.full(len(own_T), np.inf), np.full(len(own_T), -np.inf)
        for kind, parts in _PARTS.items():
            runs = np.isin(own_T, parts)
            if runtime == "aligned" and kind != WGRAD:
                runs = (lead_T == kind) & (own_T != WGRAD)
            runs = np.flatnonzero(runs)
            times = np.asarray(products.get(kind, ()), float).reshape(-1, 2)
            if len(times) % max(len(runs), 1) or (len(times) == 0) != (len(runs) == 0):
                raise ProfileError(
                    f"rank {r} ran {len(times)} kernels of {KINDS[kind]} in {len(runs)} actions of that kind: must be a whole "
                    f"multiple, as all of them run the same; XLA may have merged or split some"
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
    """Returns the median time of an action of each kind that there is."""
    kinds, took = np.concatenate([order.kinds for order in run.schedule]), np.concatenate(run.ends) - np.concatenate(run.starts)
    return {KINDS[kind]: float(np.median(took[kinds == kind])) for kind in np.unique(kinds)}


def planned(schedule: Schedule, costs_ms: Mapping[str, float], runtime: Runtime) -> Simulation:
    """Simulates the step if every action took its kind's cost, and transfers and all the rest nothing."""
    return simulate(schedule, Costs(**costs_ms), execution=_EXECUTION[runtime])


def late(run: Simulation, costs_ms: Mapping[str, float]) -> list[np.ndarray]:
    """Returns, per rank, how much later each action ended than if it had begun when all it waited for had ended, and had taken
    its kind's cost; below 0 where it was faster than that."""
    ready, _ = _waits(run, costs_ms)
    return _by_rank(run.schedule, np.concatenate(run.ends) - ready - _usual(run.schedule, costs_ms))


def critical(run: Simulation) -> list[np.ndarray]:
    """Returns, per rank, whether each action is on the path that leads from the one that ended last back to the start, each
    time to what ended last of all that was waited for."""
    _, before = _waits(run, costs(run))
    at, path = int(np.argmax(np.concatenate(run.ends))), np.zeros(len(before), bool)
    while at >= 0:
        path[at], at = True, before[at]
    return _by_rank(run.schedule, path)


def report(schedule: Schedule, run: Simulation, runtime: Runtime) -> dict[str, Any]:
    """Returns the step as planned, with the costs that were measured, and as it ran, for JSON."""
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
    """Returns, for the actions of all ranks in a row, when all that each waited for had ended, at the latest when it began; and
    which of these ended last, as a place in the row, -1 for none.

    It waits for the one before it on its rank, for what it needs from another stage, and a wgrad for its dgrad. Permutes, and
    head and embedding, which all ranks run together, make it wait for others too: where there is a gap before it, for whatever
    of an earlier tick had ended last by then.
    """
    schedule = run.schedule
    starts, ends, ticks = (np.concatenate(rows) for rows in (run.starts, run.ends, schedule.ticks))
    gradients, (all_needs, all_makes) = schedule.num_stages * schedule.num_microbatches, schedule.links
    makes = np.concatenate(all_makes)
    maker = np.full(len(schedule.home), -1)
    maker[makes] = np.arange(len(makes))
    maker[-1] = -1  # what wgrads share, and where needs of -1 point
    needs = [
        np.where(order.kinds == WGRAD, gradients + stages * schedule.num_microbatches + order.microbatches, need)
        for order, stages, need in zip(schedule, schedule.stages, all_needs, strict=True)
    ]
    previous = np.arange(len(starts)) - 1
    previous[np.cumsum([0, *map(len, schedule.orders[:-1])])] = -1
    candidates = np.stack([previous, maker[np.concatenate(needs)]])
    end_of = np.append(ends, -np.inf)
    before = np.take_along_axis(candidates, end_of[candidates].argmax(0)[None], 0)[0]
    for i in np.flatnonzero(starts - end_of[before] > _GAP * _usual(schedule, costs_ms)):
        others = np.where((ticks < ticks[i]) & (ends <= starts[i]), ends, -np.inf)
        if others.max() > end_of[before[i]]:
            before[i] = others.argmax()
    return np.where(before < 0, starts, np.minimum(starts, end_of[before])), before


def _usual(schedule: Schedule, costs_ms: Mapping[str, float]) -> np.ndarray:
    """Returns what each action should take, of all ranks in a row."""
    return np.array([costs_ms[action.kind] for order in schedule for action in order])


def _by_rank(schedule: Schedule, row: np.ndarray) -> list[np.ndarray]:
    return np.split(row, np.cumsum([len(order) for order in schedule.orders])[:-1])
