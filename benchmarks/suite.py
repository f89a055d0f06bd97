"""The benchmarks from one command: which there are, running one, comparing two results, and README's tables.

    python -m benchmarks list
    python -m benchmarks run fsdp --work gpt-1b3            # flags are the benchmark's own; so is --help
    python -m benchmarks compare before.json after.json
    python -m benchmarks show results/
    python -m benchmarks readme --check

Scripts write JSON of different shapes. `nodes` finds in any of them what was timed, by which name, on what and with what flags.
"""

import ast
import json
import os
import runpy
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import benchmarks
from benchmarks import harness
from jgraph.cli.parse import one_line
from jgraph.errors import JgraphError
from jgraph.training.config import TrainConfig

Row = dict[str, Any]

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
WITHIN = "within the spread"
_RATIO = "fastest PyTorch / jgraph"
_EXPECTED = "expected JSON as `python -m benchmarks run NAME` writes it to benchmarks/results"
_NOT_BY_HAND = ("__main__", "pipeline_program")  # the latter answers `pipeline`

_VERSIONS = ("python", "jax", "jaxlib", "flax", "optax", "torch")
_FACTS = ("date", "device", "revision", *_VERSIONS)
_SETTINGS = ("options", "config", "sizes", "size", "ranks", "pp", "microbatches", "chunks", "xla_options")
# Of those, what chooses rows or says where things go or when to give up does not alter what a row measures.
_IDLE_OPTIONS = (
    "name out revision table mode variant variants presets work parts pipelines schedules joins peers actions quick one_gpu "
    "rounds together soak hang_seconds timeout peer_timeout budget"
)
_IDLE_CONFIG = (
    "preset steps data run_dir resume log_every eval_every eval_batches checkpoint_every checkpoint_keep sample_tokens"
)
_IDLE = {f"options.{name}" for name in _IDLE_OPTIONS.split()}
_IDLE |= {f"config.{name}" for name in _IDLE_CONFIG.split()}
# Keys that only hold rows; fields that name a row beside the other keys that lead to it; fields that are times, in so many ms.
_HOLDERS = ("works", "rows", "results", "curves", "soaks")
_NAMES = ("work", "size", "system", "schedule", "variant", "join", "microbatches")
_TIMES = {
    "ms": 1.0,
    "median_ms": 1.0,
    "step_ms": 1.0,
    "costs_ms": 1.0,
    "generate_and_check_s": 1e3,
    "colour_s": 1e3,
    "table_s": 1e3,
}


class ResultsError(JgraphError):
    """There is no such benchmark, or a file is not what was asked for."""


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
                compare(a, b)
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
    Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 10_000).print(table)


# Benchmarks


def found() -> dict[str, str]:
    """The first line of the docstring of every module that is a script, by name. Read, not imported: most import jax."""
    files = sorted(file for folder in benchmarks.__path__ for file in Path(folder).glob("*.py"))
    sources = {file.stem: file.read_text() for file in files if file.stem not in _NOT_BY_HAND}
    scripts = {name: source for name, source in sources.items() if '\nif __name__ == "__main__":' in source}
    return {name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0] for name, source in scripts.items()}


def listed() -> Iterator[list[str]]:
    """A row for each results file; of a benchmark that has none, one all the same."""
    scripts = found()
    files: dict[str, list[Path]] = {name: [] for name in scripts}
    for file in sorted(harness.RESULTS.glob("*.json")):
        stem = f"{file.stem.rstrip('0123456789')}_"  # --name is free, but begins so by custom
        by = [name for name in scripts if stem.startswith(f"{name}_")]
        files.setdefault(max(by, key=len, default=file.stem), []).append(file)
    for name, own in files.items():
        for nth, file in enumerate(own):
            try:
                facts = [distinct(read(file), key) for key in ("date", "device", "revision")]
            except ResultsError:
                facts = ["not readable", "", ""]
            yield [name, file.name, *facts, "" if nth else scripts.get(name, "")]
        if not own:
            yield [name, "", "", "", "", scripts[name]]


