"""Loss curves of runs that should be the same run, in one picture, with how far they are from one of them.

    for graph in off auto full; do
        python -m jgraph.train --preset gpt-124m --data python-source --fsdp 4 --batch-size 32 --steps 2000 \
            --optimizer.warmup-steps 200 --log-every 10 --eval-every 500 --graph $graph --run-dir runs/$graph
    done                                                            # and auto once more, as runs/again: the noise
    python -m benchmarks.convergence auto=runs/auto again=runs/again off=runs/off full=runs/full
    python -m benchmarks.convergence --draw notes                   # from benchmarks/results/convergence.json

The first run is the one that the others are compared with.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks import harness
from jgraph.training.metrics import read_metrics

_WINDOW = 10  # entries of the moving mean


@dataclass(frozen=True)
class Options:
    """Command line."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """NAME=DIRECTORY of runs with as many logged steps; the results are written."""
    draw: str = ""
    """Draw the results that there are into this directory."""
    revision: str = ""
    """Git revision of the runs, for the JSON."""


def main(options: Options) -> None:
    file = harness.RESULTS / "convergence.json"
    if options.runs:
        curves = {name: curve(Path(run)) for name, _, run in (run.partition("=") for run in options.runs)}
        harness.RESULTS.mkdir(exist_ok=True)
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "revision": options.revision}
        file.write_text(json.dumps(about | {"curves": curves}) + "\n")
    curves = json.loads(file.read_text())["curves"]
    print(table(curves))
    if options.draw:
        picture(curves, Path(options.draw) / "convergence.svg")


def curve(run: Path) -> dict[str, Any]:
    """What a run directory tells: the losses of logged steps, in nats a token, and those on held-out text."""
    config = json.loads((run / "config.json").read_text())
    entries = read_metrics(run / "metrics.jsonl")
    return {
        "graph": config["graph"],
        "versions": config["versions"],
        "step": [entry["step"] for entry in entries],
        "loss": [entry["loss"] for entry in entries],
        "step_ms": float(np.median([entry["step_time_ms"] for entry in entries])),
        "heldout": {str(entry["step"]): entry["eval_loss"] for entry in entries if "eval_loss" in entry},
    }


def differences(curves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of every run from the first, by logged step."""
    first, *others = curves
    reference = np.array(curves[first]["loss"])
    return {name: np.array(curves[name]["loss"]) - reference for name in others}


def table(curves: dict[str, Any]) -> str:
    first = next(iter(curves))
    columns = ["run", "graph", "ms a step", "last loss", "held out", f"from {first}: mean", "mean of sizes", "largest"]
    lines = [harness.line(columns), "|---" * len(columns) + "|"]
    apart = differences(curves)
    for name, one in curves.items():
        cells = [name, one["graph"], f"{one['step_ms']:.2f}", f"{one['loss'][-1]:.4f}", f"{[*one['heldout'].values()][-1]:.4f}"]
        if name in apart:
            difference = apart[name]
            cells += [f"{difference.mean():+.4f}", f"{np.abs(difference).mean():.4f}", f"{np.abs(difference).max():.4f}"]
        lines.append(harness.line(cells + [""] * (len(columns) - len(cells))))
    return "\n".join(lines)


def picture(curves: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, one in curves.items():
        above.plot(one["step"], one["loss"], label=f"{name}: --graph {one['graph']}", linewidth=1)
    above.set_yscale("log")
    above.set_ylabel("loss, nats a token")
    above.legend()
    first = next(iter(curves))
    below.axhline(0, color="gray", linewidth=0.5)
    below.plot([], [])  # the first one's color
    for name, difference in differences(curves).items():
        size = min(_WINDOW, len(difference))
        mean = np.convolve(difference, np.full(size, 1 / size), mode="valid")
        below.plot(curves[name]["step"][size - 1 :], mean, label=name, linewidth=1)
    below.set_ylabel(f"difference from {first},\nmean of the last {_WINDOW} entries")
    below.set_xlabel("step")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
