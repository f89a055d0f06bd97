"""Counts the programs that JAX compiles, and divides the time of a start into phases."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax

Interval: TypeAlias = tuple[float, float]
"""Start and end, by `time.monotonic`."""
Phase: TypeAlias = Literal["imports and data", "tracing", "XLA", "initial state", "first step"]

_HIT = "/jax/compilation_cache/cache_hits"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_TRACED = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration")


@dataclass
class Compiles:
    """The programs that JAX compiled or loaded, and when it traced and compiled them, on all threads."""

    programs: int = 0  # compiled, or loaded from JAX's compilation cache
    hits: int = 0  # loaded from the cache
    tracing: list[Interval] = field(default_factory=list)  # of all traces and lowerings, also nested ones
    compiling: list[Interval] = field(default_factory=list)  # or loading

    def __str__(self) -> str:
        return f"{self.programs - self.hits} compiled, {self.hits} loaded from the compile cache"


@contextlib.contextmanager
def watch() -> Iterator[Compiles]:
    """Records the programs that JAX compiles or loads from its cache inside a `with` block, on all threads."""
    found = Compiles()
    lock = threading.Lock()

    def on_event(event: str, duration_secs: Any = 0.0, **_: str | int) -> None:
        end = time.monotonic()
        interval = (end - duration_secs, end)
        with lock:
            if event == _HIT:
                found.hits += 1
            if event == _COMPILED:
                found.programs += 1
                found.compiling.append(interval)
            if event in _TRACED:
                found.tracing.append(interval)

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_event)


class Startup:
    """Divides the time from `began` to the end of the first step into phases, which do not overlap.

    Time counts as "tracing" while any thread traces or lowers a program, otherwise as "XLA" while any thread compiles or loads
    one, and otherwise as the section of the main thread that `enter` named last.
    """

    def __init__(self, began: float, compiles: Compiles):
        self._sections: dict[Phase, float] = {"imports and data": began}
        self._compiles = compiles

    def enter(self, section: Literal["initial state", "first step"]) -> None:
        """Begins a section. Sections are entered in the order of the phases."""
        self._sections[section] = time.monotonic()

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds of each phase up to now."""
        ends = [*self._sections.values(), time.monotonic()][1:]
        intervals: dict[Phase, list[Interval]] = {"tracing": self._compiles.tracing, "XLA": self._compiles.compiling}
        for (name, start), end in zip(self._sections.items(), ends, strict=True):
            intervals[name] = [(start, end)]
        found = divide(intervals)
        return {"imports and data": found.pop("imports and data"), **found}

    def __str__(self) -> str:
        seconds = self.seconds()
        notes = {"XLA": f" ({self._compiles})"}
        phases = ", ".join(f"{name} {length:.1f}{notes.get(name, '')}" for name, length in seconds.items())
        return f"first step finished {sum(seconds.values()):.1f} s after the start: {phases}"


def divide(phases: Mapping[Phase, Sequence[Interval]]) -> dict[Phase, float]:
    """Returns the length of each phase. A moment in several intervals counts once, for the first of their phases."""
    found: dict[Phase, float] = {}
    intervals: list[Interval] = []
    for name, own in phases.items():
        intervals.extend(own)
        found[name] = _union(intervals) - sum(found.values())
    return found


def _union(intervals: Sequence[Interval]) -> float:
    """Returns the length of the union of intervals: traces are nested, and threads compile at once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
