"""Reads serialized protocol buffers without their schema. A message is a list of (field number, value).

The value is an int for integers, bools and enums, and bytes for strings and submessages.
"""

from collections.abc import Iterator
from typing import TypeAlias

Fields: TypeAlias = list[tuple[int, bytes | int]]


def fields(data: bytes) -> Fields:
    """Parses the message at the start of `data`. Other bytes may follow. Raises IndexError if `data` ends inside a number."""
    found: Fields = []
    position = number = 0
    while position < len(data):
        key, position = _varint(data, position)
        previous, number = number, key >> 3
        # The length of a message is not stored with it. Its fields are in the order of their numbers, so it ends before a
        # smaller number, or before a wire type other than varint and bytes.
        if number < max(previous, 1) or key & 7 not in (0, 2):
            break
        value, position = _varint(data, position)
        if key & 7 == 2:
            value, position = data[position : position + value], position + value
        found.append((number, value))
    return found


def submessages(message: Fields, number: int) -> Iterator[Fields]:
    """Yields the messages in the repeated field `number`, in order."""
    for found, value in message:
        if found == number and isinstance(value, bytes):
            yield fields(value)


def text(message: Fields, number: int) -> str:
    """Returns the last string field with this number. Empty if the field is absent or an integer."""
    value = dict(message).get(number, b"")
    return value.decode() if isinstance(value, bytes) else ""


def integer(message: Fields, number: int) -> int | None:
    """Returns the last integer field with this number. None if the field is absent or holds bytes."""
    value = dict(message).get(number)
    return value if isinstance(value, int) else None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        shift += 7
        position += 1
        if byte < 128:
            return value, position
