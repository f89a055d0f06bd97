"""Reads serialized protocol buffers without their schema. A message is a list of (field number, value)."""

from collections.abc import Iterator
from typing import TypeAlias

Fields: TypeAlias = list[tuple[int, bytes | int]]


def fields(data: bytes) -> Fields:
    """Parses the fields of the message at the start of `data`.

    The length of a message is not stored with it. Fields are serialized in the order of their numbers, so parsing stops at the
    first field with a smaller number or with a wire type other than varint and bytes.

    Args:
        data: A serialized message, perhaps followed by other bytes.

    Returns:
        (field number, value) of each field, in order. The value is an int for integers, bools and enums, and bytes for strings
        and submessages. Empty if `data` is empty.

    Raises:
        IndexError: If `data` ends inside a number.
    """
    found: Fields = []
    position = number = 0
    while position < len(data):
        key, position = _varint(data, position)
        previous, number = number, key >> 3
        if number < max(previous, 1) or key & 7 not in (0, 2):
            break
        value, position = _varint(data, position)
        if key & 7 == 2:
            value, position = data[position : position + value], position + value
        found.append((number, value))
    return found


def submessages(message: Fields, number: int) -> Iterator[Fields]:
    """Yields the messages in a repeated field, in order.

    Args:
        message: The parsed fields of the outer message, from `fields`.
        number: Number of the field.

    Yields:
        The parsed fields of each submessage. Nothing if the field is absent.
    """
    for found, value in message:
        if found == number and isinstance(value, bytes):
            yield fields(value)


def text(message: Fields, number: int) -> str:
    """Reads a string field, the last one with this number.

    Args:
        message: The parsed fields, from `fields`.
        number: Number of the field.

    Returns:
        The string. Empty if the field is absent or an integer.

    Raises:
        UnicodeDecodeError: If the bytes are not UTF-8.
    """
    value = dict(message).get(number, b"")
    return value.decode() if isinstance(value, bytes) else ""


def integer(message: Fields, number: int) -> int | None:
    """Reads an integer field, the last one with this number.

    Args:
        message: The parsed fields, from `fields`.
        number: Number of the field.

    Returns:
        The integer. None if the field is absent or holds bytes.
    """
    value = dict(message).get(number)
    return value if isinstance(value, int) else None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value, shift, position = value | (byte & 127) << shift, shift + 7, position + 1
        if byte < 128:
            return value, position
