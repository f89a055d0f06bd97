"""Shared parts of the command lines: tyro parsers, exit codes and one-line errors that name flags.

The library names arguments (`model.num_heads`) in its errors. A command prints them as flags (`--model.num-heads`).
"""

import contextlib
import errno
import functools
import importlib
import inspect
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from tyro.constructors import PrimitiveConstructorSpec

from jgraph.errors import ConfigError, JgraphError, NonFiniteError, of_type
from jgraph.exits import leave

_T = TypeVar("_T")

HUNG = os.EX_TEMPFAIL
"""Exit code (75) of a command that timed out while waiting for its devices. The same command, run again, resumes."""
_MESSAGE_TIMEOUT_SECONDS = 60


def optional(kind: Callable[[str], _T], metavar: str) -> PrimitiveConstructorSpec[_T | None]:
    """Returns a tyro constructor of one value for a flag with the default None."""
    # Use it as `number: Annotated[int | None, optional(int, "INT")] = None`. Without it, tyro shows the flag as `{None}|INT` in
    # the help and in its errors.
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
    """Returns the names of the arguments that become flags: all except positional-only ones."""
    parameters = inspect.signature(kind).parameters.items()
    return {name for name, parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}


def flag(name: str) -> str:
    """Returns the command-line flag of a configuration field: `model.num_heads` -> `--model.num-heads`."""
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
    """Replaces field names in backticks by flags: "`num_heads`" by "--num-heads", and "`resume` off" by "--no-resume"."""

    def named(match: re.Match[str]) -> str:
        # The first part of a nested field decides, such as `model` of `model.num_heads`.
        if match[1].partition(".")[0] not in fields:
            return match[0]
        return flag(match[1]).replace("--", "--no-", 1) if match[2] else flag(match[1])

    return re.sub(r"`([a-z][a-z0-9_.]*)`( off)?", named, text)


class FlagConsole(Console):
    """A rich console that prints names of `fields` in backticks as flags. Raises BrokenPipeError if the reader is gone."""

    def __init__(self, fields: Collection[str] = (), **settings: Any):
        super().__init__(**settings)
        self.fields = fields

    def print(self, *objects: Any, **settings: Any) -> None:
        super().print(*(as_flags(o, self.fields) if isinstance(o, str) else o for o in objects), **settings)

    def on_broken_pipe(self) -> None:
        """Reraises the BrokenPipeError. rich calls this method while it handles the error, and would exit with code 1."""
        raise


@contextlib.contextmanager
def phase(name: str, console: Console | None = None, *, at_stop: Callable[[], str] | None = None) -> Iterator[None]:
    """Shows that a phase of a command takes seconds: on stderr by default, because stdout has the result of a command.

    A terminal has a line with the elapsed time, and at the end the final time. A log has one line: on stdout the name at the
    start, on stderr the final time, because a command that fails prints one line there.

    With `at_stop`, SIGINT and SIGTERM end the process at once, also while XLA compiles: one line names the phase and has the
    result of `at_stop`, which another thread calls to release what the process holds. Only for phases that change nothing.
    """
    console = console or FlagConsole(stderr=True)
    is_live = console.is_interactive and not console.quiet
    # Other output goes above the live line, unless one of the streams is a file.
    redirect = sys.stdout.isatty() and sys.stderr.isatty()
    columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    live = Progress(
        *columns, console=console, transient=True, disable=not is_live, redirect_stdout=redirect, redirect_stderr=redirect
    )
    live.add_task(name, total=None)

    def stop(number: int) -> None:
        def say() -> None:
            live.stop()
            text = f"stopped by {signal.Signals(number).name} while {name}{at_stop() if at_stop else ''}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        _exit_at_once(128 + number, say)

    start = time.perf_counter()
    prints_end = is_live or console.stderr
    if not prints_end:
        console.print(name, markup=False, highlight=False, soft_wrap=True)
    with live, _stops(stop) if at_stop else contextlib.nullcontext():
        yield
    if prints_end:
        text = f"{name}: {time.perf_counter() - start:.1f} s"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def interruptible(name: str) -> contextlib.AbstractContextManager[None]:
    """A `phase` of a command that only reads files: Ctrl-C ends the command at once."""
    return phase(name, at_stop=lambda: "")


@contextlib.contextmanager
def _stops(act: Callable[[int], object]) -> Iterator[None]:
    """Calls `act` from another thread with SIGINT or SIGTERM, also while the main thread is in a call of XLA."""
    # Python runs its handlers in the main thread, when the call returns. It writes the number of the signal to this pipe at
    # once. A thread in `signal.sigwait` would need all threads of XLA to block the signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1)[0]:
            if number in (signal.SIGINT, signal.SIGTERM):
                act(number)

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    previous = signal.set_wakeup_fd(writer)
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        os.write(writer, b"\0")
        watcher.join()
        os.close(reader)
        os.close(writer)


