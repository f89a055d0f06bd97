"""Reads which temporary buffers of a program are in use over its run, from XLA's buffer assignment."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jgraph.scopes import innermost
from jgraph.xla import _protobuf
from jgraph.xla.hlo import HloModule, Op, operations

_MOST = 8
_SAMPLES = 240
# Kinds of events in XLA's `HeapSimulatorTrace`. The first, 0, allocates a buffer.
_FREE, _SHARE = 1, 2
_HOST = 5  # the memory space of pinned host memory
_Change: TypeAlias = tuple[int, str, int]
"""A buffer, the instruction that defines it, and its bytes: negative if it is freed."""


@dataclass(frozen=True)
class Buffers:
    """Temporary buffers of one size and origin that are in use at once. `str` formats them in one line.

    Attributes:
        count: Number of buffers.
        nbytes: Size of each in bytes.
        shape: Dtype and shape of the array, as XLA writes them, e.g. `bf16[16,1024]`.
        op: The operation that computes the array, with its source line. For layers, that of one of them.
        scope: The part of the step that computes it: a category of `jgraph.profile`, such as forward, recompute, dgrad, loss or
            all-gather. Empty if it is not known.
    """

    count: int
    nbytes: int
    shape: str
    op: str
    scope: str = ""

    def __str__(self) -> str:
        parts = f"{self.count} x {show_bytes(self.nbytes)}", self.shape, self.scope and f"{self.scope}:", self.op
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Usage:
    """Temporary memory over the run of a program. Each sample is after an allocation, and one of them is at the peak.

    Attributes:
        allocations: The number of the allocation of each sample, ascending. Of many allocations, those with the largest sums.
        scopes: Bytes in use at each sample by `Buffers.scope`, `other` if it is not known.
    """

    allocations: tuple[int, ...]
    scopes: dict[str, tuple[int, ...]]

    @property
    def peak(self) -> int:
        """The largest sum in bytes."""
        return max(map(sum, zip(*self.scopes.values(), strict=True)), default=0)


def read(assignment: bytes, program: HloModule, known: Mapping[str, Op]) -> tuple[tuple[Buffers, ...], Usage | None]:
    """Returns the largest groups of temporary buffers at the peak, and the use of memory over the program.

    `assignment` is a serialized `BufferAssignmentProto`. `known` has operations that were looked up before, because a lookup
    searches the stack frames of the program.
    """
    message = _protobuf.fields(assignment)
    logical = {_protobuf.integer(one, 1) or 0: one for one in _protobuf.submessages(message, 1)}
    sizes = {number: _protobuf.integer(one, 2) or 0 for number, one in logical.items()}
    on_host = {number for number, one in logical.items() if _protobuf.integer(one, 4) == _HOST}
    heaps = [
        list(_changes((e for e in _protobuf.submessages(heap, 1) if _protobuf.integer(e, 2) not in on_host), sizes))
        for heap in _protobuf.submessages(message, 4)
    ]
    names: dict[int, str] = {}
    for heap in heaps:
        names |= _at_peak(heap)
    ops = {**known, **operations(program, set(names.values()) - known.keys())}
    groups: collections.Counter[tuple[int, str, str]] = collections.Counter()
    shown: dict[tuple[int, str, str], tuple[str, str]] = {}
    for number, name in names.items():
        shape = _shape(program, name, next(_protobuf.submessages(logical[number], 3), []))
        # Layers have the same source line. Without one, XLA's name differs by a number.
        key = sizes[number], shape, ops[name].source if name in ops and ops[name].source else name.partition(".")[0]
        groups[key] += 1
        shown.setdefault(key, (str(ops[name]), _scope(program, name)) if name in ops else (name, ""))
    found = [Buffers(count, key[0], key[1], *shown[key]) for key, count in groups.items()]
    # A program has one heap, or a large one.
    usage = max((_usage(heap, program) for heap in heaps), key=lambda usage: usage.peak, default=None)
    return tuple(sorted(found, key=lambda group: -group.count * group.nbytes)[:_MOST]), usage


def _usage(changes: Sequence[_Change], program: HloModule) -> Usage:
    scopes = {number: _scope(program, name) or "other" for number, name, nbytes in changes if nbytes > 0}
    totals = dict.fromkeys(scopes.values(), 0)
    samples: list[list[int]] = []
    for number, _, nbytes in changes:
        totals[scopes[number]] += nbytes
        if nbytes > 0:
            samples.append([*totals.values()])
    size = -(-len(samples) // _SAMPLES)
    rows = [range(i, min(i + size, len(samples))) for i in range(0, len(samples), max(size, 1))]
    chosen = [max(row, key=lambda i: sum(samples[i])) for row in rows]
    return Usage(tuple(chosen), {scope: tuple(samples[i][k] for i in chosen) for k, scope in enumerate(totals)})


def _at_peak(changes: Iterable[_Change]) -> dict[int, str]:
    """Returns the buffers of a heap in use when their sum is largest, with the instructions that define them."""
    live: dict[int, str] = {}
    peak: dict[int, str] = {}
    total = most = 0
    for number, name, nbytes in changes:
        total += nbytes
        if nbytes < 0:
            live.pop(number)
        else:
            live[number] = name
        if total > most:
            most, peak = total, dict(live)
    return peak


def _changes(events: Iterable[_protobuf.Fields], sizes: Mapping[int, int]) -> Iterator[_Change]:
    """Yields the allocations of a heap, and with negative sizes what it frees, in the order in which the program runs."""
    # Buffers that share the memory of another one, and how many use it.
    owner: dict[int, int] = {}
    users: collections.Counter[int] = collections.Counter()
    names: dict[int, str] = {}
    for event in events:
        kind, number = _protobuf.integer(event, 1) or 0, _protobuf.integer(event, 2) or 0
        if kind == _FREE:
            first = owner.pop(number, number)
            users[first] -= 1
            if not users[first] and sizes.get(first):
                yield first, names[first], -sizes[first]
            continue
        owner[number] = owner.get(_protobuf.integer(event, 5) or 0, number) if kind == _SHARE else number
        first = owner[number]
        users[first] += 1
        if users[first] == 1 and sizes.get(first):
            names[first] = _protobuf.text(event, 4)
            yield first, names[first], sizes[first]


def _scope(program: HloModule, name: str) -> str:
    if name not in program.instructions:
        return ""
    parts = program.parts(program.instructions[name])
    collective = next((part.collective for part in parts if part.collective), "")
    return collective or innermost(next((part.op_name for part in parts if part.op_name), ""))


def _shape(program: HloModule, name: str, location: _protobuf.Fields) -> str:
    """Returns the shape of a result of an instruction. XLA's `LogicalBufferProto.Location` has its index in a tuple."""
    instruction = program.instructions.get(name)
    index = dict(location).get(3, b"")
    at = index[0] if isinstance(index, bytes) and index else 0
    return str(instruction.shapes[at]) if instruction and at < len(instruction.shapes) else ""


def show_bytes(number: int) -> str:
    """Formats a number of bytes, e.g. `1.5 GiB`."""
    power = max(k for k in range(4) if k == 0 or number >= 1024**k)
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
