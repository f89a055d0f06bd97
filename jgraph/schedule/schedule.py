"""A pipeline schedule: one order per rank, the placement of the stages, and the tick of every action.

Every action takes one tick, and a rank runs at most one action per tick. The result of an action is available from the next
tick on. Without explicit ticks, every action gets the earliest possible tick. Such ticks exist if and only if the schedule does
not deadlock. A `Schedule` is validated when it is constructed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import DGRAD, FORWARD, WGRAD
from jgraph.schedule.order import Order

# Schedule tables have a row per tick. The limit prevents a large number in a file from exhausting memory.
_SPARE_TICKS = 1000

Placement = tuple[tuple[int, ...], ...]


def loop(pp: int, chunks: int) -> Placement:
    """Returns the round-robin placement: chunk c of rank r is stage c * pp + r."""
    return tuple(tuple(c * pp + r for c in range(chunks)) for r in range(pp))


def vee(pp: int) -> Placement:
    """Returns the V-shaped placement of 2 * `pp` stages on `pp` ranks: rank r has the tuple of stages (r, 2 * pp - 1 - r)."""
    return tuple((r, 2 * pp - 1 - r) for r in range(pp))


@dataclass(frozen=True, eq=False)
class Schedule(Sequence[Order]):
    """A validated, immutable pipeline schedule, a sequence of one `Order` per rank. Schedules are compared by identity.

    Shapes of attributes and methods: P ranks, S stages, M microbatches; a rank has N actions, where N may differ between ranks.
    Ranks, stages, microbatches and ticks are numbered from 0.

    Attributes:
        orders: The order of each rank. All ranks have the same number of microbatches.
        placement: The stages of each rank, ascending, one per chunk; each stage is on exactly one rank. () for the round-robin
            placement: chunk c of rank r is stage c * P + r. The constructor replaces () by this placement.
        ticks: The ticks of each rank's actions, integers [N] per rank, ascending. () for the earliest possible ticks. The
            constructor stores read-only int64 copies.
        name: Name in messages and pictures.
        num_stages: S, the number of stages over all ranks. Computed from `placement`.

    Raises:
        OrderError: If the schedule deadlocks, the tick of an action is not after the ticks of all actions that it depends on, a
            schedule of A actions over all ranks has more than 1000 + 10 * A ticks, or orders, placement and ticks do not match
            each other. If a single action is wrong, the attributes `rank` and `position` of the error locate it; else they are
            None.

    Examples:
        >>> jgraph.Schedule((jgraph.Order.parse([1, 1, -1, -1]), jgraph.Order.parse([1, -1, 1, -1])), name="1f1b")
        Schedule(1f1b: 2 ranks, 2 stages, 2 microbatches, 6 ticks)
    """

    orders: tuple[Order, ...]
    placement: Placement = ()
    ticks: tuple[np.ndarray, ...] = ()
    name: str = "custom"
    num_stages: int = field(init=False)

    def __post_init__(self):
        """Validates the schedule and computes the placement, the number of stages and the ticks."""
        if not isinstance(self.orders, Sequence) or not self.orders or not all(isinstance(o, Order) for o in self.orders):
            problem = "`orders` must be a sequence of at least one Order; Order.parse constructs one from signed numbers"
            raise OrderError(problem, field="orders")
        placement = self.placement or loop(len(self.orders), self.orders[0].num_chunks)
        object.__setattr__(self, "placement", placement)
        _check_counts(self)
        object.__setattr__(self, "num_stages", sum(map(len, placement)))
        object.__setattr__(self, "ticks", _check_ticks(self) if len(self.ticks) else _earliest(self))
        for row in self.ticks:
            row.flags.writeable = False

    def __len__(self) -> int:
        """Returns the number of ranks."""
        return len(self.orders)

    @overload
    def __getitem__(self, index: int) -> Order: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Order, ...]: ...

    def __getitem__(self, index: int | slice) -> Order | tuple[Order, ...]:
        """Returns the order of a rank, or a tuple of orders for a slice."""
        return self.orders[index]

    def __str__(self) -> str:
        """Returns the name and the numbers of ranks, stages, microbatches and ticks."""
        counts = {
            ("rank", "ranks"): self.num_ranks,
            ("stage", "stages"): self.num_stages,
            ("microbatch", "microbatches"): self.num_microbatches,
            ("tick", "ticks"): self.num_ticks,
        }
        words = [f"{count} {plural if count > 1 else word}" for (word, plural), count in counts.items()]
        return f"{self.name}: {', '.join(words)}"

    def __repr__(self) -> str:
        """Returns the type and the text of `__str__`."""
        return f"Schedule({self})"

    def split(self) -> "Schedule":
        """Returns a new schedule in which every full backward is replaced by a dgrad and, directly after it, a wgrad.

        All actions get the earliest possible ticks. Placement and name are kept.
        """
        return Schedule(tuple(order.split() for order in self.orders), self.placement, name=self.name)

    def newest_first(self) -> "Schedule":
        """Returns a new schedule in which every wgrad belongs to the newest pending dgrad of its rank, over all chunks.

        A dgrad is pending until its wgrad runs. Only the chunks and microbatches of wgrads change, and `wgrads` of every order
        becomes `newest`. Ticks, kinds, full backwards, placement and name stay the same. A wgrad directly after a dgrad then
        belongs to this dgrad, so the program can pass the dgrad's stash on directly, without a slot. Weight gradients are
        summed in a different order, which changes their rounding.
        """
        orders = []
        for order in self.orders:
            chunks = order.chunks.copy()
            pending = []
            for position, kind in enumerate(order.kinds.tolist()):
                if kind == DGRAD:
                    pending.append(chunks[position])
                elif kind == WGRAD:
                    chunks[position] = pending.pop()
            orders.append(Order(order.kinds, chunks, order.num_layers_per_chunk, "newest"))
        return Schedule(tuple(orders), self.placement, self.ticks, self.name)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.orders)

    @property
    def num_chunks(self) -> int:
        """Largest number of chunks of a rank."""
        return max(map(len, self.placement))

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return self.orders[0].num_microbatches

    @property
    def num_ticks(self) -> int:
        """Number of ticks of a step: the last tick of any rank plus 1."""
        return int(max(t[-1] for t in self.ticks)) + 1

    @cached_property
    def rank_of_stage(self) -> np.ndarray:
        """The rank of each stage, int64 [S]."""
        return self._by_stage([[r] * len(stages) for r, stages in enumerate(self.placement)])

    @cached_property
    def num_layers(self) -> list[int]:
        """The number of layers of each stage, a list with S entries, from `Order.num_layers_per_chunk`."""
        return self._by_stage([order.num_layers_per_chunk for order in self.orders]).tolist()

    def _by_stage(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Reorders values per rank and chunk to an array by stage, int64 [S]."""
        return np.concatenate(rows)[np.argsort(np.concatenate(self.placement))]

    @cached_property
    def stages(self) -> tuple[np.ndarray, ...]:
        """The stage of each action: a tuple with one int64 array [N] per rank, in the sequence of the order."""
        return tuple(np.array(row)[order.chunks] for row, order in zip(self.placement, self.orders, strict=True))

    def when(self, times: Sequence[np.ndarray], kinds: tuple[int, ...], missing: float = -1) -> np.ndarray:
        """Arranges the times of actions in a table by stage and microbatch.

        Args:
            times: Time (or tick) of each action: one array [N] per rank, all of the same dtype.
            kinds: The kinds of actions to include: 0 forward, 1 dgrad, 2 wgrad, 3 full backward. If a stage has several actions
                of these kinds for a microbatch, the table has the time of the last one.
            missing: Value for a stage and microbatch without such an action. The dtype of `times` must be able to hold it.

        Returns:
            A new array of shape [S, M] and the dtype of `times`: the time of the action by stage and microbatch.
        """
        table = np.full((self.num_stages, self.num_microbatches), missing, np.asarray(times[0]).dtype)
        for order, stages, time in zip(self.orders, self.stages, times, strict=True):
            mask = (order.kinds[:, None] == kinds).any(axis=1)
            table[stages[mask], order.microbatches[mask]] = time[mask]
        return table

    @cached_property
    def links(self) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """For each action, the number of the array that it reads from another stage, and of the array that it computes.

        The arrays of a step are numbered: s * M + m is the output of stage s for microbatch m, computed by its forward, and
        (S + s) * M + m is the gradient of the input of stage s for microbatch m, computed by its dgrad or full backward.

        Returns:
            The pair (reads, computes) of tuples, each with one int64 array [N] per rank. `reads` has the number of the array
            that each action reads, or -1 if it reads none: wgrads, forwards of the first stage, and dgrads and full backwards
            of the last stage. `computes` has the number of the array that each action computes, or 2 * S * M for wgrads, which
            compute no array for another stage.
        """
        count = self.num_microbatches
        last = self.num_stages - 1
        needs, makes = [], []
        for order, stages in zip(self.orders, self.stages, strict=True):
            forward, wgrad = order.kinds == FORWARD, order.kinds == WGRAD
            made = np.where(forward, stages, self.num_stages + stages)
            needs_none = wgrad | (stages == np.where(forward, 0, last))
            needs.append(np.where(needs_none, -1, (made + np.where(forward, -1, 1)) * count + order.microbatches))
            makes.append(np.where(wgrad, 2 * self.num_stages * count, made * count + order.microbatches))
        return tuple(needs), tuple(makes)

    @cached_property
    def home(self) -> np.ndarray:
        """The rank that computes each array of a step, int64 [2 * S * M + 1].

        Entry s * M + m is the rank that computes the output of stage s for microbatch m. Entry (S + s) * M + m is the rank that
        computes the gradient of the input of stage s for microbatch m. The last entry is -1; its index 2 * S * M stands for no
        array in `links`.
        """
        return np.append(np.tile(np.repeat(self.rank_of_stage, self.num_microbatches), 2), -1)


