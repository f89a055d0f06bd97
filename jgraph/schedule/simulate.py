"""Simulates a schedule: computes the time of a step, and the idle time and memory use of each rank, from costs per action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule._slots import check_sizes, live_spans
from jgraph.schedule.action import DGRAD, KINDS, WGRAD, check_integer
from jgraph.schedule.schedule import Schedule

# Synchronization of ranks.
# dataflow: an action starts as soon as its rank is free and its input has arrived. Only here, ticks do not matter.
# neighbours: a rank enters the next tick when it and the ranks that it exchanges arrays with have finished the current tick, as
#   with a collective permute in every tick.
# lockstep: a rank enters the next tick when all ranks have finished the current tick.
Execution = Literal["dataflow", "neighbours", "lockstep"]


@dataclass(frozen=True)
class Costs:
    """Times of the actions of a stage for one microbatch, in any unit: one number > 0 each, or one per stage."""

    forward: float | Sequence[float] = 1.0
    dgrad: float | Sequence[float] = 1.0
    wgrad: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None  # the full backward; None for the sum of `dgrad` and `wgrad`

    def table(self, num_stages: int) -> np.ndarray:
        """Returns the costs by kind, in the order of `KINDS`, and stage, float64 [4, S]."""
        rows = [_times(kind, getattr(self, kind), num_stages) for kind in KINDS[:3]]
        rows.append(rows[DGRAD] + rows[WGRAD] if self.backward is None else _times("backward", self.backward, num_stages))
        return np.stack([np.broadcast_to(row, num_stages) for row in rows])

    def per_chunk(self, chunks: int) -> "Costs":
        """Divides the times of all layers of a rank by its number of chunks, which gives the times of one stage."""
        check_integer("chunks", chunks)
        given = {kind: getattr(self, kind) for kind in KINDS}
        return Costs(**{kind: (_times(kind, value) / chunks).tolist() for kind, value in given.items() if value is not None})


def _times(kind: str, value: object, num_stages: int | None = None) -> np.ndarray:
    """Validates the cost of a kind, and returns it as float64 [] or [S]. Raises OrderError if it is invalid."""
    try:
        row = np.asarray(value, float)
    except (TypeError, ValueError):
        row = np.full((), np.nan)
    fits = row.ndim < 2 if num_stages is None else row.shape in ((), (num_stages,))
    if isinstance(value, str) or not fits or not np.isfinite(row).all() or (row <= 0).any():
        stages = "per stage" if num_stages is None else f"for each of {num_stages} stages"
        raise OrderError(f"`{kind}` is {value!r}: must be one number > 0, or one {stages}", field=kind)
    return row


@dataclass(frozen=True)
class Simulation:
    """Start and end of every action, in the unit of the costs: one float64 array [N] per rank, in the sequence of its order."""

    schedule: Schedule
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    latency: float  # time of a transfer to another rank; the sender does not wait for it

    @property
    def makespan(self) -> float:
        return float(max(end[-1] for end in self.ends))

    @property
    def busy(self) -> np.ndarray:
        """The sum of the durations of each rank's actions, float64 [P]."""
        return np.array([(end - start).sum() for start, end in zip(self.starts, self.ends, strict=True)])

    @property
    def idle(self) -> np.ndarray:
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, from 0 to 1."""
        return float(self.idle.mean() / self.makespan)

    def peak(self, sizes: Mapping[str, float]) -> np.ndarray:
        """Returns the peak bytes of each rank, float64 [P]. `sizes` has the bytes of a stage and a microbatch by pool."""
        # The result can be larger than the bytes of the slots of `assign`, if stages differ in cost: here a received array
        # counts from its arrival, while there it has a slot only from the next tick on.
        check_sizes(sizes)
        times, changes = [], []
        for pool, spans in live_spans(self.schedule, self.starts, self.ends, latency=self.latency).items():
            times += spans
            changes += [np.full(spans[0].shape, sign * float(sizes.get(pool, 0))) for sign in (1, -1)]
        times, changes = np.stack(times), np.stack(changes)
        peaks = []
        for stages in self.schedule.placement:
            time, change = times[:, list(stages)].ravel(), changes[:, list(stages)].ravel()
            # Frees come before allocations at the same time. Arrays that do not exist have the time NaN, which sorts last.
            peaks.append(np.cumsum(change[np.lexsort((change, time))]).max(initial=0))
        return np.array(peaks)


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, latency: float = 0.0, execution: Execution = "dataflow"
) -> Simulation:
    """Simulates a schedule without a device. Without costs, a full backward takes 2 and every other action 1."""
    check_choice("execution", execution, get_args(Execution))
    if not isinstance(latency, (int, float)) or not 0 <= latency < float("inf"):
        raise OrderError(f"`latency` is {latency!r}: must be a time >= 0", field="latency")
    table = (costs or Costs()).table(schedule.num_stages)
    ranks = range(schedule.num_ranks)
    home = schedule.home.tolist()
    neighbours = [{r} for r in ranks]
    for a, b in pairwise(schedule.rank_of_stage.tolist()):
        neighbours[a].add(b)
        neighbours[b].add(a)
    lengths = [len(order) for order in schedule.orders]
    took = np.concatenate([table[o.kinds, s] for o, s in zip(schedule.orders, schedule.stages, strict=True)])
    rank, durations = np.repeat(ranks, lengths).tolist(), took.tolist()
    ticks, needs, makes = (np.concatenate(rows).tolist() for rows in (schedule.ticks, *schedule.links))
    starts = np.zeros(len(ticks))
    arrived, clock = [0.0] * len(home), [0.0] * len(ranks)
    now = 0
    for i in np.argsort(ticks, kind="stable").tolist():
        while execution != "dataflow" and now < ticks[i]:
            now += 1
            if execution == "lockstep":
                clock = [max(clock)] * len(ranks)
            else:
                clock = [max(clock[q] for q in neighbours[r]) for r in ranks]
        r, need = rank[i], needs[i]
        if need >= 0:
            travel = latency if home[need] != r else 0.0
            clock[r] = max(clock[r], arrived[need] + travel)
        starts[i] = clock[r]
        clock[r] += durations[i]
        arrived[makes[i]] = clock[r]
    starts, ends = (tuple(np.split(times, np.cumsum(lengths)[:-1])) for times in (starts, starts + took))
    return Simulation(schedule, starts, ends, latency)
