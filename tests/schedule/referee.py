"""An independent, slow and simple checker for schedules. It shares no algorithm with the library.

The referee keeps a dict of the contents of slots and a dict of finished actions, and checks both at every use. Contents are
nested tuples, not names: the value of a forward contains the activation that it read, the value of a dgrad contains the
residuals and the gradient that it read, and so on. A wrong value anywhere therefore changes the result.

Within a tick, arrays sent in the previous tick arrive first; then all ranks read and write. A slot that is reused by an arrival
in the tick of its last use counts as a clash, as in a compiled program.
"""

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np

from jgraph.schedule import Schedule, Slots, assign
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD

# P ranks, S stages, M microbatches


OWN_POOLS = ("forward_dgrad", "forward_wgrad", "stash")


class Foul(AssertionError):  # noqa: N818 - a referee calls a foul
    """The schedule or its slots violate a rule. The message names the rule, the rank and the tick."""


def counted(schedule: Schedule) -> list[list[tuple[int, int, int, int]]]:
    """Returns (tick, kind, stage, microbatch) of each action per rank.

    Counts microbatches independently of the library: first in, first out per kind, except for wgrads of the newest dgrad.
    """
    rows = []
    for r, order in enumerate(schedule.orders):
        seen: Counter[tuple[int, int]] = Counter()
        waiting: defaultdict[int, list[int]] = defaultdict(list)
        row = []
        for i, (kind, chunk) in enumerate(zip(order.kinds.tolist(), order.chunks.tolist(), strict=True)):
            parts = (DGRAD, WGRAD) if kind == BACKWARD else (kind,)
            microbatches = {seen[part, chunk] for part in parts}
            for part in parts:
                seen[part, chunk] += 1
            if kind == DGRAD:
                waiting[chunk].append(max(microbatches))
            if kind == WGRAD and order.wgrads == "newest":
                microbatches = {waiting[chunk].pop()}
            if len(microbatches) > 1:
                raise Foul(f"rank {r}, entry {i}: a full backward has two microbatches, {sorted(microbatches)}")
            (m,) = microbatches
            if m != order.microbatches[i]:
                raise Foul(f"rank {r}, entry {i}: microbatch is {order.microbatches[i]}, expected {m}")
            row.append((int(schedule.ticks[r][i]), kind, schedule.placement[r][chunk], m))
        rows.append(row)
    return rows


