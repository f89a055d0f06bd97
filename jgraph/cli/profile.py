"""See where a training step's time went.

    python -m jgraph.train --profile 10:13 --run-dir runs/first   # records, and writes the report
    python -m jgraph.profile runs/first                           # the report again, from what was recorded
    python -m jgraph.profile trace.xplane.pb --program step.txt   # of any jax program: a trace, and compiled.as_text()

Writes profile.html, which needs nothing else and opens anywhere, and profile.json.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from jgraph.cli.parse import FlagConsole, exit_code, fields_of, one_line
from jgraph.errors import ConfigError

_PROG = "jgraph.profile"


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
        if self.steps < 0:
            raise ConfigError(f"--steps is {self.steps}: must be 0 or the number of steps", field="steps")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        Exit code: 0 when done or asked for help, 2 for input that cannot work (one line on stderr), 130 after Ctrl-C.
    """
    args = list(sys.argv[1:] if argv is None else argv)

    def act() -> None:
        options = one_line(lambda: tyro.cli(Options, prog=f"python -m {_PROG}", description=__doc__, args=args))
        if options is not None:
            run(options, FlagConsole(fields_of(Options)))

    return exit_code(_PROG, act, fields_of(Options))


def run(options: Options, console: Console) -> None:
    """Raises JgraphError, OSError."""
    # Only now: jax takes its time.
    from jgraph.profile import report, summary

    path = Path(options.path)
    recorded = next((place for place in (path, path / "profile") if (place / "run.json").exists()), None)
    if recorded:
        if options.program or options.steps:
            raise ConfigError(f"{path} says everything: leave out --program and --steps", field="program")
        profile, out = report.of_run(recorded), recorded
    else:
        program = Path(options.program) if options.program else None
        profile = report.of_trace(path, program=program, steps=options.steps or None)
        out = path if path.is_dir() else path.parent
    summary.show(profile, console)
    files = report.write(profile, Path(options.out) if options.out else out)
    console.print(f"written to {', '.join(map(str, files))}", highlight=False, soft_wrap=True)
