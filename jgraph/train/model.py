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
    """Imports a model class.

    Args:
        name: The class, as `package.module:Class`. Importing runs the code of the module.

    Returns:
        The class, of any type.

    Raises:
        ConfigError: If the module or the class does not exist, or the code of the module raises an exception.
    """
    module, _, class_name = name.partition(":")
    with model_errors(name, "be package.module:Class, with a module that can be imported from here"):
        return getattr(importlib.import_module(module), class_name)


def is_class_name(name: object) -> bool:
    """Returns True if `name` is a string of the form `package.module:Class`. Does not import the class."""
    return isinstance(name, str) and re.fullmatch(r"[\w.]+:\w+", name) is not None


def is_built_in(name: str) -> bool:
    """Returns True if the class `name`, as `package.module:Class`, is in the package `jgraph_models`. Does not import it."""
    return re.split(r"[.:]", name)[0] == "jgraph_models"


def check_import(saved: str, named: str) -> None:
    """Checks that the model class in a saved configuration may be imported.

    An import runs the code of the module, and the author of a saved configuration may not be trusted. A class outside
    `jgraph_models` must therefore be named by the caller too.

    Args:
        saved: Class in the saved configuration, as `package.module:Class`.
        named: Class that the caller named, in the same form; empty if the caller named none.

    Raises:
        ConfigError: If `named` is another class than `saved`, or is empty for a class outside `jgraph_models`.
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
    """Imports a model class and returns the dataclass of its settings.

    Args:
        name: The class, as `package.module:Class`.

    Returns:
        The annotated type of the first argument of the constructor, if it is a dataclass. None if it is another type, or has no
        annotation that can be evaluated.

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
    """Restores model settings from a dict, the inverse of `dataclasses.asdict`. Supports one level of nested dataclasses.

    Args:
        kind: The dataclass.
        fields: Its fields by name, as decoded from JSON, with a dict for a nested dataclass. Lists stay lists. Not changed.

    Returns:
        An instance of `kind`.

    Raises:
        TypeError: If a field is unknown, or a field without a default is missing.
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
    """Converts exceptions of a user's model inside the `with` block into a ConfigError of one line.

    The message has the type and first line of the exception, and the file and line of the user's code that raised it.

    Args:
        name: The model class, as `package.module:Class`.
        must: The requirement that the class does not meet, for the message, for example `have loss(tokens_BS)`.

    Raises:
        ConfigError: If the block raises an `Exception` that is not a JgraphError. A JgraphError is raised unchanged.
    """
    try:
        yield
    except JgraphError:
        raise
    except Exception as e:
        raise ConfigError(f"`module` is {name}: must {must} ({_described(e)})", field="module") from e