def referee(schedule: Schedule, slots: Slots | None = None) -> int:
    """Runs the schedule with its slots, tick by tick. Returns the number of checked reads; raises Foul."""
    slots = assign(schedule) if slots is None else slots
    numbers = {pool: table.tolist() for pool, table in slots.numbers.items()}
    counts = {pool: row.tolist() for pool, row in slots.counts.items()}
    home = {stage: r for r, stages in enumerate(schedule.placement) for stage in stages}
    last, M = len(home) - 1, schedule.num_microbatches
    by_tick: dict[int, list[tuple[int, int, int, int]]] = {}
    for r, row in enumerate(counted(schedule)):
        before = -1
        for tick, kind, stage, m in row:
            if tick <= before:
                raise Foul(f"rank {r} has tick {tick} after tick {before}")
            before = tick
            by_tick.setdefault(tick, []).append((r, kind, stage, m))

    held: dict[tuple[str, int, int], tuple] = {}
    done: dict[tuple[int, int, int], int] = {}
    uses = 0

    def where(pool: str, r: int, stage: int, m: int) -> tuple[str, int, int]:
        slot = numbers[pool][stage][m]
        if not 0 <= slot < counts[pool][r]:
            raise Foul(f"{pool} of stage {stage}, microbatch {m} has slot {slot} of {counts[pool][r]} on rank {r}")
        return pool, r, slot

    def use(pool: str, r: int, stage: int, m: int) -> tuple:
        nonlocal uses
        uses += 1
        found = held.get(where(pool, r, stage, m), (None, None))
        if found[:2] != (stage, m):
            raise Foul(f"tick {tick}, rank {r}: {pool} of stage {stage}, microbatch {m} holds {found[:2]}")
        return found[2]

    def need(part: int, stage: int, m: int) -> None:
        if not done.get((part, stage, m), tick) < tick:
            raise Foul(f"tick {tick}: stage {stage}, microbatch {m} has not finished kind {part} in an earlier tick")

    sent: list[tuple[str, int, int, tuple]] = []
    results: dict[tuple[int, int], tuple] = {}
    for tick in range(max(by_tick) + 1):
        for pool, stage, m, value in sent:
            held[where(pool, home[stage], stage, m)] = stage, m, value
        sent = []
        for r, kind, stage, m in by_tick.get(tick, []):
            writes = {}
            if kind == FORWARD:
                activation = None
                if stage > 0:
                    need(FORWARD, stage - 1, m)
                    activation = use("activation", r, stage, m)
                value = "forward", stage, m, activation
                writes = {"forward_dgrad": value, "forward_wgrad": value}
                if stage < last:
                    sent.append(("activation", stage + 1, m, value))
            if kind in (DGRAD, BACKWARD):
                gradient = None
                need(FORWARD, stage, m)
                kept = use("forward_dgrad", r, stage, m)
                if stage < last:
                    need(DGRAD, stage + 1, m)
                    gradient = use("gradient", r, stage, m)
                value = "dgrad", stage, m, kept, gradient
                if stage > 0:
                    sent.append(("gradient", stage - 1, m, value))
            if kind == DGRAD:
                writes = {"stash": value}
            if kind == WGRAD:
                need(DGRAD, stage, m)
                value = use("stash", r, stage, m)
            if kind in (WGRAD, BACKWARD):
                results[stage, m] = use("forward_wgrad", r, stage, m), value
            for pool, new in writes.items():
                held[where(pool, r, stage, m)] = stage, m, new
            for part in (DGRAD, WGRAD) if kind == BACKWARD else (kind,):
                if (part, stage, m) in done:
                    raise Foul(f"tick {tick}: kind {part} of stage {stage}, microbatch {m} runs twice")
                done[part, stage, m] = tick
    everything = {(part, s, m) for part in (FORWARD, DGRAD, WGRAD) for s in range(last + 1) for m in range(M)}
    if set(done) != everything:
        raise Foul(f"missing: {sorted(everything - set(done))[:3]}; unexpected: {sorted(set(done) - everything)[:3]}")
    for m in range(M):
        forwards: list[tuple] = []
        for stage in range(last + 1):
            forwards.append(("forward", stage, m, forwards[-1] if stage else None))
        gradient = None
        for stage in range(last, -1, -1):
            gradient = "dgrad", stage, m, forwards[stage], gradient
            if results[stage, m] != (forwards[stage], gradient):
                raise Foul(f"the wgrad of stage {stage}, microbatch {m} was computed from {results[stage, m]}")
    return uses


def kinds_and_chunks(numbers: list[int | float]) -> list[tuple[int, int]] | None:
    """Parses signed numbers to (kind, chunk); None if one is invalid. A chunk without wgrads has full backwards."""
    row = []
    for entry in numbers:
        chunk = int(abs(entry)) - 1
        if chunk < 0 or (entry != int(entry) and entry > 0):
            return None
        if entry > 0:
            row.append((FORWARD, chunk))
        elif entry != int(entry):
            row.append((WGRAD, chunk))
        else:
            row.append((DGRAD if entry - 0.5 in numbers else BACKWARD, chunk))
    return row


def can_run(rows: list[list[tuple[int, int]] | None], placement: tuple[tuple[int, ...], ...]) -> bool:
    """True if lists of (kind, chunk) per rank form a complete step without deadlock.

    Every rank runs its next action as soon as it is ready, until every rank is finished or blocked. Microbatches go first
    in, first out.
    """
    home = {stage: r for r, stages in enumerate(placement) for stage in stages}
    last = len(home) - 1
    for row, stages in zip(rows, placement, strict=True):
        if row is None or {chunk for _, chunk in row} != set(range(len(stages))):
            return False
    done: Counter[tuple[int, int]] = Counter()  # finished microbatches by (kind, stage)
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                kind, chunk = row[at[r]]
                s = placement[r][chunk]
                forwards, dgrads, wgrads = (done[part, s] for part in (FORWARD, DGRAD, WGRAD))
                if kind == FORWARD:
                    may = s == 0 or done[FORWARD, s - 1] > forwards
                elif kind == WGRAD:
                    may = wgrads < dgrads
                else:
                    may = dgrads < forwards and (s == last or done[DGRAD, s + 1] > dgrads)
                    may = may and (kind == DGRAD or wgrads == dgrads)
                if not may:
                    break
                for part in (DGRAD, WGRAD) if kind == BACKWARD else (kind,):
                    done[part, s] += 1
                at[r] += 1
                moved = True
    finished = {done[part, s] for part in (FORWARD, DGRAD, WGRAD) for s in home}
    return at == [len(row) for row in rows] and len(finished) == 1


