"""Other destinations of the metrics: TensorBoard event files, Weights & Biases."""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from jgraph.errors import ConfigError, os_errors
from jgraph.train.rundir import RunDir, replace_json

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_installed(names: Sequence[str]) -> None:
    """Checks that the Python packages of trackers are installed. Imports nothing."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            wrong = f"needs the package {_PACKAGES[name]}; install it, e.g. with pip install 'jgraph[{name}]'"
            raise ConfigError(f"`log` is {name}: {wrong}", field="log")


def start(names: Sequence[str], run_dir: RunDir, done: int) -> "list[Tracker]":
    """Starts the trackers of a run whose directory has a config.json, after `done` steps."""
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](run_dir, done) for name in dict.fromkeys(names)]


class TensorBoard:
    """Writes TensorBoard event files. TensorBoard hides entries after step `done` in earlier files."""

    def __init__(self, run_dir: RunDir, done: int):
        from tensorboardX import SummaryWriter

        self._directory = run_dir.tensorboard
        # The file name contains the second; two runs within one second must not share a file.
        with os_errors("run_dir", self._directory):
            self._writer = SummaryWriter(str(self._directory), purge_step=done + 1, filename_suffix=f".{done}")

    def add(self, entry: dict[str, Any]) -> None:
        """Writes one scalar for each number of an entry, and flushes the file. Leaves out None and lists."""
        with os_errors("run_dir", self._directory):
            for name, value in _numbers(entry).items():
                self._writer.add_scalar(name, value, entry["step"])
            self._writer.flush()

    def close(self) -> None:
        with os_errors("run_dir", self._directory):
            self._writer.close()


class Wandb:
    """Logs to Weights & Biases (W&B), which gets config.json. `wandb.json` has the id of the W&B run, for a run that resumes.

    Entries of steps after `done` are logged again, because W&B cannot remove entries.
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
        self._run.log({"step": entry["step"], **_numbers(entry)})

    def close(self) -> None:
        """Waits until the remaining entries are uploaded."""
        self._run.finish()


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "step" and isinstance(value, int | float)}


Tracker: TypeAlias = TensorBoard | Wandb
"""A destination of the metrics. `add` receives each entry of metrics.jsonl, `close` writes the rest."""
