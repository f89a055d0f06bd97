"""An Order: everything one rank does in a step, in sequence. Made only if it can run.

The microbatch of an entry is not said but counted: the k-th forward of a chunk is microbatch k, and so are its k-th dgrad and,
first in, first out, its k-th wgrad. An order may say instead that a wgrad is that of the newest dgrad that still waits.
"""

import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Self, get_args, overload

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, KINDS, WGRAD, Action

Wgrads = Literal["oldest", "newest"]


@dataclass(frozen=True, eq=False)
class Order(Sequence[Action]):
    """A checked sequence of the actions of one rank. `Order.parse` makes one of signed numbers.

    Attributes:
        kinds: int8 [N], places in `KINDS`.
        chunks: int32 [N], 0-based; every chunk of the rank appears.
        num_layers_per_chunk: of each chunk; () says one each. Exactly one where a chunk's wgrad is delayed: an entry says the
            chunk, so it could not say which layer's wgrad it means.
        wgrads: which of the dgrads that wait a wgrad belongs to: the `oldest`, as everywhere else, or the `newest`, whose
            arrays a program has at hand.
        microbatches: int32 [N], counted from the entries.

    Raises:
        OrderError: the order cannot run; `position` is the first entry at fault.
    """

    kinds: np.ndarray
    chunks: np.ndarray
    num_layers_per_chunk: tuple[int, ...] = ()
    wgrads: Wgrads = "oldest"
    microbatches: np.ndarray = field(init=False)

    def __post_init__(self):
        kinds, chunks = np.asarray(self.kinds), np.asarray(self.chunks)
        _check_arrays(kinds, chunks)
        kinds, chunks = np.array(kinds, np.int8), np.array(chunks, np.int32)
        num_chunks = int(chunks.max()) + 1
        given = self.num_layers_per_chunk
        layers = _per_chunk("num_layers_per_chunk", 1 if np.size(given) == 0 else given, num_chunks, int) or ()
        check_choice("wgrads", self.wgrads, get_args(Wgrads))
        microbatches = _check(kinds, chunks, layers, self.wgrads)
        for name, array in (("kinds", kinds), ("chunks", chunks), ("microbatches", microbatches)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "num_layers_per_chunk", layers)

    @classmethod
    def parse(
        cls,
        numbers: Iterable[object],
        num_layers_per_chunk: int | Sequence[int] | None = None,
        delay_wgrad: bool | Sequence[bool] | None = None,
    ) -> Self:
        """Returns the order of Transformer Engine's signed numbers.

        >>> jgraph.Order.parse([1, 1, -1, -1.5, -1, -1.5])
        Order([1, 1, -1, -1.5, -1, -1.5]: 6 actions, 1 chunk)

        Args:
            numbers: `c` forward, `-c` dgrad, `-c-0.5` wgrad of chunk c, counted from 1. Without wgrads, `-c` is the whole
                backward of chunk c. Whole entries are integers.
            num_layers_per_chunk: one number for all chunks or one per chunk; None for one layer each.
            delay_wgrad: whether wgrads are entries of their own, for all chunks or per chunk; None reads it off the entries.

        Raises:
            OrderError: with `position`, the index of the first entry at fault.
        """
        entries = _entries(numbers)
        parsed = [_parse_entry(i, entry, len(entries)) for i, entry in enumerate(entries)]
        kinds = np.array([kind for kind, _ in parsed], np.int8)
        chunks = np.array([chunk for _, chunk in parsed], np.int32)
        _check_chunks(chunks)
        num_chunks = int(chunks.max()) + 1
        kinds = _read_backwards(kinds, chunks, _per_chunk("delay_wgrad", delay_wgrad, num_chunks, bool))
        layers = _per_chunk("num_layers_per_chunk", num_layers_per_chunk, num_chunks, int)
        return cls(kinds, chunks, layers or ())

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Self:
        """Returns the order of these actions, whose microbatches must be counted as one of the choices of `wgrads` does."""
        actions = list(actions) if isinstance(actions, Iterable) else [actions]
        for i, action in enumerate(actions):
            if not isinstance(action, Action) or action.kind not in KINDS:
                raise OrderError.at(i, f"{_show(action)}; an order is made of Actions, each one of {', '.join(KINDS)}")
            # Looked at before the array is made, whose cast would make a chunk of anything.
            if not _is_whole(action.chunk) or not 0 <= int(action.chunk) < len(actions):
                raise OrderError.at(i, f"of chunk {_show(action.chunk)}; chunks are whole numbers from 0, without gaps")
        kinds, chunks = (
            np.array([KINDS.index(a.kind) for a in actions], np.int8),
            np.array([a.chunk for a in actions], np.int32),
        )
        order, said = cls(kinds, chunks), [action.microbatch for action in actions]
        if said != order.microbatches.tolist():
            newest = cls(kinds, chunks, wgrads="newest")
            order = newest if said == newest.microbatches.tolist() else order
        for i, (action, counted) in enumerate(zip(actions, order.microbatches.tolist(), strict=True)):
            if action.microbatch != counted:
                remedy = f"microbatches go first in, first out, so this must be microbatch {counted}"
                raise OrderError.at(i, f"the {action}; {remedy}")
        return order

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> list[Action]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Action(KINDS[self.kinds[index]], int(self.chunks[index]), int(self.microbatches[index]))

    def __iter__(self) -> Iterator[Action]:
        columns = (self.kinds.tolist(), self.chunks.tolist(), self.microbatches.tolist())
        return (Action(KINDS[kind], chunk, microbatch) for kind, chunk, microbatch in zip(*columns, strict=True))

    def __repr__(self) -> str:
        numbers = ", ".join(f"{number:g}" for number in self.to_list()[:12]) + ", ..." * (len(self) > 12)
        return f"Order([{numbers}]: {len(self)} actions, {self.num_chunks} chunk{'s' * (self.num_chunks > 1)})"

    def _key(self) -> tuple[Any, ...]:
        return self.kinds.tobytes(), self.chunks.tobytes(), self.num_layers_per_chunk, self.microbatches.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    @property
    def num_chunks(self) -> int:
        return len(self.num_layers_per_chunk)

    @property
    def num_microbatches(self) -> int:
        return int(self.microbatches.max()) + 1

    @property
    def delay_wgrad(self) -> tuple[bool, ...]:
        """Whether any wgrad of a chunk is an action of its own, for each chunk."""
        return tuple(bool((self.kinds[self.chunks == c] == WGRAD).any()) for c in range(self.num_chunks))

    def split(self) -> "Order":
        """Returns the same order with every backward as a dgrad and, at once after it, a wgrad."""
        return self._split(np.ones(self.num_chunks, bool))

    def to_list(self) -> list[int | float]:
        """Inverts `parse`. In a chunk where some wgrads are delayed, a whole backward becomes a dgrad and a wgrad."""
        order = self._split(np.array(self.delay_wgrad))
        chunks = (order.chunks + 1).tolist()
        return [
            chunk if kind == FORWARD else -chunk - 0.5 if kind == WGRAD else -chunk
            for kind, chunk in zip(order.kinds.tolist(), chunks, strict=True)
        ]

    def _split(self, which: np.ndarray) -> "Order":
        fused = (self.kinds == BACKWARD) & which[self.chunks]
        if not fused.any():
            return self
        kinds = np.repeat(np.where(fused, DGRAD, self.kinds), 1 + fused)
        kinds[np.flatnonzero(fused) + np.arange(1, fused.sum() + 1)] = WGRAD
        return Order(kinds, np.repeat(self.chunks, 1 + fused), self.num_layers_per_chunk, self.wgrads)


