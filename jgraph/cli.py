"""Command lines through tyro: flags that may be left out, errors in one line, a field of an error turned into its flag."""

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from rich.console import Console
from tyro.constructors import PrimitiveConstructorSpec

from jgraph.errors import ConfigError, JgraphError, NonFiniteError

T = TypeVar("T")

HUNG = os.EX_TEMPFAIL
"""Exit code, 75, of a command whose devices hang: the same again goes on."""
_LAST_WORDS_SECONDS = 60


def optional(kind: Callable[[str], T], metavar: str) -> PrimitiveConstructorSpec[T | None]:
    """Returns the type of a flag that may be left out. tyro shows `int | None` as `{None}|INT`, and its errors are as long."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: value is None or not isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


Count = Annotated[int | None, optional(int, "INT"), tyro.conf.arg(help_behavior_hint="")]
Name = Annotated[str | None, optional(str, "NAME"), tyro.conf.arg(help_behavior_hint="")]
Module = Annotated[str, tyro.conf.arg(name="model.module", metavar="MODULE:CLASS")]
File = Annotated[Path | None, optional(Path, "FILE"), tyro.conf.arg(help_behavior_hint="")]
Directory = Annotated[Path | None, optional(Path, "DIRECTORY"), tyro.conf.arg(help_behavior_hint="")]


def fields_of(kind: Any) -> set[str]:
    """Returns the names of a dataclass's fields, or of a function's arguments."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(inspect.signature(kind).parameters)


def flag(name: str) -> str:
    """Returns the flag of a field: `model.num_heads` -> `--model.num-heads`."""
    return "--" + _RENAMED.get(name, name).replace("_", "-")


# The model's own settings and where it is read as one thing on the command line; so data and how it is read; what is given one
# at a time there.
_RENAMED = {
    "module": "model.module",
    "data_field": "data.field",
    "data_shuffle": "data.shuffle",
    "data_documents": "data.documents",
    "prompts": "prompt",
}


def as_flags(text: str, fields: Collection[str]) -> str:
    """Returns a message of the library with fields' names in backticks as the flags that they are here."""

    def named(match: re.Match[str]) -> str:
        if match[1].partition(".")[0] not in fields:
            return match[0]
        return flag(match[1]).replace("--", "--no-", 1) if match[2] else flag(match[1])

    return re.sub(r"`([a-z][a-z0-9_.]*)`( off)?", named, text)


class FlagConsole(Console):
    """A console that tells of flags where the library names fields, and leaves a pipe that nobody reads to `run`."""

    def __init__(self, fields: Collection[str] = (), **settings: Any):
        super().__init__(**settings)
        self.fields = fields

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(as_flags(o, self.fields) if isinstance(o, str) else o for o in objects), **settings)

    def on_broken_pipe(self) -> None:
        raise


def run(
    prog: str, act: Callable[[list[str]], int | None], argv: Sequence[str] | None = None, fields: Collection[str] = ()
) -> int:
    """Runs a command and returns the exit code of its process.

    Args:
        act: runs the command `prog` with the arguments; returns the exit code, None for 0.
        argv: the arguments; None for those of the process.
        fields: names that are flags of this command.

    Returns:
        That of `act`; 1 for a loss or gradient that is not finite and 2 for input that cannot work, both told in one line on
        stderr; 130 after Ctrl-C; 141 where nobody reads stdout any more, as behind `| head`. `HUNG` comes from `end_at_once`.
    """
    try:
        code = act(list(sys.argv[1:] if argv is None else argv)) or 0
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


def run_options(
    kind: Any, act: Callable[[Any], None], prog: str, about: str | None, argv: Sequence[str] | None, *, positional: str
) -> int:
    """Runs a command whose arguments are a dataclass's fields, of which one has no flag; returns the code that `run` does."""

    def parsed(args: list[str]) -> None:
        if (options := parse(kind, prog, about, args)) is not None:
            act(options)

    return run(prog, parsed, argv, fields_of(kind) - {positional})


def end_at_once(prog: str, tell: Callable[[], str], fields: Collection[str] = ()) -> NoReturn:
    """Ends the process with `HUNG` after a line on stderr, from any thread, whatever the others are stuck in.

    Nothing is unwound: where the runtime waits for a device, Python's own end would wait for the runtime.
    """
    # Neither a text that does not come nor a pipe that nobody reads keeps the process.
    at_last = threading.Timer(_LAST_WORDS_SECONDS, os._exit, [HUNG])
    at_last.daemon = True
    at_last.start()
    try:
        print(f"{prog}: error: {as_flags(' '.join(tell().split()), fields)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(HUNG)


def run_command(acts: Iterable[Callable[..., None]], prog: str, about: str, args: Sequence[str]) -> None:
    """Runs the function that the first argument names, with the arguments after it."""

    def later(act: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        return functools.wraps(act)(lambda *args, **kwargs: functools.partial(act, *args, **kwargs))

    if call := parse({act.__name__: later(act) for act in acts}, prog, about, args):
        call()


def write_file(field: str, path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file that a flag named. Raises ConfigError where that fails."""
    try:
        write(path)
    except OSError as e:
        raise ConfigError(f"`{field}` {path} cannot be written: {e.strerror or e}", field=field) from None


_RULE = r"[─-]{3,}"


def parse(
    kind: Any, prog: str, about: str | None, args: Sequence[str], *, elsewhere: Mapping[str, str] | None = None, **settings: Any
) -> Any:
    """Parses arguments through tyro; returns the instance that they make, or None after --help, which is printed.

    Args:
        kind: a dataclass or a function; or those of the subcommands, by name.
        prog, about: name of the command, and the text of its help.
        elsewhere: flags of other programs, and what is written here instead.
        settings: for `tyro.cli`.

    Raises:
        ConfigError: what tyro would have drawn a box around, in one line; or the JgraphError that a field's check raised.
    """
    messages = io.StringIO()
    ask: Any = tyro.extras.subcommand_cli_from_dict if isinstance(kind, dict) else tyro.cli
    try:
        with contextlib.redirect_stderr(messages):
            return ask(kind, prog=f"python -m {prog}", description=about, args=args, **settings)
    except SystemExit as e:
        if e.code in (0, None):
            return None
        # tyro turns what a dataclass raises about its fields into a box around the same words.
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, JgraphError):
                raise cause from None
            cause = cause.__context__
        told = _unboxed(messages.getvalue())
        unknown = re.match(r"Unrecognized options: (--[\w.-]+)", told)
        if unknown and (here := (elsewhere or {}).get(unknown[1].replace("_", "-"))):
            told = f"{unknown[1]} is no flag here: write {here}"
        raise ConfigError(told, field="") from None


def _unboxed(text: str) -> str:
    """Returns tyro's box in one line: its first paragraph, and its advice about the flag.

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
