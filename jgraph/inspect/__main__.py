"""Inspect schedules and compiled programs before they run.

    python -m jgraph.inspect schedule zb-h1 --pp 4 --microbatches 8
    python -m jgraph.inspect schedule aligned --pp 4 --microbatches 16 --chunks 2 --costs 1,1.1,0.8 --svg aligned.svg
    python -m jgraph.inspect schedule --order my_schedule.csv --json numbers.json
    python -m jgraph.inspect capture jgraph_models.gpt:gpt_124m --target h200
    python -m jgraph.inspect capture my_module:my_example --graph full --json report.json

`schedule` does not import jax. `capture` needs jax; with --target it needs no GPU.
"""

import functools
import io
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from jgraph.cli import FlagConsole, fields_of, parse, run
from jgraph.inspect.capture import CaptureOptions, show_capture
from jgraph.inspect.schedule import ScheduleOptions, show_schedule

_PROG = "python -m jgraph.inspect"
_FIELDS = fields_of(ScheduleOptions) | fields_of(CaptureOptions)
# Columns if the output is not a terminal.
_PIPE_WIDTH = 100


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
    options = parse({"schedule": ScheduleOptions, "capture": CaptureOptions}, prog, __doc__, args)
    if isinstance(options, ScheduleOptions):
        show_schedule(options, _console())
    elif isinstance(options, CaptureOptions):
        show_capture(options, _console())


def _console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Replace dots and lines by question marks if the encoding lacks them, instead of raising.
        sys.stdout.reconfigure(errors="replace")
    return FlagConsole(_FIELDS, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
