"""Look at runs, one or several side by side.

    python -m jgraph.report runs/first
    python -m jgraph.report runs/first runs/second --to compared.html

Writes one HTML file, which needs nothing else and opens anywhere: curves of loss, held-out loss, learning rate, gradient norm,
tokens a second and memory, texts, and what differs between the configurations. The runs may be going on.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import File, run_options
from jgraph.errors import os_errors

_PROG = "python -m jgraph.report"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories of `python -m jgraph.train`."""
    to: File = None
    """The file to write; report.html of the first run by default."""


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run_options(Options, write, prog, __doc__, argv, positional="runs")


def write(options: Options) -> None:
    """Writes the page. Raises JgraphError, OSError."""
    from jgraph.page import render
    from jgraph.report.runs import compared

    page, to = render("jgraph.report", compared(options.runs)), options.to or options.runs[0] / "report.html"
    with os_errors("to", to):
        to.write_text(page, encoding="utf-8")
    print(f"written to {to}")


if __name__ == "__main__":
    sys.exit(main())
