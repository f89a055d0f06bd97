"""The benchmarks from one command: which there are, running one, comparing two results, and README's tables.

python -m benchmarks list
python -m benchmarks run fsdp --work gpt-1b3            # flags are the benchmark's own; so is --help
python -m benchmarks compare before.json after.json
python -m benchmarks show results/
python -m benchmarks readme --check
"""

import os
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import runner
from benchmarks.compare import ResultsError, compare, distinct, read
from benchmarks.readme import write_readme
from benchmarks.rows import fastest, named, ratio
from benchmarks.runner import benchmark_of, found, soaks
from jgraph.cli.parse import one_line
from jgraph.errors import JgraphError


@dataclass(frozen=True)
class List:
    """Every benchmark, with the results it has left."""


@dataclass(frozen=True)
class Run:
    """Run a benchmark; the flags after its name are its own."""

    name: tyro.conf.Positional[str]
    """As `list` has it."""


@dataclass(frozen=True)
class Compare:
    """Times of two results files, row by row."""

    a: tyro.conf.Positional[Path]
    """What was before."""
    b: tyro.conf.Positional[Path]
    """What is now."""


@dataclass(frozen=True)
class Show:
    """Every row of the results in a folder, short: its time, PyTorch's fastest and ours over it by rounds, what failed."""

    folder: tyro.conf.Positional[Path]
    """As `--out` of a benchmark."""


@dataclass(frozen=True)
class Readme:
    """Write README's tables of speed from benchmarks/results."""

    check: bool = False
    """Write nothing; exit code 1 where README is not what would be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        Exit code: 0 when done, 1 where README has drifted, 2 for input that cannot work (one line on stderr). A benchmark
        may end the process with a code of its own.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    own, rest = (argv[:2], argv[2:]) if argv[:1] == ["run"] else (argv, [])
    commands = {"list": List, "run": Run, "compare": Compare, "show": Show, "readme": Readme}
    parse = tyro.extras.subcommand_cli_from_dict
    try:
        command: Any = one_line(lambda: parse(commands, prog="python -m benchmarks", description=__doc__, args=own))
        match command:
            case List():
                show(("benchmark", "results", "date", "device", "revision", "what"), listed())
            case Run(name) if name not in (scripts := found()):
                raise ResultsError(f"no benchmark is named {name}; there are: {', '.join(scripts)}")
            case Compare(a, b):
                told, rows = compare(a, b)
                print("\n".join(told))
                show(("row", "A ms", "B ms", "B/A", "B is"), rows)
            case Show(folder):
                show(("work", "row", "ms", "torch / it", "it / jgraph", "failed"), shown(folder))
            case Readme(check):
                return write_readme(check)
            case _:
                pass
    except (JgraphError, OSError) as e:
        print(f"benchmarks: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    if isinstance(command, Run):  # out here: what fails in it keeps its traceback
        sys.argv = [command.name, *rest]
        runpy.run_module(f"benchmarks.{command.name}", run_name="__main__", alter_sys=True)
    return 0


def show(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(box=box.MARKDOWN, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("A ms", "B ms", "B/A") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    # A pipe has no width, and what reads it wants a row in a line.
    if table.row_count:
        Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000).print(table)


def listed() -> Iterator[list[str]]:
    """A row for each results file; of a benchmark that has none, one all the same."""
    scripts = found()
    files: dict[str, list[Path]] = {name: [] for name in scripts}
    for file in sorted(runner.RESULTS.glob("*.json")):
        files.setdefault(benchmark_of(file.stem, scripts), []).append(file)
    for name, own in files.items():
        for nth, file in enumerate(own):
            try:
                facts = [distinct(read(file).values(), key) for key in ("date", "device", "revision")]
            except ResultsError:
                facts = ["not readable", "", ""]
            yield [name, file.name, *facts, "" if nth else scripts.get(name, "")]
        if not own:
            yield [name, "", "", "", "", scripts[name]]


def shown(folder: Path) -> Iterator[list[str]]:
    for file in sorted(folder.glob("*.json")):
        for work, result in read(file).items():
            peer, ours = (fastest(result["rows"], system) for system in ("torch", "jgraph"))
            for row in result["rows"]:
                told = [f"{row['ms']:.3f}" if "ms" in row else "", ratio(peer, row), ratio(row, ours)]
                yield [f"{file.stem} {work}", named(row)[:60], *told, row.get("failed", "")[:100]]
        if file.stem == "soaks":
            yield from ([cells[0], *cells[2:6], cells[7]] for cells in soaks(read(file)))
