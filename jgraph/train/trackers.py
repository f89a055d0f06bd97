"""Other destinations of the metrics: TensorBoard event files, Weights & Biases."""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Protocol

from jgraph.errors import ConfigError, os_errors
from jgraph.train.rundir import RunDir, replace_json

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """Receives the entries of metrics.jsonl."""

    def add(self, entry: dict[str, Any]) -> None:
        """Receives an entry: its "step", numbers, and None for unknown numbers."""

    def close(self) -> None:
        """Writes everything and releases files and connections."""


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            wrong = f"needs the package {_PACKAGES[name]}; install it, e.g. with pip install 'jgraph[{name}]'"
            raise ConfigError(f"`log` is {name}: {wrong}", field="log")


def start(names: Sequence[str], run_dir: RunDir, done: int) -> list[Tracker]:
    """Starts the trackers of a run.

    Args:
        names: Any of `tensorboard` and `wandb`.
        run_dir: The run directory.
        done: Number of steps already done. Entries of later steps are replaced where the tracker supports it.

    Returns:
        The trackers, without duplicates.

    Raises:
        ConfigError: If a tracker cannot start.
    """
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](run_dir, done) for name in dict.fromkeys(names)]


class TensorBoard:
    """Writes event files to `tensorboard/`. TensorBoard hides earlier entries of steps after `done`."""

    def __init__(self, run_dir: RunDir, done: int):
        from tensorboardX import SummaryWriter

        self._directory = run_dir.tensorboard
        # The file name contains the second; two runs within one second must not share a file.
        with os_errors("run_dir", self._directory):
            self._writer = SummaryWriter(str(self._directory), purge_step=done + 1, filename_suffix=f".{done}")

    def add(self, entry: dict[str, Any]) -> None:
        """Writes one scalar per number and flushes the file."""
        with os_errors("run_dir", self._directory):
            for name, value in _numbers(entry).items():
                self._writer.add_scalar(name, value, entry["step"])
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        with os_errors("run_dir", self._directory):
            self._writer.close()


class Wandb:
    """Logs to Weights & Biases. Stores the id in `wandb.json`, so that a resumed run continues the same W&B run.

    Entries of steps after `done` are logged again, because Weights & Biases cannot remove entries.
    """

    def __init__(self, run_dir: RunDir, done: int):
        wandb: Any = importlib.import_module("wandb")
        known = json.loads(run_dir.wandb.read_text())["id"] if done and run_dir.wandb.exists() else None
        try:
            self._run: Any = wandb.init(
                id=known,
                resume="allow" if known else None,
                name=run_dir.path.absolute().name,
                dir=str(run_dir.path),
                config=run_dir.fields(),
            )
        except wandb.Error as e:
            raise ConfigError(f"`log` is wandb: Weights & Biases cannot start ({e})", field="log") from e
        # A metric instead of the step counter of W&B, which cannot go back when a run is resumed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        replace_json(run_dir.wandb, {"id": self._run.id})

    def add(self, entry: dict[str, Any]) -> None:
        """Logs the numbers of an entry in one call."""
        self._run.log({"step": entry["step"], **_numbers(entry)})

    def close(self) -> None:
        """Uploads the remaining entries and finishes the run."""
        self._run.finish()


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "step" and isinstance(value, int | float)}
