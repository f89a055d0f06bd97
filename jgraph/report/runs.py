"""What the page shows of run directories, from their files alone: neither devices nor the model are needed."""

import json
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jgraph.errors import ConfigError
from jgraph.train.metrics import read_metrics
from jgraph.train.rundir import RunDir, flatten

CURVES = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_memory_bytes")
# Of a curve on the page, at most about so many: several for every pixel.
_POINTS = 2000


def compared(paths: Sequence[Path]) -> dict[str, Any]:
    """Returns the data of the page: `runs`, in the order given. Raises ConfigError where there is no run."""
    if not paths:
        raise ConfigError("`runs` is empty: must name a run directory, or several", field="runs")
    names = [path.absolute().name for path in paths]
    # By their whole paths where these alone tell them apart.
    runs = [_run(path, name if names.count(name) == 1 else str(path)) for path, name in zip(paths, names, strict=True)]
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    title = f"{len(runs)} runs: {', '.join(run['name'] for run in runs)}" if len(runs) > 1 else runs[0]["name"]
    return {"title": title, "about": about, "runs": runs}


def thinned(values: Sequence[float | None], most: int = _POINTS) -> list[tuple[int, float | None]]:
    """Returns the indices of the values to draw, in order, each with the mean of its stretch of the curve.

    Of a curve of more than `most` values these are, of each of equal stretches, the first, the least, the largest and the first
    that is missing; and the last of all.
    """
    size = 1 if len(values) <= most else math.ceil(4 * len(values) / most)
    kept: list[tuple[int, float | None]] = []
    for first in range(0, len(values), size):
        stretch = range(first, min(first + size, len(values)))
        there = {i: value for i in stretch if (value := values[i]) is not None}
        those = {first} | ({len(values) - 1} & set(stretch))
        if there:
            those |= {min(there, key=there.__getitem__), max(there, key=there.__getitem__)}
        if len(there) < len(stretch):
            those.add(next(i for i in stretch if i not in there))
        mean = sum(there.values()) / len(there) if there else None
        kept += [(i, mean) for i in sorted(those)]
    return kept


def _run(path: Path, name: str) -> dict[str, Any]:
    run_dir = RunDir(path)
    if not path.exists():
        raise ConfigError(f"`runs` is {path}: does not exist; name a run directory", field="runs")
    if not run_dir.config.exists():
        raise ConfigError(f"`runs` is {path}: must be a run directory, with a config.json", field="runs")
    fields, entries = run_dir.fields(), read_metrics(run_dir.metrics)
    done, steps = entries[-1]["step"] if entries else 0, _number(fields.get("steps"))
    sizes = [_number(fields.get(size)) for size in ("batch_size", "seq_len")]
    state = "going on, or killed" if run_dir.lock_file.exists() else "stopped"
    rates = [rate for entry in entries if (rate := _number(entry.get("tokens_per_second"))) is not None]
    return {
        "name": name,
        "state": "finished" if steps is not None and done >= steps else state,
        "done": done,
        "steps": steps,
        "tokens_per_step": None if None in sizes else math.prod(filter(None, sizes)),
        "tokens_per_second": statistics.median(rates) if rates else None,
        "curves": {curve: points for curve in CURVES if (points := _curve(entries, curve))["step"]},
        "samples": run_dir.read_samples(),
        "config": {field: _text(field, value) for field, value in flatten(fields).items() if field != "run_dir"},
    }


def _curve(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns step, seconds and value of the entries that have one, None where it was not finite; means where it is thinned."""
    those = [entry for entry in entries if name in entry]
    values = [_number(entry[name]) for entry in those]
    if all(value is None for value in values):
        values = []
    shown = thinned(values)
    return {
        "step": [those[i]["step"] for i, _ in shown],
        "seconds": [_number(those[i].get("seconds")) for i, _ in shown],
        "value": [values[i] for i, _ in shown],
        "mean": [mean for _, mean in shown] if len(shown) < len(values) else None,
    }


def _number(value: Any) -> float | None:
    """Returns a number that JSON and JavaScript have; None for all else."""
    try:
        return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:
        return None


def _text(field: str, value: Any) -> str:
    if field == "corpus.fingerprint":
        return str(value)[:12]
    return value if isinstance(value, str) else json.dumps(value)
