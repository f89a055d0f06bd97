"""Typed reads from a Hugging Face config.json.

Each function returns the default for a field that is missing or null, and raises a ConfigError that names the field for a value
of another type or out of range. No jax here.
"""

import math
from collections.abc import Mapping
from typing import Any

from jgraph.errors import ConfigError, require

_REQUIRED: Any = object()
_LARGEST = 2**31 - 1  # sizes and token ids are int32


def integer(config: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, least: int = 1) -> Any:
    """Returns an integer in [least, 2**31)."""
    value = _value(config, name, default)
    fits = value is default or (type(value) is int and least <= value <= _LARGEST)
    require(fits, name, _shown(value), f"an integer from {least} to {_LARGEST}")
    return value


def number(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> float:
    """Returns a finite number, at least 0."""
    value = _value(config, name, default)
    fits = type(value) in (int, float) and 0 <= value <= 1e30 and math.isfinite(value)
    require(fits, name, _shown(value), "a finite number, at least 0")
    return float(value)


def boolean(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> bool:
    """Returns a boolean."""
    value = _value(config, name, default)
    require(type(value) is bool, name, _shown(value), "true or false")
    return value


def string(config: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """Returns a string."""
    value = _value(config, name, default)
    require(value is default or isinstance(value, str), name, _shown(value), "a string")
    return value


def strings(config: Mapping[str, Any], name: str) -> list[str]:
    """Returns a list of strings; empty if it is missing."""
    value = _value(config, name, [])
    require(isinstance(value, list) and all(isinstance(one, str) for one in value), name, _shown(value), "a list of strings")
    return value


def mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns an object; empty if it is missing."""
    value = _value(config, name, {})
    require(isinstance(value, dict), name, _shown(value), "an object")
    return value


def _value(config: Mapping[str, Any], name: str, default: Any) -> Any:
    value = config.get(name)
    if value is None and default is _REQUIRED:
        raise ConfigError(f"`{name}` is missing: must be given", field=name)
    return default if value is None else value


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
