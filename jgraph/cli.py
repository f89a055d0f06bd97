"""Shared parts of the command lines: tyro parsers, exit codes and one-line errors that name flags.

The library names arguments (`model.num_heads`) in its errors. A command prints them as flags (`--model.num-heads`).
"""

import contextlib
import errno
import functools
import inspect
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from rich.console import Console
from tyro.constructors import PrimitiveConstructorSpec

from jgraph.errors import ConfigError, JgraphError, NonFiniteError

_T = TypeVar("_T")

HUNG = os.EX_TEMPFAIL
"""Exit code (75) of a command that timed out while waiting for its devices. The same command, run again, resumes."""
_MESSAGE_TIMEOUT_SECONDS = 60


def optional(kind: Callable[[str], _T], metavar: str) -> PrimitiveConstructorSpec[_T | None]:
    """Returns a tyro constructor for a flag whose default is None. If the user passes the flag, it takes one value.

    Use it as `number: Annotated[int | None, optional(int, "INT")] = None`. Without it, tyro shows the flag as `{None}|INT` in
    the help and in its errors.

    Args:
        kind: Converts the text of the value, for example `int`. It must raise ValueError if the text is not valid.
        metavar: Placeholder of the value in the help, for example `INT`.

    Returns:
        The constructor. Pass it to `Annotated` after the type.
    """
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


def fields_of(kind: Callable[..., object]) -> set[str]:
    """Returns the names of the arguments that become flags: all except positional-only ones.

    Args:
        kind: A function, or a dataclass with its fields as arguments.

    Returns:
        The names as in Python, with underscores.
    """
    parameters = inspect.signature(kind).parameters.items()
    return {name for name, parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}


def flag(name: str) -> str:
    """Returns the command-line flag of a configuration field: `model.num_heads` -> `--model.num-heads`.

    Underscores become hyphens. A few fields have flags of another name, e.g. `module` -> `--model.module`. Does not check that
    the field exists.
    """
    return "--" + _RENAMED.get(name, name).replace("_", "-")


# Flags that are grouped under another prefix than the field's name, or repeated one value at a time.
_RENAMED = {
    "module": "model.module",
    "data_field": "data.field",
    "data_format": "data.format",
    "data_template": "data.template",
    "data_truncate": "data.truncate",
    "data_shuffle": "data.shuffle",
    "data_documents": "data.documents",
    "prompts": "prompt",
}


def as_flags(text: str, fields: Collection[str]) -> str:
    """Replaces field names in backticks by flags: "`num_heads`" by "--num-heads", and "`resume` off" by "--no-resume".

    Args:
        text: A message of the library.
        fields: Field names that are flags of the command. A nested field is replaced if its first part is in `fields`, such as
            `model` of `model.num_heads`. All other names stay in backticks.

    Returns:
        The message with flags.
    """

    def named(match: re.Match[str]) -> str:
        if match[1].partition(".")[0] not in fields:
            return match[0]
        return flag(match[1]).replace("--", "--no-", 1) if match[2] else flag(match[1])

    return re.sub(r"`([a-z][a-z0-9_.]*)`( off)?", named, text)


