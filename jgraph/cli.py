"""Command lines through tyro, whose errors are told in one line."""

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import TypeVar

from jgraph.errors import ConfigError, JgraphError, NonFiniteError

T = TypeVar("T")


def exit_code(prog: str, act: Callable[[], None]) -> int:
    """Runs a command: 0 when it returns, 1 for a loss or gradient that is not finite, 2 for input that cannot work, told in one
    line on stderr, 130 after Ctrl-C."""
    try:
        act()
    except (JgraphError, OSError) as e:
        print(f"{prog}: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 1 if isinstance(e, NonFiniteError) else 2
    except KeyboardInterrupt:
        return 130
    return 0


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
