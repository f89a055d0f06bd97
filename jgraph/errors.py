"""The errors of this library. All derive from `JgraphError`; the command line prints their message in one line."""

import contextlib
import math
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal


class JgraphError(ValueError):
    """Base of every jgraph error. The message names the argument, its value, the allowed values and the remedy.

    Attributes:
        field: The name of the invalid argument, with dots for nested fields (`model.num_heads`). Empty if there is none.
    """

    field: str = ""

    def __init__(self, message: str, **attributes: Any):
        super().__init__(message)
        for name, value in attributes.items():
            assert hasattr(self, name), f"{type(self).__name__} has no {name}"
            setattr(self, name, value)


class ConfigError(JgraphError):
    """An argument or a configuration field has an invalid value."""

    def __init__(self, message: str, *, field: str):
        super().__init__(message, field=field)


def check_choice(field: str, value: object, allowed: Collection[str]) -> None:
    """Raises ConfigError if an argument does not have one of the allowed values.

    Args:
        field: The name of the argument.
        value: Its value.
        allowed: The allowed values.
    """
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"`{field}` is {value!r}: must be one of {', '.join(allowed)}", field=field)


def check_types(config: Any, *, prefix: str = "") -> None:
    """Raises ConfigError if a field of a dataclass does not have the type of its annotation.

    Checks numbers, strings, bools, `Literal`s, and tuples of strings or `Literal`s.

    Args:
        config: The dataclass.
        prefix: A prefix of the field names in the error.
    """
    for name, kind in typing.get_type_hints(type(config)).items():
        field, value, choices = prefix + name, getattr(config, name), typing.get_args(kind)
        if typing.get_origin(kind) is Literal:
            check_choice(field, value, choices)
        elif typing.get_origin(kind) is tuple and typing.get_origin(choices[0]) is Literal:
            for item in value:
                check_choice(field, item, typing.get_args(choices[0]))
        elif kind == tuple[str, ...]:
            fits = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
            require(fits, field, repr(value), "a tuple of strings")
        elif kind in (int, float, str, bool):
            fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
            allowed = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}[kind]
            require(fits, field, repr(value), allowed)


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises ConfigError unless a condition holds.

    Args:
        condition: The condition.
        field: The name of the argument.
        value: Its value.
        allowed: A description of the allowed values.
    """
    if not condition:
        raise ConfigError(f"`{field}` is {value}: must be {allowed}", field=field)


def require_positive(config: object, names: str, *, prefix: str = "") -> None:
    """Raises ConfigError if a field is not a positive, finite number.

    Args:
        config: The dataclass.
        names: The names of the fields, separated by spaces.
        prefix: A prefix of the field names in the error.
    """
    for name in names.split():
        value = getattr(config, name)
        require(value > 0 and math.isfinite(value), prefix + name, value, "positive")


@contextlib.contextmanager
def os_errors(field: str, path: object, verb: Literal["read", "written"] = "written") -> Iterator[None]:
    """Converts an OSError inside the block into a ConfigError that names the argument and its path.

    Args:
        field: The argument that holds the path.
        path: The path.
        verb: The operation that failed, for the message.

    Raises:
        ConfigError: If the block raises an OSError.
    """
    try:
        yield
    except OSError as e:
        raise ConfigError(f"`{field}` is {path}: cannot be {verb} ({e.strerror or e})", field=field) from e


_HUB_ID = re.compile(r"(?:https?:/+huggingface\.co/(?:datasets/)?)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")


def download_hint(path: str | Path, *, kind: Literal["model", "dataset"] = "model") -> str:
    """Returns the command that downloads a missing path, if the path looks like an id on the Hugging Face Hub.

    Args:
        path: A path that does not exist, or an id such as `Qwen/Qwen3-0.6B`, or the address of its page.
        kind: The kind of repository.

    Returns:
        A clause to append to an error message. Empty if the path has another form, an alphabetic file suffix or an existing
        parent directory.
    """
    found = _HUB_ID.fullmatch(str(path))
    if not found or re.search(r"\.[A-Za-z]+$", found[1]) or Path(path).parent.exists():
        return ""
    options = "" if kind == "model" else "--repo-type dataset "
    command = f"hf download {found[1]} {options}--local-dir {found[1].rpartition('/')[2]}"
    return f"; to use {found[1]} from the Hugging Face Hub, download it first: {command}"


class ShapeError(JgraphError):
    """An array has the wrong shape or dtype."""


class DataError(JgraphError):
    """A text, tokenizer or token file is invalid or does not match the others."""


class CompilerOptionError(JgraphError):
    """The installed XLA does not have an option, or refuses its value."""


class TargetError(JgraphError):
    """A program cannot be compiled for an absent GPU."""


class DonationError(JgraphError):
    """The compiled program copies or swaps donated arrays instead of updating them in place.

    Attributes:
        leaves: The names of these leaves.
    """

    leaves: tuple[str, ...] = ()


class OrderError(JgraphError):
    """A pipeline order cannot run, or no order exists for the given parameters.

    Attributes:
        position: The index of the invalid entry in the order of its rank. None if there is no single one.
        rank: The rank of the order. None for a single order.
    """

    position: int | None = None
    rank: int | None = None

    @classmethod
    def at(cls, position: int, problem: str) -> typing.Self:
        """Returns the error "entry {position} is {problem}".

        Args:
            position: Index of the invalid entry in its order.
            problem: The message.

        Returns:
            The error, with its `position`.
        """
        return cls(f"entry {position} is {problem}", position=position)

    @classmethod
    def of_rank(cls, rank: int, problem: str, position: int | None = None) -> typing.Self:
        """Returns the error "rank {rank}{problem}".

        Args:
            rank: The rank.
            problem: The message.
            position: The index of the invalid entry in its order.

        Returns:
            The error, with its `rank` and `position`.
        """
        return cls(f"rank {rank}{problem}", rank=rank, position=position)


class SplitError(JgraphError):
    """The backward of a stage cannot be split as requested, or its parts are from different splits.

    Attributes:
        path: The parameter or input that causes it, e.g. `embed/embedding`. Empty if there is no single one.
    """

    path: str = ""


class CallableError(JgraphError):
    """Graphed callables cannot be built as requested, or a call does not match the sample arguments.

    Attributes:
        mismatches: A message with the path of each mismatch. Empty for other errors.
    """

    mismatches: tuple[str, ...] = ()


class OwnershipError(JgraphError):
    """A buffer is read after its owner reused it, or is passed to a function that may run after its owner updates it.

    Attributes:
        owner: The owner, e.g. `main_grad of callable 0`.
    """

    owner: str = ""


class CheckpointError(JgraphError):
    """A checkpoint cannot be written or read, or is from another run."""


class ProfileError(JgraphError):
    """A recorded trace or program is missing, damaged or incomplete."""


class NonFiniteError(JgraphError):
    """The loss or a gradient became infinite or NaN.

    Attributes:
        step: The number of the step, from 1. Its update was not applied.
    """

    step: int = -1
