"""Reads which temporary buffers of a program are in use when they need the most memory, from XLA's buffer assignment."""

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jgraph.scopes import innermost
from jgraph.xla import _protobuf
from jgraph.xla.hlo import HloModule, Op, operations

_MOST = 8
# Kinds of events in XLA's `HeapSimulatorTrace`. The first, 0, allocates a buffer.
_FREE, _SHARE = 1, 2


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


def largest(assignment: bytes, program: HloModule, known: Mapping[str, Op]) -> tuple[Buffers, ...]:
    """Returns the largest groups of temporary buffers in use at the peak, from a serialized `BufferAssignmentProto`.

    `known` has operations that were looked up before, because a lookup searches the stack frames of the program.
    """
    message = _protobuf.fields(assignment)
    logical = {_protobuf.integer(one, 1) or 0: one for one in _protobuf.submessages(message, 1)}
    sizes = {number: _protobuf.integer(one, 2) or 0 for number, one in logical.items()}
    names: dict[int, str] = {}
    for trace in _protobuf.submessages(message, 4):
        names |= _at_peak(list(_protobuf.submessages(trace, 1)), sizes)
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
    return tuple(sorted(found, key=lambda group: -group.count * group.nbytes)[:_MOST])


def _at_peak(events: Iterable[_protobuf.Fields], sizes: Mapping[int, int]) -> dict[int, str]:
    """Returns the buffers of a heap in use when their sum is largest, with the instructions that define them."""
    live: dict[int, str] = {}
    peak: dict[int, str] = {}
    # Buffers that share the memory of another one, and how many use it.
    owner: dict[int, int] = {}
    users: collections.Counter[int] = collections.Counter()
    total = most = 0
    for event in events:
        kind, number = _protobuf.integer(event, 1) or 0, _protobuf.integer(event, 2) or 0
        if kind == _FREE:
            first = owner.pop(number, number)
            users[first] -= 1
            if not users[first]:
                total -= sizes.get(first, 0)
                live.pop(first, None)
            continue
        owner[number] = owner.get(_protobuf.integer(event, 5) or 0, number) if kind == _SHARE else number
        first = owner[number]
        users[first] += 1
        if users[first] == 1:
            total += sizes.get(first, 0)
            live[first] = _protobuf.text(event, 4)
        if total > most:
            most, peak = total, dict(live)
    return peak


def _scope(program: HloModule, name: str) -> str:
    instruction = program.instructions[name]
    return instruction.collective or innermost(instruction.op_name)


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