def _entries(numbers: Iterable[object]) -> list[object]:
    unordered = isinstance(numbers, (str, bytes, Mapping, Set))
    if unordered or not isinstance(numbers, Iterable) or (isinstance(numbers, np.ndarray) and not numbers.ndim):
        raise OrderError(f"an order is a sequence of signed numbers such as [1, -1]; got {_show(numbers)}")
    entries = list(numbers)
    if not entries:
        raise OrderError("the order is empty; it needs at least one forward and one backward, e.g. [1, -1]")
    return entries


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _parse_entry(position: int, entry: Any, length: int) -> tuple[int, int]:
    """Returns kind and 0-based chunk of a signed number."""
    if _is_whole(entry):
        value = int(entry)
        if value != 0 and abs(value) <= length:
            return (FORWARD if value > 0 else DGRAD), abs(value) - 1
        what = "0" if value == 0 else f"{_show(value)}, but {length} entries cannot hold that many chunks"
        remedy = "chunks count from 1, without gaps"
    elif isinstance(entry, (float, np.floating)):
        value = float(entry)
        if -length - 1 < value < -1 and (-value) % 1 == 0.5:
            return WGRAD, int(-value) - 1
        what = _show(value)
        if value != 0 and math.isfinite(value) and value == int(value):
            remedy = f"forwards and dgrads are integers: {_show(int(value))}"
        else:
            remedy = "only a wgrad has a fraction, and it is -c-0.5, e.g. -1.5 for chunk 1"
    else:
        what, remedy = _show(entry), "an entry is a number: c forward, -c dgrad, -c-0.5 wgrad of chunk c"
    raise OrderError.at(position, f"{what}; {remedy}")