def _earliest(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Computes the earliest ticks: a rank is free, and the array that its action reads is available. Raises on a deadlock."""
    needs, makes = ([row.tolist() for row in rows] for rows in schedule.links)
    made = [-1] * len(schedule.home)
    waiting: dict[int, int] = {}
    ticks: list[list[int]] = [[] for _ in needs]
    ready = list(range(len(needs)))
    while ready:
        r = ready.pop()
        for i in range(len(ticks[r]), len(needs[r])):
            need = needs[r][i]
            tick = ticks[r][-1] + 1 if ticks[r] else 0
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
    """Describes a deadlock by the cycle of ranks that wait for each other."""
    # `stuck`: for each blocked rank, the position of its next action, and the array that it reads, by its index in `links`.
    home = schedule.home.tolist()
    chain = []
    r = next(iter(stuck))
    while r not in chain:
        chain.append(r)
        r = home[stuck[r][1]]
    cycle = chain[chain.index(r) :]
    r = min(cycle)
    waits = []
    for q in cycle[cycle.index(r) :] + cycle[: cycle.index(r)]:
        position, need = stuck[q]
        flat, m = divmod(need, schedule.num_microbatches)
        needed = f"forward of stage {flat}" if flat < schedule.num_stages else f"dgrad of stage {flat - schedule.num_stages}"
        action = schedule[q][position]
        waits.append(f"rank {q} at entry {position} ({action}) waits for rank {home[need]}'s {needed}, microbatch {m}")
    shown = "; ".join(waits[:3]) + (" ..." if len(waits) > 3 else "")
    return OrderError(f"the schedule deadlocks: {shown}; move the needed actions forward", position=stuck[r][0], rank=r)


def _check_counts(schedule: Schedule) -> None:
    """Raises OrderError if orders and placement differ in chunks, or a stage is not on exactly one rank."""
    orders, placement = schedule.orders, schedule.placement
    if not isinstance(placement, Sequence) or not all(isinstance(row, (Sequence, np.ndarray)) for row in placement):
        raise OrderError("`placement` must have one row of stages per rank", field="placement")
    _check_rows("placement", placement, orders)
    for r, (order, stages) in enumerate(zip(orders, placement, strict=True)):
        if order.num_chunks != len(stages):
            placed = f"{len(stages)} stages in its placement; give one stage per chunk"
            raise OrderError.of_rank(r, f" has {order.num_chunks} chunks in its order, but {placed}")
        if not all(isinstance(stage, (int, np.integer)) for stage in stages) or list(stages) != sorted(stages):
            raise OrderError.of_rank(r, f" has stages {stages}; list integers in ascending order, chunk by chunk")
        if order.num_microbatches != orders[0].num_microbatches:
            expected = f"but rank 0 has {orders[0].num_microbatches}; all ranks must have the same number"
            raise OrderError.of_rank(r, f" has {order.num_microbatches} microbatches, {expected}")
    all_stages = sorted(s for stages in placement for s in stages)
    if all_stages != list(range(len(all_stages))):
        raise OrderError(f"the ranks have stages {all_stages}; each of 0 to {len(all_stages) - 1} must occur exactly once")


def _check_rows(field: str, rows: Sequence[Sequence[int] | np.ndarray], orders: Sequence[Order]) -> None:
    """Raises OrderError if there is not one row per order."""
    if len(rows) != len(orders):
        raise OrderError(f"`{field}` has {len(rows)} rows for {len(orders)} orders; give one row per order", field=field)


def _check_ticks(schedule: Schedule) -> tuple[np.ndarray, ...]:
    """Validates explicit ticks and returns int64 copies."""
    made = np.full(len(schedule.home), -1, np.int64)
    all_needs, all_makes = schedule.links
    _check_rows("ticks", schedule.ticks, schedule.orders)
    rows = []
    for r, (order, row, makes) in enumerate(zip(schedule.orders, schedule.ticks, all_makes, strict=True)):
        given = np.asarray(row)
        allowed = "ticks must be ascending integers >= 0"
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
            reason = f"it needs a result of tick {made[needs[position]]}; move it to a later tick"
            raise OrderError.of_rank(r, f"{entry}, but {reason}", position)
    total = sum(map(len, schedule.orders))
    last = max(int(ticks[-1]) for ticks in rows)
    if last >= (most := _SPARE_TICKS + 10 * total):
        remedy = f"at most {most:,} are allowed: remove ticks with all ranks idle"
        raise OrderError(f"the schedule has {last + 1:,} ticks for {total} actions; {remedy}")
    return tuple(rows)
