"""Metrics of a run: metrics.jsonl, step time, peak memory."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jgraph.errors import os_errors
from jgraph.train.rundir import replace_text
from jgraph.train.trackers import Tracker


def peak_memory_bytes(device: Any) -> int:
    """Returns the largest memory use so far, in bytes.

    Args:
        device: A `jax.Device`.

    Returns:
        The peak memory of the device since the process started. For a device without such a counter, for example a CPU, the
        peak memory of the process on the host.
    """
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest  # bytes on macOS, KiB on Linux


class MetricsLog:
    """Writes metrics.jsonl: one JSON object per line. Opens the file when it is created.

    Args:
        path: The file; created if missing. Its directory must exist.
        done: Number of finished steps. Entries of later steps and damaged lines are removed from an existing file, atomically.
        trackers: Other destinations, which also receive every entry. `close` closes them.

    Raises:
        ConfigError: If the file cannot be written. All methods raise this error.
    """

    def __init__(self, path: Path, *, done: int, trackers: Sequence[Tracker] = ()):
        self._trackers, self._path = trackers, path
        kept = [line for line, entry in _entries(path) if entry["step"] <= done]
        text = "".join(f"{line}\n" for line in kept)
        with os_errors("run_dir", path):
            if not path.exists() or path.read_bytes() != text.encode():
                replace_text(path, text)
            self._file = path.open("a")

    def add(self, entry: dict[str, Any]) -> None:
        """Appends an entry to the file, flushes the file, and passes the entry to the trackers.

        Args:
            entry: A dict that JSON can represent, with the key "step" (int, number of finished steps). Floats that are NaN or
                infinite become null in the file and None for the trackers. Not changed.

        Raises:
            ConfigError: If the file cannot be written.
        """
        entry = finite(entry)
        with os_errors("run_dir", self._path):
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
        for tracker in self._trackers:
            tracker.add(entry)

    def close(self) -> None:
        """Closes the file, and then the trackers in order.

        Raises:
            ConfigError: If the file cannot be written.
        """
        with os_errors("run_dir", self._path):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of a dict with None in place of each float that is NaN or infinite, because JSON has no such numbers.

    Args:
        entry: The dict. Nested values are not searched.
    """
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics.jsonl.

    Args:
        path: The file. It need not exist.

    Returns:
        One dict per line, in the order of the file. Empty if there is no file. Skips lines that are not a JSON object with an
        int "step", or that have a "loss", "eval_loss" or "seconds" that is not a number; the losses may be None.
    """
    return [entry for _, entry in _entries(path)]


class StepClock:
    """Measures the time of steps, without compilation, evaluation and checkpoints. Does not wait for devices.

    Attributes:
        seconds: Total time between all pairs of `start` and `stop`, plus the initial value.

    Args:
        seconds: Initial value of the total, for example the time of the steps before a run was resumed.
    """

    def __init__(self, seconds: float = 0.0):
        self.seconds, self._lap_seconds, self._lap_steps = seconds, 0.0, 0
        self._started: float | None = None

    def start(self) -> None:
        """Starts the clock. Call it before a step is dispatched. Does nothing if the clock is running."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, steps: int, *, of: int | None = None) -> None:
        """Stops the clock. Call it when the last dispatched step has finished.

        Adds the time since `start` to `seconds`, or the share `steps` / `of` of it if `of` is given. Also counts the steps for
        `lap`. If the clock is not running, adds no time.

        Args:
            steps: Number of steps since `start`, without halted steps, which changed nothing and will be repeated.
            of: Number of steps since `start`, with halted steps; None if no step halted.
        """
        if self._started is not None:
            elapsed, self._started = time.perf_counter() - self._started, None
            elapsed *= steps / of if of else 1.0
            self.seconds += elapsed
            self._lap_seconds += elapsed
        self._lap_steps += steps

    def lap(self) -> float:
        """Ends a lap and starts the next one.

        Returns:
            The mean time per step in seconds, over the steps that `stop` has counted since the last call of `lap`. NaN if there
            were none.
        """
        mean = self._lap_seconds / self._lap_steps if self._lap_steps else math.nan
        self._lap_seconds, self._lap_steps = 0.0, 0
        return mean


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in path.read_text(errors="replace").split("\n") if path.exists() else ():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and _has_numbers(entry):
            yield line, entry


def _has_numbers(entry: dict[str, Any]) -> bool:
    """True if losses are numbers or null, and seconds are a number."""
    losses = all(isinstance(entry.get(name, 0), int | float | None) for name in ("loss", "eval_loss"))
    return losses and isinstance(entry.get("seconds", 0), int | float)
