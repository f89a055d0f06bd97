"""Collects the data of the report page from the files of run directories. Needs neither devices nor the model."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jgraph.errors import ConfigError
from jgraph.settings import flatten
from jgraph.train.metrics import read_metrics
from jgraph.train.rundir import RunDir

# A value of JSON, as written to the page.
Json = Any

_CURVES = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_memory_bytes")
# Maximum number of points per curve, approximately: several per pixel.
_POINTS = 2000


def compared(paths: Sequence[Path]) -> dict[str, Json]:
    """Reads run directories, which may still be training, and returns the data of the report page. Writes nothing."""
    if not paths:
        raise ConfigError("`runs` is empty: must name at least one run directory", field="runs")
    names = [path.absolute().name for path in paths]
    # Directories of the same name are distinguished by their paths.
    runs = [_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]
    title = f"{len(runs)} runs: {', '.join(run['name'] for run in runs)}" if len(runs) > 1 else runs[0]["name"]
    return {"title": title, "about": {"date": datetime.now(UTC).isoformat(timespec="seconds")}, "runs": runs}


def thinned(values: Sequence[float | None]) -> list[tuple[int, float | None]]:
    """Selects the values of a curve to draw, approximately `_POINTS`. Returns (index, mean of its stretch) of each.

    A longer curve is divided into stretches of equal length; the last one may be shorter. Of each, the first value, the
    minimum, the maximum and the first missing value are selected, and the last value of the curve. Otherwise all values are
    selected.
    """
    size = 1 if len(values) <= _POINTS else math.ceil(4 * len(values) / _POINTS)  # of a stretch, which has up to four points
    selected: list[tuple[int, float | None]] = []
    for first in range(0, len(values), size):
        stretch = range(first, min(first + size, len(values)))
        present = {i: value for i in stretch if (value := values[i]) is not None}
        extremes = {min(present, key=present.__getitem__), max(present, key=present.__getitem__)} if present else set()
        missing = set(stretch) - set(present)
        last = {len(values) - 1} & set(stretch)
        mean = sum(present.values()) / len(present) if present else None
        selected += [(i, mean) for i in sorted({first, *extremes, *sorted(missing)[:1], *last})]
    return selected


def _run(path: Path, name: str) -> dict[str, Json]:
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        problem = "must be a run directory, with a config.json" if path.exists() else "does not exist; name a run directory"
        raise ConfigError(f"`runs` is {path}: {problem}", field="runs")
    fields = run_dir.fields()
    entries = read_metrics(run_dir.metrics)
    done = entries[-1]["step"] if entries else 0
    steps = _number(fields.get("steps"))
    sizes = [_number(fields.get(size)) for size in ("batch_size", "seq_len")]
    state = "running, or killed" if run_dir.lock_file.exists() else "stopped"
    rates = [rate for entry in entries if (rate := _number(entry.get("tokens_per_second"))) is not None]
    config = {field: value if isinstance(value, str) else json.dumps(value) for field, value in flatten(fields).items()}
    config.pop("run_dir", None)
    if "corpus.fingerprint" in config:
        config["corpus.fingerprint"] = config["corpus.fingerprint"][:12]
    return {
        "name": name,
        # A run that is killed leaves its lock file.
        "state": "finished" if steps is not None and done >= steps else state,
        "done": done,
        "steps": steps,
        "tokens_per_step": None if None in sizes else math.prod(filter(None, sizes)),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "curves": {curve: points for curve in _CURVES if (points := _curve(entries, curve))["step"]},
        "samples": run_dir.read_samples(),
        "config": config,
    }


def _curve(entries: Sequence[Mapping[str, Json]], name: str) -> dict[str, list[float | None] | None]:
    """Returns the points of a metric, as lists of equal length. All are empty if no value is finite."""
    entries = [entry for entry in entries if name in entry]
    values = [_number(entry[name]) for entry in entries]
    if all(value is None for value in values):
        values = []
    shown = thinned(values)
    return {
        "step": [entries[i]["step"] for i, _ in shown],
        "seconds": [_number(entries[i].get("seconds")) for i, _ in shown],
        "value": [values[i] for i, _ in shown],  # None for infinities and NaN
        "mean": [mean for _, mean in shown] if len(shown) < len(values) else None,
    }


def _number(value: Json) -> float | None:
    """Returns the value if it is a finite number that JavaScript can represent, otherwise None."""
    try:
        return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:
        return None
