r"""Compares the loss curves of equivalent runs, and draws them.

    for graph in off auto full; do
        python -m jgraph.train --preset gpt-124m --data python-source --fsdp 4 --batch-size 32 --steps 2000 \
            --optimizer.warmup-steps 200 --log-every 10 --eval-every 500 --graph $graph --run-dir runs/$graph
    done                                         # run auto a second time as runs/again, to measure the noise
    python -m benchmarks run convergence --runs auto=runs/auto again=runs/again off=runs/off full=runs/full
    python -m benchmarks run convergence --draw notes/develop    # draws the stored results

FP8 against bf16, with all four runs in parallel on one GPU:

    export XLA_CLIENT_MEM_FRACTION=0.22
    run() {
        python -m jgraph.train --preset gpt-124m --data python-source --steps 2000 --log-every 10 --eval-every 500 \
            --checkpoint-every 2000 --sample-tokens 0 --on-nonfinite skip --run-dir runs/$1 "${@:2}" >runs/$1.txt 2>&1 &
    }
    mkdir -p runs
    run bf16; run again; run current --precision fp8; run delayed --precision fp8 --fp8.recipe delayed; wait
    python -m benchmarks run convergence --name convergence_fp8 --draw notes/develop \
        --runs bf16=runs/bf16 again=runs/again current=runs/current delayed=runs/delayed

The compared value is the mean loss of the last 200 steps. The first run and all runs with the same settings give the noise.
Other runs may differ by twice the noise, or by 0.01 nats if that is more.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.compare import read
from benchmarks.pictures import save_figure
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from jgraph.train.metrics import read_metrics

_WINDOW = 10  # logged steps in the moving mean
_LAST_STEPS, _ALLOWED_NATS = 200, 0.01


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions(Options):
    """Flags of the benchmark."""

    runs: tuple[str, ...] = ()
    """NAME=DIRECTORY of each run. All runs must log the same steps. The first run is the baseline."""
    draw: str = ""
    """Directory for a figure of the stored results."""


def works(options: ConvergenceOptions) -> Iterator[Work]:
    """Yields one work with the curves of the runs, then draws the stored results."""
    if options.runs:
        runs = [run.partition("=") for run in options.runs]
        preset = json.loads((Path(runs[0][2]) / "config.json").read_text()).get("preset", "")
        yield Work(preset, {}, rows=[curve(name, Path(run)) for name, _, run in runs])
    if options.draw:  # the runner has stored the yielded work by now
        for result in read(options.file).values():
            draw_curves(result["rows"], Path(options.draw) / f"{options.name}.svg")


def curve(name: str, run: Path) -> Row:
    """Reads the losses of a run directory, in nats per token."""
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
    """Returns the table layout of a work."""
    rows = result["rows"]
    first = rows[0] if rows else {}
    baselines = [row for row in rows if settings(row) == settings(first)]
    means = [last_mean(row, first) for row in baselines]
    noise = max(means, default=0) - min(means, default=0)
    allowed = max(_ALLOWED_NATS, 2 * noise)

    def verdict(row: Row) -> str:
        delta = last_mean(row, first) - statistics.fmean(means)
        return "" if row in baselines else f"{delta:+.4f}, {'within' if abs(delta) <= allowed else 'exceeds'} {allowed:.4f}"

    def difference(row: Row) -> str:
        length = min(len(row["losses"]), len(first["losses"]))
        delta = losses(row)[:length] - losses(first)[:length]
        return "" if row is first else f"{delta.mean():+.4f}, {np.abs(delta).mean():.4f}, {np.abs(delta).max():.4f}"

    columns = {
        "run": lambda row: row["variant"],
        "graph": lambda row: row["graph"],
        "precision": lambda row: settings(row)[1],
        "step, ms": number("ms"),
        "skipped steps, non-finite losses": lambda row: (
            f"{row.get('skipped', 'not recorded')}, {np.count_nonzero(~np.isfinite(losses(row)))}"
        ),
        "last loss": lambda row: f"{losses(row)[-1]:.4f}",
        "validation loss": lambda row: f"{[math.nan, *row['heldout'].values()][-1]:.4f}",
        f"mean loss of the last {_LAST_STEPS} steps": lambda row: f"{last_mean(row, first):.4f}",
        "difference from the baseline, limit": verdict,
        f"difference from {first.get('variant')} per step: mean, mean absolute, largest": difference,
    }
    names = ", ".join(row["variant"] for row in baselines)
    notes = (
        f"Losses are in nats per token. Baseline: {names}. Their means over the last {_LAST_STEPS} steps differ by {noise:.4f}."
    )
    return Section(work, columns, notes=notes)


def settings(row: Row) -> tuple[str | None, str]:
    """Returns the graph mode and the precision of a run. Baseline runs share both with the first run."""
    return row.get("graph"), row.get("precision", "bf16")


def losses(row: Row) -> np.ndarray:
    """Returns the losses of the logged steps. A missing loss becomes NaN."""
    return np.array(row["losses"], float)


def last_mean(row: Row, first: Row) -> float:
    """Averages the losses of the last `_LAST_STEPS` steps. NaN if the run does not end at the last step of the first run."""
    last = first["steps"][-1]
    if row["steps"][-1] != last:
        return math.nan
    return statistics.fmean(loss for step, loss in zip(row["steps"], losses(row), strict=True) if step > last - _LAST_STEPS)


def draw_curves(rows: list[Row], path: Path) -> None:
    """Draws the losses and their differences from the first run."""
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
    for axes in (above, below):
        axes.set_facecolor("none")
    above.set_yscale("log")
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False)
    below.set_ylabel(f"difference from {rows[0]['variant']},\nmean of {_WINDOW} logged steps")
    below.set_xlabel("step")
    save_figure(figure, path)


BENCHMARK = Benchmark("Loss curves", __doc__, ConvergenceOptions, works, section)
