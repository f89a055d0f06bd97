"""The timing loop of `jgraph.compare` and of the benchmarks. Imports no JAX, so that programs of other frameworks use it too.

GPU speed drifts with temperature, clock and other load, and the first program has an advantage. Programs are therefore timed in
rounds, in which each has one turn. A turn warms up for a duration, not for a number of calls, because a GPU at its power limit
runs the first second faster than the rest.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

Run: TypeAlias = Callable[[], object]
"""Dispatches one call of a program, or waits for all dispatched calls."""


@dataclass(frozen=True, kw_only=True)
class Timer:
    """Durations of a turn."""

    seconds: float
    """Minimum duration of a repeat."""
    repeats: int
    """Number of repeats. The median counts."""
    warmup_seconds: float
    """Warm-up before the first repeat, until the clock of the GPU has settled."""

    def repeats_ms(self, run: Run, wait: Run) -> tuple[list[float], int]:
        """Returns the time per call of each repeat, without a wait between calls, and the number of calls of a repeat."""
        start, done = time.perf_counter(), 0
        while time.perf_counter() < start + self.warmup_seconds:
            run()
            wait()
            done += 1
        calls = max(1, math.ceil(self.seconds * done / (time.perf_counter() - start)))
        return [self._repeat_ms(run, wait, calls) for _ in range(self.repeats)], calls

    @staticmethod
    def _repeat_ms(run: Run, wait: Run, calls: int) -> float:
        # The host reads the time only before and after a repeat.
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        return (time.perf_counter() - start) / calls * 1e3

    def dispatch_seconds(self, run: Run, wait: Run) -> float:
        """Returns the median host time of a dispatch to an idle device. `run` must be warm."""
        # Idle, because runtimes block the host once enough work is in flight (jax: 32 executables).
        samples, end = [], time.perf_counter() + self.seconds
        while len(samples) < self.repeats or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
            wait()
        return statistics.median(samples)


def without_overlap(run: Run, wait: Run, platform: str) -> Run:
    """Returns a call that waits on a CPU, where the threads of two calls at once can wait for each other forever."""
    return (lambda: (run(), wait())) if platform == "cpu" else run


def in_round(programs: Sequence[T], number: int) -> Sequence[T]:
    """Returns the programs in the order of a round. Odd rounds are reversed, so that a drift does not favor the first."""
    return programs[::-1] if number % 2 else programs
