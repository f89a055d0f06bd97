"""A Schedule: one Order per rank, where every stage is, and when each action may start. Made only if it can run.

Time is counted in ticks: every action takes one, a rank does at most one a tick, and what an action makes can be used from the
next tick on. A schedule without ticks of its own gets the earliest ones, which exist exactly if it does not deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import DGRAD, FORWARD, WGRAD
from jgraph.schedule.order import Order

# Tables have a row for every tick: a number in a file must not fill the memory.
_SPARE_TICKS = 1000

Placement = tuple[tuple[int, ...], ...]


def loop(pp: int, chunks: int) -> Placement:
    """Returns the placement in which stages go round the ranks: chunk c of rank r is stage c * pp + r."""
    return tuple(tuple(c * pp + r for c in range(chunks)) for r in range(pp))


def vee(pp: int) -> Placement:
    """Returns the placement of two chunks a rank, down and up again: rank r has stages r and 2 * pp - 1 - r."""
    return tuple((r, 2 * pp - 1 - r) for r in range(pp))


@dataclass(frozen=True, eq=False)
class Schedule(Sequence[Order]):
    """Says what every rank of a pipeline does, and when: an order for each, the place of every stage, the tick of every action.

    >>> jgraph.Schedule((jgraph.Order.parse([1, 1, -1, -1]), jgraph.Order.parse([1, -1, 1, -1])), name="1f1b")
    Schedule(1f1b: 2 ranks, 2 stages, 2 microbatches, 6 ticks)

    Attributes:
        orders: of each rank.
        placement: stages of each rank, ascending, one for each chunk. () puts them round the ranks (`loop`).
        ticks: of each rank's actions, int [N]; () for the earliest possible.
        name: for messages and pictures.

    Raises:
        OrderError: a dependency is never met; `rank` and `position` say where.
    """

    orders: tuple[Order, ...]
    placement: Placement = ()
    ticks: tuple[np.ndarray, ...] = ()
    name: str = "custom"
    num_stages: int = field(init=False)

    def __post_init__(self):
        if not isinstance(self.orders, Sequence) or not self.orders or not all(isinstance(one, Order) for one in self.orders):
            wrong = "a schedule needs at least one rank's order, each an Order; Order.parse makes one of signed numbers"
            raise OrderError(wrong, field="orders")
        if not isinstance(self.ticks, tuple):
            raise OrderError("`ticks` must be a tuple of one row per rank", field="ticks")
        placement = self.placement or loop(len(self.orders), self.orders[0].num_chunks)
        object.__setattr__(self, "placement", placement)
        _check_counts(self)
        object.__setattr__(self, "num_stages", sum(map(len, placement)))
        object.__setattr__(self, "ticks", _check_ticks(self) if self.ticks else _earliest(self))
        for row in self.ticks:
            row.flags.writeable = False

    def __len__(self) -> int:
        return len(self.orders)

    def __getitem__(self, index):
        return self.orders[index]

    def __repr__(self) -> str:
        counts = {"rank": self.num_ranks, "stage": self.num_stages, "microbatch": self.num_microbatches, "tick": self.num_ticks}
        words = (f"{count} {word}{('es' if word == 'microbatch' else 's') * (count > 1)}" for word, count in counts.items())
        return f"Schedule({self.name}: {', '.join(words)})"

    def split(self) -> "Schedule":
        """Returns the schedule with every backward as a dgrad and a wgrad right after it, at the earliest ticks."""
        return Schedule(tuple(order.split() for order in self.orders), self.placement, name=self.name)

    def newest_first(self) -> "Schedule":
        """Returns the same ticks, but every wgrad is that of the newest dgrad that waits on its rank, whatever the chunk.

        Then a wgrad that comes right after a dgrad is that one's, whose arrays need not be kept, and only those few dgrads wait
        whose wgrads fill idle ticks. Gradients are summed in another order.
        """
        orders = []
        for order in self.orders:
            chunks, waiting = order.chunks.copy(), []
            for position, kind in enumerate(order.kinds.tolist()):
                if kind == DGRAD:
                    waiting.append(chunks[position])
                elif kind == WGRAD:
                    chunks[position] = waiting.pop()
            orders.append(Order(order.kinds, chunks, order.num_layers_per_chunk, "newest"))
        return Schedule(tuple(orders), self.placement, self.ticks, self.name)

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_microbatches(self) -> int:
        return self.orders[0].num_microbatches

    @property
    def num_ticks(self) -> int:
        return int(max(t[-1] for t in self.ticks)) + 1

    @cached_property
    def rank_of_stage(self) -> np.ndarray:
        """int [S]."""
        return self._by_stage([[r] * len(stages) for r, stages in enumerate(self.placement)])

    @cached_property
    def num_layers(self) -> list[int]:
        """Layers of each stage."""
        return self._by_stage([order.num_layers_per_chunk for order in self.orders]).tolist()

    def _by_stage(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns by stage what these rows say by rank and chunk."""
        values = np.empty(self.num_stages, np.int64)
        values[np.concatenate(self.placement)] = np.concatenate(rows)
        return values

    @cached_property
    def stages(self) -> tuple[np.ndarray, ...]:
        """The stage of every action, per rank; int [N]."""
        return tuple(np.array(row)[order.chunks] for row, order in zip(self.placement, self.orders, strict=True))

    def when(self, times: Sequence[np.ndarray], kinds: tuple[int, ...], missing: float = -1) -> np.ndarray:
        """`times` (per rank, per action) of the actions of these kinds, as a table [S, M]; `missing` where there is none."""
        table = np.full((self.num_stages, self.num_microbatches), missing, np.asarray(times[0]).dtype)
        for order, stages, time in zip(self.orders, self.stages, times, strict=True):
            mask = (order.kinds[:, None] == kinds).any(axis=1)
            table[stages[mask], order.microbatches[mask]] = time[mask]
        return table

    @cached_property
    def links(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Per rank and action, the flat index of the array that it needs, -1 for none, and of that which it makes.

        s * M + m is the activation of stage s, (S + s) * M + m its gradient; wgrads share the one past the end.
        """
        count, last = self.num_microbatches, self.num_stages - 1
        needs, makes = [], []
        for order, stages in zip(self.orders, self.stages, strict=True):
            forward, wgrad = order.kinds == FORWARD, order.kinds == WGRAD
            made = np.where(forward, stages, self.num_stages + stages)
            nothing = wgrad | (stages == np.where(forward, 0, last))
            needs.append(np.where(nothing, -1, (made + np.where(forward, -1, 1)) * count + order.microbatches))
            makes.append(np.where(wgrad, 2 * self.num_stages * count, made * count + order.microbatches))
        return tuple(needs), tuple(makes)

    @cached_property
    def home(self) -> np.ndarray:
        """The rank that makes each array, by the index that `links` has; -1 for the one past the end."""
        return np.append(np.tile(np.repeat(self.rank_of_stage, self.num_microbatches), 2), -1)


def _earliest(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Returns the ticks of the actions if each comes as soon as its rank is free and what it needs is there.

    Raises OrderError if the ranks wait for each other.
    """
    needs, makes = ([row.tolist() for row in rows] for rows in schedule.links)
    made = [-1] * len(schedule.home)
    waiting: dict[int, int] = {}
    ticks: list[list[int]] = [[] for _ in needs]
    ready = list(range(len(needs)))
    while ready:
        r = ready.pop()
        for i in range(len(ticks[r]), len(needs[r])):
            need, tick = needs[r][i], ticks[r][-1] + 1 if ticks[r] else 0
            if need >= 0:
                if made[need] < 0:
                    waiting[need] = r
                    break
                tick = max(tick, made[need] + 1)
            ticks[r].append(tick)
            made[makes[r][i]] = tick
            if makes[r][i] in waiting:
                ready.append(waiting.pop(makes[r][i]))
    if waiting:
        raise _deadlock(schedule, {r: (len(ticks[r]), need) for need, r in waiting.items()})
    return tuple(np.array(row, np.int64) for row in ticks)


def _deadlock(schedule: Schedule, stuck: dict[int, tuple[int, int]]) -> OrderError:
    """Returns an error that names the ranks that wait for each other, following who waits for whom until a rank comes twice."""
    home = schedule.home.tolist()
    chain, r = [], next(iter(stuck))
    while r not in chain:
        chain.append(r)
        r = home[stuck[r][1]]
    cycle = chain[chain.index(r) :]
    r = min(cycle)
    waits = []
    for q in cycle[cycle.index(r) :] + cycle[: cycle.index(r)]:
        position, need = stuck[q]
        flat, m = divmod(need, schedule.num_microbatches)
        what = f"forward of stage {flat}" if flat < schedule.num_stages else f"dgrad of stage {flat - schedule.num_stages}"
        action = schedule[q][position]
        waits.append(f"rank {q} at entry {position} ({action}) waits for rank {home[need]}'s {what}, microbatch {m}")
    told = "; ".join(waits[:3]) + " ..." * (len(waits) > 3)
    return OrderError(f"the schedule deadlocks: {told}; place what is waited for earlier", position=stuck[r][0], rank=r)


def _check_counts(schedule: Schedule) -> None:
    orders, placement = schedule.orders, schedule.placement
    if not isinstance(placement, Sequence) or not all(isinstance(row, (Sequence, np.ndarray)) for row in placement):
        raise OrderError("`placement` must be one row of stages per rank", field="placement")
    _check_rows("placement", placement, orders)
    for r, (order, stages) in enumerate(zip(orders, placement, strict=True)):
        if order.num_chunks != len(stages):
            placed = f"{len(stages)} stages are placed there; every stage of a rank is one chunk of its order"
            raise OrderError.of_rank(r, f" has an order of {order.num_chunks} chunks, but {placed}")
        if not all(isinstance(stage, (int, np.integer)) for stage in stages):
            raise OrderError.of_rank(r, f" has stages {stages}; stages are whole numbers from 0")
        if list(stages) != sorted(stages):
            raise OrderError.of_rank(r, f" has stages {stages}; list them in ascending order, chunk by chunk")
        if order.num_microbatches != orders[0].num_microbatches:
            others = f"rank 0 has {orders[0].num_microbatches}; every rank sees the same ones"
            raise OrderError.of_rank(r, f" has {order.num_microbatches} microbatches, {others}")
    everywhere = sorted(s for stages in placement for s in stages)
    if everywhere != list(range(len(everywhere))):
        raise OrderError(f"the ranks have stages {everywhere}; each of 0 to {len(everywhere) - 1} must be on exactly one")


def _check_rows(field: str, rows: Sequence[Any], orders: Sequence[Order]) -> None:
    if len(rows) != len(orders):
        raise OrderError(f"`{field}` has {len(rows)} rows for {len(orders)} orders; give one row per order", field=field)


def _check_ticks(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Returns a copy of ticks that were given, in a type that differences fit into.

    Raises:
        OrderError: they do not ascend on a rank, something is used before the tick after the one that made it, or there are
            far more than there are actions.
    """
    made, (all_needs, all_makes) = np.full(len(schedule.home), -1, np.int64), schedule.links
    _check_rows("ticks", schedule.ticks, schedule.orders)
    rows = []
    for r, (order, row, makes) in enumerate(zip(schedule.orders, schedule.ticks, all_makes, strict=True)):
        given, allowed = np.asarray(row), "ticks are whole numbers from 0 and go up"
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or given.max(initial=0) > 2**62:
            raise OrderError.of_rank(r, f" has ticks {given.dtype}{list(given.shape)}; {allowed}")
        ticks = given.astype(np.int64)
        if len(ticks) != len(order):
            raise OrderError.of_rank(r, f" has {len(order)} actions, but {len(ticks)} ticks; give one per action")
        if ticks[0] < 0 or (np.diff(ticks) <= 0).any():
            position = int(np.argmax(np.diff(ticks, prepend=-1) <= 0))
            raise OrderError.of_rank(r, f", entry {position} has tick {ticks[position]}; {allowed}", position)
        made[makes] = ticks
        rows.append(ticks)
    made[-1] = -1
    for r, (ticks, needs) in enumerate(zip(rows, all_needs, strict=True)):
        early = np.flatnonzero(made[needs] >= ticks)
        if len(early):
            position = int(early[0])
            entry = f", entry {position} ({schedule[r][position]}) is at tick {ticks[position]}"
            needed = f"what it needs is made at tick {made[needs[position]]}; it can start in the tick after that"
            raise OrderError.of_rank(r, f"{entry}, but {needed}", position)
    total, last = sum(map(len, schedule.orders)), max(int(ticks[-1]) for ticks in rows)
    if last >= (most := _SPARE_TICKS + 10 * total):
        remedy = f"it may have {most:,}: leave out those in which no rank does anything"
        raise OrderError(f"the schedule has {last + 1:,} ticks for {total} actions; {remedy}")
    return tuple(rows)
