"""How everything here is timed: warm until the clocks have settled, then repeats of many steps, and the median of those.

A card at its power limit runs its first second faster than all others, so the warm-up is a time, not a number of steps.
"""

import json
import math
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: the median of the repeats and the repeats themselves; and what the card did meanwhile."""

    ms: float
    repeats_ms: list[float]
    steps: int
    power_watts: float | None
    sm_clock_mhz: float | None


def time_steps(
    run: Callable[[], object],
    wait: Callable[[], object],
    *,
    steps: int,
    seconds: float,
    repeats: int,
    warmup_seconds: float,
) -> Timing:
    """Times a step that is handed to the device asynchronously.

    Args:
        run: hands over one step.
        wait: returns when everything handed over is done.
        steps: fewest in a repeat; the clock is read before and after, never between.
        seconds: a repeat has as many steps more as it takes to last this long: its start and end must not count.
        repeats: at least 5, of which the median is taken.
        warmup_seconds: run before the first repeat.
    """
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + warmup_seconds:
        for _ in range(steps):
            run()
        wait()
        done += steps
    steps = max(steps, math.ceil(seconds * done / (time.perf_counter() - start)))
    repeats_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            run()
        wait()
        repeats_ms.append((time.perf_counter() - start) / steps * 1e3)
    with ThreadPoolExecutor(1) as pool:  # the card is read while it works, but not while it is timed
        reading = pool.submit(read_card)
        while not reading.done():
            for _ in range(steps):
                run()
            wait()
    watts, mhz = reading.result() or (None, None)
    return Timing(statistics.median(repeats_ms), repeats_ms, steps, watts, mhz)


def read_card() -> tuple[float, float] | None:
    """Watts drawn and SM clock in MHz of the first GPU, as nvidia-smi reads them; None without one."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    try:
        watts, mhz = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split(",")
        return float(watts), float(mhz)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def count_gpus() -> int:
    """By nvidia-smi; without jax or torch, which would take hold of them."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.splitlines())


def resident_bytes() -> int:
    """Memory of this process, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def environment(*, revision: str = "") -> dict[str, Any]:
    """Versions, date and git revision, for the JSON; `revision` where the tree travelled without its .git."""
    packages = ("jax", "jaxlib", "flax", "optax", "torch")
    installed = {name: version for name in packages if (version := _version(name))}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision or _git_revision(),
        "python": platform.python_version(),
        **installed,
    }


def write_results(name: str, results: dict[str, Any], table: str) -> None:
    """Writes benchmarks/results/NAME.json and .md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(table)


def line(cells: list[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def spread(row: dict[str, Any]) -> str:
    return f"{min(row['repeats_ms']):.3f}, {max(row['repeats_ms']):.3f}"


def ratio(row: dict[str, Any], to: dict[str, Any] | None, key: str) -> str:
    return f"{row[key] / to[key]:.3f}" if to else ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
