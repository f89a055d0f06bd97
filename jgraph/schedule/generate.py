"""Schedules by name, each as a formula for what a rank does: no search, no costs.

gpipe: all forwards, then all backwards (Huang et al. 2019). 1f1b: at most P - r microbatches in flight on rank r
(PipeDream-Flush, Narayanan et al. 2021). interleaved-1f1b: the same over several chunks a rank (Megatron-LM, 2021). zb-h1,
zb-h2, zb-v: wgrads are moved to where a rank would be idle (Qi et al., Zero Bubble Pipeline Parallelism, 2023; Pipeline
Parallelism with Controllable Memory, 2024). dualpipe-v: the V-shaped half of DualPipe (DeepSeek, 2025). aligned: see
`_aligned`.
"""

from collections.abc import Callable

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD, check_whole
from jgraph.schedule.order import Order
from jgraph.schedule.schedule import Schedule, loop, vee

# P ranks, r this rank, M microbatches, C chunks per rank, n = M * C forwards of a rank


def generate(name: str, *, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Makes a pipeline schedule by name.

    >>> jgraph.schedule.generate("zb-h1", pp=4, microbatches=16)
    Schedule(zb-h1: 4 ranks, 4 stages, 16 microbatches, 51 ticks)

    Args:
        name: one of `NAMES`.
        pp: ranks of the pipeline.
        microbatches: per step.
        chunks: stages per rank. zb-v and dualpipe-v have 2 in any case; interleaved-1f1b needs at least 2.

    Returns:
        Schedule: a sequence of one Order per rank, each with `.to_list()`.

    Raises:
        OrderError: no schedule has this name, or it cannot have so many ranks, microbatches or chunks.
    """
    if not isinstance(name, str) or name not in _GENERATORS:
        raise OrderError(f"no schedule is called {name!r}; there are {', '.join(NAMES)}", field="name")
    for what, value in (("pp", pp), ("microbatches", microbatches), ("chunks", chunks)):
        check_whole(what, value)
    make, allowed = _GENERATORS[name]
    if name == "interleaved-1f1b" and chunks == 1:
        raise OrderError("interleaved-1f1b with chunks=1: it has at least 2 chunks a rank; with one, take 1f1b", field="chunks")
    if allowed is not None and chunks not in allowed:
        most = f"{allowed[-1]} chunk{'s' * (allowed[-1] > 1)}"
        raise OrderError(f"{name} with chunks={chunks}: it has {most} a rank", field="chunks")
    return make(int(pp), int(microbatches), int(chunks))


def forward_sequence(M: int, C: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns chunks and microbatches of a rank's forwards if `group` of them go through a chunk before the next one's turn."""
    microbatches = np.arange(M)
    first = microbatches - microbatches % group
    # Sorted by (group, chunk, microbatch) with one stable sort.
    chunk, microbatch = np.divmod(np.arange(C * M), M)
    at = np.argsort(first[microbatch] * C + chunk, kind="stable")
    return chunk[at], microbatch[at]


def alternate(forwards: np.ndarray, backwards: np.ndarray, warmup: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns kinds and chunks: `warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    n = len(forwards)
    steady = np.stack([forwards[warmup:], backwards[: n - warmup]], 1).ravel()
    chunks = np.concatenate([forwards[:warmup], steady, backwards[n - warmup :]])
    kinds = np.concatenate([np.full(warmup, FORWARD), np.tile([FORWARD, BACKWARD], n - warmup), np.full(warmup, BACKWARD)])
    return kinds, chunks


def _gpipe(P: int, M: int, C: int) -> Schedule:
    up, down = np.repeat(np.arange(C), M), np.repeat(np.arange(C)[::-1], M)
    order = Order(np.repeat([FORWARD, BACKWARD], C * M), np.concatenate([up, down]))
    return Schedule((order,) * P, loop(P, C), name="gpipe")


def _one_f_one_b(P: int, M: int, C: int) -> Schedule:
    zeros = np.zeros(M, np.int32)
    orders = tuple(Order(*alternate(zeros, zeros, min(P - 1 - r, M))) for r in range(P))
    return Schedule(orders, loop(P, 1), name="1f1b")


def _interleaved(P: int, M: int, C: int) -> Schedule:
    """Groups of P microbatches, as in `_grouped`."""
    forwards = _grouped(P, M, C)[0]
    orders = []
    for r in range(P):
        # The last chunk's first forward comes after this many, and its dgrad may follow at once on the last rank.
        warmup = 2 * (P - 1 - r) + int(np.argmax(forwards == C - 1))
        orders.append(Order(*alternate(forwards, C - 1 - forwards, min(warmup, M * C))))
    return Schedule(tuple(orders), loop(P, C), name="interleaved-1f1b")


def _zero_bubble(name: str, warmup: Callable[[int, int], int], limit: Callable[[int], int]):
    def make(P: int, M: int, C: int) -> Schedule:
        """Rank r starts with `warmup` forwards, then dgrad and forward in turn, and before a forward that would be more than
        `limit` ahead of its wgrads, a wgrad; after the last forward, dgrad and wgrad in turn, then the wgrads that are left."""
        orders = []
        for r in range(P):
            ahead, most = min(warmup(P, r), M), limit(P)
            lean = max(0, min(M, most) - ahead)  # dgrad and forward, without a wgrad
            full = M - ahead - lean
            kinds = (
                [FORWARD] * ahead
                + [DGRAD, FORWARD] * lean
                + [DGRAD, WGRAD, FORWARD] * full
                + [DGRAD, WGRAD] * ahead
                + [WGRAD] * lean
            )
            orders.append(Order(np.array(kinds, np.int8), np.zeros(len(kinds), np.int32)))
        return Schedule(tuple(orders), loop(P, 1), name=name)

    return make


def _zb_v(P: int, M: int, C: int) -> Schedule:
    """Both ends of the V are on rank 0, so a microbatch's dgrad starts on the rank where its forward ended."""
    count = max(2 * P - 1, M)  # of a schedule that fills the V; what is beyond M is left out
    orders = []
    for r in range(P):
        row = _Row()
        row.add((FORWARD, 0), times=2 * (P - r) - 1)
        row.add((FORWARD, 1), (FORWARD, 0), times=r)
        row.add((FORWARD, 1), (DGRAD, 1), (WGRAD, 1), times=P - r)
        while row.done[FORWARD, 1] < count:
            if row.done[FORWARD, 0] < count:
                row.add((FORWARD, 0))
            row.add((DGRAD, 0), (WGRAD, 0), (FORWARD, 1), (DGRAD, 1), (WGRAD, 1))
        row.add((DGRAD, 0), (DGRAD, 1), times=r)
        row.add((DGRAD, 0), (WGRAD, 0), times=P - r)
        for chunk in (1, 0):
            row.add((WGRAD, chunk), times=row.done[DGRAD, chunk] - row.done[WGRAD, chunk])
        orders.append(row.order(M))
    return Schedule(tuple(orders), vee(P), name="zb-v")


def _dualpipe_v(P: int, M: int, C: int) -> Schedule:
    """Forwards of one chunk alternate with backwards of the other; wgrads are delayed only at both ends of the step."""
    if M < 2 * P:
        raise OrderError(
            f"dualpipe-v on {P} ranks needs at least {2 * P} microbatches, got {M}; take more, or zb-v", field="microbatches"
        )
    orders = []
    for r in range(P):
        row, rest = _Row(), P - r - 1
        row.add((FORWARD, 0), times=2 * rest)
        row.add((FORWARD, 0), (FORWARD, 1), times=r + 1)
        row.add((DGRAD, 1), (WGRAD, 1), (FORWARD, 1), times=rest)
        row.add((FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0), times=M - 2 * P + r + 1)
        row.add((BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0), times=rest)
        # Of the last 2 * (r + 1) backwards, in turn of chunk 1 and chunk 0, the later half is split.
        tail = [(DGRAD if i >= r + 1 else BACKWARD, 1 - i % 2) for i in range(2 * (r + 1))]
        row.add(*tail)
        pending = [(WGRAD, chunk) for kind, chunk in tail if kind == DGRAD]
        for i in range(rest):
            row.add(*pending[i : i + 1], (DGRAD, 0))
            pending.append((WGRAD, 0))
        row.add(*pending[rest:])
        orders.append(row.order(M))
    return Schedule(tuple(orders), vee(P), name="dualpipe-v")


class _Row:
    """The actions of a rank, collected while a generator counts them."""

    def __init__(self):
        self.entries: list[tuple[int, int]] = []
        self.done = {(kind, chunk): 0 for kind in range(4) for chunk in range(2)}

    def add(self, *entries: tuple[int, int], times: int = 1) -> None:
        self.entries += entries * times
        for entry in entries:
            self.done[entry] += max(times, 0)

    def order(self, M: int) -> Order:
        """Returns the order without the entries of microbatches from M on."""
        kinds, chunks = np.array(self.entries, np.int8).T
        keep = np.ones(len(kinds), bool)
        for kind, chunk in set(self.entries):
            if kind != BACKWARD:
                keep[np.flatnonzero((kinds == kind) & (chunks == chunk))[M:]] = False
        return Order(kinds[keep], chunks[keep])


def _grouped(P: int, M: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    """`forward_sequence` in groups of P microbatches. What P leaves over joins the first group: a group smaller than P would
    leave every rank waiting for itself, and one larger than the first would be needed by its dgrads before it is there."""
    first = min(M, P + M % P)
    start = forward_sequence(first, C, first)
    rest = forward_sequence(M - first, C, P)
    return np.concatenate([start[0], rest[0]]), np.concatenate([start[1], rest[1] + first])


def _aligned(P: int, M: int, C: int) -> Schedule:
    """Phase-aligned rounds: in a tick all ranks do the same kind of action, so one SPMD program needs no branch.

    Rank r does the k-th forward of the step in round k + r, and the k-th dgrad in round start + k + P - 1 - r. A round is a
    tick of forwards, one of dgrads, one of wgrads, each left out where no rank has one. That leaves a rank idle in P - 1 of
    the ticks after its first dgrad: where the others still have forwards, or still have dgrads. It does a pending wgrad
    there, so these ticks alone are mixed, and with M >= 2P - 1 there are M * C + P - 1 ticks of forwards, as many of dgrads,
    and M * C - (P - 1) of wgrads: 3 * M * C + P - 1. With fewer microbatches there is no wgrad yet for some of the idle places.
    """
    # With fewer microbatches than ranks a group would be too short for the ring: the places beyond M stay empty.
    chunk, microbatch = _grouped(P, max(M, P) if C > 1 else M, C)
    back_chunk = C - 1 - chunk
    n = len(chunk)
    rank = np.arange(P)
    start = int(np.flatnonzero(chunk == C - 1)[0]) + P - 1
    rounds = np.arange(start + n + P - 1)[:, None]

    def turns(index: np.ndarray) -> np.ndarray:
        """[rounds, P]: which turn of its sequence a rank has; n, the empty place, where it has none."""
        index = np.where((index >= 0) & (index < n), index, n)
        return np.where(np.append(microbatch < M, False)[index], index, n)

    forward, dgrad = turns(rounds - rank), turns(rounds - start - (P - 1 - rank))
    has_forward, has_dgrad = rounds[:, 0] < n + P - 1, rounds[:, 0] >= start

    # Idle places take a wgrad where one is pending. Counted before any tick of wgrads is placed, so `pending` is the most
    # there are.
    pending = np.zeros(P, np.int64)
    idle_forward, idle_dgrad = (forward == n) & has_forward[:, None], (dgrad == n) & has_dgrad[:, None]
    fill_forward, fill_dgrad = np.zeros_like(idle_forward), np.zeros_like(idle_dgrad)
    least, end_of_round = np.zeros(len(rounds), np.int64), np.zeros(len(rounds), np.int64)
    for t in range(start, len(rounds)):
        fill_forward[t] = idle_forward[t] & (pending > 0)
        fill_dgrad[t] = idle_dgrad[t] & (pending > fill_forward[t])
        pending = pending - fill_forward[t] - fill_dgrad[t]
        least[t] = pending.min()
        pending = pending + (dgrad[t] < n)
        end_of_round[t] = pending.min()

    # A tick of wgrads as early as may be: all ranks have one to do, and can still fill every idle place to come.
    later = np.minimum.accumulate(np.append(least[1:], end_of_round[-1])[::-1])[::-1]
    wgrad_ticks, has_wgrad = 0, np.zeros(len(rounds), bool)
    for t in range(start, len(rounds)):
        has_wgrad[t] = wgrad_ticks < min(end_of_round[t], later[t])
        wgrad_ticks += has_wgrad[t]
    total = M * C
    trailing = int(max(total - fill_forward.sum(0) - fill_dgrad.sum(0))) - wgrad_ticks

    rows, wgrads = [], np.full(P, WGRAD)
    for t in range(len(rounds)):
        if has_forward[t]:
            rows.append(np.where(forward[t] < n, FORWARD, np.where(fill_forward[t], WGRAD, IDLE)))
        if has_dgrad[t]:
            rows.append(np.where(dgrad[t] < n, DGRAD, np.where(fill_dgrad[t], WGRAD, IDLE)))
        if has_wgrad[t]:
            rows.append(wgrads)
    kinds = np.stack([*rows, *[wgrads] * trailing])
    kinds[(kinds == WGRAD) & (np.cumsum(kinds == WGRAD, axis=0) > total)] = IDLE
    ticks = tuple(np.flatnonzero(kinds[:, r] != IDLE) for r in range(P))
    orders = []
    for r, row in enumerate(ticks):
        own = kinds[row, r]
        chunks = np.empty(len(own), np.int32)
        for kind, sequence in ((FORWARD, chunk), (DGRAD, back_chunk), (WGRAD, back_chunk)):
            chunks[own == kind] = sequence[microbatch < M]
        orders.append(Order(own, chunks))
    return Schedule(tuple(orders), loop(P, C), ticks, name="aligned")


_GENERATORS: dict[str, tuple[Callable[[int, int, int], Schedule], tuple[int, ...] | None]] = {
    "gpipe": (_gpipe, None),
    "1f1b": (_one_f_one_b, (1,)),
    "interleaved-1f1b": (_interleaved, None),
    "zb-h1": (_zero_bubble("zb-h1", lambda P, r: P - r, lambda P: P), (1,)),
    "zb-h2": (_zero_bubble("zb-h2", lambda P, r: 2 * (P - r) - 1, lambda P: 2 * P - 1), (1,)),
    "zb-v": (_zb_v, (1, 2)),
    "dualpipe-v": (_dualpipe_v, (1, 2)),
    "aligned": (_aligned, None),
}
NAMES = tuple(_GENERATORS)
