"""Generates pipeline schedules by name, each from a closed formula, without search and costs.

- gpipe: all forwards, then all backwards (Huang et al. 2019).
- 1f1b: at most P - r microbatches in flight on rank r (PipeDream-Flush, Narayanan et al. 2021).
- interleaved-1f1b: 1f1b over several chunks per rank (Megatron-LM, 2021).
- zb-h1, zb-h2, zb-v: wgrads fill idle ticks (Qi et al., Zero Bubble Pipeline Parallelism, 2023; Pipeline
  Parallelism with Controllable Memory, 2024).
- dualpipe-v: the V-shaped half of DualPipe (DeepSeek, 2025).
- aligned: all ranks run the same kind of action in a tick (see `_aligned`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD, check_integer
from jgraph.schedule.order import Order
from jgraph.schedule.schedule import Schedule, loop, vee

# P ranks, r index of a rank, M microbatches, C chunks per rank, n = M * C forwards per rank


def generate(name: str, *, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Generates a pipeline schedule by name.

    Args:
        name: One of `NAMES`: `gpipe`, `1f1b`, `interleaved-1f1b`, `zb-h1`, `zb-h2`, `zb-v`, `dualpipe-v` or `aligned`. gpipe,
            1f1b and interleaved-1f1b have full backwards; zb-h1, zb-h2, zb-v and aligned have separate dgrads and wgrads;
            dualpipe-v has both.
        pp: Number of ranks of the pipeline, at least 1.
        microbatches: Number of microbatches per step, at least 1; at least 2 * pp for dualpipe-v.
        chunks: Number of chunks (stages) per rank. gpipe and aligned: any number. interleaved-1f1b: at least 2. 1f1b, zb-h1 and
            zb-h2: only 1. zb-v and dualpipe-v: 1 and 2 are accepted, and the schedule has 2.

    Returns:
        The schedule, a sequence with one `Order` per rank. `Order.to_list` returns the signed numbers of a rank. Stages are
        placed round-robin (stage s on rank s % pp), or in a V for zb-v and dualpipe-v (stages r and 2 * pp - 1 - r on rank r).

    Raises:
        OrderError: If `name` is unknown, a number is not an integer of at least 1, or the schedule does not support this number
            of microbatches or chunks.

    Examples:
        >>> jgraph.schedule.generate("zb-h1", pp=4, microbatches=16)
        Schedule(zb-h1: 4 ranks, 4 stages, 16 microbatches, 51 ticks)
    """
    if not isinstance(name, str) or name not in _GENERATORS:
        raise OrderError(f"`name` is {name!r}: must be one of {', '.join(NAMES)}", field="name")
    for argument, value in (("pp", pp), ("microbatches", microbatches), ("chunks", chunks)):
        check_integer(argument, value)
    make, allowed = _GENERATORS[name]
    if name == "interleaved-1f1b" and chunks == 1:
        raise OrderError("interleaved-1f1b with chunks=1: needs at least 2 chunks per rank; use 1f1b for one", field="chunks")
    if allowed is not None and chunks not in allowed:
        supported = "1 chunk" if allowed[-1] == 1 else f"{allowed[-1]} chunks"
        raise OrderError(f"{name} with chunks={chunks}: supports only {supported} per rank", field="chunks")
    return make(int(pp), int(microbatches), int(chunks))


def forward_sequence(bounds: Sequence[int], C: int) -> np.ndarray:
    """Returns chunks and microbatches of forwards, [2, n]. A group passes through all chunks before the next group starts."""
    # `bounds` has the first microbatch of each group, then the number of microbatches: [0, 2, 4] is two groups of two.
    pairs = [(c, m) for first, end in pairwise(bounds) for c in range(C) for m in range(first, end)]
    return np.array(pairs).T


