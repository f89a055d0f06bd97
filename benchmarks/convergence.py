"""Loss curves of runs that should be the same run, in one picture, with how far they are from the first of them.

    for graph in off auto full; do
        python -m jgraph.train --preset gpt-124m --data python-source --fsdp 4 --batch-size 32 --steps 2000 \
            --optimizer.warmup-steps 200 --log-every 10 --eval-every 500 --graph $graph --run-dir runs/$graph
    done                                                            # and auto once more, as runs/again: the noise
    python -m benchmarks run convergence --runs auto=runs/auto again=runs/again off=runs/off full=runs/full
    python -m benchmarks run convergence --draw notes/develop      # the picture, of the results that there are

FP8 against bf16, all at the same time on one GPU, whose memory they share:

    export XLA_CLIENT_MEM_FRACTION=0.22
    run() {
        python -m jgraph.train --preset gpt-124m --data python-source --steps 2000 --log-every 10 --eval-every 500 \
            --checkpoint-every 2000 --sample-tokens 0 --on-nonfinite skip --run-dir runs/$1 "${@:2}" >runs/$1.txt 2>&1 &
    }
    mkdir -p runs
    run bf16; run again; run current --precision fp8; run delayed --precision fp8 --fp8.recipe delayed; wait
    python -m benchmarks run convergence --name convergence_fp8 --draw notes/develop \
        --runs bf16=runs/bf16 again=runs/again current=runs/current delayed=runs/delayed

The first run and those with its settings say how far apart runs may be: twice what they are, or 0.01 nats where that is more,
in the mean of the losses of the last 200 steps.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.compare import read
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from jgraph.train.metrics import read_metrics

_WINDOW = 10  # entries of the moving mean
_LAST_STEPS, _ALLOWED_NATS = 200, 0.01


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(Options):
    """Names the runs that are compared."""

    runs: tuple[str, ...] = ()
    """NAME=DIRECTORY of runs with as many logged steps; the first one is what the others are compared with."""
    draw: str = ""
    """Draw the results that there are into this directory."""


def works(options: ConvergenceOptions) -> Iterator[Work]:
    if options.runs:
        runs = [run.partition("=") for run in options.runs]
        preset = json.loads((Path(runs[0][2]) / "config.json").read_text()).get("preset", "")
        yield Work(preset, {}, rows=[curve(name, Path(run)) for name, _, run in runs])
    if options.draw:  # what was just yielded is stored by now
        for result in read(options.file).values():
            picture(result["rows"], Path(options.draw) / f"{options.name}.svg")


def curve(name: str, run: Path) -> Row:
    """Reads of a run directory the losses of logged steps, in nats a token, and those on held-out text."""
    config, entries = json.loads((run / "config.json").read_text()), read_metrics(run / "metrics.jsonl")
    return {
        "system": "jgraph",
        "variant": name,
        "graph": config["graph"],
        "precision": f"fp8 {config['fp8']['recipe']}" if config.get("precision") == "fp8" else "bf16",
        "device": config["versions"].get("device"),
        "ms": statistics.median(entry["step_time_ms"] for entry in entries),
        "steps": [entry["step"] for entry in entries],
        "losses": [entry["loss"] for entry in entries],
        "skipped": entries[-1]["skipped"],
        "heldout": {str(entry["step"]): entry["eval_loss"] for entry in entries if "eval_loss" in entry},
    }


def section(work: str, result: Row) -> Section:
    rows = result["rows"]
    first = rows[0] if rows else {}
    alike = [row for row in rows if settings(row) == settings(first)]
    means = [last_mean(row, first) for row in alike]
    spread = max(means, default=0) - min(means, default=0)
    allowed = max(_ALLOWED_NATS, 2 * spread)

    def verdict(row: Row) -> str:
        far = last_mean(row, first) - statistics.fmean(means)
        return "" if row in alike else f"{far:+.4f}, {'within' if abs(far) <= allowed else 'beyond'} {allowed:.4f}"

    def apart(row: Row) -> str:
        length = min(len(row["losses"]), len(first["losses"]))
        far = losses(row)[:length] - losses(first)[:length]
        return "" if row is first else f"{far.mean():+.4f}, {np.abs(far).mean():.4f}, {np.abs(far).max():.4f}"

    columns = {
        "run": lambda row: row["variant"],
        "graph": lambda row: row["graph"],
        "precision": lambda row: settings(row)[1],
        "ms a step": number("ms"),
        "skipped, not finite": lambda row: f"{row.get('skipped', 'not told')}, {np.count_nonzero(~np.isfinite(losses(row)))}",
        "last loss": lambda row: f"{losses(row)[-1]:.4f}",
        "held out": lambda row: f"{[math.nan, *row['heldout'].values()][-1]:.4f}",
        f"mean of the last {_LAST_STEPS} steps": lambda row: f"{last_mean(row, first):.4f}",
        "from runs alike": verdict,
        f"from {first.get('variant')}: mean, mean of sizes, largest": apart,
    }
    names = ", ".join(row["variant"] for row in alike)
    return Section(work, columns, notes=f"Alike: {names}, in the mean of the last {_LAST_STEPS} steps {spread:.4f} nats apart.")


def settings(row: Row) -> tuple[str | None, str]:
    """Returns what runs that are alike have in common."""
    return row.get("graph"), row.get("precision", "bf16")


def losses(row: Row) -> np.ndarray:
    return np.array(row["losses"], float)  # NaN where it was not finite


def last_mean(row: Row, first: Row) -> float:
    """Returns the mean of the logged losses of the last steps of the first run; NaN for a run that did not get there."""
    last = first["steps"][-1]
    if row["steps"][-1] != last:
        return math.nan
    return statistics.fmean(loss for step, loss in zip(row["steps"], losses(row), strict=True) if step > last - _LAST_STEPS)


def picture(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for row in rows:
        graph, precision = settings(row)
        above.plot(row["steps"], losses(row), label=f"{row['variant']}: --graph {graph}, {precision}", linewidth=1)
        length = min(len(row["steps"]), len(rows[0]["steps"]))
        size = min(_WINDOW, length)
        mean = np.convolve(losses(row)[:length] - losses(rows[0])[:length], np.full(size, 1 / size), mode="valid")
        below.plot(row["steps"][size - 1 : length], mean, label=row["variant"], linewidth=1)
    above.set_yscale("log")
    above.set_ylabel("loss, nats a token")
    above.legend()
    below.set_ylabel(f"difference from {rows[0]['variant']},\nmean of the last {_WINDOW} entries")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


BENCHMARK = Benchmark("Loss curves", __doc__, ConvergenceOptions, works, section)
