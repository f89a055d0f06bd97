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

    Args:
        message: The message, `str(error)`.
        **attributes: Values of attributes of the error class, such as `field`.
    """

    field: str = ""

    def __init__(self, message: str, **attributes: Any):
        super().__init__(message)
        for name, value in attributes.items():
            assert hasattr(self, name), f"{type(self).__name__} has no {name}"
            setattr(self, name, value)

    @property
    def problem(self) -> str:
        """The message without the name of the argument at its start."""
        return str(self).removeprefix(f"`{self.field}` ")


class ConfigError(JgraphError):
    """An argument or a configuration field has an invalid value.

    Args:
        message: The message.
        field: The name of the argument, with dots for nested fields. Empty if there is no single one.
    """

    def __init__(self, message: str, *, field: str):
        super().__init__(message, field=field)

    def about(self, field: str) -> "ConfigError":
        """Returns the error about another argument, `field`, whose value was passed on to the one of this error."""
        return ConfigError(f"`{field}` {self.problem}", field=field)


def shown(value: object) -> str:
    """Returns a short `repr` of a value for a message, or its type if the `repr` is long."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else of_type(value)


def of_type(value: object) -> str:
    """Describes a value by its type, for a message: the `repr` of a step or of arrays is long and slow to make."""
    return f"of type {type(value).__name__}"


def check_choice(field: str, value: object, allowed: Collection[str]) -> None:
    """Raises ConfigError if an argument is not one of several strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"`{field}` is {shown(value)}: must be one of {', '.join(allowed)}", field=field)


def check_types(config: Any, *, prefix: str = "") -> None:
    """Checks the values of the fields of a dataclass against their annotations. Errors name them after `prefix`."""
    # A `float` field may hold an int. A bool is not a number. Fields of types that are not named here are not checked.
    for name, kind in typing.get_type_hints(type(config)).items():
        field = prefix + name
        value = getattr(config, name)
        choices = typing.get_args(kind)
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
    """Raises a ConfigError with the message "`field` is {value}: must be {allowed}" if `condition` is false."""
    if not condition:
        raise ConfigError(f"`{field}` is {value}: must be {allowed}", field=field)


def require_positive(config: object, names: str, *, prefix: str = "") -> None:
    """Checks that fields, named in one string with spaces, are positive, finite numbers."""
    for name in names.split():
        value = getattr(config, name)
        require(value > 0 and math.isfinite(value), prefix + name, value, "positive")


@contextlib.contextmanager
def os_errors(field: str, path: object, verb: Literal["read", "written"] = "written") -> Iterator[None]:
    """Converts an OSError inside the block into a ConfigError that names the argument and its path. For `with`."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f"`{field}` is {path}: cannot be {verb} ({e.strerror or e})", field=field) from e


_HUB_ID = re.compile(r"(?:https?:/+huggingface\.co/(?:datasets/)?)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")


def download_hint(path: str | Path, *, kind: Literal["model", "dataset"] = "model") -> str:
    """Returns a clause with the command to download a path `OWNER/NAME`, or its page, from the Hugging Face Hub; or ""."""
    # A path with a suffix of letters, such as `.txt`, or with an existing parent directory is not meant as an id.
    found = _HUB_ID.fullmatch(str(path))
    if not found or re.search(r"\.[A-Za-z]+$", found[1]) or Path(path).parent.exists():
        return ""
    options = "" if kind == "model" else "--repo-type dataset "
    command = f"hf download {found[1]} {options}--local-dir {found[1].rpartition('/')[2]}"
    return f"; to use {found[1]} from the Hugging Face Hub, download it first: {command}"


class ShapeError(JgraphError):
    """An array has the wrong shape or dtype, or a setting does not fit the shapes of the arrays."""


class DataError(JgraphError):
    """A text, tokenizer or token file is missing or invalid, or the files do not match each other."""


class CompilerOptionError(JgraphError):
    """The installed XLA does not have an option, or refuses its value."""


class TargetError(JgraphError):
    """A program cannot be compiled for a GPU that is not present: unknown GPU, missing compiler, or unsupported program."""


class DonationError(JgraphError):
    """The compiled program copies or swaps donated arrays instead of updating them in place.

    Attributes:
        leaves: One string per array that is copied or swapped: its path in the format of `jax.tree_util.keystr`, such as
            `"['w']"`.
    """

    leaves: tuple[str, ...] = ()


class OrderError(JgraphError):
    """A pipeline order cannot run, or no order exists for the given parameters.

    An order is the sequence of the actions of one pipeline rank in a step: forward and backward passes of microbatches.

    Attributes:
        position: The index of the invalid entry in the order of its rank. None if there is no single one.
        rank: The pipeline rank of the order. None if the error is not about one rank.
    """

    position: int | None = None
    rank: int | None = None

    @classmethod
    def at(cls, position: int, problem: str) -> typing.Self:
        """Returns an error with the message "entry {position} is {problem}". Does not raise it.

        Args:
            position: Index of the invalid entry in its order, from 0.
            problem: The rest of the message.

        Returns:
            The error. Its attribute `position` is set, and `rank` is None.
        """
        return cls(f"entry {position} is {problem}", position=position)

    @classmethod
    def of_rank(cls, rank: int, problem: str, position: int | None = None) -> typing.Self:
        """Returns an error with the message "rank {rank}{problem}". Does not raise it.

        Args:
            rank: The pipeline rank, from 0.
            problem: The rest of the message. Starts with a space or a comma.
            position: The index of the invalid entry in the order of this rank; None if there is no single one.

        Returns:
            The error. Its attributes `rank` and `position` are set.
        """
        return cls(f"rank {rank}{problem}", rank=rank, position=position)


class SplitError(JgraphError):
    """A backward pass cannot be split into dgrad and wgrad, or the split functions are called with wrong arguments.

    wgrad computes, at a later time, the gradients of the delayed parameters: weights of matmuls. dgrad computes those of the
    inputs of the stage and of all other parameters. Wrong arguments are, for example, residuals of another split.

    Attributes:
        path: The name of the parameter or input that causes the error, e.g. `embed/embedding`. Empty if there is no single one.
    """

    path: str = ""


class CallableError(JgraphError):
    """Graphed callables cannot be built as requested, or a call does not match the arguments that they were compiled for.

    Graphed callables are functions that `jgraph.make_graphed_callables` compiled for the shapes of sample arguments.

    Attributes:
        mismatches: One message for each argument of a call with another shape, dtype or structure than its sample argument. A
            message contains the path of the argument. Empty for other errors.
    """

    mismatches: tuple[str, ...] = ()


class OwnershipError(JgraphError):
    """A borrowed array is read after jgraph overwrote its buffer, or is passed to a function that may run after that.

    A borrowed array is a handle (`Borrowed`) to a buffer that jgraph owns and updates, such as accumulated gradients.

    Attributes:
        owner: A text that names the buffer, e.g. `main_grad of callable 0`.
    """

    owner: str = ""


class CheckpointError(JgraphError):
    """A checkpoint cannot be written or read, or is from another run."""


class ProfileError(JgraphError):
    """A recorded trace or program is missing, damaged or incomplete."""


class NonFiniteError(JgraphError):
    """The loss or a gradient became infinite or NaN.

    Attributes:
        step: The number of the training step in which it happened, from 1. The parameters were not updated in this step. -1 if
            unknown.
    """

    step: int = -1