def ticks_are_valid(schedule: Schedule, ticks: list[np.ndarray]) -> bool:
    """True if the ticks ascend on every rank and every array is produced in an earlier tick than it is used."""
    made: dict[tuple[int, int, int], int] = {}
    rows = counted(schedule)
    for row, own in zip(rows, ticks, strict=True):
        if own[0] < 0 or any(a >= b for a, b in pairwise(own.tolist())):
            return False
        for (_, kind, stage, m), tick in zip(row, own.tolist(), strict=True):
            made[DGRAD if kind == BACKWARD else kind, stage, m] = tick
    for row, own in zip(rows, ticks, strict=True):
        for (_, kind, stage, m), tick in zip(row, own.tolist(), strict=True):
            if kind == FORWARD and stage > 0 and made[FORWARD, stage - 1, m] >= tick:
                return False
            if kind in (DGRAD, BACKWARD) and stage < schedule.num_stages - 1 and made[DGRAD, stage + 1, m] >= tick:
                return False
    return True


def referee_times(schedule: Schedule, costs_table: np.ndarray, latency: float) -> tuple[list[list[float]], list[list[float]]]:
    """Returns (starts, ends) per rank if every action starts as soon as its rank is free and its input has arrived.

    Visits the ranks repeatedly, one action each, until none can proceed.

    Args:
        schedule: The schedule.
        costs_table: Cost by kind and stage, [4, S].
        latency: Time of a transfer to another rank.
    """
    rows = counted(schedule)
    home = {stage: r for r, stages in enumerate(schedule.placement) for stage in stages}
    finished: dict[tuple[int, int, int], float] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            if len(ends[r]) == len(row):
                continue
            _, kind, stage, m = row[len(ends[r])]
            part = DGRAD if kind == BACKWARD else kind
            source = None
            if kind == FORWARD and stage > 0:
                source = FORWARD, stage - 1, m
            if part == DGRAD and stage < len(home) - 1:
                source = DGRAD, stage + 1, m
            if source is not None and source not in finished:
                continue
            start = ends[r][-1] if ends[r] else 0.0
            if source is not None:
                start = max(start, finished[source] + (latency if home[source[1]] != r else 0.0))
            finished[part, stage, m] = start + float(costs_table[kind, stage])
            starts[r].append(start)
            ends[r].append(finished[part, stage, m])
            moved = True
    if [len(row) for row in rows] != [len(row) for row in ends]:
        raise Foul("the ranks deadlock")
    return starts, ends


def referee_tick_times(
    schedule: Schedule, costs_table: np.ndarray, latency: float, execution: str
) -> tuple[list[list[float]], list[list[float]]]:
    """Returns (starts, ends) per rank for an execution tick by tick.

    A rank enters a tick when the ranks it waits for have finished the previous one. In `lockstep` these are all ranks; with
    `neighbours`, itself and the ranks with a stage before or after one of its own.
    """
    rows = counted(schedule)
    home = {stage: r for r, stages in enumerate(schedule.placement) for stage in stages}
    waits_for = {r: {r} for r in range(len(rows))}
    for stage, r in home.items():
        waits_for[r] |= {home[other] for other in (stage - 1, stage + 1) if other in home}
    if execution == "lockstep":
        waits_for = {r: set(waits_for) for r in waits_for}
    doing = {(tick, r): (kind, stage, m) for r, row in enumerate(rows) for tick, kind, stage, m in row}
    finished: dict[tuple[int, int, int], float] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    left = [0.0] * len(rows)
    for now in range(max(tick for tick, _ in doing) + 1):
        entered = [max(left[q] for q in waits_for[r]) for r in range(len(rows))]
        left = list(entered)
        for r, start in enumerate(entered):
            if (now, r) not in doing:
                continue
            kind, stage, m = doing[now, r]
            part = DGRAD if kind == BACKWARD else kind
            step = {FORWARD: -1, DGRAD: 1, WGRAD: 0}[part]
            if step and stage + step in home:
                start = max(start, finished[part, stage + step, m] + latency * (home[stage + step] != r))
            left[r] = finished[part, stage, m] = start + float(costs_table[kind, stage])
            starts[r].append(start)
            ends[r].append(left[r])
    return starts, ends
