"""The benchmarks from one command: which there are, running one, comparing two results, and README's tables.

    python -m benchmarks list
    python -m benchmarks run fsdp --work gpt-1b3            # flags are the benchmark's own; so is --help
    python -m benchmarks compare before.json after.json
    python -m benchmarks show results/
    python -m benchmarks readme --check

A results file has rows of the schema in `benchmarks/rows.py`.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import tyro

from benchmarks import runner
from benchmarks.compare import ResultsError, compared, distinct, read
from benchmarks.readme import write_readme
from benchmarks.rows import fastest, named, ratio
from benchmarks.runner import benchmark_of, find_benchmarks, soaks
from benchmarks.tables import markdown
from jgraph.cli import parse
from jgraph.errors import JgraphError

Command = Callable[[], int | None]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        Exit code: 0 when done, 1 where README has drifted, 2 for input that cannot work (one line on stderr). A benchmark
        may end the process with a code of its own.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    own, rest = (argv[:2], argv[2:]) if argv[:1] == ["run"] else (argv, [])

    def list_() -> Command:
        """List every benchmark, with the results it has left."""
        return lambda: show(("benchmark", "results", "date", "device", "revision", "what"), listed())

    def run(name: tyro.conf.Positional[str]) -> Command:
        """Run a benchmark; the flags after its name are its own."""
        return lambda: start(name, rest)

    def compare(a: tyro.conf.Positional[Path], b: tyro.conf.Positional[Path]) -> Command:
        """Compare the times of two results files, row by row."""
        return lambda: show(("row", "A ms", "B ms", "B/A", "B is"), compared(a, b))

    def show_(folder: tyro.conf.Positional[Path]) -> Command:
        """Show every row of a folder's results: its time, PyTorch's fastest and ours over it by rounds, what failed or won."""
        return lambda: show(("work", "row", "ms", "torch / it", "it / jgraph", "failed, chosen"), shown(folder))

    def readme(*, check: bool = False) -> Command:
        """Write README's tables of speed, and all others, from benchmarks/results; or only check whether they have drifted."""
        return lambda: write_readme(check)

    commands = {"list": list_, "run": run, "compare": compare, "show": show_, "readme": readme}
    try:
        command = parse(commands, "benchmarks", __doc__, own)
        return (command() if command else 0) or 0
    except (JgraphError, OSError) as e:
        print(f"benchmarks: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2


def start(name: str, flags: list[str]) -> int:
    if name not in (scripts := find_benchmarks()):
        raise ResultsError(f"no benchmark is named {name}; there are: {', '.join(scripts)}")
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK.main(name, flags)


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table whose columns stand under each other; nothing where it has no rows."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    heads, *cells = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    if cells:
        print("\n".join(markdown(heads, cells)))


def listed() -> Iterator[list[str]]:
    """Yields a row for each results file; of a benchmark that has none, one all the same."""
    scripts = find_benchmarks()
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
                yield [f"{file.stem} {work}", named(row)[:60], *told, row.get("failed", row.get("chosen", ""))[:100]]
        if file.stem == "soaks":
            yield from ([cells[0], *cells[2:6], cells[7]] for cells in soaks(read(file)))
