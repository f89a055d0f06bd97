"""How everything here is timed: warm until the clocks have settled, then repeats of many steps, and the median of those.

A card at its power limit runs its first second faster than all others, so the warm-up is a time, not a number of steps.
"""

import faulthandler
import json
import math
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
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


def soak(
    run: Callable[[], object], wait: Callable[[], object], devices: list[Any], *, steps: int, hang_seconds: float
) -> Iterator[dict[str, Any]]:
    """Steps, each waited for: the bytes in use before them, and ten times on the way what they are and how long steps took.

    A step that hangs ends the process, and where it was is written to stderr. Of jax, only what `devices` can tell is used.
    """

    def memory() -> dict[str, Any]:
        stats = [device.memory_stats() for device in devices]
        return {"device_bytes": sum(s["bytes_in_use"] for s in stats) if all(stats) else None, "host_bytes": resident_bytes()}

    times = []
    yield {"done": 0, **{f"first_{place}": size for place, size in memory().items()}}
    for step in range(1, steps + 1):
        faulthandler.dump_traceback_later(hang_seconds, exit=True)
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
        faulthandler.cancel_dump_traceback_later()
        if step * 10 // steps > (step - 1) * 10 // steps:
            yield {"done": step, "median_ms": statistics.median(times), "slowest_ms": max(times), **memory()}


def print_soak(title: str, row: dict[str, Any], steps: int, *facts: str) -> int:
    """What `soak` has found, with other facts of the row by their names; the exit status, 1 where the row has failed."""
    print(f"{title}: {row.get('done', 0)} of {steps} steps")
    for place in ("device", "host"):
        before, after = row.get(f"first_{place}_bytes"), row.get(f"{place}_bytes")
        grown = "not told" if before is None or after is None else f"{before:,} -> {after:,} bytes, {after - before:+,}"
        print(f"{place}: {grown}")
    if "median_ms" in row:
        told = "".join(f", {fact.replace('_', ' ')}: {row[fact]}" for fact in facts)
        print(f"median {row['median_ms']:.2f} ms, slowest {row['slowest_ms']:.2f} ms{told}")
    if "failed" in row:
        print(row["failed"])
    return int("failed" in row)


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


class Table:
    """Rows by work, written after each; what an earlier run has left there stays until its work is run again.

    Args:
        name: of the files in benchmarks/results.
        draw: makes the Markdown of all works.
    """

    def __init__(self, name: str, draw: Callable[[dict[str, Any]], str]):
        self.name, self.draw = name, draw
        file = RESULTS / f"{name}.json"
        self.works: dict[str, Any] = json.loads(file.read_text())["works"] if file.exists() else {}

    def begin(self, work: str, **about: Any) -> None:
        self.works[work] = {**about, "device": None, "rows": []}

    def add(self, work: str, row: dict[str, Any]) -> None:
        self.works[work]["rows"].append(row)
        self.works[work]["device"] = row.get("device") or self.works[work]["device"]
        print(f"{work}: { ({key: value for key, value in row.items() if key != 'repeats_ms'}) }", flush=True)
        write_results(self.name, {"works": self.works}, str(self))

    def __str__(self) -> str:
        return self.draw(self.works)


def merge(rows: list[dict[str, Any]], failure: str) -> dict[str, Any]:
    """All that a process has answered, and why it stopped early."""
    merged = {key: value for row in rows for key, value in row.items()}
    return merged | ({"failed": failure} if failure else {})


def fastest(rows: list[dict[str, Any]], system: str) -> dict[str, Any] | None:
    return min((row for row in rows if row["system"] == system and "ms" in row), key=lambda row: row["ms"], default=None)


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
