"""How everything here is timed: warm until the clocks have settled, then repeats of many steps, and the median of those.

A card at its power limit runs its first second faster than all others, so the warm-up is a time, not a number of steps.
"""

import faulthandler
import math
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any


def time_steps(
    run: Callable[[], object], wait: Callable[[], object], *, seconds: float, repeats: int, warmup_seconds: float
) -> dict[str, Any]:
    """Times a step that is handed to the device asynchronously.

    Args:
        run: hands over one step.
        wait: returns when everything handed over is done.
        seconds: a repeat has as many steps as it takes to last this long: its start and end must not count. The clock is read
            before and after, never between.
        repeats: how many repeats the median is taken of.
        warmup_seconds: how long steps run before the first repeat.

    Returns:
        Milliseconds a step, and the card's power and clock meanwhile, as a row has them.
    """
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + warmup_seconds:
        run()
        wait()
        done += 1
    steps = max(1, math.ceil(seconds * done / (time.perf_counter() - start)))
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
    return {"ms": statistics.median(repeats_ms), "power_watts": watts, "sm_clock_mhz": mhz}


def read_card() -> tuple[float, float] | None:
    """Returns watts drawn and SM clock in MHz of the first GPU, as nvidia-smi reads them; None without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    told = _nvidia_smi(f"--id={first}", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits")
    try:
        watts, mhz = told.split(",")
        return float(watts), float(mhz)
    except ValueError:
        return None


@cache
def count_gpus() -> int:
    """Counts them by nvidia-smi and CUDA_VISIBLE_DEVICES; without jax or torch, which would take hold of them."""
    gpus = _nvidia_smi("--list-gpus").splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    return min(len(gpus), len(list(filter(None, visible.split(",")))))


def _nvidia_smi(*arguments: str) -> str:
    """Returns what it prints; nothing where it is not there."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def resident_bytes() -> int:
    """Returns the memory of this process, as Linux counts it."""
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
    """Runs steps, each waited for; tells the bytes in use before them, and ten times on the way that and how long steps took.

    Ten steps are run before, since the first ones record graphs.

    A step that hangs ends the process, and where it was is written to stderr. Of jax, only what `devices` can tell is used.
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
            told = {"ms": median, "slowest_ms": times[slowest[0]], "late": sum(time > 2 * median for time in times)}
            told |= {"slowest": [[index + 1, times[index]] for index in slowest]}
            yield {"done": step, **told, **memory(), **facts()}
