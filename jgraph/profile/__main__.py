"""See where a training step's time went.

    python -m jgraph.train --profile 10:13 --run-dir runs/first   # records, and writes the report
    python -m jgraph.profile runs/first                           # the report again, from what was recorded
    python -m jgraph.profile trace.xplane.pb --program step.txt   # of any jax program: a trace, and compiled.as_text()

Writes profile.html, which needs nothing else and opens anywhere, and profile.json.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from jgraph.cli import FlagConsole, fields_of, parse, run
from jgraph.errors import ConfigError, os_errors, require

_PROG = "python -m jgraph.profile"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_OR_TRACE")]
    """A run directory, a *.xplane.pb, or a directory that has one."""
    out: str = ""
    """Where to write; by default beside what was recorded, or, for a trace, into the directory of the trace."""
    program: str = ""
    """For a trace: a file with the text of the program, as compiled.as_text() gives it."""
    steps: int = 0
    """For a trace: how many equal steps are in it; 0: guessed."""

    def __post_init__(self):
        require(self.steps >= 0, "steps", self.steps, "0 or the number of steps")


_FIELDS = fields_of(Options)


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run(prog, functools.partial(_run, prog=prog), argv, _FIELDS)


def _run(args: list[str], prog: str) -> None:
    options = parse(Options, prog, __doc__, args)
    if options is not None:
        show(options, FlagConsole(_FIELDS))


def show(options: Options, console: Console) -> None:
    """Writes and prints the report that is asked for. Raises JgraphError, OSError."""
    # Only now: jax takes its time.
    from jgraph.profile import report, summary

    path = Path(options.path)
    recorded = next((place for place in (path, path / "profile") if (place / "run.json").exists()), None)
    if recorded:
        if options.program or options.steps:
            raise ConfigError(f"{path} says everything: leave out `program` and `steps`", field="program")
        profile, out = report.of_run(recorded), recorded
    else:
        program = Path(options.program) if options.program else None
        profile = report.of_trace(path, program=program, steps=options.steps or None)
        out = path if path.is_dir() else path.parent
    summary.show(profile, console)
    out = Path(options.out) if options.out else out
    with os_errors("out", out):
        files = report.write(profile, out)
    console.print(f"written to {', '.join(map(str, files))}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
