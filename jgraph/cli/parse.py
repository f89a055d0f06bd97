"""Command lines through tyro, whose errors are told in one line."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console

from jgraph.errors import ConfigError, JgraphError, NonFiniteError

T = TypeVar("T")


class PipeConsole(Console):
    """A console that leaves a pipe that nobody reads to `exit_code`."""

    def on_broken_pipe(self) -> None:
        raise


def exit_code(prog: str, act: Callable[[], int | None]) -> int:
    """Runs a command and returns what the process is to exit with.

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
        print(f"{prog}: error: {' '.join(str(e).split())}", file=sys.stderr)
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
