"""Report the time of each kernel in a recorded training step.

    python -m jgraph.train --profile 10:13 --run-dir runs/first   # records, and writes the report
    python -m jgraph.profile runs/first                           # the report again, from the recording
    python -m jgraph.profile trace.xplane.pb --program step.txt   # of any jax program: a trace, and compiled.as_text()

Writes profile.json, and profile.html, a page in a single file.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import FlagConsole, fields_of, parse, run
from jgraph.errors import ConfigError, os_errors, require

_PROG = "python -m jgraph.profile"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    path: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_OR_TRACE")]
    """Run directory, *.xplane.pb, or directory that contains one."""
    out: str = ""
    """Output directory. Default: the directory of the recording or trace."""
    program: str = ""
    """For a trace: file with the text of the program, from compiled.as_text()."""
    steps: int = 0
    """For a trace: number of equal steps in it. 0: guessed."""

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
    """Writes the report and prints a summary."""
    options, console = parse(Options, prog, __doc__, args), FlagConsole(_FIELDS)
    if options is None:
        return
    # Imported after the options are checked, because importing jax is slow.
    from jgraph.profile import _summary, report

    path = Path(options.path)
    recorded = next((place for place in (path, path / "profile") if (place / "run.json").exists()), None)
    if recorded:
        if options.program or options.steps:
            raise ConfigError(f"{path} is a complete recording: omit `program` and `steps`", field="program")
        profile, out = report.of_run(recorded), recorded
    else:
        program = Path(options.program) if options.program else None
        profile = report.of_trace(path, program=program, steps=options.steps or None)
        out = path if path.is_dir() else path.parent
    _summary.show(profile, console)
    out = Path(options.out) if options.out else out
    with os_errors("out", out):
        files = report.write(profile, out)
    console.print(f"written to {', '.join(map(str, files))}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
