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

from jgraph.cli import File, run_options, write_file

_PROG = "jgraph.report"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run directories of `python -m jgraph.train`."""
    to: File = None
    """The file to write; report.html of the first run by default."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, as `jgraph.cli.run`."""
    return run_options(Options, write, _PROG, __doc__, argv, positional="runs")


def write(options: Options) -> None:
    """Writes the page. Raises JgraphError, OSError."""
    from jgraph.page import render
    from jgraph.report.runs import compared

    page, to = render("jgraph.report", compared(options.runs)), options.to or options.runs[0] / "report.html"
    write_file("to", to, lambda path: path.write_text(page, encoding="utf-8"))
    print(f"written to {to}")


if __name__ == "__main__":
    sys.exit(main())