def run(
    prog: str, act: Callable[[list[str]], int | None], argv: Sequence[str] | None = None, fields: Collection[str] = ()
) -> int:
    """Runs a command, and converts its errors into an exit code and one line on stderr that names flags."""
    # The exit code is that of `act`; 1 for a loss or gradient that is not finite; 2 for other errors of jgraph and the
    # operating system; 130 after Ctrl-C; 141 if the reader of stdout has closed it, as in `| head`. Other exceptions pass.
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Prints a question mark for each character that the encoding lacks, instead of raising.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = act(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError as e:
        # Python flushes stdout at exit and would print a second error about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code(e)
    except (JgraphError, OSError) as e:
        message = str(e)
        if isinstance(e, OSError) and e.filename is None and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message = f"standard output or a temporary file cannot be written: {e.strerror}"
        print(_error_line(prog, message, fields), file=sys.stderr)
        return exit_code(e)
    except KeyboardInterrupt as e:
        return exit_code(e)  # without a message


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a command that ends with an exception."""
    match error:
        case BrokenPipeError():
            return 128 + signal.SIGPIPE
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case JgraphError() | OSError() if not isinstance(error, NonFiniteError):
            return 2
    return 1


def _error_line(prog: str, message: str, fields: Collection[str]) -> str:
    return f"{prog.removeprefix('python -m ')}: error: {as_flags(' '.join(message.split()), fields)}"


def end_at_once(prog: str, describe: Callable[[], str], fields: Collection[str] = ()) -> NoReturn:
    """Prints an error line to stderr and ends the process with exit code 75 (`HUNG`). Callable from any thread."""
    _exit_at_once(HUNG, lambda: print(_error_line(prog, describe(), fields), file=sys.stderr, flush=True))


def _exit_at_once(code: int, say: Callable[[], object]) -> NoReturn:
    """Calls `say` and ends the process with an exit code."""
    # Other threads are not unwound and exit handlers do not run: the interpreter's own shutdown would block on a device that
    # does not respond, and on a compilation. Neither a slow `say` nor a blocked pipe may keep the process alive.
    deadline = threading.Timer(_MESSAGE_TIMEOUT_SECONDS, os._exit, [code])
    deadline.daemon = True
    deadline.start()
    try:
        say()
    finally:
        leave(code)


def command(prog: str, about: str | None, *acts: Callable[..., None]) -> Callable[..., int]:
    """Returns `main(argv=None, prog=prog)`, which parses the arguments of a function with tyro, and `run`s it."""

    # With several `acts`, each is a subcommand. Each argument of a function is a flag; positional-only arguments are positional
    # on the command line, too. The `Args` of the docstring become the help of the flags, and its summary replaces a missing
    # `about`.
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
    """Parses arguments with tyro. Returns the instance or the result of `kind`, or None after it printed the help."""
    # `kind` is a dataclass or function, or a dictionary of them by subcommand; only the selected one is called. `elsewhere` has
    # the flag to use instead of a flag of other programs, for the error.
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
    """Reduces tyro's error box to one line: the first paragraph, and the suggested flag."""
    # tyro has no public structure for parse errors. The box is a title and paragraphs between horizontal rules, in Unicode or
    # ASCII. The last paragraph points to --help.
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    if not re.search(_RULE, text):
        return " ".join(text.split())
    _title, *rows = (line.strip(" │╰╯") for line in text.splitlines())
    paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(_RULE, "\n".join(rows))]
    texts = [paragraph for paragraph in paragraphs if paragraph and not paragraph.startswith("For full helptext")]
    line = re.sub(r"^Error parsing (--\S+): ", r"\1: ", texts[0])
    line = re.sub(r"no type matching .* instantiated from \[(.*?)\]\. Got errors: .*", r"invalid value \1", line)
    flags = re.findall(r"(--\S+ (?:[A-Z]+|\{[^}]*\}|\|)+)", " ".join(texts[1:]))
    if texts[1:] and texts[1].startswith("Argument helptext") and flags:
        return f"{line}; takes {flags[0]}"
    return f"{line}; did you mean {' or '.join(flags)}?" if flags else line


def find(name: str) -> Callable[..., Any]:
    """Imports a class or a function by its name, MODULE:NAME or FILE.py:NAME. Raises ConfigError if there is none."""
    module, _, attribute = name.rpartition(":")
    if not module:
        raise ConfigError(f"{name!r} must be MODULE:NAME or FILE.py:NAME", field="name")
    imported = _importable(Path(module).resolve()) if module.endswith(".py") else module
    try:
        found = getattr(importlib.import_module(imported), attribute, None)
    except (Exception, SystemExit) as e:  # the import of a user module may raise any exception
        raise ConfigError(f"{module} cannot be imported: {reason(e)}", field="name") from e
    if not callable(found):
        problem = f"has no {attribute!r}" if found is None else f"has {attribute!r}, {of_type(found)}"
        raise ConfigError(f"{module} {problem}: must be a class or a function", field="name")
    return found


def _importable(path: Path) -> str:
    """Makes a file and the modules beside it importable, as for `python FILE.py`. Returns the name of its module."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: pass an existing FILE.py:NAME", field="name")
    for name, module in list(sys.modules.items()):
        known, beside = getattr(module, "__file__", None), path.with_name(f"{name}.py")
        # Python would use the imported module. A file beside `path` may have the name of a module of Python without harm.
        is_meant = name == path.stem or name not in sys.stdlib_module_names
        if is_meant and name != "__main__" and beside.is_file() and not (known and beside.samefile(known)):
            other = known or f"a module of Python named {name!r}"
            raise ConfigError(f"{beside} cannot be imported beside {other}: rename one of them", field="name")
    if sys.path[0] != (folder := str(path.parent)):
        sys.path.insert(0, folder)
    return path.stem


def example(name: str, made: object, *, also: str = "") -> tuple[Callable[..., Any], Sequence[Any], int | Sequence[int]]:
    """Returns function, arguments and `donate_argnums` of an example, the result `made` of a user function.

    `also` names other results that the command takes, for the error.
    """
    match made:
        case (fn, (*args,), *donated) if callable(fn) and len(donated) <= 1:
            return fn, args, donated[0] if donated else ()
    must = f"{also}(fn, args) or (fn, args, donate_argnums), with args a tuple"
    raise ConfigError(f"{name}() returns {type(made).__name__}: must return {must}", field="name")


def reason(error: BaseException) -> str:
    """Describes an exception of user code in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
