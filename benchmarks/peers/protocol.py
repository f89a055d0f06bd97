"""The protocol between a timed process and `benchmarks/turns.py`. Imports neither jax nor torch.

The process imports its libraries and waits for a line on stdin, so that only one process builds on the GPU. It builds, warms
up, and then measures once for each further line. It prints its answers as JSON lines on stdout.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.harness import read_power_and_clock
from jgraph import timing
from jgraph.timing import Run

Answer = dict[str, Any]


class Timer(timing.Timer):
    """Durations of a turn, and the ways to measure. The same for jgraph and its peers."""

    def back_to_back(self, run: Run, wait: Run) -> dict[str, Any]:
        """Times steps that are dispatched without waiting. Waits once at the end of each repeat.

        Returns the median `ms`, and `power_watts` and `sm_clock_mhz` of the GPU under load.
        """
        repeats_ms, steps = self.repeats_ms(run, wait)
        with ThreadPoolExecutor(1) as pool:  # reads power and clock under load, outside the timed repeats
            reading = pool.submit(read_power_and_clock)
            while not reading.done():
                for _ in range(steps):
                    run()
                wait()
        watts, mhz = reading.result() or (None, None)
        return {"ms": statistics.median(repeats_ms), "power_watts": watts, "sm_clock_mhz": mhz}

    def per_token(self, run: Run, wait: Run, new: int) -> dict[str, Any]:
        """Times the generation of `new` tokens, per token."""
        timed = self.back_to_back(run, wait)
        return timed | {"ms": timed["ms"] / new}

    def one_by_one(self, run: Run, wait: Run) -> dict[str, Any]:
        """Times steps with a wait after each, so that the fill and drain of a pipeline count."""
        return self.back_to_back(lambda: (run(), wait()), lambda: None)

    def on_platform(self, run: Run, wait: Run, platform: str) -> dict[str, Any]:
        """Times steps back to back, except on a CPU (`jgraph.timing.without_overlap`)."""
        return self.back_to_back(timing.without_overlap(run, wait, platform), wait)

    def each(self, runs: Mapping[str, Run], wait: Run) -> dict[str, Any]:
        """Times functions one after another: `NAME_ms` of each, `ms` as their sum, and `power_watts` of the last one."""
        timed = {name: self.back_to_back(run, wait) for name, run in runs.items()}
        own = {f"{name}_ms": one["ms"] for name, one in timed.items()}
        return own | {"ms": sum(own.values()), "power_watts": next(reversed(timed.values()))["power_watts"]}


def read_request() -> dict[str, Any]:
    """Returns the JSON request in the first command-line argument, after `wait_for_start`."""
    request = json.loads(sys.argv[1])
    wait_for_start()
    return request


def wait_for_start() -> None:
    """Blocks until a line arrives on stdin, when the GPU is free for the build. Returns at once in a terminal."""
    if not sys.stdin.isatty():
        sys.stdin.readline()


def take_turns(measure: Callable[[Timer], Answer], soak: Callable[..., Iterator[Answer]] | None = None) -> None:
    """Reports that the process is warm, and measures once per line on stdin until stdin closes.

    Each key of the answer of `measure` becomes a median of the row and a list `repeats_KEY`. `soak` yields its progress.
    """
    answer(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        if soak and "hang_seconds" in request:
            for progress in soak(**request):
                answer(**progress)
            answer(turn={})
        else:
            answer(turn=measure(Timer(**request)))


def answer(**row: Any) -> None:
    """Prints keys of the row as a JSON line."""
    print(json.dumps(row), flush=True)
