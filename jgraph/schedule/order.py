"""The order of one rank: the sequence of its actions in a step. An `Order` is validated when it is constructed.

Microbatches are implicit: the k-th forward, k-th dgrad and k-th wgrad of a chunk belong to microbatch k (first in, first out).
With `wgrads="newest"`, a wgrad belongs to the newest pending dgrad of its chunk instead (last in, first out).
"""

import math
import numbers
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self, SupportsInt, TypeGuard, TypeVar, get_args, overload

import numpy as np

from jgraph.errors import OrderError, check_choice
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, KINDS, WGRAD, Action, show

Wgrads = Literal["oldest", "newest"]
_T = TypeVar("_T", bound=int)


@dataclass(frozen=True, eq=False)
class Order(Sequence[Action]):
    """A validated, immutable sequence of the N actions of one rank. `Order.parse` constructs one from signed numbers.

    A sequence of `Action`. Two orders are equal if they have the same kinds, chunks, numbers of layers and microbatches.

    Attributes:
        kinds: Kind of each action, int8 [N]: 0 forward, 1 dgrad, 2 wgrad, 3 full backward. The constructor copies the array and
            makes the copy read-only.
        chunks: Chunk of each action, int32 [N], 0-based, copied like `kinds`. Every chunk of the rank appears.
        num_layers_per_chunk: Number of layers of each chunk; () for one layer each. Must be 1 for a chunk with separate wgrads,
            because a wgrad names only the chunk and not one of its layers.
        wgrads: The rule that assigns a microbatch to a wgrad. A dgrad is pending until its wgrad runs. With `oldest`, the rule
            of Transformer Engine, a wgrad belongs to the oldest pending dgrad of its chunk; with `newest`, to the newest one.
        microbatches: Microbatch of each action, int32 [N], 0-based. Computed from the other fields.

    Raises:
        OrderError: If the arrays have other dtypes, shapes or ranges, an action comes before an action that it depends on, an
            action is missing, or chunks have different numbers of microbatches. The attribute `position` of the error is the
            index of the first invalid entry.
        ConfigError: If `wgrads` is unknown.
    """

    kinds: np.ndarray
    chunks: np.ndarray
    num_layers_per_chunk: tuple[int, ...] = ()
    wgrads: Wgrads = "oldest"
    microbatches: np.ndarray = field(init=False)

    def __post_init__(self):
        """Validates the entries, computes the microbatches and makes the arrays read-only."""
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
        """Parses Transformer Engine's signed numbers.

        Args:
            numbers: Entries of the order. For the 1-based chunk c, `c` is its forward, `-c` its dgrad and `-c-0.5` its wgrad.
                If a chunk has no wgrad entries, `-c` is its full backward. Forwards and dgrads must be integers, not floats.
                Entries do not contain microbatches: actions of the same kind and chunk get microbatches 0, 1, 2 and so on.
            num_layers_per_chunk: Number of layers, one integer >= 1 for all chunks or one per chunk. None for one layer each.
            delay_wgrad: True if wgrads are separate entries, one bool for all chunks or one per chunk. It changes nothing in
                the order, and is only compared with the entries. None omits this check.

        Returns:
            The order, with `wgrads` set to `oldest`.

        Raises:
            OrderError: If an entry is not such a number, the order cannot run, the entries contradict `delay_wgrad`, or an
                argument has another type or number of values. The attribute `position` of the error is the index of the first
                invalid entry.

        Examples:
            >>> jgraph.Order.parse([1, 1, -1, -1.5, -1, -1.5])
            Order([1, 1, -1, -1.5, -1, -1.5]: 6 actions, 1 chunk)
        """
        if (entries := _items(numbers)) is None:
            raise OrderError(f"an order must be a sequence of signed numbers, e.g. [1, -1]; got {show(numbers)}")
        parsed = [_parse_entry(i, entry, len(entries)) for i, entry in enumerate(entries)]
        kinds, chunks = np.array(parsed, np.int32).reshape(-1, 2).T
        full = (kinds == DGRAD) & ~np.isin(chunks, chunks[kinds == WGRAD])
        order = cls(np.where(full, BACKWARD, kinds), chunks, () if num_layers_per_chunk is None else num_layers_per_chunk)  # pyright: ignore[reportArgumentType]
        if delay_wgrad is not None:
            order.check_delayed(one_each("delay_wgrad", delay_wgrad, order.num_chunks, bool))
        return order

    def __len__(self) -> int:
        """Returns the number of actions."""
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> list[Action]: ...

    def __getitem__(self, index: int | slice) -> Action | list[Action]:
        """Returns the `Action` at an integer index, or a list of actions for a slice."""
        return self._actions[index]

    @cached_property
    def _actions(self) -> list[Action]:
        columns = (self.kinds.tolist(), self.chunks.tolist(), self.microbatches.tolist())
        return [Action(KINDS[kind], chunk, microbatch) for kind, chunk, microbatch in zip(*columns, strict=True)]

    def __repr__(self) -> str:
        """Returns the first 12 signed numbers and the numbers of actions and chunks."""
        numbers = [f"{number:g}" for number in self.to_list()[:12]]
        shown = ", ".join([*numbers, "..."] if len(self) > 12 else numbers)
        return f"Order([{shown}]: {len(self)} actions, {self.num_chunks} chunk{'s' if self.num_chunks > 1 else ''})"

    def _key(self) -> tuple[bytes | tuple[int, ...], ...]:
        return self.kinds.tobytes(), self.chunks.tobytes(), self.num_layers_per_chunk, self.microbatches.tobytes()

    def __eq__(self, other: object) -> bool:
        """Returns True for an `Order` with the same kinds, chunks, layers and microbatches. `wgrads` is not compared."""
        return isinstance(other, Order) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hashes kinds, chunks, layers and microbatches."""
        return hash(self._key())

    @property
    def num_chunks(self) -> int:
        """Number of chunks (stages) of the rank."""
        return len(self.num_layers_per_chunk)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return int(self.microbatches.max()) + 1

    @property
    def delay_wgrad(self) -> tuple[bool, ...]:
        """A tuple with one bool per chunk: True if any wgrad of the chunk is a separate action."""
        return tuple(bool((self.kinds[self.chunks == c] == WGRAD).any()) for c in range(self.num_chunks))

    def check_delayed(self, wanted: Sequence[bool]) -> None:
        """Checks that exactly the wanted chunks have separate wgrad actions. Returns nothing.

        Args:
            wanted: One bool per chunk: True if the chunk must have separate wgrads, False if it must have none.

        Raises:
            OrderError: If a chunk has wgrads although its bool is False, or only full backwards although its bool is True. The
                attribute `position` of the error is the index of the first such wgrad or full backward.
        """
        expected, has = np.array(wanted)[self.chunks], np.array(self.delay_wgrad)[self.chunks]
        wrong = np.flatnonzero(np.where(self.kinds == WGRAD, ~expected, (self.kinds == BACKWARD) & expected & ~has))
        if len(wrong):
            position = int(wrong[0])
            c = int(self.chunks[position]) + 1
            problem = f"{-c}, but chunk {c} has no wgrad although delay_wgrad is True"
            remedy = f"add one {-c - 0.5:g} for each {-c}, or pass delay_wgrad=False"
            if self.kinds[position] == WGRAD:
                problem = f"{-c - 0.5:g}, a wgrad of chunk {c}, although delay_wgrad is False"
                remedy = "remove it, or pass delay_wgrad=True"
            raise OrderError.at(position, f"{problem}; {remedy}")

    def split(self, which: np.ndarray | None = None) -> "Order":
        """Splits full backwards into a dgrad, directly followed by a wgrad.

        Args:
            which: bool array with one entry per chunk: True to split the full backwards of the chunk. None splits all.

        Returns:
            A new order with one more action per split backward.
        """
        full = self.kinds == BACKWARD
        if which is not None:
            full &= which[self.chunks]
        kinds = np.repeat(np.where(full, DGRAD, self.kinds), 1 + full)
        kinds[np.flatnonzero(full) + np.arange(1, full.sum() + 1)] = WGRAD
        return Order(kinds, np.repeat(self.chunks, 1 + full), self.num_layers_per_chunk, self.wgrads)

    def to_list(self) -> list[int | float]:
        """Returns the signed numbers of the order, which `parse` reads.

        In a chunk that also has separate wgrads, a full backward becomes a dgrad and a wgrad, because signed numbers cannot mix
        both in a chunk. The numbers contain neither `num_layers_per_chunk` nor `wgrads`.

        Returns:
            A list of ints and floats. For the 1-based chunk c, the int c is its forward, the int -c its dgrad or full backward,
            and the float -c-0.5 its wgrad.
        """
        order = self.split(np.array(self.delay_wgrad))
        chunks = (order.chunks + 1).tolist()
        return [
            chunk if kind == FORWARD else -chunk - 0.5 if kind == WGRAD else -chunk
            for kind, chunk in zip(order.kinds.tolist(), chunks, strict=True)
        ]


def _is_integer(value: object) -> TypeGuard[SupportsInt]:
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _parse_entry(position: int, entry: object, length: int) -> tuple[int, int]:
    """Returns the kind and the 0-based chunk of a signed number in an order of `length` entries."""
    if _is_integer(entry):
        value = int(entry)
        if value != 0 and abs(value) <= length:
            return (FORWARD if value > 0 else DGRAD), abs(value) - 1
        shown = "0" if value == 0 else f"{show(value)}, but {length} entries cannot hold that many chunks"
        remedy = "chunks must be numbered from 1 without gaps"
    elif isinstance(entry, (float, np.floating)):
        value = float(entry)
        if -length - 1 < value < -1 and (-value) % 1 == 0.5:
            return WGRAD, int(-value) - 1
        shown, remedy = show(value), "only a wgrad has a fraction, written -c-0.5, e.g. -1.5 for chunk 1"
        if value != 0 and math.isfinite(value) and value == int(value):
            remedy = f"forwards and dgrads are integers: write {show(int(value))}"
    else:
        shown, remedy = show(entry), "must be a number: c forward, -c dgrad, -c-0.5 wgrad of chunk c"
    raise OrderError.at(position, f"{shown}; {remedy}")


def _items(value: object) -> list[Any] | None:
    """Returns the items of an ordered iterable; None for other objects, text, mappings, sets and 0-dimensional arrays."""
    unordered = isinstance(value, (str, bytes, Mapping, Set)) or (isinstance(value, np.ndarray) and not value.ndim)
    return None if unordered or not isinstance(value, Iterable) else list(value)


def one_each(name: str, value: object, count: int, kind: type[_T], *, of: str = "chunk") -> tuple[_T, ...]:
    """Broadcasts an argument to `count` values, one per chunk or per `of`, a singular noun for the message."""
    items = _items(value)
    values: list[Any] = [value] * count if items is None else items
    one = "bool" if issubclass(kind, bool) else "int >= 1"
    for item in values:
        if not (isinstance(item, (bool, np.bool_)) if one == "bool" else _is_integer(item) and 1 <= int(item) < 2**31):
            raise OrderError(f"`{name}` is {show(value)}: must be one {one}, or one per {of}", field=name)
    if len(values) != count:
        raise OrderError(f"`{name}` has {len(values)} values, but there are {count} {of}s: give one per {of}", field=name)
    return tuple(kind(item) for item in values)


def _check_arrays(kinds: np.ndarray, chunks: np.ndarray) -> None:
    """Raises OrderError if the arrays are not integers of shape [N], N > 0, or a kind or chunk is out of range."""
    if not kinds.size:
        raise OrderError("the order is empty; add at least one forward and one backward, e.g. [1, -1]")
    integers = np.issubdtype(kinds.dtype, np.integer) and np.issubdtype(chunks.dtype, np.integer)
    if not integers or kinds.ndim != 1 or kinds.shape != chunks.shape:
        shown = f"`kinds` is {kinds.dtype}{list(kinds.shape)} and `chunks` is {chunks.dtype}{list(chunks.shape)}"
        raise OrderError(f"{shown}: both must be integer arrays of shape [N]")
    wrong = np.flatnonzero((kinds < FORWARD) | (kinds > BACKWARD) | (chunks < 0) | (chunks >= len(chunks)))
    if len(wrong):
        position = int(wrong[0])
        allowed = f"kinds must be {FORWARD} to {BACKWARD}, and chunks numbered from 0 without gaps"
        raise OrderError.at(position, f"of kind {kinds[position]} and chunk {chunks[position]}; {allowed}")
    seen = np.bincount(chunks) > 0
    if not seen.all():
        missing = int(np.argmin(seen))
        position = int(np.argmax(chunks > missing))
        problem = f"of chunk {chunks[position] + 1}, but chunk {missing + 1} has no entry"
        raise OrderError.at(position, f"{problem}; number the chunks from 1 without gaps")


def _check(kinds: np.ndarray, chunks: np.ndarray, layers: tuple[int, ...], wgrads: Wgrads) -> np.ndarray:
    """Checks that the order can run, and returns the microbatch of each action, int32 [N]."""
    microbatches: list[int] = []
    # Per chunk: the number of forwards and dgrads so far, and the microbatches with a pending wgrad.
    forwards, dgrads = [0] * len(layers), [0] * len(layers)
    pending: list[deque[int]] = [deque() for _ in layers]
    # A full backward counts as a dgrad.
    parts = np.where(kinds == BACKWARD, DGRAD, kinds)
    totals = {part: np.bincount(chunks[parts == part], minlength=len(layers)).tolist() for part in (FORWARD, DGRAD)}

    def position_of(part: int, c: int, m: int) -> int:
        return int(np.flatnonzero((parts == part) & (chunks == c))[m])

    def error_at(position: int, m: int, problem: str) -> OrderError:
        action = f"the {KINDS[parts[position]]} of chunk {chunks[position] + 1}, microbatch {m}"
        return OrderError.at(position, f"{action}, {problem}")

    def remedy(part: int, c: int, m: int) -> str:
        """Suggests a move after the required action, or gives the number of such actions if it is missing."""
        total = totals[part][c]
        return f"move it after entry {position_of(part, c, m)}" if m < total else f"the order has only {total} of them"

    cross_chunk_error = None  # errors within a chunk take precedence
    for position, (kind, c) in enumerate(zip(kinds.tolist(), chunks.tolist(), strict=True)):
        if kind == WGRAD:
            if not pending[c]:
                raise error_at(position, dgrads[c], f"which comes before its dgrad; {remedy(DGRAD, c, dgrads[c])}")
            m = pending[c].popleft() if wgrads == "oldest" else pending[c].pop()
            if layers[c] > 1:
                problem = f"which has {layers[c]} layers; to delay its wgrad, make every layer a separate chunk"
                raise error_at(position, m, problem)
        else:
            # Forwards pass the chunks upwards and dgrads downwards; each depends on the same kind of the chunk before.
            needed, done, neighbour = (FORWARD, forwards, c - 1) if kind == FORWARD else (DGRAD, dgrads, c + 1)
            m = done[c]
            if kind != FORWARD and m >= forwards[c]:
                raise error_at(position, m, f"which comes before its forward; {remedy(FORWARD, c, m)}")
            if 0 <= neighbour < len(layers) and done[neighbour] <= m < totals[needed][neighbour]:
                problem = f"which needs the {KINDS[needed]} of chunk {neighbour + 1}, a later entry"
                error = error_at(position, m, f"{problem}; {remedy(needed, neighbour, m)}")
                cross_chunk_error = cross_chunk_error or error
            if kind == BACKWARD and pending[c] and wgrads == "oldest":
                problem = f"and includes its wgrad while the wgrad of microbatch {pending[c][0]} is pending"
                raise error_at(position, m, f"{problem}; wgrads go first in, first out: split it")
            done[c] += 1
            if kind == DGRAD:
                pending[c].append(m)
        microbatches.append(m)
    missing = [(position_of(FORWARD, c, m), m, "dgrad", -c - 1) for c, m in enumerate(dgrads) if m < forwards[c]]
    missing += [(position_of(DGRAD, c, left[0]), left[0], "wgrad", -c - 1.5) for c, left in enumerate(pending) if left]
    if missing:
        position, m, name, entry = min(missing)
        raise error_at(position, m, f"but its {name} is missing; add {entry:g}")
    if (fewest := min(forwards)) < max(forwards):
        problem = f"but chunk {forwards.index(fewest) + 1} has only {fewest} microbatches; all chunks must have the same number"
        raise error_at(position_of(FORWARD, forwards.index(max(forwards)), fewest), fewest, problem)
    if cross_chunk_error:
        raise cross_chunk_error
    return np.array(microbatches, np.int32)
