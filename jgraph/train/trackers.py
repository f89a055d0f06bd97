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
    """Checks that the Python packages of trackers are installed. Imports nothing.

    Args:
        names: Any of "tensorboard", which needs tensorboardX, and "wandb", which needs wandb.

    Raises:
        ConfigError: If a package is not installed. The message has the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            wrong = f"needs the package {_PACKAGES[name]}; install it, e.g. with pip install 'jgraph[{name}]'"
            raise ConfigError(f"`log` is {name}: {wrong}", field="log")


def start(names: Sequence[str], run_dir: RunDir, done: int) -> "list[Tracker]":
    """Starts the trackers of a run. Opens files in the run directory, or connects to Weights & Biases.

    Args:
        names: Any of "tensorboard" and "wandb". Their packages must be installed.
        run_dir: The run directory, which must exist and have a config.json.
        done: Number of finished steps. TensorBoard hides earlier entries of later steps. Weights & Biases cannot remove them.

    Returns:
        One tracker per name, in the order of `names`, without duplicates.

    Raises:
        ConfigError: If an event file cannot be written, or Weights & Biases cannot start.
    """
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](run_dir, done) for name in dict.fromkeys(names)]


class TensorBoard:
    """Writes TensorBoard event files to `tensorboard/` in the run directory. Opens a new file when it is created.

    Args:
        run_dir: The run directory.
        done: Number of finished steps. TensorBoard hides entries of later steps in earlier files.

    Raises:
        ConfigError: If the file cannot be written. All methods raise this error.
    """

    def __init__(self, run_dir: RunDir, done: int):
        from tensorboardX import SummaryWriter

        self._directory = run_dir.tensorboard
        # The file name contains the second; two runs within one second must not share a file.
        with os_errors("run_dir", self._directory):
            self._writer = SummaryWriter(str(self._directory), purge_step=done + 1, filename_suffix=f".{done}")

    def add(self, entry: dict[str, Any]) -> None:
        """Writes one scalar for each number of an entry, at its "step", and flushes the file. Leaves out None and lists.

        Args:
            entry: A dict with "step" (int, number of finished steps) and the metrics by name. Not changed.

        Raises:
            ConfigError: If the file cannot be written.
        """
        with os_errors("run_dir", self._directory):
            for name, value in _numbers(entry).items():
                self._writer.add_scalar(name, value, entry["step"])
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file. Raises ConfigError if it cannot be written."""
        with os_errors("run_dir", self._directory):
            self._writer.close()


class Wandb:
    """Logs to Weights & Biases (W&B). Creates or continues a W&B run when it is created.

    Stores the id of the W&B run in `wandb.json` of the run directory, so that a resumed run continues the same W&B run. Entries
    of steps after `done` are logged again, because W&B cannot remove entries.

    Args:
        run_dir: The run directory, with a config.json, which is sent to W&B.
        done: Number of finished steps. If it is 0, a new W&B run is created.

    Raises:
        ConfigError: If W&B cannot start, or `wandb.json` cannot be written.
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
        """Sends the numbers of an entry to W&B in one call, with its "step" as the x-axis. Leaves out None and lists.

        Args:
            entry: A dict with "step" (int, number of finished steps) and the metrics by name. Not changed.
        """
        self._run.log({"step": entry["step"], **_numbers(entry)})

    def close(self) -> None:
        """Uploads the remaining entries and finishes the W&B run. Waits for the upload."""
        self._run.finish()


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "step" and isinstance(value, int | float)}


Tracker: TypeAlias = TensorBoard | Wandb
"""A destination of the metrics. `add` receives each entry of metrics.jsonl, `close` writes the rest."""