def _show(value: object) -> str:
    """Returns a value for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a user's object may raise anything, and ours must be the error that is seen
        text = "something that cannot be printed"
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def _per_chunk(name: str, value: Any, num_chunks: int, kind: type) -> tuple | None:
    """Returns a value for each chunk, from one for all or one per chunk; None for None."""
    if value is None:
        return None
    values: list[Any] = [value] * num_chunks
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)):
        values = [value.item()] * num_chunks if isinstance(value, np.ndarray) and not value.ndim else list(value)
    for item in values:
        if not (isinstance(item, (bool, np.bool_)) if kind is bool else _is_whole(item) and 1 <= int(item) < 2**31):
            one = f"{kind.__name__}{' >= 1' * (kind is int)}"
            raise OrderError(f"`{name}` is {_show(value)}: must be one {one}, or one per chunk", field=name)
    if len(values) != num_chunks:
        wrong = f"`{name}` has {len(values)} values, but the order has {num_chunks} chunks: give one per chunk"
        raise OrderError(wrong, field=name)
    return tuple(kind(item) for item in values)


def _read_backwards(kinds: np.ndarray, chunks: np.ndarray, delayed: tuple[bool, ...] | None) -> np.ndarray:
    """Returns the kinds, where `-c` is the dgrad alone if chunk c's wgrads are delayed, and else the whole backward."""
    has_wgrad = np.bincount(chunks[kinds == WGRAD], minlength=chunks.max() + 1) > 0
    wanted = has_wgrad if delayed is None else np.array(delayed)
    wrong = np.flatnonzero(np.where(kinds == DGRAD, (wanted & ~has_wgrad)[chunks], (kinds == WGRAD) & ~wanted[chunks]))
    if len(wrong):
        position = int(wrong[0])
        c = int(chunks[position]) + 1
        if kinds[position] == DGRAD:
            problem = f"{-c}, but no wgrad of chunk {c} comes, and delay_wgrad says that they are delayed"
            remedy = f"add one {-c - 0.5:g} for each {-c}, or pass delay_wgrad=False"
        else:
            problem = f"{-c - 0.5:g}, a wgrad of chunk {c}, but delay_wgrad says that they are not delayed"
            remedy = "remove it, or pass delay_wgrad=True"
        raise OrderError.at(position, f"{problem}; {remedy}")
    return np.where((kinds == DGRAD) & ~wanted[chunks], BACKWARD, kinds)


def _check_arrays(kinds: np.ndarray, chunks: np.ndarray) -> None:
    """Raises OrderError unless these are two equally long rows of whole numbers that say actions."""
    if not kinds.size:
        raise OrderError("the order is empty; it needs at least one forward and one backward")
    whole = np.issubdtype(kinds.dtype, np.integer) and np.issubdtype(chunks.dtype, np.integer)
    if not whole or kinds.ndim != 1 or kinds.shape != chunks.shape:
        raise OrderError(
            f"kinds are {kinds.dtype}{list(kinds.shape)}, chunks {chunks.dtype}{list(chunks.shape)}; both must be one row of "
            f"whole numbers, one of each per entry"
        )
    wrong = np.flatnonzero((kinds < FORWARD) | (kinds > BACKWARD) | (chunks < 0) | (chunks >= len(chunks)))
    if len(wrong):
        position = int(wrong[0])
        allowed = f"kinds are {FORWARD} to {BACKWARD}, chunks count from 0, without gaps"
        raise OrderError.at(position, f"of kind {kinds[position]} and chunk {chunks[position]}; {allowed}")


def _check_chunks(chunks: np.ndarray) -> None:
    """Raises OrderError unless chunks count from 1 without gaps."""
    seen = np.bincount(chunks) > 0
    if not seen.all():
        missing = int(np.argmin(seen))
        position = int(np.flatnonzero(chunks > missing)[0])
        problem = f"of chunk {chunks[position] + 1}, but no entry is of chunk {missing + 1}"
        raise OrderError.at(position, f"{problem}; number the chunks from 1, without gaps")


def newest_waiting(kinds: np.ndarray) -> np.ndarray:
    """Returns, for every wgrad, the position of the newest dgrad that waits then; there must be one."""
    waiting, found = [], []
    for position, kind in enumerate(kinds.tolist()):
        if kind == DGRAD:
            waiting.append(position)
        elif kind == WGRAD:
            found.append(waiting.pop())
    return np.array(found, np.int64)