def shown(folder: Path) -> Iterator[list[str]]:
    for file in sorted(folder.glob("*.json")):
        data = read(file)
        for work, result in data.get("works", {}).items():
            peer, ours = (harness.fastest(result["rows"], system) for system in ("torch", "jgraph"))
            for row in result["rows"]:
                told = [f"{row['ms']:.3f}" if "ms" in row else "", harness.ratio(peer or {}, row), harness.ratio(row, ours)]
                yield [f"{file.stem} {work}", harness.named(row)[:60], *told, row.get("failed", "")[:100]]
        for row in data.get("soaks", []):
            grown = (row.get("device_bytes") or 0) - (row.get("first_device_bytes") or 0)
            told = f"soak: {row.get('done', 0)} of {row['steps']}, slowest {row.get('slowest_ms', 0):.2f}, {grown:+,} bytes"
            yield [row["work"], told, f"{row.get('median_ms', 0):.3f}", "", "", row.get("failed", "")[:100]]


# Results of any shape


@dataclass(frozen=True)
class Node:
    """An object of the JSON with the keys that lead to it, and what it and those around it say about the run."""

    path: tuple[str, ...]
    value: Row
    facts: dict[str, str]
    settings: Row


@dataclass(frozen=True)
class Timed:
    """Milliseconds; None with the reason where it did not run."""

    ms: float | None
    repeats_ms: list[float]
    failed: str
    node: Node


def read(file: Path) -> Row:
    try:
        data = json.loads(file.read_text())
    except OSError as e:
        raise ResultsError(f"{file} cannot be read ({e.strerror}); {_EXPECTED}") from None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise ResultsError(f"{file} is not results of a benchmark; {_EXPECTED}")
    return data


def nodes(value: Any, around: Node = Node((), {}, {}, {}), *keys: str) -> Iterator[Node]:
    path = (*around.path, *(key for key in keys if key not in _HOLDERS))
    if isinstance(value, list):
        for one in value:
            yield from nodes(one, Node(path, {}, around.facts, around.settings))
    elif isinstance(value, dict):
        inside = [value[key] for key in ("environment", "versions") if isinstance(value.get(key), dict)]
        facts = {key: one[key] for one in (value, *inside) for key in _FACTS if one.get(key) and isinstance(one[key], str)}
        settings = {key: one for name in _SETTINGS if name in value for key, one in _flat(name, value[name])}
        if "config" in value:  # of a time when a field was not there: as if it had been left alone
            settings = dict(_flat("config", json.loads(json.dumps(asdict(TrainConfig()))))) | settings
        node = Node(path, value, around.facts | facts, around.settings | settings)
        yield node
        for key, one in value.items():
            if key not in (*_SETTINGS, "environment", "versions"):
                yield from nodes(one, node, key)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(f"{name}.{key}", one)
    else:
        yield name, value


def distinct(data: Any, fact: str) -> str:
    """All that results say of it; of a date the day."""
    return ", ".join(sorted({node.facts[fact][: 10 if fact == "date" else None] for node in nodes(data) if fact in node.facts}))


def timed(file: Path) -> dict[str, Timed]:
    """Everything in a results file that has a time, or says why not, by name."""
    rows: dict[str, Timed] = {}
    for node in nodes(read(file)):
        value = node.value
        names = [*node.path, *(str(value[key]) for key in _NAMES if isinstance(value.get(key), str | int) and value[key] != "")]
        for field, factor in _TIMES.items():
            many = value.get(field)
            for part, ms in many.items() if isinstance(many, dict) else [("", many)]:
                if isinstance(ms, int | float) and ms > 0:
                    name = ", ".join(filter(None, [*names, part.strip(), "" if field == "ms" else field]))
                    rows.setdefault(name, Timed(ms * factor, _repeats(value, part) if field == "ms" else [], "", node))
        if isinstance(failed := value.get("failed", value.get("error")), str):
            rows.setdefault(", ".join(names), Timed(None, [], failed, node))
    if not any(row.ms for row in rows.values()):
        raise ResultsError(f"{file} has no times; {_EXPECTED}")
    return rows


def _repeats(value: Row, part: str) -> list[float]:
    known = value.get("repeats_ms")
    known = known.get(part) if isinstance(known, dict) else known
    return [ms for ms in known if isinstance(ms, int | float)] if isinstance(known, list) else []


# Comparing


