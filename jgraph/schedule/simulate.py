"""Simulates a schedule: computes the time of a step, and the idle time and memory use of each rank, from costs per action."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule.action import DGRAD, KINDS, WGRAD, check_integer
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.slots import check_sizes, live_spans

Execution = Literal["dataflow", "neighbours", "lockstep"]


@dataclass(frozen=True)
class Costs:
    """Times of the actions of a stage for one microbatch, by kind of action, in any unit.

    Each attribute is one number > 0 for all stages, or a sequence with one number per stage, from the first to the last stage.
    The values are checked when they are used, not by the constructor.

    Attributes:
        forward: Time of a forward.
        dgrad: Time of a dgrad, the gradient of the stage's input.
        wgrad: Time of a wgrad, the gradients of the stage's parameters.
        backward: Time of a full backward, which is dgrad and wgrad in one action. None for the sum of `dgrad` and `wgrad`.
    """

    forward: float | Sequence[float] = 1.0
    dgrad: float | Sequence[float] = 1.0
    wgrad: float | Sequence[float] = 1.0
    backward: float | Sequence[float] | None = None

    def table(self, num_stages: int) -> np.ndarray:
        """Returns the costs by kind and stage.

        Args:
            num_stages: S, the number of stages over all ranks.

        Returns:
            float64 [4, S]. The rows are forward, dgrad, wgrad and full backward.

        Raises:
            OrderError: If a cost is not a number > 0, or the number of values is not `num_stages`.
        """
        rows = [_times(kind, getattr(self, kind), num_stages) for kind in KINDS[:3]]
        rows.append(rows[DGRAD] + rows[WGRAD] if self.backward is None else _times("backward", self.backward, num_stages))
        return np.stack([np.broadcast_to(row, num_stages) for row in rows])

    def per_chunk(self, chunks: int) -> "Costs":
        """Returns new costs, in which every time is divided by a number of chunks.

        Use it on costs that are the times of all layers of a rank. The result has the times of one stage.

        Args:
            chunks: Number of chunks (stages) per rank.

        Returns:
            The costs. `backward` stays None if it is None.

        Raises:
            OrderError: If `chunks` is not an integer >= 1, or a cost is not a number > 0.
        """
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
    """Start and end times of every action of a schedule, in the unit of the costs. Returned by `simulate`.

    P is the number of ranks. A rank has N actions, where N may differ between ranks.

    Attributes:
        schedule: The simulated schedule.
        starts: Start of each action: one float64 array [N] per rank, in the sequence of its order. The step starts at 0.
        ends: End of each action: one float64 array [N] per rank.
        latency: Time of a transfer to another rank.
    """

    schedule: Schedule
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    latency: float

    @property
    def makespan(self) -> float:
        """The time from the start of the step to the end of its last action, in the unit of the costs."""
        return float(max(end[-1] for end in self.ends))

    @property
    def busy(self) -> np.ndarray:
        """The sum of the durations of each rank's actions, float64 [P], in the unit of the costs."""
        return np.array([(end - start).sum() for start, end in zip(self.starts, self.ends, strict=True)])

    @property
    def idle(self) -> np.ndarray:
        """The time that each rank is idle during the makespan, float64 [P], in the unit of the costs."""
        return self.makespan - self.busy

    @property
    def bubble(self) -> float:
        """The idle fraction of all ranks' time, from 0 to 1."""
        return float(self.idle.mean() / self.makespan)

    def peak(self, sizes: Mapping[str, float]) -> np.ndarray:
        """Returns the peak memory use of each rank, in bytes.

        The result can be larger than the bytes of the slots that `jgraph.schedule.slots.assign` allocates, if stages differ in
        cost. Here a received array counts from its arrival, while there it has a slot only from the next tick on.

        Args:
            sizes: Bytes by pool, for the arrays of one stage and one microbatch. The pools are `forward_dgrad` and
                `forward_wgrad` (residuals of a forward for its dgrad and its wgrad), `stash` (values that a dgrad keeps for its
                wgrad), `activation` and `gradient` (arrays received from another stage). Missing pools count as 0.

        Returns:
            float64 [P]: for each rank, the maximum over the step of the bytes of its live arrays.

        Raises:
            OrderError: If a pool is unknown, or a size is not a finite number >= 0.
        """
        check_sizes(sizes)
        times, changes = [], []
        for pool, spans in live_spans(self.schedule, self.starts, self.ends, latency=self.latency).items():
            times += spans
            changes += [np.full(spans[0].shape, sign * float(sizes.get(pool, 0))) for sign in (1, -1)]
        times, changes, peaks = np.stack(times), np.stack(changes), []
        for stages in self.schedule.placement:
            time, change = times[:, list(stages)].ravel(), changes[:, list(stages)].ravel()
            # Frees come before allocations at the same time. Arrays that do not exist have the time NaN, which sorts last.
            peaks.append(np.cumsum(change[np.lexsort((change, time))]).max(initial=0))
        return np.array(peaks)


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, latency: float = 0.0, execution: Execution = "dataflow"
) -> Simulation:
    """Simulates a schedule without a device.

    Args:
        schedule: The schedule. Its ticks affect the times only with `neighbours` and `lockstep`.
        costs: Time of each kind of action of a stage. None for 1 per forward, dgrad and wgrad, and 2 per full backward.
        latency: Time of a transfer to another rank, in the unit of the costs. The sender does not wait for it.
        execution: Synchronization of ranks. `dataflow`: an action starts as soon as its rank is free and its input has arrived.
            `neighbours`: a rank enters the next tick when it and the ranks that it exchanges arrays with have finished the
            current tick, as with a collective permute in every tick. `lockstep`: a rank enters the next tick when all ranks
            have finished the current tick.

    Returns:
        A `Simulation` with the start and end of every action, in the unit of the costs. Its properties are the makespan, busy
        and idle times and the bubble; its method `peak` returns the memory use.

    Raises:
        OrderError: If a cost is not a number > 0 or has not one value per stage, or `latency` is not a finite number >= 0.
        ConfigError: If `execution` is unknown.

    Examples:
        >>> jgraph.schedule.simulate(jgraph.schedule.generate("1f1b", pp=2, microbatches=4)).bubble
        0.2
    """
    check_choice("execution", execution, get_args(Execution))
    if not isinstance(latency, (int, float)) or not 0 <= latency < float("inf"):
        raise OrderError(f"`latency` is {latency!r}: must be a time >= 0", field="latency")
    table = (costs or Costs()).table(schedule.num_stages)
    ranks, home = range(schedule.num_ranks), schedule.home.tolist()
    neighbours = [{r} for r in ranks]
    for a, b in pairwise(schedule.rank_of_stage.tolist()):
        neighbours[a].add(b)
        neighbours[b].add(a)
    lengths = [len(order) for order in schedule.orders]
    took = np.concatenate([table[o.kinds, s] for o, s in zip(schedule.orders, schedule.stages, strict=True)])
    rank, durations = np.repeat(ranks, lengths).tolist(), took.tolist()
    ticks, needs, makes = (np.concatenate(rows).tolist() for rows in (schedule.ticks, *schedule.links))
    starts, arrived, clock, now = np.zeros(len(ticks)), [0.0] * len(home), [0.0] * len(ranks), 0
    for i in np.argsort(ticks, kind="stable").tolist():
        while execution != "dataflow" and now < ticks[i]:
            now += 1
            if execution == "lockstep":
                clock = [max(clock)] * len(ranks)
            else:
                clock = [max(clock[q] for q in neighbours[r]) for r in ranks]
        r, need = rank[i], needs[i]
        if need >= 0:
            clock[r] = max(clock[r], arrived[need] + latency * (home[need] != r))
        starts[i] = clock[r]
        clock[r] += durations[i]
        arrived[makes[i]] = clock[r]
    starts, ends = (tuple(np.split(times, np.cumsum(lengths)[:-1])) for times in (starts, starts + took))
    return Simulation(schedule, starts, ends, latency)
