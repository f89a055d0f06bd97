"""Reads results files and compares two of them row by row. Warns about settings that differ."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, verdict
from jgraph.errors import JgraphError
from jgraph.settings import flatten
from jgraph.train.config import TrainConfig

_EXPECTED = "expected JSON as `python -m benchmarks run NAME` writes it to benchmarks/results"
_SETTINGS = ("options", "config", "size", "ranks", "xla_options")
# Settings that select rows, name outputs or set timeouts. They do not change a measurement.
_IDLE_OPTIONS = (
    "name out revision table mode variant variants presets work first parts pipelines schedules joins peers actions quick "
    "one_gpu rounds together soak hang_seconds timeout peer_timeout budget categories"
)
_IDLE_CONFIG = (
    "preset steps data run_dir resume log_every eval_every eval_batches checkpoint_every checkpoint_keep sample_tokens log"
)
_IDLE = {f"options.{name}" for name in _IDLE_OPTIONS.split()} | {f"config.{name}" for name in _IDLE_CONFIG.split()}
_NAMES = ("system", "schedule", "variant", "join", "microbatches")


class ResultsError(JgraphError):
    """Raised for an unknown benchmark, a file without results, or a page without table markers."""


@dataclass(frozen=True)
class TimedRow:
    """The times and settings of a row. `ms` is None and `failed` has the reason if the row did not run."""

    ms: float | None
    repeats_ms: list[float]
    failed: str
    result: Row
    settings: Row


def read(file: Path) -> dict[str, Row]:
    """Returns the results of a file by work. Raises `ResultsError` if it has none."""
    try:
        data = json.loads(file.read_text())
    except OSError as e:
        raise ResultsError(f"{file} cannot be read ({e.strerror}); {_EXPECTED}") from None
    except (ValueError, RecursionError):
        data = None
    works = data.get("works") if isinstance(data, dict) else None
    if not isinstance(works, dict) or not all(isinstance(one, dict) and "rows" in one for one in works.values()):
        raise ResultsError(f"{file} is not a results file; {_EXPECTED}")
    return works


def distinct(results: Iterable[Row], fact: str) -> str:
    """Returns the distinct values of a key of results or of their environments, sorted, with commas. Dates are days."""
    values = (one.get(fact) or one["environment"].get(fact) for one in results)
    return ", ".join(sorted({one[: 10 if fact == "date" else None].removeprefix("1 x ") for one in values if one}))


def timed_rows(file: Path) -> dict[str, TimedRow]:
    """Returns the rows of a file that have a time or an error, by name. Raises `ResultsError` if no row has a time."""
    rows: dict[str, TimedRow] = {}
    for work, result in read(file).items():
        for row in result["rows"]:
            name = ", ".join([work, *(str(row[key]) for key in _NAMES if row.get(key))])
            settings = flatten({key: one[key] for one in (result, row) for key in _SETTINGS if key in one})
            settings["device"] = (result.get("device") or "not recorded").removeprefix("1 x ")
            if "config" in result:  # fields that are newer than the result have their default
                settings = flatten({"config": json.loads(json.dumps(TrainConfig().to_dict()))}) | settings
            if "ms" in row or "failed" in row:
                rows[name] = TimedRow(row.get("ms"), row.get("repeats_ms", []), row.get("failed", ""), result, settings)
            for category, ms in row.get("categories", {}).items():
                if ms > 0:
                    rows[f"{name}: {category}"] = TimedRow(ms, [], "", result, settings)
    if not any(row.ms for row in rows.values()):
        raise ResultsError(f"{file} has no times; {_EXPECTED}")
    return rows


def compare_files(a: Path, b: Path) -> list[list[str]]:
    """Compares the rows that both files have: name, both times, B/A, and a verdict.

    Prints the origin of both files, settings that differ, and rows that only one file has.
    """
    before, after = timed_rows(a), timed_rows(b)
    for side, file, rows in (("A", a, before), ("B", b, after)):
        print("\n   ".join([f"{side}: {file}", *origins(rows)]))
    both = {name: (row, after[name]) for name, row in before.items() if row.ms and name in after and after[name].ms}
    changed = Counter(change for pair in both.values() for change in changes(*pair))
    if changed:
        each = (change if rows == len(both) else f"{change} ({rows} rows)" for change, rows in changed.items())
        print(f"warning: B/A does not compare the code alone, because settings differ: {'; '.join(each)}")
    if not both:
        print("the files have no row in common")
    for side, own, others in (("A", before, after), ("B", after, before)):
        for name in (name for name, row in own.items() if row.ms and name not in both and ": " not in name):
            print(f"only in {side}: {name}" + (f" (other file: {others[name].failed})" if name in others else ""))
    cells = []
    for name, (one, other) in both.items():
        ms = one.ms or 0.0, other.ms or 0.0
        cells.append([name, *(f"{x:.3f}" for x in (*ms, ms[1] / ms[0])), verdict(one.repeats_ms, other.repeats_ms)])
    return cells


def changes(a: TimedRow, b: TimedRow) -> Iterator[str]:
    """Yields `KEY OLD -> NEW` for each setting of both rows that differs and affects the measurement."""
    for key in sorted((a.settings.keys() & b.settings.keys()) - _IDLE):
        if a.settings[key] != b.settings[key]:
            yield f"{key} {a.settings[key]} -> {b.settings[key]}"


def origins(rows: dict[str, TimedRow]) -> list[str]:
    """Returns one line per run in a file: date, revision, versions, device, and its works if the file has several runs."""
    runs: dict[str, dict[str, None]] = {}
    for name, row in rows.items():
        env, device = row.result["environment"], row.settings["device"]
        versions = (f"{key} {env[key]}" for key in ("python", "jax", "jaxlib", "flax", "optax", "torch") if key in env)
        run = ", ".join([env["date"], f"revision {env['revision']}", *versions, device])
        runs.setdefault(run, {})[name.partition(",")[0]] = None
    return [run + (f": {', '.join(works)}" if len(runs) > 1 else "") for run, works in runs.items()]