def compare(a: Path, b: Path) -> None:
    before, after = timed(a), timed(b)
    print("\n   ".join([f"A: {a}", *about(before)]))
    print("\n   ".join([f"B: {b}", *about(after)]))
    both = {name: (row, after[name]) for name, row in before.items() if row.ms and name in after and after[name].ms}
    unlike: dict[str, int] = {}
    for one, other in both.values():
        for change in changes(one.node, other.node):
            unlike[change] = unlike.get(change, 0) + 1
    if unlike:
        told = (change if rows == len(both) else f"{change} (of {rows} rows)" for change, rows in unlike.items())
        print(f"warning: B did not run as A did, so B/A is not of the code alone: {'; '.join(told)}")
    cells = []
    for name, (one, other) in both.items():
        ms = one.ms or 0.0, other.ms or 0.0
        cells.append([name, *(f"{x:.3f}" for x in (*ms, ms[1] / ms[0])), verdict(one.repeats_ms, other.repeats_ms)])
    if cells:
        show(("row", "A ms", "B ms", "B/A", "B is"), cells)
    else:
        print("no row is in both")
    for side, own, others in (("A", before, after), ("B", after, before)):
        for name in (name for name, row in own.items() if row.ms and name not in both):
            print(f"only in {side}: {name}" + (f" (in the other: {others[name].failed})" if name in others else ""))


def verdict(a: list[float], b: list[float]) -> str:
    """Of b's repeats; the spread is from the fastest to the slowest, and a single one has none."""
    if min(len(a), len(b)) < 2:
        return "no spread known"
    return "faster" if max(b) < min(a) else "slower" if min(b) > max(a) else WITHIN


def changes(a: Node, b: Node) -> Iterator[str]:
    if a.facts.get("device") != b.facts.get("device"):
        yield f"device {a.facts.get('device', 'not told')} -> {b.facts.get('device', 'not told')}"
    # A flag that one of the scripts did not have cannot be compared.
    for key in sorted((a.settings.keys() & b.settings.keys()) - _IDLE):
        if a.settings[key] != b.settings[key]:
            yield f"{key} {a.settings[key]} -> {b.settings[key]}"


def about(rows: dict[str, Timed]) -> list[str]:
    """What ran where and when: a line for each run that the file is made of."""
    runs: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for name, row in ((name, row) for name, row in rows.items() if row.ms):
        told = row.node.facts
        versions = ", ".join(f"{key} {told[key]}" for key in _VERSIONS if key in told) or "versions not told"
        run = f"{told.get('date', 'date not told')}, revision {told.get('revision', 'not told')}, {versions}"
        devices, works = runs.setdefault(run, ({}, {}))
        devices[told.get("device", "device not told")] = works[name.partition(",")[0]] = None
    works_of = {run: f": {', '.join(works)}" if len(runs) > 1 else "" for run, (_, works) in runs.items()}
    return [f"{run}, {' and '.join(devices)}{works_of[run]}" for run, (devices, _) in runs.items()]


# README


def write_readme(check: bool) -> int:
    text = README.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end and "\n## Speed\n" in head):
        raise ResultsError(f"{README} must have {BEGIN} and then {END} in its section ## Speed, for the tables to go between")
    new = f"{head}{BEGIN}\n{speed()}\n{END}{tail}"
    if check and new != text:
        print(f"{README.name}: ## Speed is not what the results say; run python -m benchmarks readme", file=sys.stderr)
        return 1
    if not check:
        README.write_text(new)
    return 0


