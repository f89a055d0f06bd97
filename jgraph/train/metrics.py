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
from jgraph.train._trackers import Tracker
from jgraph.train.rundir import replace_text


def peak_memory_bytes(device: Any) -> int:
    """Returns the peak memory of a device, or of the host's process for a device without such a counter."""
    stats = device.memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest  # bytes on macOS, KiB on Linux


class MetricsLog:
    """Writes metrics.jsonl, and passes entries to the trackers. Begins by removing entries after step `done`."""

    def __init__(self, path: Path, *, done: int, trackers: Sequence[Tracker] = ()):
        self._trackers = trackers
        self._path = path
        kept = [line for line, entry in _entries(path) if entry["step"] <= done]
        text = "".join(f"{line}\n" for line in kept)
        with os_errors("run_dir", path):
            if not path.exists() or path.read_bytes() != text.encode():
                replace_text(path, text)
            self._file = path.open("a")

    def add(self, entry: dict[str, Any]) -> None:
        """Appends an entry and flushes the file. NaN and infinite numbers become null."""
        entry = finite(entry)
        with os_errors("run_dir", self._path):
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
        for tracker in self._trackers:
            tracker.add(entry)

    def close(self) -> None:
        with os_errors("run_dir", self._path):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def finite(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy with None in place of each float that is NaN or infinite, because JSON has no such numbers."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in entry.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the entries of a metrics.jsonl, which need not exist. Skips lines that are damaged or have no step."""
    return [entry for _, entry in _entries(path)]


class StepClock:
    """Measures the time of steps, without compilation, evaluation and checkpoints. `seconds` is the total, over all runs."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds
        self._lap_seconds = 0.0
        self._lap_steps = 0
        self._started: float | None = None

    def start(self) -> None:
        """Starts the clock before a step is dispatched. Does nothing if the clock is running."""
        if self._started is None:
            self._started = time.perf_counter()

    def stop(self, steps: int, *, of: int | None = None) -> None:
        """Stops the clock when the last dispatched step has finished. Counts `steps` / `of` of the time since `start`.

        Halted steps are counted in `of` only, because they will be repeated.
        """
        if self._started is not None:
            elapsed = time.perf_counter() - self._started
            self._started = None
            elapsed *= steps / of if of else 1.0
            self.seconds += elapsed
            self._lap_seconds += elapsed
        self._lap_steps += steps

    def lap(self) -> float:
        """Returns the mean seconds per step since the last call; NaN without steps."""
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
    losses = all(isinstance(entry.get(name, 0), int | float | None) for name in ("loss", "eval_loss"))
    return losses and isinstance(entry.get("seconds", 0), int | float)
