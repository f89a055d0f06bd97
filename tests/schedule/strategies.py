"""Random valid schedules, and random mutations of them."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from jgraph.schedule import Order, Schedule, loop, vee
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, LETTERS, WGRAD

Placement = tuple[tuple[int, ...], ...]
MUTATIONS = ("nudge", "swap", "drop", "duplicate", "flip", "rechunk", "half", "move")


def random_placement(rng: np.random.Generator, P: int, C: int) -> Placement:
    """Draws a round-robin, V-shaped or arbitrary placement; an arbitrary one may have unequal numbers of stages per rank."""
    match rng.integers(4):
        case 0:
            return loop(P, C)
        case 1:
            return vee(P)
        case 2:
            rows = rng.permutation(P * C).reshape(P, C)
        case _:
            cuts = np.sort(rng.choice(np.arange(1, P * C), P - 1, replace=False)) if P > 1 else []
            rows = np.split(rng.permutation(P * C), cuts)
    return tuple(tuple(sorted(row.tolist())) for row in rows)


def random_schedule(
    rng: np.random.Generator, *, most_ranks: int = 4, most_chunks: int = 3, most_microbatches: int = 5
) -> Schedule:
    """Draws a valid schedule by repeatedly choosing one of the actions that are ready.

    The weights of forwards, dgrads and wgrads and the fraction of full backwards are drawn as well; otherwise all schedules
    would look like a shuffled steady state. Full backwards occur only if no wgrad of the chunk is pending.
    """
    P = int(rng.integers(1, most_ranks + 1))
    placement = random_placement(rng, P, int(rng.integers(1, most_chunks + 1)))
    M = int(rng.integers(1, most_microbatches + 1))
    home = {s: (r, c) for r, stages in enumerate(placement) for c, s in enumerate(stages)}
    S = len(home)
    eager = np.array([1.0, 1.0, 1.0]) * 10.0 ** rng.uniform(-1.5, 1.5, 3)
    fuses = rng.choice([0.0, 0.3, 0.7, 1.0], size=S).tolist()
    F, I, W = [0] * S, [0] * S, [0] * S  # noqa: E741
    rows: list[list[tuple[int, int]]] = [[] for _ in placement]
    weights = eager.tolist()
    draws = rng.random(2 * 3 * S * M).tolist()
    while True:
        can = [(FORWARD, s) for s in range(S) if F[s] < (M if s == 0 else F[s - 1])]
        can += [(DGRAD, s) for s in range(S) if I[s] < min(F[s], M if s == S - 1 else I[s + 1])]
        can += [(WGRAD, s) for s in range(S) if W[s] < I[s]]
        if not can:
            break
        mark = draws.pop() * sum(weights[kind] for kind, _ in can)
        for kind, s in can:  # noqa: B007 - the last value is used after the loop
            mark -= weights[kind]
            if mark < 0:
                break
        r, c = home[s]
        if kind == DGRAD and W[s] == I[s] and draws.pop() < fuses[s]:
            kind = BACKWARD
        F[s] += kind == FORWARD
        I[s] += kind in (DGRAD, BACKWARD)
        W[s] += kind in (WGRAD, BACKWARD)
        rows[r].append((kind, c))
    orders = tuple(Order(*np.array(row).T) for row in rows)
    return Schedule(orders, placement)


def delayed_ticks(rng: np.random.Generator, schedule: Schedule) -> Schedule:
    """Stretches every tick of a schedule to 1 to 3 ticks, the same for all ranks."""
    later = np.cumsum(rng.integers(1, 4, schedule.num_ticks))
    return Schedule(schedule.orders, schedule.placement, tuple(later[t] for t in schedule.ticks))


def mutate(rng: np.random.Generator, numbers: Sequence[int | float]) -> tuple[str, list[int | float]]:
    """Applies one random mutation to signed numbers. Returns its name and the result."""
    numbers = list(numbers)
    name = MUTATIONS[rng.integers(len(MUTATIONS))]
    i, j = rng.integers(len(numbers), size=2).tolist()
    entry = numbers[i]
    match name:
        case "nudge":
            numbers[i - 1], numbers[i] = entry, numbers[i - 1]
        case "swap":
            numbers[i], numbers[j] = numbers[j], entry
        case "drop":
            del numbers[i]
        case "duplicate":
            numbers.insert(j, entry)
        case "flip":
            numbers[i] = -entry
        case "rechunk":
            chunks = int(max(abs(n) for n in numbers))
            sign = 1 if entry > 0 else -1
            numbers[i] = sign * (int(rng.integers(1, chunks + 2)) + abs(entry) % 1)
            numbers[i] = int(numbers[i]) if numbers[i] == int(numbers[i]) else numbers[i]
        case "half":
            numbers[i] = int(entry + 0.5) if entry != int(entry) else -abs(entry) - 0.5
        case "move":
            numbers.insert(j, numbers.pop(i))
    return name, numbers


def mutate_kinds(rng: np.random.Generator, row: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Applies one random mutation that signed numbers cannot express.

    Replaces a dgrad and a wgrad of its chunk by a full backward, splits a full backward with the wgrad at a random later
    position, or changes the kind of an action.
    """
    row = list(row)
    i = int(rng.integers(len(row)))
    kind, chunk = row[i]
    wgrads = [j for j, entry in enumerate(row) if entry == (WGRAD, chunk)]
    if kind == DGRAD and wgrads:
        row[i] = BACKWARD, chunk
        # The next wgrad after a dgrad often, but not always, belongs to it.
        del row[next((j for j in wgrads if j > i), wgrads[0]) if rng.random() < 0.7 else int(rng.choice(wgrads))]
    elif kind == BACKWARD:
        row[i] = DGRAD, chunk
        row.insert(int(rng.integers(i + 1, len(row) + 1)) if rng.random() < 0.8 else i, (WGRAD, chunk))
    else:
        row[i] = int(rng.integers(4)), chunk
    return row


