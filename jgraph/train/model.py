"""Imports a model class by name, finds its settings, and reports errors of its code in one line."""

import contextlib
import importlib
import inspect
import re
import traceback
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from jgraph.errors import ConfigError, JgraphError, require


def find_model(name: str) -> Any:
    """Imports the class `package.module:Class`. Raises ConfigError if it cannot be imported."""
    module, _, class_name = name.partition(":")
    with model_errors(name, "be package.module:Class, with a module that can be imported from here"):
        return getattr(importlib.import_module(module), class_name)


def is_class_name(name: object) -> bool:
    """Returns True for a string of the form `package.module:Class`."""
    return isinstance(name, str) and re.fullmatch(r"[\w.]+:\w+", name) is not None


def is_built_in(name: str) -> bool:
    """Returns True if the class `package.module:Class` is in `jgraph_models`."""
    return re.split(r"[.:]", name)[0] == "jgraph_models"


def check_import(saved: str, named: str) -> None:
    """Checks that the model class in a saved configuration may be imported.

    An import runs the code of the module, and the author of a saved configuration may not be trusted. A class outside
    `jgraph_models` must therefore be named by the caller too.

    Args:
        saved: Class in the saved configuration.
        named: Class that the caller named; empty if the caller named none.

    Raises:
        ConfigError: If the caller named another class, or none for a class outside `jgraph_models`.
    """
    if is_built_in(saved):
        require(named in ("", saved), "module", named, f"{saved}, as in the run's config.json, or left out")
    elif named != saved:
        raise ConfigError(
            f"`module` is {saved} in the run's config.json: an import runs its code, so it is imported only if you name it; "
            f"if you trust it, pass `module` {saved}",
            field="module",
        )


def settings_of(name: str) -> type | None:
    """Returns the type of the first constructor argument of a model if it is a dataclass, else None.

    Raises:
        ConfigError: If the model class cannot be imported.
    """
    found = find_model(name)
    try:
        # The signature of an NNX class itself accepts anything.
        hints, (_, *names) = typing.get_type_hints(found.__init__), inspect.signature(found.__init__).parameters
        first = hints.get(names[0]) if names else None
    except (NameError, TypeError, ValueError):
        return None
    return first if isinstance(first, type) and is_dataclass(first) else None


def settings_from(kind: type, fields: dict[str, Any]) -> Any:
    """Restores a dataclass and its nested dataclasses from `dataclasses.asdict`.

    Args:
        kind: The dataclass.
        fields: Its fields, with dictionaries for nested dataclasses, as decoded from JSON.

    Returns:
        The instance.
    """
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: hints[name](**value) if isinstance(value, dict) and is_dataclass(hints.get(name)) else value
            for name, value in fields.items()
        }
    )


def _described(error: Exception) -> str:
    """Describes an error in one line, with the last traceback frame in the user's code."""
    ours = str(Path(__file__).parent)
    places = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<")) and not {"site-packages", "importlib"} & set(Path(frame.filename).parts)
    ]
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}{places[-1] if places else ''}"


@contextlib.contextmanager
def model_errors(name: str, must: str) -> Iterator[None]:
    """Converts exceptions of a user's model into a ConfigError of one line with the location in the user's code.

    Args:
        name: The model class, as `package.module:Class`.
        must: The requirement that the class does not meet, for the message, for example `have loss(tokens_BS)`.

    Raises:
        ConfigError: If the block raises an exception that is not a JgraphError.
    """
    try:
        yield
    except JgraphError:
        raise
    except Exception as e:
        raise ConfigError(f"`module` is {name}: must {must} ({_described(e)})", field="module") from e
