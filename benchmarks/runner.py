"""The runner that all benchmarks share: common flags, timing, results files and soaks.

A benchmark declares its works, the candidates of each work, and the columns of its table. Each candidate is a separate process:
`programs/` has those of jgraph, `peers/` those of PyTorch and plain JAX, and `peers/protocol.py` defines their protocol.
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
from benchmarks.harness import count_gpus
from benchmarks.rows import Row, unknown_keys
from benchmarks.tables import Section, comparison, markdown, number
from benchmarks.turns import Candidate, TimingOptions, race, run_once

RESULTS = Path(__file__).parent / "results"
SOAK_HEADS = [
    "work",
    "devices",
    "steps",
    "median step, ms",
    "slowest step, ms",
    "device memory, bytes, growth",
    "host memory, bytes, growth",
    "outcome",
    "date",
]


@dataclass(frozen=True, kw_only=True)
class Options(TimingOptions):
    """Flags of every benchmark."""

    sizes: Literal["full", "tiny"] = "full"
    """Use `tiny` on a machine without a GPU."""
    revision: str = ""
    """Git revision to store in the results, for a copy of the sources without .git."""
    out: str = ""
    """Folder of the results. Default: benchmarks/results."""
    name: str = ""
    """File name of the results: NAME.json and NAME.md. Default: the name of the benchmark."""

    @property
    def file(self) -> Path:
        """Path of the results file."""
        return Path(self.out or RESULTS) / f"{self.name}.json"


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """Flags of benchmarks that time a training step."""

    categories: bool = False
    """Also measure the time of jgraph by category, from a short profile of the step without CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class VariantOptions(TraceOptions):
    """Flags of benchmarks that time a training step in variants of jgraph."""

    first: str = ""
    """jgraph variant that runs in every round. Default: the preset."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A further jgraph variant, NAME=VALUE[ NAME=VALUE ...], with the settings of `benchmarks.works.vary`. May be repeated."""

    @property
    def variants(self) -> list[str]:
        """The jgraph variants, in the order of their rows."""
        return list(dict.fromkeys((self.first, "", *self.variant)))


@dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    """Flags of benchmarks that can run a soak: many steps, watched for hangs and memory growth."""

    soak: int = 0
    """Run this many steps of the first variant of each work, store the outcome in soaks.json, and time nothing."""
    soak_against: Literal["auto", "nothing"] = "auto"
    """auto: repeat the steps with graph auto and compare the losses. nothing: skip the comparison."""
    hang_seconds: float = 60.0
    """Maximum duration of a step in a soak. A longer step counts as a hang."""


@dataclass(frozen=True, kw_only=True)
class MultiGPUOptions(Options):
    """Flags of benchmarks that train on several GPUs."""

    ranks: int = 0
    """Number of GPUs. 0 uses all."""
    graph: Literal["auto", "off", "full"] = "auto"
    """CUDA graph capture, like `--graph` of `python -m jgraph.train`."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """XLA option NAME=VALUE for all jgraph programs. May be repeated."""

    @property
    def num_ranks(self) -> int:
        """Number of GPUs, or of fake CPU devices."""
        import jax  # here, because it takes a second

        return self.ranks or count_gpus() or len(jax.devices())


@dataclass(frozen=True)
class Work:
    """A workload and the candidates that are timed on it.

    Attributes:
        name: Key of the work in the results file.
        facts: Keys of its result beside `rows`: `ranks`, and `config` or `size`.
        groups: Candidates that are timed in the same rounds. The first of each group is jgraph.
        rows: Rows that are not timed in rounds.
        building: Maximum number of processes of a group that build in parallel. 0 for all.
    """

    name: str
    facts: Row
    groups: Sequence[Sequence[Candidate]] = ()
    rows: Iterable[Row] = ()
    building: int = 1


@dataclass(frozen=True)
class Benchmark:
    """Declaration of a benchmark.

    Attributes:
        title: Heading of its results page.
        description: Text of --help.
        options: Class of its flags.
        works: Yields the works that the options select.
        section: Returns the table layout of a work, given its name and result.
    """

    title: str
    description: str | None
    options: type[Options]
    works: Callable[[Any], Iterable[Work]]
    section: Callable[[str, Row], Section]

    def main(self, name: str, flags: Sequence[str]) -> int:
        """Runs the benchmark with command-line flags, and returns the exit code."""
        program = f"python -m benchmarks run {name}"
        options: Any = tyro.cli(self.options, prog=program, description=self.description, args=flags)
        options = replace(options, name=options.name or name)
        if getattr(options, "soak", 0):
            return self._soak(options)
        results = Results(options, self.draw)
        for work in self.works(options):
            run(work, options, results)
        print(results)
        return 0

    def draw(self, works: Row) -> str:
        """Returns the results page in Markdown."""
        parts = [comparison(works)] if comparison(works) else []
        parts += [self.section(name, result).draw(result) for name, result in works.items()]
        return f"# {self.title}\n\n" + "\n".join("\n".join(lines) + "\n" for lines in parts)

    def _soak(self, options: Any) -> int:
        results, status = Results(replace(options, name="soaks"), soaks_page), 0
        for work in self.works(options):
            variant = next(iter(options.variant), "")
            ours = next(one for group in work.groups for one in group if one.labels["variant"] == variant)
            graph = ours.request.get("config", ours.request).get("graph", "auto")
            parts = [f"{options.name} {work.name}", ours.labels.get("schedule"), variant, f"graph {graph}"]
            name = ", ".join(filter(None, parts))
            results.begin(name, graph=graph, **work.facts)
            soak_request = {"steps": options.soak, "hang_seconds": options.hang_seconds}
            row = run_once(ours, timeout=options.timeout, soak=soak_request) | {"steps": options.soak}
            losses = row.pop("losses", [])
            results.put(name, [row])
            if losses and graph != options.soak_against == "auto":
                plain = replace(ours, request=ours.request | {"config": ours.request["config"] | {"graph": "auto"}})
                other = run_once(plain, timeout=options.timeout, soak=soak_request)
                error = {"failed": f"with graph auto: {other['failed']}"} if "failed" in other else {}
                row |= error or loss_difference(losses, other["losses"])
                results.put(name, [row])
            status |= "failed" in row
        print(results)
        return status


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> Row:
    """Compares the losses of two runs: the largest difference, NaN if any is, and the first step with a difference."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    first = next((step for step, difference in enumerate(differences) if difference != 0), None)
    return {"differs": max(differences, key=lambda difference: (math.isnan(difference), difference)), "first_differs": first}


