"""One runner for all benchmarks: the options they share, running one, its results, its table.

A benchmark says which works there are, who takes part in each, and how its rows are drawn. Who takes part is a process of its
own: ours are in `programs/`, PyTorch's in `peers/`, and `peers/protocol.py` says how they are request.
"""

import ast
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tyro

import benchmarks
from benchmarks.rows import Row, unknown_keys
from benchmarks.tables import Section, comparison, markdown, number
from benchmarks.turns import Candidate, TimingOptions, ask, race

RESULTS = Path(__file__).parent / "results"
SOAKS = ["what", "device", "steps", "median ms", "slowest", "bytes on the devices, growth", "of the process", "", "date"]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """Holds the flags of every benchmark."""

    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    out: str = ""
    """Folder for the results; benchmarks/results if it is left out."""
    name: str = ""
    """Results go to NAME.json and .md there; the benchmark's own name if it is left out."""

    @property
    def file(self) -> Path:
        """The file of its results."""
        return Path(self.out or RESULTS) / f"{self.name}.json"


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """Adds the flags of benchmarks of a training step."""

    categories: bool = False
    """Tell jgraph's time by category too, from a short trace of the step without capture."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    """Adds the flags of benchmarks whose works can be soaked."""

    soak: int = 0
    """Steps of each work, by the first variant if there is one, watched for memory and hangs, into soaks.json; nothing else is
    run."""
    soak_against: Literal["auto", "nothing"] = "auto"
    """Whether a soak's losses are compared with those of the same steps with graph auto, which run after it."""
    hang_seconds: float = 60.0
    """Longest time of a step of a soak."""


@dataclass(frozen=True, kw_only=True)
class MultiGPUOptions(Options):
    """Adds the flags of benchmarks of training on several GPUs."""

    ranks: int = 0
    """GPUs that take part; 0 for all that there are."""
    graph: Literal["auto", "off", "full"] = "auto"
    """What is captured, as in `python -m jgraph.train`."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for all of jgraph's programs; may be repeated."""


@dataclass(frozen=True)
class Work:
    """Names a work, and who takes part in it.

    Attributes:
        about: what its result has beside rows: `ranks`, and `config` or `size`.
        groups: processes that take turns with each other; the first of each is ours.
        rows: rows of processes that are not timed against each other, or of no process.
        building: most processes of a group that build at once; 0 for all.
    """

    name: str
    about: Row
    groups: Sequence[Sequence[Candidate]] = ()
    rows: Iterable[Row] = ()
    building: int = 1


@dataclass(frozen=True)
class Benchmark:
    """Declares a benchmark: a script's works, who takes part, and how its rows are drawn.

    Attributes:
        title: the heading of its table.
        about: the text of --help.
        options: its flags, with defaults.
        works: yields the works that the options ask for.
        section: says how a work of that name is drawn, from its result.
    """

    title: str
    about: str | None
    options: type[Options]
    works: Callable[[Any], Iterable[Work]]
    section: Callable[[str, Row], Section]

    def main(self, name: str, flags: Sequence[str]) -> int:
        """Runs the benchmark, whose results have this name if no flag says another; returns the exit status."""
        options: Any = tyro.cli(self.options, prog=f"python -m benchmarks run {name}", description=self.about, args=flags)
        options = replace(options, name=options.name or name)
        if getattr(options, "soak", 0):
            return self._soak(options)
        results = Results(options, self.draw)
        for work in self.works(options):
            run(work, options, results)
        print(results)
        return 0

    def draw(self, works: Row) -> str:
        parts = [comparison(works)] if comparison(works) else []
        parts += [self.section(name, result).draw(result) for name, result in works.items()]
        return f"# {self.title}\n\n" + "\n".join("\n".join(lines) + "\n" for lines in parts)

    def _soak(self, options: Any) -> int:
        results, status = Results(replace(options, name="soaks"), draw_soaks), 0
        for work in self.works(options):
            variant = next(iter(options.variant), "")
            ours = next(one for group in work.groups for one in group if one.labels["variant"] == variant)
            graph = ours.request.get("config", ours.request).get("graph", "auto")
            told = [f"{options.name} {work.name}", ours.labels.get("schedule"), variant, f"graph {graph}"]
            name = ", ".join(filter(None, told))
            results.begin(name, graph=graph, **work.about)
            soak_request = {"steps": options.soak, "hang_seconds": options.hang_seconds}
            row = ask(ours, timeout=options.timeout, soak=soak_request) | {"steps": options.soak}
            losses = row.pop("losses", [])
            results.put(name, [row])
            if losses and graph != options.soak_against == "auto":
                plain = replace(ours, request=ours.request | {"config": ours.request["config"] | {"graph": "auto"}})
                other = ask(plain, timeout=options.timeout, soak=soak_request)
                why = {"failed": f"with graph auto: {other['failed']}"} if "failed" in other else {}
                row |= why or loss_difference(losses, other["losses"])
                results.put(name, [row])
            status |= "failed" in row
        print(results)
        return status


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> Row:
    """Returns the largest difference of losses on the same batches, and the first step that has one or is not a number."""
    found = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    first = next((step for step, difference in enumerate(found) if difference != 0), None)
    return {"differs": max(found, key=lambda difference: (math.isnan(difference), difference)), "first_differs": first}


