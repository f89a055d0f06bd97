"""Every error a user can meet, in one family, so that a caller can catch it and the command line can print it in one line."""

import contextlib
import math
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal


class JgraphError(ValueError):
    """Base of every jgraph error; a ValueError. The message names the thing, its value, what is allowed and what to change.

    Attributes:
        field: name of the argument at fault, dotted where it is a field of one (`model.num_heads`); empty where there is none.
    """

    field: str = ""

    def __init__(self, message: str, **attributes: Any):
        super().__init__(message)
        for name, value in attributes.items():
            assert hasattr(self, name), f"{type(self).__name__} has no {name}"
            setattr(self, name, value)


class ConfigError(JgraphError):
    """An argument or a field has a value that cannot work."""

    def __init__(self, message: str, *, field: str):
        super().__init__(message, field=field)


def check_choice(field: str, value: object, allowed: Collection[str]) -> None:
    """Raises ConfigError if the value of an argument is none of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"`{field}` is {value!r}: must be one of {', '.join(allowed)}", field=field)


def check_types(config: Any, *, prefix: str = "") -> None:
    """Raises ConfigError where a field of a dataclass, named after `prefix`, does not have the type of its annotation.

    Numbers, strings, bools, choices (`Literal`) and tuples of strings or choices are checked.
    """
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(kind) is Literal:
            check_choice(prefix + name, value, typing.get_args(kind))
            continue
        if typing.get_origin(kind) is tuple and typing.get_origin(typing.get_args(kind)[0]) is Literal:
            for one in value:
                check_choice(prefix + name, one, typing.get_args(typing.get_args(kind)[0]))
            continue
        if kind == tuple[str, ...]:
            fits, allowed = isinstance(value, tuple) and all(isinstance(v, str) for v in value), "a tuple of strings"
        elif kind in (int, float, str, bool):
            fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
            allowed = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}[kind]
        else:
            continue
        if not fits:
            raise ConfigError(f"`{prefix}{name}` is {value!r}: must be {allowed}", field=prefix + name)


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raises ConfigError if a field's value is not one that is allowed."""
    if not condition:
        raise ConfigError(f"`{field}` is {value}: must be {allowed}", field=field)


def require_positive(config: object, names: str, *, prefix: str = "") -> None:
    """Raises ConfigError where one of the named fields (a blank between two) is not a positive, finite number."""
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
    """A text, a tokenizer or token files cannot be used as they are."""


class CompilerOptionError(JgraphError):
    """The installed XLA does not know an option, or refuses its value."""


class TargetError(JgraphError):
    """A program cannot be compiled for a GPU that is not here."""


class DonationError(JgraphError):
    """Donated arrays would be copied or change places in the compiled program, instead of being updated in place.

    Attributes:
        leaves: names of the leaves that are not updated in place.
    """

    leaves: tuple[str, ...] = ()


class OrderError(JgraphError):
    """A pipeline order cannot run, or the parameters make none.

    Attributes:
        position: index of the entry at fault in its rank's order; None where no single entry is.
        rank: the rank whose order it is; None for an order on its own.
    """

    position: int | None = None
    rank: int | None = None

    @classmethod
    def at(cls, position: int, problem: str) -> typing.Self:
        """Returns the error of an entry that "is ..."."""
        return cls(f"entry {position} is {problem}", position=position)

    @classmethod
    def of_rank(cls, rank: int, problem: str, position: int | None = None) -> typing.Self:
        """Returns the error of a rank, or of an entry of its order: "rank 0 ..."."""
        return cls(f"rank {rank}{problem}", rank=rank, position=position)


class SplitError(JgraphError):
    """A stage's backward cannot be split as asked, or its parts do not belong together.

    Attributes:
        path: of the parameter or input at fault, e.g. `embed/embedding`; empty where no single one is.
    """

    path: str = ""


class CallableError(JgraphError):
    """Graphed callables cannot be built as asked, or are called with something else than they were built for.

    Attributes:
        mismatches: one text with its path for everything that differs from what was built; empty for other errors.
    """

    mismatches: tuple[str, ...] = ()


class OwnershipError(JgraphError):
    """A buffer is read after its owner took it back, or is passed where its owner may update it.

    Attributes:
        owner: whose it is, e.g. `main_grad of callable 0`.
    """

    owner: str = ""


class CheckpointError(JgraphError):
    """A checkpoint cannot be written or read, or does not belong to this run."""


class ProfileError(JgraphError):
    """A recorded trace or program cannot be reported on."""


class NonFiniteError(JgraphError):
    """The loss or a gradient became infinite or NaN.

    Attributes:
        step: the number, from 1, of the step whose update was not applied.
    """

    step: int = -1