def run(work: Work, options: Options, results: "Results") -> None:
    """Times a work and stores its rows after every build and round."""
    results.begin(work.name, **work.facts)
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
    """Returns the first docstring line of every module that defines `BENCHMARK`. Parses the files, because imports load jax."""
    files = sorted(file for folder in benchmarks.__path__ for file in Path(folder).glob("*.py"))
    scripts = {file.stem: source for file in files if "\nBENCHMARK = " in (source := file.read_text())}
    return {name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0] for name, source in scripts.items()}


def benchmark_of(stem: str, scripts: Iterable[str]) -> str:
    """Returns the benchmark that wrote a results file, named NAME, NAME and a number, NAME_SUFFIX, or both.

    Of several matching names it is the longest. Without one, it is `stem` without its number.
    """
    matching = (name for name in scripts if re.match(rf"{name}\d*(_|$)", stem))
    return max(matching, key=len, default=stem.rstrip("0123456789"))


class Results:
    """The results of a file, by work. Keeps the works of earlier runs until they run again.

    Args:
        options: Flags of the benchmark. They define the path of the file.
        draw: Returns the results page in Markdown.
    """

    def __init__(self, options: Options, draw: Callable[[Row], str]):
        self.options, self.draw = options, draw
        self.works: dict[str, Any] = json.loads(options.file.read_text())["works"] if options.file.exists() else {}

    def begin(self, work: str, **more: Any) -> None:
        """Starts a new result. `more` are its keys beside the rows."""
        facts = {"environment": environment(revision=self.options.revision), "options": asdict(self.options)}
        self.works[work] = {**facts, **more, "device": None, "rows": []}

    def put(self, work: str, rows: list[Row]) -> None:
        """Replaces the rows of a work, and writes the JSON file and the page. Each key of a row must be in the schema."""
        for row in rows:
            assert not unknown_keys(row), f"add {unknown_keys(row)} to FIELDS in benchmarks/rows.py"
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
    """Returns the date, the versions and the git revision. A nonempty `revision` replaces the one of git."""
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


def soak_rows(works: Row) -> Iterator[list[str]]:
    """Yields the cells under `SOAK_HEADS`, one row per soak."""
    for name, result in works.items():
        (row,) = result["rows"]
        grown = []
        for place in ("device", "host"):
            first, last = row.get(f"first_{place}_bytes"), row.get(f"{place}_bytes")
            grown += ["not recorded" if first is None or last is None else f"{last:,}, {last - first:+,}"]
        facts = ["constant loss" if row["same_loss"] else "loss changed"] if "same_loss" in row else []
        facts += [f"loss {row['loss']}"] if "loss" in row else []
        facts += [f"skipped steps: {row['skipped']}"] if "skipped" in row else []
        if "late" in row:
            facts += [f"steps over twice the median: {row['late']}"]
        if "differs" in row:
            first = row["first_differs"]
            facts += ["losses bitwise equal to graph auto"]
            if first is not None:
                facts[-1] = f"losses differ from graph auto by up to {row['differs']:.2g}, from step {first} on"
        cells = [name, row.get("device", ""), f"{row.get('done', 0)} of {row['steps']}"]
        cells += [number("ms")(row), number("slowest_ms")(row), *grown]
        yield [*cells, row.get("failed") or ", ".join(["no hang", *facts]), result["environment"]["date"][:10]]


def soaks_page(works: Row) -> str:
    """Returns the results page of the soaks in Markdown."""
    return "\n".join(["# Soak runs", "", *markdown(SOAK_HEADS, soak_rows(works))]) + "\n"