def speed() -> str:
    """The tables, each after a line that says where and when."""
    data = {file.stem: read(file)["works"] for file in sorted(harness.RESULTS.glob("*.json")) if "works" in read(file)}
    pick = {name: [one for one in data if one.rstrip("0123456789") == name] for name in ("pipeline", "fsdp", "callables")}
    blocks = max((name for name in pick["callables"] if "blocks" in data[name]), key=lambda name: distinct(data[name], "date"))
    one = ["single_gpu", "single_gpu_1b3"]
    parts: list[str] = []

    def add(title: str, used: list[str], note: str, table: list[str]) -> None:
        told = {name: data[name] for name in used if name in data}
        jax, torch, dates = (distinct(told, key) for key in ("jax", "torch", "date"))
        links = ", ".join(f"[{name}](benchmarks/results/{name}.md)" for name in told)
        text = f"{title}, jax {jax} against PyTorch {torch}, {dates} ({links}). {note}"
        parts.extend([textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False), "", *table, ""])

    works = [item for name in one if name in data for item in data[name].items()]
    add(
        f"One {distinct([result for _, result in works], 'device')}",
        one,
        "Milliseconds a training step, median:",
        one_gpu(works),
    )
    note = "Host time until an iteration is handed over, over its 24 calls, and the whole iteration:"
    add("Twelve launch-bound GPT blocks one by one", [blocks], note, one_by_one(data[blocks]["blocks"]["rows"]))
    several = [name for names in pick.values() for name in names if set(data[name]) - {"blocks", "replays"}]
    note = "Milliseconds, median: a whole training step of fsdp, loss and gradients of pipeline and callables:"
    add("Several GPUs", [*several, *(name for name in data if name.endswith("_earlier"))], note, several_gpus(data))
    if (soaks := harness.RESULTS / "soaks.json").exists():
        parts += [*harness.draw_soaks(read(soaks)["soaks"]).splitlines()[2:], ""]
    return "\n".join(parts[:-1])


def one_gpu(works: Iterable[tuple[str, Row]]) -> list[str]:
    shown = (("jgraph", ""), ("jgraph", "graph=off"), *(("torch", how) for how in ("compile + CUDA graph", "compile", "eager")))
    heads = ["preset", "jgraph", "jgraph, graphs off", "torch.compile + CUDA graph", "torch.compile", "torch eager"]
    heads += [_RATIO, "peak GB, ours and its"]
    lines = [harness.line(heads), "|---" * len(heads) + "|"]
    for preset, result in works:
        rows, config = result["rows"], result["config"]
        by = {(row["system"], row["variant"]): row["ms"] for row in rows if "ms" in row}
        best, model = min(by.values(), default=None), config["model"]
        times = [("**{}**" if by[v] == best else "{}").format(_short(by[v])) if v in by else "did not run" for v in shown]
        shape = f"{model['num_layers']} layers of {model['d_model']}, {config['batch_size']}x{config['seq_len']} tokens"
        peer, ours = harness.fastest(rows, "torch"), next((row for row in rows if row["system"] == "jgraph"), {})
        ratio = f"{_ratio(peer, ours)}, {_of(rows)}" if peer else ""
        lines += [harness.line([f"{preset}, {shape}", *times, ratio, _peaks(rows)])]
    return lines


def one_by_one(rows: list[Row]) -> list[str]:
    """What a replay costs the host, of ours and of the graphed callables of PyTorch; the faster in bold."""
    peer = next((row for row in rows if (row["system"], row["variant"]) == ("torch", "graphed callables")), {})
    lines = [harness.line(["calls", "host us a call", "to PyTorch's", "ms an iteration", "to PyTorch's"]), "|---" * 5 + "|"]
    for row in rows:
        cells = [harness.named(row)]
        for key, digits in (("host_us", 1), ("ms", 2)):
            cells += [f"{row[key]:.{digits}f}" if key in row else row.get("failed", "did not run")]
            cells += ["" if row is peer else harness.ratio(row, peer, key, digits=2)]
        lines += [harness.line(cells)]
    return lines


def several_gpus(data: dict[str, Row]) -> list[str]:
    """Rows by number of GPUs. Where peers were timed in turns the ratio is of rounds; else all stored runs give a range."""
    heads = ["work", "devices", "PyTorch", "jgraph", "PyTorch / jgraph", "of"]
    found: list[tuple[int, list[str]]] = []
    for name, works in data.items():
        kind = name.rstrip("0123456789")
        for work, result in works.items():
            ranks, rows, size = result.get("ranks", 0), result["rows"], result.get("size", {})
            if kind == "pipeline":
                shape = f"{size['batch']}x{size['length']}" if "model" in size else f"d {size['d_model']}, {size['tokens']}"
                runs = [works_["rows"] for one in (data[name], data.get("pipeline_earlier", {})) if (works_ := one.get(work))]
                found += [(ranks, _row(f"pipeline, {work}, {shape} tokens", result, runs, _others(data, name, result)))]
            elif kind == "callables" and work not in ("blocks", "replays"):
                found += [(ranks, _row(f"callables, {work}", result, [rows], _others(data, name, result)))]
            elif kind == "fsdp":
                config = result["config"]
                shape = f"{config['batch_size']}x{config['seq_len']} tokens"
                for how in harness.PARAMETERS:
                    alike = [row for row in rows if row["system"] in ("jgraph", "torch") and harness.parameters(row) == how]
                    if alike:
                        found += [(ranks, _row(f"fsdp, {work}, {shape}, parameters {how}", result, [alike], []))]
    lines = [harness.line(heads), "|---" * len(heads) + "|"]
    return lines + [harness.line(cells) for _, cells in sorted(found, key=lambda one: one[0])]