def _check(kinds: np.ndarray, chunks: np.ndarray, layers: tuple[int, ...], wgrads: Wgrads) -> np.ndarray:
    """Raises OrderError if the order cannot run; returns the microbatches. One pass per chunk, no Python loop over entries."""
    _check_chunks(chunks)
    assert len(layers) == chunks.max() + 1
    by_chunk = np.argsort(chunks, kind="stable")
    bounds = np.searchsorted(chunks[by_chunk], np.arange(len(layers) + 1))
    microbatches = np.empty(len(kinds), np.int32)
    positions = [by_chunk[start:stop] for start, stop in pairwise(bounds)]
    counts, faults = [], []
    for c, at in enumerate(positions):
        try:
            counts.append(_check_chunk(c, kinds[at], at, microbatches, layers[c], wgrads))
        except OrderError as error:
            faults.append(error)
    if faults:
        raise min(faults, key=lambda error: error.position or 0)
    if len(set(counts)) > 1:
        c = int(np.argmax(counts))
        fewest = min(counts)
        position = int(positions[c][np.flatnonzero(kinds[positions[c]] == FORWARD)[fewest]])
        few = f"chunk {counts.index(fewest) + 1} has only {fewest} microbatches; every chunk sees the same ones"
        raise OrderError.at(position, f"the forward of chunk {c + 1}, microbatch {fewest}, but {few}")
    _check_between_chunks(kinds, positions)
    return microbatches


def _check_chunk(c: int, kinds: np.ndarray, at: np.ndarray, microbatches: np.ndarray, layers: int, wgrads: Wgrads) -> int:
    """Checks one chunk by itself: forward before dgrad before wgrad, as many of each. Returns how many.

    `kinds` are those of the chunk's entries and `at` their positions. Fills in `microbatches`.
    """
    forward, dgrad, wgrad = (
        np.cumsum(mask) for mask in (kinds == FORWARD, (kinds == DGRAD) | (kinds == BACKWARD), kinds >= WGRAD)
    )
    k = np.choose(kinds, (forward, dgrad, wgrad, dgrad)) - 1
    microbatches[at] = k

    def fail(i: int, problem: str):
        name = KINDS[kinds[i]] if kinds[i] != BACKWARD else "dgrad"
        raise OrderError.at(int(at[i]), f"the {name} of chunk {c + 1}, microbatch {k[i]}, {problem}")

    def later(mask: np.ndarray, count: int) -> str:
        """Returns where the action that must come first is, if it comes at all."""
        found = np.flatnonzero(mask)
        return f"move it after entry {at[found[count]]}" if count < len(found) else f"only {len(found)} come in all"

    overtakes = (kinds == BACKWARD) & (wgrad != dgrad) & (wgrads == "oldest")
    bad = np.flatnonzero((dgrad > forward) | (wgrad > dgrad) | overtakes)
    if len(bad):
        i = int(bad[0])
        if dgrad[i] > forward[i]:
            fail(i, f"before its forward; {later(kinds == FORWARD, int(k[i]))}")
        if wgrad[i] > dgrad[i]:
            fail(i, f"before its dgrad; {later((kinds == DGRAD) | (kinds == BACKWARD), int(k[i]))}")
        pending = f"while the wgrad of microbatch {wgrad[i] - 1} is pending"
        fail(i, f"with its wgrad, {pending}; wgrads go first in, first out: split it")
    if wgrads == "newest":
        microbatches[at[kinds == WGRAD]] = k[newest_waiting(kinds)]
    total = int(forward[-1])
    if dgrad[-1] < total:
        fail(int(np.flatnonzero(kinds == FORWARD)[dgrad[-1]]), f"and its dgrad never comes; add {-(c + 1)} for it")
    if wgrad[-1] < total:
        i = int(np.flatnonzero((kinds == DGRAD) | (kinds == BACKWARD))[wgrad[-1]])
        fail(i, f"and its wgrad never comes; add {-(c + 1.5):g} for it")
    if layers > 1 and (kinds == WGRAD).any():
        i = int(np.argmax(kinds == WGRAD))
        fail(i, f"which has {layers} layers; where wgrad is delayed, make every layer a chunk of its own")
    return total


def _check_between_chunks(kinds: np.ndarray, positions: list[np.ndarray]) -> None:
    """Raises OrderError unless forwards go up the chunks and dgrads come down: one works on the result of the other."""
    forwards = [at[kinds[at] == FORWARD] for at in positions]
    dgrads = [at[(kinds[at] == DGRAD) | (kinds[at] == BACKWARD)] for at in positions]
    faults = []
    for c in range(1, len(positions)):
        for name, first, second, before, after in (
            ("forward", forwards[c - 1], forwards[c], c - 1, c),
            ("dgrad", dgrads[c], dgrads[c - 1], c, c - 1),
        ):
            m = int(np.argmax(second < first))
            if second[m] < first[m]:
                faults.append((int(second[m]), int(first[m]), name, after, before, m))
    if faults:
        position, other, name, after, before, m = min(faults)
        needed = f"before that of chunk {before + 1}, which it needs; move it after entry {other}"
        raise OrderError.at(position, f"the {name} of chunk {after + 1}, microbatch {m}, {needed}")