def run(work: Work, options: Options, results: "Results") -> None:
    results.begin(work.name, **work.about)
    done: list[Row] = []

    def save(rows: list[Row]) -> None:
        results.put(work.name, [*done, *rows])

    for row in work.rows:
        done.append(row)
        save([])
    numbers = count()
    for group in work.groups:
        done += race(group, save, options, building=work.building, numbers=numbers)


def find_benchmarks() -> dict[str, str]:
    """Returns every module with a `BENCHMARK`, and the first line of its docstring. Read, not imported: most import jax."""
    files = sorted(file for folder in benchmarks.__path__ for file in Path(folder).glob("*.py"))
    scripts = {file.stem: source for file in files if "\nBENCHMARK = " in (source := file.read_text())}
    return {name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0] for name, source in scripts.items()}


def benchmark_of(stem: str, scripts: Iterable[str]) -> str:
    """Returns the benchmark that a results file is of; --name is free, but begins so by custom, then a number, `_` or both."""
    matching = (name for name in scripts if re.match(rf"{name}\d*(_|$)", stem))
    return max(matching, key=len, default=stem.rstrip("0123456789"))


class Results:
    """Holds results by work, written whenever there are more; what an earlier run left stays until its work is run again."""

    def __init__(self, options: Options, draw: Callable[[Row], str]):
        self.options, self.draw = options, draw
        self.works: dict[str, Any] = json.loads(options.file.read_text())["works"] if options.file.exists() else {}

    def begin(self, work: str, **about: Any) -> None:
        told = {"environment": environment(revision=self.options.revision), "options": asdict(self.options)}
        self.works[work] = {**told, **about, "device": None, "rows": []}

    def put(self, work: str, rows: list[Row]) -> None:
        """Stores all rows of a work, as far as they are known."""
        for row in rows:
            assert not unknown_keys(row), f"benchmarks/rows.py does not tell of {unknown_keys(row)}"
        result = self.works[work]
        result["rows"] = rows
        result["device"] = next((row["device"] for row in rows if row["system"] != "torch" and "device" in row), None)
        file = self.options.file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"works": self.works}, indent=2) + "\n")
        file.with_suffix(".md").write_text(str(self))

    def __str__(self) -> str:
        return self.draw(self.works)


def environment(*, revision: str = "") -> Row:
    """Returns versions, date and git revision; `revision` where the tree travelled without its .git."""
    names = ("jax", "jaxlib", "flax", "optax", "torch", "torchao", "transformer_engine")
    installed = {name: metadata.version(name) for name in names if find_spec(name)}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "revision": revision or _git_revision(), "python": platform.python_version(), **installed}


def _git_revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def soaks(works: Row) -> Iterator[list[str]]:
    """Yields the cells of `SOAKS`."""
    for name, result in works.items():
        (row,) = result["rows"]
        grown = []
        for place in ("device", "host"):
            first, last = row.get(f"first_{place}_bytes"), row.get(f"{place}_bytes")
            grown += ["not told" if first is None or last is None else f"{last:,}, {last - first:+,}"]
        facts = [f"{key.replace('_', ' ')} {row[key]}" for key in ("same_loss", "loss", "skipped") if key in row]
        if "late" in row:
            facts += [f"{row['late']} steps of twice the median"]
        if "differs" in row:
            first = row["first_differs"]
            facts += ["losses bit by bit those of graph auto"]
            if first is not None:
                facts[-1] = f"losses up to {row['differs']:.2g} from those of graph auto, from step {first} on"
        cells = [name, row.get("device", ""), f"{row.get('done', 0)} of {row['steps']}"]
        cells += [number("ms")(row), number("slowest_ms")(row), *grown]
        yield [*cells, row.get("failed") or ", ".join(["no hang", *facts]), result["environment"]["date"][:10]]


def draw_soaks(works: Row) -> str:
    return "\n".join(["# Soaks", "", *markdown(SOAKS, soaks(works))]) + "\n"
