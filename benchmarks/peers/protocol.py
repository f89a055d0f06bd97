"""What a process that is timed shares with the table it is timed for: its request, its turns, its answers. No jax, no torch.

It imports, waits to be told that the GPU is free, builds and warms up; then it is given a turn for each line on stdin, and
idles in between. All that it says is JSON lines on stdout. The table's side is `benchmarks/turns.py`.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import time_steps

Run = Callable[[], object]
Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Says how long everything is timed; the same on both sides."""

    seconds: float
    """Shortest time of a repeat."""
    repeats: int
    """Of a turn, of which the median is taken."""
    warmup_seconds: float
    """Before the first of them: whatever had the turn before, or nothing, the card's clock settles."""

    def back_to_back(self, run: Run, wait: Run) -> dict[str, Any]:
        """Times steps handed over one after the other; the device is waited for once a repeat."""
        return time_steps(run, wait, **asdict(self))

    def one_by_one(self, run: Run, wait: Run) -> dict[str, Any]:
        """Times steps of which each is waited for, so that the filling and draining of a pipeline count."""
        return self.back_to_back(lambda: (run(), wait()), lambda: None)

    def in_flight(self, run: Run, wait: Run, platform: str) -> dict[str, Any]:
        """Times them back to back; on a CPU one by one, where the threads of a step can wait for those of another, for ever."""
        return (self.one_by_one if platform == "cpu" else self.back_to_back)(run, wait)

    def each(self, runs: Mapping[str, Run], wait: Run) -> dict[str, Any]:
        """Times several back to back, one after the other; returns NAME_ms of each, and of all of them together."""
        timed = {name: self.back_to_back(run, wait) for name, run in runs.items()}
        own = {f"{name}_ms": one["ms"] for name, one in timed.items()}
        return own | {"ms": sum(own.values()), "power_watts": next(reversed(timed.values()))["power_watts"]}

    def handover_seconds(self, run: Run, wait: Run) -> float:
        """Returns the median time in which `run` returns when the device has nothing to do; `run` must be warm.

        From an idle device, since both runtimes make the host wait once enough is in flight (jax: 32 executables).
        """
        samples, end = [], time.perf_counter() + self.seconds
        while len(samples) < self.repeats or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
            wait()
        return statistics.median(samples)


def request() -> dict[str, Any]:
    """Returns the table's request to this process, once the GPU is free for it to build."""
    asked = json.loads(sys.argv[1])
    begin()
    return asked


def begin() -> None:
    """Returns when this process is told that it may build; at once where nobody tells, as by hand in a terminal."""
    if not sys.stdin.isatty():
        sys.stdin.readline()


def take_turns(measure: Callable[[Clock], Answer], soak: Callable[..., Iterator[Answer]] | None = None) -> None:
    """Says that all is built and warm, and answers each turn until there are no more.

    Args:
        measure: times a turn; its keys become medians of the row, and lists as `repeats_KEY`.
        soak: runs as many steps as its arguments say, and tells how they went, where a soak is asked for.
    """
    answer(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if soak and "hang_seconds" in asked:
            for told in soak(**asked):
                answer(**told)
            answer(turn={})
        else:
            answer(turn=measure(Clock(**asked)))


def answer(**row: Any) -> None:
    print(json.dumps(row), flush=True)
