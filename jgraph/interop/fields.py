"""Typed reads from a Hugging Face config.json.

Each function returns the default unchanged for a field that is missing or null. Without a default, the field is required. A
value of another type or out of range raises a ConfigError that names the field. No jax here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jgraph.errors import ConfigError, require

_REQUIRED: Any = object()
_LARGEST = 2**31 - 1  # sizes and token ids are int32


def integer(config: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
    """Reads an integer in [least, 2**31). True, False and floats such as 2.0 are not integers."""
    allowed = f"an integer from {least} to {_LARGEST}"
    return _checked(config, name, default, lambda value: type(value) is int and least <= value <= _LARGEST, allowed)


def number(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> float:
    """Reads an integer or a float in [0, 1e30], as a float."""
    allowed = "a finite number, at least 0"
    return float(_checked(config, name, default, lambda v: type(v) in (int, float) and 0 <= v <= 1e30, allowed))


def boolean(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> bool:
    """Reads true or false."""
    return _checked(config, name, default, lambda value: type(value) is bool, "true or false")


def string(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """Reads a string."""
    return _checked(config, name, default, lambda value: isinstance(value, str), "a string")


def strings(config: Mapping[str, Any], name: str) -> list[str]:
    """Reads a list of strings, empty if the field is missing."""
    allowed = "a list of strings"
    return _checked(config, name, [], lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v), allowed)


def mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Reads a JSON object, empty if the field is missing."""
    return _checked(config, name, {}, lambda value: isinstance(value, dict), "an object")


def _checked(config: Mapping[str, Any], name: str, default: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
    value = config.get(name)
    if value is None and default is _REQUIRED:
        raise ConfigError(f"`{name}` is missing: must be given", field=name)
    if value is None:
        return default
    shown = repr(value)
    require(fits(value), name, shown if len(shown) <= 40 else f"{shown[:40]}...", allowed)
    return value
