"""Lists, runs and compares the benchmarks, and writes the tables of their results.

    python -m benchmarks list
    python -m benchmarks run fsdp --work gpt-1b3            # `run fsdp --help` shows the flags of the benchmark
    python -m benchmarks compare before.json after.json
    python -m benchmarks show results/
    python -m benchmarks readme --check

`benchmarks/rows.py` documents the schema of a results file.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import tyro

from benchmarks import runner
from benchmarks.compare import ResultsError, compare_files, distinct, read
from benchmarks.readme import write_readme
from benchmarks.rows import fastest, ratio, row_name
from benchmarks.runner import benchmark_of, find_benchmarks, soak_rows
from benchmarks.tables import markdown
from jgraph.cli import parse
from jgraph.errors import JgraphError

Command = Callable[[], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, 1 for an outdated page, 2 and a line on stderr for invalid input, or a benchmark's code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    own, rest = (argv[:2], argv[2:]) if argv[:1] == ["run"] else (argv, [])

    def list_() -> Command:
        """List all benchmarks and their results files."""
        return lambda: print_table(("benchmark", "results", "date", "device", "revision", "description"), list_rows())

    def run(name: tyro.conf.Positional[str]) -> Command:
        """Run a benchmark. Flags after NAME belong to the benchmark."""
        return lambda: run_benchmark(name, rest)

    def compare(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path]) -> Command:
        """Compare the times of two results files, row by row."""
        return lambda: print_table(("row", "A, ms", "B, ms", "B/A", "B is"), compare_files(a, b))

    def show_(folder: tyro.conf.Positional[Path]) -> Command:
        """Show all rows of the results in a folder: time, ratios to the fastest PyTorch and jgraph rows, and errors."""
        heads = ("work", "row", "ms", "fastest torch / row", "row / fastest jgraph", "error or choice")
        return lambda: print_table(heads, show_rows(folder))

    def readme(*, check: bool = False) -> Command:
        """Write the tables of README.md, notes/ and benchmarks/results/*.md, and the pictures, from the stored results.

        Args:
            check: Write nothing. Exit with code 1 if a page differs from the results.
        """
        return lambda: write_readme(check)

    commands = {"list": list_, "run": run, "compare": compare, "show": show_, "readme": readme}
    try:
        command = parse(commands, "benchmarks", __doc__, own)
        return (command() if command else 0) or 0
    except (JgraphError, OSError) as e:
        print(f"benchmarks: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2


def run_benchmark(name: str, flags: list[str]) -> int:
    """Runs a benchmark with its command-line flags, and returns its exit code."""
    if name not in (scripts := find_benchmarks()):
        raise ResultsError(f"unknown benchmark {name}; choose one of: {', '.join(scripts)}")
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK.main(name, flags)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints an aligned Markdown table. Prints nothing if there are no rows."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    heads, *cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    if cells:
        print("\n".join(markdown(heads, cells)))


def list_rows() -> Iterator[list[str]]:
    """Yields one table row per results file, and one for each benchmark without results."""
    scripts = find_benchmarks()
    files: dict[str, list[Path]] = {name: [] for name in scripts}
    for file in sorted(runner.RESULTS.glob("*.json")):
        files.setdefault(benchmark_of(file.stem, scripts), []).append(file)
    for name, own in files.items():
        for nth, file in enumerate(own):
            try:
                facts = [distinct(read(file).values(), key) for key in ("date", "device", "revision")]
            except ResultsError:
                facts = ["unreadable", "", ""]
            yield [name, file.name, *facts, "" if nth else scripts.get(name, "")]
        if not own:
            yield [name, "", "", "", "", scripts[name]]


def show_rows(folder: Path) -> Iterator[list[str]]:
    """Yields one table row per row of each results file in `folder`."""
    for file in sorted(folder.glob("*.json")):
        for work, result in read(file).items():
            peer, ours = (fastest(result["rows"], system) for system in ("torch", "jgraph"))
            for row in result["rows"]:
                times = [f"{row['ms']:.3f}" if "ms" in row else "", ratio(peer, row), ratio(row, ours)]
                yield [f"{file.stem} {work}", row_name(row)[:60], *times, row.get("failed", row.get("chosen", ""))[:100]]
        if file.stem == "soaks":
            yield from ([cells[0], *cells[2:6], cells[7]] for cells in soak_rows(read(file)))
