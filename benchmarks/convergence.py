"""Loss curves of runs that should be the same run, in one picture, with how far they are from the first of them.

    for graph in off auto full; do
        python -m jgraph.train --preset gpt-124m --data python-source --fsdp 4 --batch-size 32 --steps 2000 \
            --optimizer.warmup-steps 200 --log-every 10 --eval-every 500 --graph $graph --run-dir runs/$graph
    done                                                            # and auto once more, as runs/again: the noise
    python -m benchmarks run convergence --runs auto=runs/auto again=runs/again off=runs/off full=runs/full
    python -m benchmarks run convergence --draw notes/develop      # the picture, of the results that there are
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.compare import read
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from jgraph.training.metrics import read_metrics

_WINDOW = 10  # entries of the moving mean


@dataclass(frozen=True, kw_only=True)
class Flags(Options):
    """Names the runs that are compared."""

    runs: tuple[str, ...] = ()
    """NAME=DIRECTORY of runs with as many logged steps; the first one is what the others are compared with."""
    draw: str = ""
    """Draw the results that there are into this directory."""


def works(options: Flags) -> Iterator[Work]:
    if options.runs:
        runs = [run.partition("=") for run in options.runs]
        preset = json.loads((Path(runs[0][2]) / "config.json").read_text()).get("preset", "")
        yield Work(preset, {}, rows=[curve(name, Path(run)) for name, _, run in runs])
    if options.draw:  # what was just yielded is stored by now
        for result in read(options.file).values():
            picture(result["rows"], Path(options.draw) / "convergence.svg")


def curve(name: str, run: Path) -> Row:
    """Reads of a run directory the losses of logged steps, in nats a token, and those on held-out text."""
    config, entries = json.loads((run / "config.json").read_text()), read_metrics(run / "metrics.jsonl")
    return {
        "system": "jgraph",
        "variant": name,
        "graph": config["graph"],
        "device": config["versions"].get("device"),
        "ms": statistics.median(entry["step_time_ms"] for entry in entries),
        "steps": [entry["step"] for entry in entries],
        "losses": [entry["loss"] for entry in entries],
        "heldout": {str(entry["step"]): entry["eval_loss"] for entry in entries if "eval_loss" in entry},
    }


def section(work: str, result: Row) -> Section:
    first = result["rows"][0] if result["rows"] else {}

    def apart(row: Row) -> str:
        far = np.subtract(row["losses"], first["losses"])
        return "" if row is first else f"{far.mean():+.4f}, {np.abs(far).mean():.4f}, {np.abs(far).max():.4f}"

    columns = {
        "run": lambda row: row["variant"],
        "graph": lambda row: row["graph"],
        "ms a step": number("ms"),
        "last loss": lambda row: f"{row['losses'][-1]:.4f}",
        "held out": lambda row: f"{[*row['heldout'].values()][-1]:.4f}",
        f"from {first.get('variant')}: mean, mean of sizes, largest": apart,
    }
    return Section(work, columns)


def picture(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for row in rows:
        above.plot(row["steps"], row["losses"], label=f"{row['variant']}: --graph {row['graph']}", linewidth=1)
        size = min(_WINDOW, len(row["steps"]))
        mean = np.convolve(np.subtract(row["losses"], rows[0]["losses"]), np.full(size, 1 / size), mode="valid")
        below.plot(row["steps"][size - 1 :], mean, label=row["variant"], linewidth=1)
    above.set_yscale("log")
    above.set_ylabel("loss, nats a token")
    above.legend()
    below.set_ylabel(f"difference from {rows[0]['variant']},\nmean of the last {_WINDOW} entries")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


BENCHMARK = Benchmark("Loss curves", __doc__, Flags, works, section)
