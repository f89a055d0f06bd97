"""Measurements that all benchmarks share: power and clock of the GPU, the number of GPUs, and soaks."""

import faulthandler
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any


def read_power_and_clock() -> tuple[float, float] | None:
    """Reads power (W) and SM clock (MHz) of the first visible GPU from nvidia-smi. Returns None without a GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    output = _nvidia_smi(f"--id={first}", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits")
    try:
        watts, mhz = output.split(",")
        return float(watts), float(mhz)
    except ValueError:
        return None


@cache
def count_gpus() -> int:
    """Returns the number of visible GPUs. Uses nvidia-smi, because jax and torch would allocate memory on them."""
    gpus = _nvidia_smi("--list-gpus").splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    return min(len(gpus), len(list(filter(None, visible.split(",")))))


def _nvidia_smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi. Empty if the command is missing or fails."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def resident_bytes() -> int:
    """Returns the resident set size of this process, from /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak(
    run: Callable[[], object],
    wait: Callable[[], object],
    devices: list[Any],
    facts: Callable[[], dict[str, Any]],
    *,
    steps: int,
    hang_seconds: float,
) -> Iterator[dict[str, Any]]:
    """Runs many steps, and yields the memory before the first one and ten reports of step times and memory.

    Ten steps run before the first measurement, because they record graphs. A step that takes longer than `hang_seconds` writes
    its stack trace to stderr and ends the process. `facts` returns further keys for each report.
    """

    def memory() -> dict[str, Any]:
        stats = [device.memory_stats() for device in devices]
        return {"device_bytes": sum(s["bytes_in_use"] for s in stats) if all(stats) else None, "host_bytes": resident_bytes()}

    for _ in range(10):
        run()
        wait()
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
            median = statistics.median(times)
            slowest = sorted(range(step), key=times.__getitem__)[:-6:-1]
            progress = {"ms": median, "slowest_ms": times[slowest[0]], "late": sum(time > 2 * median for time in times)}
            progress |= {"slowest": [[index + 1, times[index]] for index in slowest]}
            yield {"done": step, **progress, **memory(), **facts()}
