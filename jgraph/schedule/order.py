"""An Order: everything one rank does in a step, in sequence. Made only if it can run.

The microbatch of an entry is not said but counted: the k-th forward of a chunk is microbatch k, and so are its k-th dgrad and,
first in, first out, its k-th wgrad. An order may say instead that a wgrad is that of the newest dgrad that still waits.
"""

import math
import numbers
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
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
        layers = one_each("num_layers_per_chunk", 1 if isinstance(given, tuple) and not given else given, num_chunks, int)
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
        unordered = isinstance(numbers, (str, bytes, Mapping, Set)) or (isinstance(numbers, np.ndarray) and not numbers.ndim)
        if unordered or not isinstance(numbers, Iterable):
            raise OrderError(f"an order is a sequence of signed numbers such as [1, -1]; got {_show(numbers)}")
        entries = list(numbers)
        parsed = [_parse_entry(i, entry, len(entries)) for i, entry in enumerate(entries)]
        kinds, chunks = np.array(parsed, np.int32).reshape(-1, 2).T
        # `-c` is the dgrad alone where chunk c has wgrads, and else the whole backward.
        whole = (kinds == DGRAD) & ~np.isin(chunks, chunks[kinds == WGRAD])
        order = cls(np.where(whole, BACKWARD, kinds), chunks, () if num_layers_per_chunk is None else num_layers_per_chunk)  # pyright: ignore[reportArgumentType]
        if delay_wgrad is not None:
            order.check_delayed(one_each("delay_wgrad", delay_wgrad, order.num_chunks, bool))
        return order

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

    def check_delayed(self, wanted: Sequence[bool]) -> None:
        """Raises OrderError unless wgrads are actions of their own in the chunks of which this says so, and in no others."""
        said, has = np.array(wanted)[self.chunks], np.array(self.delay_wgrad)[self.chunks]
        wrong = np.flatnonzero(np.where(self.kinds == WGRAD, ~said, (self.kinds == BACKWARD) & said & ~has))
        if len(wrong):
            position = int(wrong[0])
            c = int(self.chunks[position]) + 1
            problem = f"{-c}, but no wgrad of chunk {c} comes, and delay_wgrad says that they are delayed"
            remedy = f"add one {-c - 0.5:g} for each {-c}, or pass delay_wgrad=False"
            if self.kinds[position] == WGRAD:
                problem = f"{-c - 0.5:g}, a wgrad of chunk {c}, but delay_wgrad says that they are not delayed"
                remedy = "remove it, or pass delay_wgrad=True"
            raise OrderError.at(position, f"{problem}; {remedy}")

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


def one_each(name: str, value: Any, count: int, kind: type, *, of: str = "chunk") -> tuple:
    """Returns a bool, or an int >= 1, for each chunk, from one for all or one per chunk. Raises OrderError."""
    values: list[Any] = [value] * count
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)):
        values = [value.item()] * count if isinstance(value, np.ndarray) and not value.ndim else list(value)
    for item in values:
        if not (isinstance(item, (bool, np.bool_)) if kind is bool else _is_whole(item) and 1 <= int(item) < 2**31):
            one = f"{kind.__name__}{' >= 1' * (kind is int)}"
            raise OrderError(f"`{name}` is {_show(value)}: must be one {one}, or one per {of}", field=name)
    if len(values) != count:
        wrong = f"`{name}` has {len(values)} values, but there are {count} {of}s: give one per {of}"
        raise OrderError(wrong, field=name)
    return tuple(kind(item) for item in values)


def _check_arrays(kinds: np.ndarray, chunks: np.ndarray) -> None:
    """Raises OrderError unless these are two equally long rows of whole numbers that say actions."""
    if not kinds.size:
        raise OrderError("the order is empty; it needs at least one forward and one backward, e.g. [1, -1]")
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


def _check(kinds: np.ndarray, chunks: np.ndarray, layers: tuple[int, ...], wgrads: Wgrads) -> np.ndarray:
    """Raises OrderError if the order cannot run; returns the microbatches."""
    _check_chunks(chunks)
    assert len(layers) == chunks.max() + 1
    microbatches: list[int] = []
    # By chunk: how many there were so far, and the microbatches whose wgrad is to come.
    forwards, dgrads = [0] * len(layers), [0] * len(layers)
    waiting: list[deque[int]] = [deque() for _ in layers]
    dgrad_kinds = (DGRAD, BACKWARD)
    where = {FORWARD: kinds == FORWARD, DGRAD: (kinds == DGRAD) | (kinds == BACKWARD)}
    totals = {kind: np.bincount(chunks[mask], minlength=len(layers)).tolist() for kind, mask in where.items()}

    def place(kind: int, c: int, m: int) -> int:
        return int(np.flatnonzero(where[kind] & (chunks == c))[m])

    def fault(position: int, m: int, problem: str) -> OrderError:
        name = "dgrad" if kinds[position] in dgrad_kinds else KINDS[kinds[position]]
        return OrderError.at(position, f"the {name} of chunk {chunks[position] + 1}, microbatch {m}, {problem}")

    def later(kind: int, c: int, m: int) -> str:
        """Returns where the action that must come first is, if it comes at all."""
        total = totals[kind][c]
        return f"move it after entry {place(kind, c, m)}" if m < total else f"only {total} come in all"

    crossed = None  # what is wrong within a chunk is told before what is wrong between two
    for position, (kind, c) in enumerate(zip(kinds.tolist(), chunks.tolist(), strict=True)):
        if kind == WGRAD:
            if not waiting[c]:
                raise fault(position, dgrads[c], f"before its dgrad; {later(DGRAD, c, dgrads[c])}")
            m = waiting[c].popleft() if wgrads == "oldest" else waiting[c].pop()
            if layers[c] > 1:
                problem = f"which has {layers[c]} layers; where wgrad is delayed, make every layer a chunk of its own"
                raise fault(position, m, problem)
        else:
            # Forwards go up the chunks and dgrads come down: one works on the result of the other.
            of, done, neighbour = (FORWARD, forwards, c - 1) if kind == FORWARD else (DGRAD, dgrads, c + 1)
            m = done[c]
            if kind != FORWARD and m >= forwards[c]:
                raise fault(position, m, f"before its forward; {later(FORWARD, c, m)}")
            if 0 <= neighbour < len(layers) and done[neighbour] <= m < totals[of][neighbour]:
                problem = f"before that of chunk {neighbour + 1}, which it needs; {later(of, neighbour, m)}"
                crossed = crossed or fault(position, m, problem)
            if kind == BACKWARD and waiting[c] and wgrads == "oldest":
                pending = f"while the wgrad of microbatch {waiting[c][0]} is pending"
                raise fault(position, m, f"with its wgrad, {pending}; wgrads go first in, first out: split it")
            done[c] += 1
            if kind == DGRAD:
                waiting[c].append(m)
        microbatches.append(m)
    missing = [(place(FORWARD, c, m), m, "dgrad", -c - 1) for c, m in enumerate(dgrads) if m < forwards[c]]
    missing += [(place(DGRAD, c, left[0]), left[0], "wgrad", -c - 1.5) for c, left in enumerate(waiting) if left]
    if missing:
        position, m, name, entry = min(missing)
        raise fault(position, m, f"and its {name} never comes; add {entry:g} for it")
    if (fewest := min(forwards)) < max(forwards):
        few = f"chunk {forwards.index(fewest) + 1} has only {fewest} microbatches; every chunk sees the same ones"
        raise fault(place(FORWARD, forwards.index(max(forwards)), fewest), fewest, f"but {few}")
    if crossed:
        raise crossed
    return np.array(microbatches, np.int32)
