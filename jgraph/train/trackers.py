"""Where the entries of metrics.jsonl go too: TensorBoard's event files, a run of Weights & Biases."""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, Protocol

from jgraph.errors import ConfigError, os_errors
from jgraph.train.rundir import RunDir, replace_json

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    """Takes entries of metrics.jsonl, as they are written there."""

    def add(self, entry: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError where the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            wrong = f"needs the package {_PACKAGES[name]}; install it, e.g. by pip install 'jgraph[{name}]'"
            raise ConfigError(f"`log` is {name}: {wrong}", field="log")


def start(names: Sequence[str], run_dir: RunDir, done: int) -> list[Tracker]:
    """Returns the trackers of a run that goes on after `done` steps. Raises ConfigError where one cannot start."""
    kinds = {"tensorboard": TensorBoard, "wandb": Wandb}
    return [kinds[name](run_dir, done) for name in dict.fromkeys(names)]


class TensorBoard:
    """Event files in `tensorboard/`; what earlier ones have of steps after `done` is not shown any more."""

    def __init__(self, run_dir: RunDir, done: int):
        from tensorboardX import SummaryWriter

        self._directory = run_dir.tensorboard
        # The file's name has the second in it; two runs within one must not share it.
        with os_errors("run_dir", self._directory):
            self._writer = SummaryWriter(str(self._directory), purge_step=done + 1, filename_suffix=f".{done}")

    def add(self, entry: dict[str, Any]) -> None:
        with os_errors("run_dir", self._directory):
            for name, value in _numbers(entry).items():
                self._writer.add_scalar(name, value, entry["step"])
            self._writer.flush()

    def close(self) -> None:
        with os_errors("run_dir", self._directory):
            self._writer.close()


class Wandb:
    """A run of Weights & Biases, whose id is kept in `wandb.json`: a run that goes on is the same one there.

    What it was given of steps after `done` is given once more: entries cannot be taken back there.
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
            raise ConfigError(f"`log` is wandb: it cannot start ({e})", field="log") from e
        # Not by its own count of steps, which may not go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        replace_json(run_dir.wandb, {"id": self._run.id})

    def add(self, entry: dict[str, Any]) -> None:
        self._run.log({"step": entry["step"], **_numbers(entry)})

    def close(self) -> None:
        self._run.finish()


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "step" and isinstance(value, int | float)}
