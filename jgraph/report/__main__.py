"""Compare the curves and settings of runs on one HTML page.

    python -m jgraph.report runs/first
    python -m jgraph.report runs/first runs/second --to compared.html

The page needs no server and no other file. It shows the curves of loss, held-out loss, learning rate, gradient norm, tokens per
second and memory, the sampled texts, and the settings that differ. Runs can be reported while they train.
"""

from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import File, command
from jgraph.errors import os_errors
from jgraph.exits import end_with
from jgraph.page import render
from jgraph.report._runs import compared


def report(
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")], /, *, to: File = None
) -> None:
    """Writes the HTML page and prints its path. Does not change the runs.

    Args:
        runs: Run directories of `python -m jgraph.train`, at least one.
        to: HTML file to write, replaced if it exists; by default report.html in the first run directory.

    Raises:
        ConfigError: If there is no directory, a directory has no config.json, or the file cannot be written.
    """
    page = render("jgraph.report", compared(runs))
    to = to or runs[0] / "report.html"
    with os_errors("to", to):
        to.write_text(page, encoding="utf-8")
    print(f"written to {to}")


main = command("python -m jgraph.report", __doc__, report)

if __name__ == "__main__":
    end_with(main)
