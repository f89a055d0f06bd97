"""Results files, and two of them side by side: what was timed in both, and whether it was timed in the same way."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import Row, verdict
from jgraph.errors import JgraphError
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import flatten

_EXPECTED = "expected JSON as `python -m benchmarks run NAME` writes it to benchmarks/results"
_SETTINGS = ("options", "config", "size", "ranks", "xla_options")
# Of those, what chooses rows or says where things go or when to give up does not alter what a row measures.
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
    """Says that there is no such benchmark, or that a file is not what was request for."""


@dataclass(frozen=True)
class Timed:
    """Holds the milliseconds of a row; None with the reason where it did not run."""

    ms: float | None
    repeats_ms: list[float]
    failed: str
    result: Row
    settings: Row


def read(file: Path) -> dict[str, Row]:
    """Returns the results of a file by work. Raises ResultsError where it has none."""
    try:
        data = json.loads(file.read_text())
    except OSError as e:
        raise ResultsError(f"{file} cannot be read ({e.strerror}); {_EXPECTED}") from None
    except (ValueError, RecursionError):
        data = None
    works = data.get("works") if isinstance(data, dict) else None
    if not isinstance(works, dict) or not all(isinstance(one, dict) and "rows" in one for one in works.values()):
        raise ResultsError(f"{file} is not results of a benchmark; {_EXPECTED}")
    return works


def distinct(results: Iterable[Row], fact: str) -> str:
    """Returns all that results say of a fact; of a date the day."""
    found = (one.get(fact) or one["environment"].get(fact) for one in results)
    return ", ".join(sorted({one[: 10 if fact == "date" else None].removeprefix("1 x ") for one in found if one}))


def timed(file: Path) -> dict[str, Timed]:
    """Returns everything in a results file that has a time, or says why not, by name."""
    rows: dict[str, Timed] = {}
    for work, result in read(file).items():
        for row in result["rows"]:
            name = ", ".join([work, *(str(row[key]) for key in _NAMES if row.get(key))])
            settings = flatten({key: one[key] for one in (result, row) for key in _SETTINGS if key in one})
            settings["device"] = (result.get("device") or "not told").removeprefix("1 x ")
            if "config" in result:  # of a time when a field was not there: as if it had been left alone
                settings = flatten({"config": json.loads(json.dumps(TrainConfig().to_dict()))}) | settings
            if "ms" in row or "failed" in row:
                rows[name] = Timed(row.get("ms"), row.get("repeats_ms", []), row.get("failed", ""), result, settings)
            for category, ms in row.get("categories", {}).items():
                if ms > 0:
                    rows[f"{name}: {category}"] = Timed(ms, [], "", result, settings)
    if not any(row.ms for row in rows.values()):
        raise ResultsError(f"{file} has no times; {_EXPECTED}")
    return rows


def compared(a: Path, b: Path) -> list[list[str]]:
    """Returns a row of cells for everything that two files have timed; prints where and when, and how they differ."""
    before, after = timed(a), timed(b)
    for side, file, rows in (("A", a, before), ("B", b, after)):
        print("\n   ".join([f"{side}: {file}", *about(rows)]))
    both = {name: (row, after[name]) for name, row in before.items() if row.ms and name in after and after[name].ms}
    unlike = Counter(change for pair in both.values() for change in changes(*pair))
    if unlike:
        each = (change if rows == len(both) else f"{change} (of {rows} rows)" for change, rows in unlike.items())
        print(f"warning: B did not run as A did, so B/A is not of the code alone: {'; '.join(each)}")
    if not both:
        print("no row is in both")
    for side, own, others in (("A", before, after), ("B", after, before)):
        for name in (name for name, row in own.items() if row.ms and name not in both and ": " not in name):
            print(f"only in {side}: {name}" + (f" (in the other: {others[name].failed})" if name in others else ""))
    cells = []
    for name, (one, other) in both.items():
        ms = one.ms or 0.0, other.ms or 0.0
        cells.append([name, *(f"{x:.3f}" for x in (*ms, ms[1] / ms[0])), verdict(one.repeats_ms, other.repeats_ms)])
    return cells


def changes(a: Timed, b: Timed) -> Iterator[str]:
    # A flag that one of the scripts did not have cannot be compared.
    for key in sorted((a.settings.keys() & b.settings.keys()) - _IDLE):
        if a.settings[key] != b.settings[key]:
            yield f"{key} {a.settings[key]} -> {b.settings[key]}"


def about(rows: dict[str, Timed]) -> list[str]:
    """Tells what ran where and when, in a line for each run that the file is made of."""
    runs: dict[str, dict[str, None]] = {}
    for name, row in rows.items():
        told, device = row.result["environment"], row.settings["device"]
        versions = (f"{key} {told[key]}" for key in ("python", "jax", "jaxlib", "flax", "optax", "torch") if key in told)
        run = ", ".join([told["date"], f"revision {told['revision']}", *versions, device])
        runs.setdefault(run, {})[name.partition(",")[0]] = None
    return [run + (f": {', '.join(works)}" if len(runs) > 1 else "") for run, works in runs.items()]