def _others(data: dict[str, Row], name: str, result: Row) -> list[list[Row]]:
    """PyTorch's rows of the same work on as many GPUs in other stored runs."""
    others = (one for file, works in data.items() if file not in (name, f"{name}_earlier") for one in works.values())
    same = [one for one in others if (one.get("size"), one.get("ranks")) == (result["size"], result["ranks"])]
    return [[row for row in one["rows"] if row["system"] == "torch"] for one in same]


def _row(title: str, result: Row, runs: list[list[Row]], others: list[list[Row]]) -> list[str]:
    """Of the own run where peers had turns in it; else of it and all others, of which those in `others` are PyTorch's alone."""
    if any("rounds" in row for row in runs[0]):
        runs, others = runs[:1], []
    everywhere = [*runs, *others]
    torch, ours = ([row for run in everywhere if (row := harness.fastest(run, system))] for system in ("torch", "jgraph"))
    of = _of([row for run in everywhere for row in run])
    cells = [title, result["device"] or "not told"]
    cells += [f"{_range(torch)} ({_how(torch[0])}; {of})" if torch else of]
    cells += [f"{_range(ours)} ({_how(ours[0])})" if ours else "did not run"]
    if not (torch and ours):
        return [*cells, "", ""]
    if len(torch) > 1:
        least, most = min(row["ms"] for row in torch), max(row["ms"] for row in torch)
        slowest, best = max(row["ms"] for row in ours), min(row["ms"] for row in ours)
        return [*cells, f"{least / slowest:.2f} to {most / best:.2f}", f"{len(torch)} runs of PyTorch's, {len(ours)} of ours"]
    rounds = len(harness.ratios(torch[0], ours[0]))
    return [*cells, _ratio(torch[0], ours[0]), f"{rounds} rounds" if rounds > 1 else "one run"]


def _of(rows: list[Row]) -> str:
    """How many of PyTorch's were tried."""
    tried = {_how(row): False for row in rows if row["system"] == "torch"}
    tried |= {_how(row): True for row in rows if row["system"] == "torch" and "ms" in row}
    ran, failed = sum(tried.values()), len(tried) - sum(tried.values())
    told = f"fastest of {ran}" if ran > 1 else "alone" if ran else "" if failed else "not run"
    return ", ".join(filter(None, (told, f"{failed} failed" if failed else "")))


def _range(rows: list[Row]) -> str:
    times = [row["ms"] for row in rows]
    return _short(times[0]) if len(times) == 1 else f"{_short(min(times))} to {_short(max(times))}"


def _ratio(peer: Row, ours: Row) -> str:
    if len(harness.ratios(peer, ours)) > 1:
        return harness.ratio(peer, ours, digits=2)
    alike = verdict(ours["repeats_ms"], peer["repeats_ms"]) == WITHIN
    return harness.ratio(peer, ours, digits=2) + f", {WITHIN}" * alike


def _peaks(rows: list[Row]) -> str:
    sizes = [(harness.fastest(rows, system) or {}).get("peak_bytes") for system in ("jgraph", "torch")]
    return ", ".join(f"{size / 1e9:.{1 if size >= 1e9 else 2}f}" if size else "not told" for size in sizes)


def _short(ms: float) -> str:
    return f"{ms:.{1 if ms >= 10 else 2}f}"


def _how(row: Row) -> str:
    """Schedule, variant and join; of XLA's options how many, as their names are longer than a table is wide."""
    words = row.get("variant", "").split()
    named = [word for word in words if not word.startswith("xla_")]
    xla = len(words) - len(named)
    parts = [
        row.get("schedule"),
        " ".join(named),
        f"join {row['join']}" if "join" in row else "",
        f"XLA options: {xla}" if xla else "",
    ]
    return ", ".join(filter(None, parts)) or "as it comes"
