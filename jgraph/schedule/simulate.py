"""Simulation: from costs per action to the time of a step, who is idle when, and the memory each rank needs over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule.action import DGRAD, KINDS, WGRAD, check_whole
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.slots import check_sizes, live_spans

Execution = Literal["dataflow", "neighbours", "lockstep"]


@dataclass(frozen=True)
class Costs:
    """Says how long an action takes, in any unit: one number for every stage, or one per stage.

    Attributes:
        forward, dgrad, wgrad: > 0.
        backward: of a backward that is not split; None for dgrad + wgrad.
    """

    forward: float | Sequence[float] = 1.0
    dgrad: float | Sequence[float] = 1.0
    wgrad: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None

    def table(self, num_stages: int) -> np.ndarray:
        """Returns the costs by kind and stage, [4, S]. Raises OrderError."""
        rows = [_times(kind, getattr(self, kind), num_stages) for kind in KINDS[:3]]
        rows.append(rows[DGRAD] + rows[WGRAD] if self.backward is None else _times("backward", self.backward, num_stages))
        return np.stack([np.broadcast_to(row, num_stages) for row in rows])

    def per_chunk(self, chunks: int) -> "Costs":
        """Returns the costs of one of `chunks` chunks, if these are the costs of all layers of a rank. Raises OrderError."""
        check_whole("chunks", chunks)
        given = {kind: getattr(self, kind) for kind in KINDS}
        return Costs(**{kind: (_times(kind, value) / chunks).tolist() for kind, value in given.items() if value is not None})


def _times(kind: str, value: object, num_stages: int | None = None) -> np.ndarray:
    """Returns one number > 0, or a row of them. Raises OrderError."""
    try:
        row = np.asarray(value, float)
    except (TypeError, ValueError):
        row = np.full((), np.nan)
    fits = row.ndim < 2 if num_stages is None else row.shape in ((), (num_stages,))
    if isinstance(value, str) or not fits or not np.isfinite(row).all() or (row <= 0).any():
        stages = "per stage" if num_stages is None else f"for each of {num_stages} stages"
        raise OrderError(f"`{kind}` is {value!r}: the cost must be one number > 0, or one {stages}", field=kind)
    return row


@dataclass(frozen=True)
class Simulation:
    """When every action of a schedule ran. Made by `simulate`.

    Attributes:
        schedule: what was simulated.
        starts, ends: of each rank's actions, [N], from 0.
        latency: of a transfer to another rank.
    """

    schedule: Schedule
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    latency: float

    @property
    def makespan(self) -> float:
        """Time from the start of the step to the end of its last action."""
        return float(max(end[-1] for end in self.ends))

    @property
    def busy(self) -> np.ndarray:
        """Time each rank computes, [P]."""
        return np.array([(end - start).sum() for start, end in zip(self.starts, self.ends, strict=True)])

    @property
    def idle(self) -> np.ndarray:
        """Time each rank does not compute, [P]."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return float(self.idle.mean() / self.makespan)

    def memory(self, sizes: Mapping[str, float]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each rank times, and the bytes in use from then on; `sizes` are bytes of an array in each pool."""
        check_sizes(sizes)
        times, changes = [], []
        for pool, (born, died) in live_spans(self.schedule, self.starts, self.ends, latency=self.latency).items():
            times += [born, died]
            changes += [np.full(born.shape, float(sizes.get(pool, 0))), np.full(died.shape, -float(sizes.get(pool, 0)))]
        times, changes = np.stack(times), np.stack(changes)
        curves = []
        for stages in self.schedule.placement:
            t, change = times[:, list(stages)].ravel(), changes[:, list(stages)].ravel()
            t, change = t[np.isfinite(t)], change[np.isfinite(t)]
            # What ends at a time makes room for what begins then.
            at = np.lexsort((change, t))
            t, level = t[at], np.cumsum(change[at])
            settled = np.append(t[1:] != t[:-1], True)[: len(t)]
            curves.append((t[settled], level[settled]))
        return curves

    def peak(self, sizes: Mapping[str, float]) -> np.ndarray:
        """Returns the most bytes in use at once, [P]. A received array counts from its arrival in time; `assign` gives it a
        slot only from the next tick, so where stages differ in cost this can be more than its slots take."""
        return np.array([level.max(initial=0) for _, level in self.memory(sizes)])


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, latency: float = 0.0, execution: Execution = "dataflow"
) -> Simulation:
    """Simulates a schedule: when every action runs, how long a step takes, how much of it ranks idle. Needs no device.

    >>> jgraph.schedule.simulate(jgraph.schedule.generate("1f1b", pp=2, microbatches=4)).bubble  # idle share
    0.2

    Args:
        schedule: its ticks matter only where the execution goes by ticks.
        costs: per action of a stage; None for 1 each, 2 for a backward that is not split.
        latency: of a transfer to another rank, in the unit of the costs; the sender goes on at once.
        execution: `dataflow`: an action starts when its rank is free and what it needs is there. `neighbours`: tick by tick, a
            rank enters the next tick when the ranks that it exchanges with have finished this one, as with a permute every
            tick. `lockstep`: when all ranks have.

    Raises:
        OrderError: a cost or the latency is not a time.
        ConfigError: `execution` is not one of its choices.
    """
    check_choice("execution", execution, get_args(Execution))
    if not isinstance(latency, (int, float)) or not 0 <= latency < float("inf"):
        raise OrderError(f"`latency` is {latency!r}: must be a time >= 0", field="latency")
    table = (costs or Costs()).table(schedule.num_stages)
    starts, ends = _play(schedule, table, latency, execution)
    return Simulation(schedule, starts, ends, latency)


def _play(schedule: Schedule, table: np.ndarray, latency: float, execution: Execution):
    """Returns when every action of a rank starts and ends, by the rank."""
    ranks, home = range(schedule.num_ranks), schedule.home.tolist()
    near = [{r} for r in ranks]
    for a, b in pairwise(schedule.rank_of_stage.tolist()):
        near[a].add(b)
        near[b].add(a)
    lengths = [len(order) for order in schedule.orders]
    took = np.concatenate([table[o.kinds, s] for o, s in zip(schedule.orders, schedule.stages, strict=True)])
    rank, costs = np.repeat(ranks, lengths).tolist(), took.tolist()
    ticks, needs, makes = (np.concatenate(rows).tolist() for rows in (schedule.ticks, *schedule.links))
    starts, arrived, clock, now = np.zeros(len(ticks)), [0.0] * len(home), [0.0] * len(ranks), 0
    for i in np.argsort(ticks, kind="stable").tolist():
        while execution != "dataflow" and now < ticks[i]:
            now += 1
            clock = [max(clock)] * len(ranks) if execution == "lockstep" else [max(clock[q] for q in near[r]) for r in ranks]
        r, need = rank[i], needs[i]
        if need >= 0:
            clock[r] = max(clock[r], arrived[need] + latency * (home[need] != r))
        starts[i] = clock[r]
        clock[r] += costs[i]
        arrived[makes[i]] = clock[r]
    return tuple(tuple(np.split(times, np.cumsum(lengths)[:-1])) for times in (starts, starts + took))