@st.composite
def schedules(draw) -> Schedule:
    """Draws valid schedules that hypothesis can shrink.

    Examples shrink to fewer ranks, chunks and microbatches, and then to the first of the actions that are ready.
    """
    P, C, M = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    spots = draw(st.permutations([r for r in range(P) for _ in range(C)]))
    placement = tuple(tuple(s for s, spot in enumerate(spots) if spot == r) for r in range(P))
    S = P * C
    F, I, W = [0] * S, [0] * S, [0] * S  # noqa: E741
    rows: list[list[tuple[int, int]]] = [[] for _ in placement]
    while True:
        can = [(FORWARD, s) for s in range(S) if F[s] < (M if s == 0 else F[s - 1])]
        dgrads = [s for s in range(S) if I[s] < min(F[s], M if s == S - 1 else I[s + 1])]
        can += [(BACKWARD, s) for s in dgrads if W[s] == I[s]] + [(DGRAD, s) for s in dgrads]
        can += [(WGRAD, s) for s in range(S) if W[s] < I[s]]
        if not can:
            break
        kind, s = can[draw(st.integers(0, len(can) - 1))]
        F[s] += kind == FORWARD
        I[s] += kind in (DGRAD, BACKWARD)
        W[s] += kind in (WGRAD, BACKWARD)
        r = spots[s]
        rows[r].append((kind, placement[r].index(s)))
    return Schedule(tuple(Order(*np.array(row).T) for row in rows), placement)


def to_csv(schedule: Schedule) -> str:
    """Formats a schedule as CSV with a row per rank and a cell per tick, for example `5F3`. Idle cells are empty."""
    rows = [[""] * schedule.num_ticks for _ in schedule.orders]
    for row, order, stages, ticks in zip(rows, schedule.orders, schedule.stages, schedule.ticks, strict=True):
        for tick, kind, stage, microbatch in zip(ticks, order.kinds, stages, order.microbatches, strict=True):
            row[tick] = f"{stage}{LETTERS[kind]}{microbatch}"
    return "".join(",".join(row) + "\n" for row in rows)
