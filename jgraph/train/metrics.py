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
    """Returns the peak memory of a `jax.Device` in bytes, or that of the process on a CPU, which has no count."""
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest  # bytes on macOS, KiB on Linux


class MetricsLog:
    """Writes metrics.jsonl: one JSON object per line, flushed after each entry.

    Args:
        path: The file; created if missing.
        done: Number of finished steps. Entries of later steps and incomplete lines are dropped, atomically.
        trackers: Also receive every entry.

    Raises:
        ConfigError: From every method, if the file cannot be written.
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
        """Appends an entry with the key "step". Numbers that are not finite become null."""
        entry = finite(entry)
        with os_errors("run_dir", self._path):
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
        for tracker in self._trackers:
            tracker.add(entry)

    def close(self) -> None:
        """Closes the file and the trackers."""
        with os_errors("run_dir", self._path):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """Replaces numbers that are not finite by None, because JSON has no NaN or infinity."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a metrics.jsonl, or none if it is missing. Skips incomplete lines."""
    return [entry for _, entry in _entries(path)]


class StepClock:
    """Measures the time of steps, without compilation, evaluation and checkpoints.

    Attributes:
        seconds: Total time.
    """

    def __init__(self, seconds: float = 0.0):
        self.seconds, self._lap_seconds, self._lap_steps = seconds, 0.0, 0
        self._started: float | None = None

    def start(self) -> None:
        """Starts before the first step is dispatched. Does nothing while running."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, steps: int, *, of: int | None = None) -> None:
        """Stops after the last dispatched step has finished.

        Args:
            steps: Number of steps since `start`, without halted ones.
            of: Number of steps since `start` including halted ones. Default: no step halted.
        """
        if self._started is not None:
            elapsed, self._started = time.perf_counter() - self._started, None
            elapsed *= steps / of if of else 1.0
            self.seconds += elapsed
            self._lap_seconds += elapsed
        self._lap_steps += steps

    def lap(self) -> float:
        """Returns the mean seconds per step since the last lap, or NaN without a step."""
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