class FlagConsole(Console):
    """A rich console that prints field names as flags. Raises BrokenPipeError if the reader of the output has closed it.

    Attributes:
        fields: Field names that are flags of the command. In printed strings, "`name`" becomes "--name" for these fields.

    Args:
        fields: The attribute `fields`.
        **settings: Keyword arguments of `rich.console.Console`.
    """

    def __init__(self, fields: Collection[str] = (), **settings: Any):
        """Creates a console with the settings of `rich.console.Console`."""
        super().__init__(**settings)
        self.fields = fields

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints objects to the file of the console, stdout by default. Names of `fields` in backticks become flags.

        Args:
            *objects: Objects to print, such as strings, `rich.text.Text` and tables. Only strings are changed.
            **settings: Keyword arguments of `rich.console.Console.print`, such as `style`.

        Raises:
            BrokenPipeError: If the reader of the output has closed it.
        """
        super().print(*(as_flags(o, self.fields) if isinstance(o, str) else o for o in objects), **settings)

    def on_broken_pipe(self) -> None:
        """Reraises the BrokenPipeError. rich calls this method while it handles the error, and would exit with code 1."""
        raise


def run(
    prog: str, act: Callable[[list[str]], int | None], argv: Sequence[str] | None = None, fields: Collection[str] = ()
) -> int:
    """Runs a command and converts its errors into an exit code and one line on stderr. Does not end the process.

    Args:
        prog: The command as the user starts it, for example `jgraph train` or `python -m jgraph.train`. Starts the error line.
        act: Called once with the list of arguments. Runs the command and returns its exit code, or None for 0.
        argv: The arguments, without the program. None: `sys.argv[1:]`.
        fields: Field names that are flags of this command. In the error line, "`name`" becomes "--name" for these fields.

    Returns:
        The exit code of `act`. 1 for a NonFiniteError: the loss or a gradient is not finite. 2 for any other JgraphError and
        for an OSError. 130 after Ctrl-C (KeyboardInterrupt), without a message. 141 if the reader of stdout has closed it, as
        in `| head`, without a message; stdout is then redirected to /dev/null. Other exceptions pass.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Prints a question mark for each character that the encoding lacks, instead of raising.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = act(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout at exit and would print a second error about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (JgraphError, OSError) as e:
        message = str(e)
        if isinstance(e, OSError) and e.filename is None and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"standard output or a temporary file cannot be written: {e.strerror}"
        print(_error_line(prog, message, fields), file=sys.stderr)
        return 1 if isinstance(e, NonFiniteError) else 2
    except KeyboardInterrupt:
        return 130


def _error_line(prog: str, message: str, fields: Collection[str]) -> str:
    return f"{prog.removeprefix('python -m ')}: error: {as_flags(' '.join(message.split()), fields)}"


def end_at_once(prog: str, describe: Callable[[], str], fields: Collection[str] = ()) -> NoReturn:
    """Prints an error line to stderr, flushes stdout and ends the process with exit code 75 (`HUNG`). Never returns.

    Can be called from any thread. Other threads are not unwound and exit handlers do not run: the interpreter's own shutdown
    would block on a device that does not respond.

    Args:
        prog: The command as the user starts it. Starts the error line.
        describe: Called once, without arguments. Returns the error message. If it takes longer than 60 seconds, the process
            ends without the message.
        fields: Field names that are flags of this command. In the error line, "`name`" becomes "--name" for these fields.
    """
    # Neither a slow `describe` nor a blocked pipe may keep the process alive.
    deadline = threading.Timer(_MESSAGE_TIMEOUT_SECONDS, os._exit, [HUNG])
    deadline.daemon = True
    deadline.start()
    try:
        print(_error_line(prog, describe(), fields), file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(HUNG)


def command(prog: str, about: str | None, *acts: Callable[..., None]) -> Callable[..., int]:
    """Returns the `main` function of a command that parses its arguments with tyro and calls a function.

    Args:
        prog: Default name of the command, for example `python -m jgraph.sample`.
        about: The text of the command's help. None: the docstring of the function.
        acts: The functions. With several, each is a subcommand with the name of the function, and the user picks one. `main`
            calls the function with the parsed arguments. Each argument of a function is a flag; positional-only arguments are
            positional on the command line too. The `Args` of the docstring become the help of the flags.

    Returns:
        A function `main(argv=None, prog=prog)`. `argv` is a sequence of arguments without the program; None reads those of the
        process. It returns the exit code: 0 after success and --help, 1 for a NonFiniteError, 2 for invalid arguments, any
        other JgraphError or an OSError, 130 after Ctrl-C, and 141 if the reader of stdout has closed it. Errors are one line
        on stderr.
    """

    def later(act: Callable[..., None]) -> Callable[..., Callable[[], None]]:
        # tyro only binds the arguments, because it would report errors of `act` as errors in the arguments.
        return functools.wraps(act)(lambda *args, **kwargs: functools.partial(act, *args, **kwargs))

    kind = later(acts[0]) if len(acts) == 1 else {act.__name__: later(act) for act in acts}
    fields = set().union(*map(fields_of, acts))

    def main(argv: Sequence[str] | None = None, prog: str = prog) -> int:
        def parse_and_act(args: list[str]) -> None:
            if call := parse(kind, prog, about, args):
                call()

        return run(prog, parse_and_act, argv, fields)

    return main


_RULE = r"[─-]{3,}"


def parse(
    kind: Any, prog: str, about: str | None, args: Sequence[str], *, elsewhere: Mapping[str, str] | None = None, **settings: Any
) -> Any:
    """Parses arguments with tyro. Prints the help to stdout for --help.

    Args:
        kind: A dataclass or a function, which is called with the parsed arguments. Or a dictionary of these by subcommand; only
            the one that the user selects is called.
        prog: The command as the user starts it, shown in the usage line.
        about: The text of the help. None: the docstring of `kind`. If `prog` is `jgraph NAME`, the help shows each
            `python -m jgraph.NAME` in this text as `jgraph NAME`.
        args: The arguments, without the program.
        elsewhere: Hints for flags that this command does not have. Keys are such flags, e.g. of other programs. Values are the
            flags of this command to use instead. The error about an unknown flag names its hint. None for no hints.
        settings: Further keyword arguments of `tyro.cli`, e.g. `default`. If `kind` is a dictionary, those of
            `tyro.extras.subcommand_cli_from_dict`.

    Returns:
        The new instance of the dataclass, or the result of the function. None after --help.

    Raises:
        ConfigError: If tyro rejects the arguments. The message is one line instead of tyro's box, and suggests a similar flag.
        JgraphError: If a dataclass rejects its fields. The error of the dataclass passes unchanged.
    """
    messages = io.StringIO()
    ask: Any = tyro.extras.subcommand_cli_from_dict if isinstance(kind, dict) else tyro.cli
    try:
        with contextlib.redirect_stderr(messages):
            return ask(kind, prog=prog, description=_examples(about, prog), args=args, **settings)
    except SystemExit as e:
        if e.code in (0, None):
            return None
        # tyro prints an exception from a dataclass as a box with the same message.
        cause: BaseException | None = e
        while cause is not None:
            if isinstance(cause, JgraphError):
                raise cause from None
            cause = cause.__context__
        message = _unboxed(messages.getvalue())
        unknown = re.match(r"Unrecognized options: (--[\w.-]+)", message)
        if unknown and (replacement := (elsewhere or {}).get(unknown[1].replace("_", "-"))):
            message = f"{unknown[1]} is not a flag of this command: use {replacement}"
        raise ConfigError(message, field="") from None


def _examples(about: str | None, prog: str) -> str | None:
    """Rewrites `python -m jgraph.NAME` in a help text to `jgraph NAME` if the command was started that way."""
    launcher, _, name = prog.rpartition(" ")
    if about is None or "." in name:
        return about
    return re.sub(r"python -m jgraph\.(\w+)", rf"{launcher} \1", about)


def _unboxed(text: str) -> str:
    """Reduces tyro's error box to one line: the first paragraph, and the suggested flag.

    tyro has no public structure for parse errors. The box is a title and paragraphs between horizontal rules, in Unicode or
    ASCII. The last paragraph points to --help.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    if not re.search(_RULE, text):
        return " ".join(text.split())
    _title, *rows = (line.strip(" │╰╯") for line in text.splitlines())
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(_RULE, "\n".join(rows))]
    texts = [paragraph for paragraph in paragraphs if paragraph and not paragraph.startswith("For full helptext")]
    line = re.sub(r"^Error parsing (--\S+): ", r"\1: ", texts[0])
    flags = re.findall(r"(--\S+ (?:[A-Z]+|\{[^}]*\}))", " ".join(texts[1:]))
    if texts[1:] and texts[1].startswith("Argument helptext") and flags:
        return f"{line}; takes {flags[0]}"
    return f"{line}; did you mean {' or '.join(flags)}?" if flags else line
