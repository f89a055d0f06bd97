"""Command lines through tyro, whose errors are told in one line."""

import contextlib
import dataclasses
import inspect
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from rich.console import Console

from jgraph.errors import ConfigError, JgraphError, NonFiniteError

T = TypeVar("T")


def fields_of(kind: Any) -> set[str]:
    """Returns the names of a dataclass's fields, or of a function's arguments."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(inspect.signature(kind).parameters)


def flag(name: str) -> str:
    """Returns the flag of a field: `model.num_heads` -> `--model.num-heads`."""
    return "--" + _RENAMED.get(name, name).replace("_", "-")


# The model's own settings and where it is read as one thing on the command line.
_RENAMED = {"module": "model.module"}


def as_flags(text: str, fields: Collection[str]) -> str:
    """Returns a message of the library with fields' names in backticks as the flags that they are here."""

    def named(match: re.Match[str]) -> str:
        if match[1].partition(".")[0] not in fields:
            return match[0]
        return flag(match[1]).replace("--", "--no-", 1) if match[2] else flag(match[1])

    return re.sub(r"`([a-z][a-z0-9_.]*)`( off)?", named, text)


class FlagConsole(Console):
    """A console that tells of flags where the library names fields, and leaves a pipe that nobody reads to `exit_code`."""

    def __init__(self, fields: Collection[str] = (), **settings: Any):
        super().__init__(**settings)
        self.fields = fields

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(as_flags(o, self.fields) if isinstance(o, str) else o for o in objects), **settings)

    def on_broken_pipe(self) -> None:
        raise


def exit_code(prog: str, act: Callable[[], int | None], fields: Collection[str] = ()) -> int:
    """Runs a command and returns what the process is to exit with.

    Args:
        prog: name of the command.
        act: runs it.
        fields: names that are flags of this command.

    That is what `act` returns, or 0; 1 for a loss or gradient that is not finite, 2 for input that cannot work, both told in
    one line on stderr; 130 after Ctrl-C; 141 where nobody reads stdout any more, as behind `| head`.
    """
    try:
        code = act() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python writes what is left when it ends, and would tell of the pipe once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (JgraphError, OSError) as e:
        print(f"{prog}: error: {as_flags(' '.join(str(e).split()), fields)}", file=sys.stderr)
        return 1 if isinstance(e, NonFiniteError) else 2
    except KeyboardInterrupt:
        return 130


_RULE = r"[─-]{3,}"


def one_line(parse: Callable[[], T]) -> T | None:
    """What `parse` returns (a call of tyro's), or None after --help, which is printed.

    Raises:
        ConfigError: what tyro would have drawn a box around, in one line; or the JgraphError that a field's check raised.
    """
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return parse()
    except SystemExit as e:
        if e.code in (0, None):
            return None
        # tyro turns what a dataclass raises about its fields into a box around the same words.
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, JgraphError):
                raise cause from None
            cause = cause.__context__
        raise ConfigError(_unboxed(messages.getvalue()), field="") from None


def _unboxed(text: str) -> str:
    """One line of tyro's box: its first paragraph, and what it suggests or says about the flag.

    tyro's parse errors have no public structure. What the box holds is prose between rules, so this needs to know only how
    boxes are drawn, in Unicode or ASCII: a title, rules between paragraphs, of which the last points to --help.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    if not re.search(_RULE, text):
        return " ".join(text.split())
    _title, *rows = (line.strip(" │╰╯") for line in text.splitlines())
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(_RULE, "\n".join(rows))]
    told = [paragraph for paragraph in paragraphs if paragraph and not paragraph.startswith("For full helptext")]
    line = re.sub(r"^Error parsing (--\S+): ", r"\1: ", told[0])
    flags = re.findall(r"(--\S+ (?:[A-Z]+|\{[^}]*\}))", " ".join(told[1:]))
    if told[1:] and told[1].startswith("Argument helptext") and flags:
        return f"{line}; takes {flags[0]}"
    return f"{line}; did you mean {' or '.join(flags)}?" if flags else line