def alternate(forwards: np.ndarray, C: int, warmup: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns kinds and chunks: `warmup` forwards, then a forward and a full backward in turn, then the remaining backwards."""
    # `forwards` has the chunk of each forward, and the k-th backward is of chunk C - 1 - forwards[k].
    n = len(forwards)
    backwards = C - 1 - forwards
    steady = np.stack([forwards[warmup:], backwards[: n - warmup]], 1).ravel()
    chunks = np.concatenate([forwards[:warmup], steady, backwards[n - warmup :]])
    kinds = np.concatenate([np.full(warmup, FORWARD), np.tile([FORWARD, BACKWARD], n - warmup), np.full(warmup, BACKWARD)])
    return kinds, chunks


def _alternating(name: str, P: int, C: int, forwards: np.ndarray, warmups: Sequence[int]) -> Schedule:
    orders = tuple(Order(*alternate(forwards, C, min(warmup, len(forwards)))) for warmup in warmups)
    return Schedule(orders, loop(P, C), name=name)


def _interleaved(P: int, M: int, C: int) -> Schedule:
    """Interleaved 1F1B in the groups of `_bounds`."""
    forwards = forward_sequence(_bounds(P, M), C)[0]
    # The last rank runs a dgrad right after the first forward of its last chunk; each rank before it adds 2 forwards.
    first = int(np.argmax(forwards == C - 1))
    return _alternating("interleaved-1f1b", P, C, forwards, [2 * (P - 1 - r) + first for r in range(P)])


def _zero_bubble(name: str, warmup: Callable[[int, int], int], limit: Callable[[int], int]):
    def make(P: int, M: int, C: int) -> Schedule:
        """Generates a schedule that holds the residuals of at most `limit` microbatches per rank."""
        # Rank r starts with `warmup` forwards. Then dgrads and forwards alternate, with a wgrad before each forward that would
        # exceed the limit. After the last forward, dgrads and wgrads alternate; the remaining wgrads come last.
        orders = []
        for r in range(P):
            ahead = min(warmup(P, r), M)
            lean = max(0, min(M, limit(P)) - ahead)  # pairs of dgrad and forward without a wgrad
            full = M - ahead - lean
            kinds = [FORWARD] * ahead + [DGRAD, FORWARD] * lean + [DGRAD, WGRAD, FORWARD] * full
            kinds += [DGRAD, WGRAD] * ahead + [WGRAD] * lean
            orders.append(Order(np.array(kinds, np.int8), np.zeros(len(kinds), np.int32)))
        return Schedule(tuple(orders), loop(P, 1), name=name)

    return make


def _zb_v(P: int, M: int, C: int) -> Schedule:
    """Zero bubble on a V: both ends of the V are on rank 0, so a dgrad starts on the rank that ran the last forward."""
    count = max(2 * P - 1, M)  # the V needs at least 2P - 1 microbatches; `_Row` drops the ones from M on
    orders = []
    for r in range(P):
        row = _Row(M)
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
        orders.append(row.order())
    return Schedule(tuple(orders), vee(P), name="zb-v")


def _dualpipe_v(P: int, M: int, C: int) -> Schedule:
    """DualPipe on a V: forwards of one chunk alternate with backwards of the other."""
    if M < 2 * P:
        raise OrderError(
            f"dualpipe-v on {P} ranks needs at least {2 * P} microbatches, got {M}; use more, or zb-v", field="microbatches"
        )
    orders = []
    for r in range(P):
        row = _Row(M)
        rest = P - r - 1
        row.add((FORWARD, 0), times=2 * rest)
        row.add((FORWARD, 0), (FORWARD, 1), times=r + 1)
        row.add((DGRAD, 1), (WGRAD, 1), (FORWARD, 1), times=rest)
        row.add((FORWARD, 0), (BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0), times=M - 2 * P + r + 1)
        row.add((BACKWARD, 1), (FORWARD, 1), (BACKWARD, 0), times=rest)
        # Only backwards near the start and the end of the step are split into dgrad and wgrad. The last 2 * (r + 1) backwards
        # alternate between chunk 1 and chunk 0, and the second half of them is split.
        tail = [(DGRAD if i >= r + 1 else BACKWARD, 1 - i % 2) for i in range(2 * (r + 1))]
        row.add(*tail)
        pending = [(WGRAD, chunk) for kind, chunk in tail if kind == DGRAD]
        for i in range(rest):
            row.add(*pending[i : i + 1], (DGRAD, 0))
            pending.append((WGRAD, 0))
        row.add(*pending[rest:])
        orders.append(row.order())
    return Schedule(tuple(orders), vee(P), name="dualpipe-v")


class _Row:
    """Collects the actions of a rank, and drops those of microbatches from M on."""

    def __init__(self, M: int):
        self.M = M
        self.entries = []
        self.done = Counter()  # counts dropped actions, too, by kind and chunk

    def add(self, *entries: tuple[int, int], times: int = 1) -> None:
        for entry in entries * times:
            self.done[entry] += 1
            if self.done[entry] <= self.M:
                self.entries.append(entry)

    def order(self) -> Order:
        return Order(*np.array(self.entries, np.int8).T)


def _bounds(P: int, M: int) -> list[int]:
    """Returns the bounds of groups of P microbatches, as for `forward_sequence`. The remainder M % P joins the first group."""
    # A group smaller than P would deadlock the ring, and a later group larger than the first would have dgrads before their
    # forwards.
    return [0, *range(min(M, P + M % P), M, P), M]


def _aligned(P: int, M: int, C: int) -> Schedule:
    """Aligned rounds: all ranks run the same kind of action in a tick, so an SPMD program needs no branch."""
    # A round is a tick of forwards, a tick of dgrads and a tick of wgrads. A tick is omitted if no rank has such an action.
    # Rank r runs its k-th forward in round k + r, and its k-th dgrad in round start + k + P - 1 - r.
    #
    # In P - 1 of the ticks after its first dgrad, a rank has no forward or dgrad while other ranks still do. It runs a pending
    # wgrad instead; only these ticks are mixed. With M >= 2P - 1 there are M * C + P - 1 ticks of forwards, as many of dgrads
    # and M * C - (P - 1) of wgrads, in total 3 * M * C + P - 1. With fewer microbatches some of these ticks come before any
    # wgrad is pending and stay idle.
    #
    # Fewer microbatches than ranks are padded to P, because a group must not be shorter than the ring. The padding stays idle.
    chunk, microbatch = forward_sequence(_bounds(P, max(M, P) if C > 1 else M), C)
    back_chunk = C - 1 - chunk
    n = len(chunk)
    rank = np.arange(P)
    start = int(np.flatnonzero(chunk == C - 1)[0]) + P - 1
    rounds = np.arange(start + n + P - 1)[:, None]

    def actions(index: np.ndarray) -> np.ndarray:
        """Replaces indices outside the sequence, and those of padding, by n; shape [rounds, P]."""
        index = np.where((index >= 0) & (index < n), index, n)
        return np.where(np.append(microbatch < M, False)[index], index, n)

    forward, dgrad = actions(rounds - rank), actions(rounds - start - (P - 1 - rank))
    has_forward, has_dgrad = rounds[:, 0] < n + P - 1, rounds[:, 0] >= start

    idle_forward, idle_dgrad = (forward == n) & has_forward[:, None], (dgrad == n) & has_dgrad[:, None]
    fill_forward, fill_dgrad, least, end_of_round = _filled(idle_forward, idle_dgrad, dgrad < n)

    # Place each tick of wgrads as early as possible, while all ranks have one pending and enough remain for later idle
    # positions.
    later = np.minimum.accumulate(np.append(least[1:], end_of_round[-1])[::-1])[::-1]
    rows = []
    wgrads = np.full(P, WGRAD)
    placed = 0
    total = M * C
    for t in range(len(rounds)):
        if has_forward[t]:
            rows.append(np.where(forward[t] < n, FORWARD, np.where(fill_forward[t], WGRAD, IDLE)))
        if has_dgrad[t]:
            rows.append(np.where(dgrad[t] < n, DGRAD, np.where(fill_dgrad[t], WGRAD, IDLE)))
        if placed < min(end_of_round[t], later[t]):
            rows.append(wgrads)
            placed += 1
    trailing = int(max(total - fill_forward.sum(0) - fill_dgrad.sum(0))) - placed
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


def _filled(idle_forward: np.ndarray, idle_dgrad: np.ndarray, runs_dgrad: np.ndarray) -> tuple[np.ndarray, ...]:
    """Fills idle positions [rounds, P] of ticks of forwards and of dgrads with pending wgrads.

    Also returns the fewest pending wgrads of a rank after the fills of each round, and at its end.
    """
    # No tick of wgrads is placed yet, so `pending` is an upper bound.
    pending = np.zeros(idle_forward.shape[1], np.int64)
    fill_forward, fill_dgrad = np.zeros_like(idle_forward), np.zeros_like(idle_dgrad)
    least, end_of_round = (np.zeros(len(idle_forward), np.int64) for _ in range(2))
    for t in range(len(idle_forward)):
        fill_forward[t] = idle_forward[t] & (pending > 0)
        fill_dgrad[t] = idle_dgrad[t] & (pending > fill_forward[t])
        pending = pending - fill_forward[t] - fill_dgrad[t]
        least[t] = pending.min()
        pending = pending + runs_dgrad[t]
        end_of_round[t] = pending.min()
    return fill_forward, fill_dgrad, least, end_of_round


# By name: the generator, and the supported numbers of chunks; None for any. The schedules on a V always have 2.
_GENERATORS: dict[str, tuple[Callable[[int, int, int], Schedule], tuple[int, ...] | None]] = {
    "gpipe": (lambda P, M, C: _alternating("gpipe", P, C, np.repeat(np.arange(C), M), [M * C] * P), None),
    "1f1b": (lambda P, M, C: _alternating("1f1b", P, C, np.zeros(M, np.int32), range(P)[::-1]), (1,)),
    "interleaved-1f1b": (_interleaved, None),
    "zb-h1": (_zero_bubble("zb-h1", lambda P, r: P - r, lambda P: P), (1,)),
    "zb-h2": (_zero_bubble("zb-h2", lambda P, r: 2 * (P - r) - 1, lambda P: 2 * P - 1), (1,)),
    "zb-v": (_zb_v, (1, 2)),
    "dualpipe-v": (_dualpipe_v, (1, 2)),
    "aligned": (_aligned, None),
}
NAMES = tuple(_GENERATORS)
