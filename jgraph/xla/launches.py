"""Counts launches, updates and recordings of command buffers with JAX's profiler.

The capture report lists thunks that can be launched as graphs. Only a run shows whether a step launches them, and whether it
must update them first because an argument moved. XLA may skip its command buffers while a profiler runs; compile with
`xla_enable_command_buffers_during_profiling` to always use them.
"""

import contextlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

import jax

from jgraph.errors import JgraphError

ProfileData: TypeAlias = jax.profiler.ProfileData  # pyright: ignore[reportInvalidTypeForm]
"""A recorded profile. Type checkers do not accept the class itself, because jax declares it without a type."""

_GRAPH_EVENTS = ("cuGraph", "command_buffer::")
# XLA's events for the first recording of a graph. jax 0.10 has the last name, 0.12 the second.
_FIRST = ("command_buffer::initialize", "command_buffer::record", "command_buffer::record_for_va_remapping")


@dataclass
class Launches:
    """Counts of the events of command buffers (CUDA graphs) on all devices of this process. All are 0 on a CPU."""

    launches: int
    updates: int  # recordings of an existing graph, because an array has another address
    records: int  # graphs that were created

    def __getattr__(self, name: str) -> NoReturn:
        """Raises JgraphError for a count that is not available yet. Python calls this for absent attributes only."""
        if name in Launches.__annotations__:
            raise JgraphError(f"`{name}` is counted when the block of count_launches() ends: read it after the block")
        raise AttributeError(name)


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Counts launches of CUDA graphs inside a `with` block, with JAX's profiler. The counts are set when the block ends.

    Do not measure time inside the block: the profiler writes files. Waits for all live arrays at the end.
    """
    count = Launches.__new__(Launches)
    with tempfile.TemporaryDirectory(prefix="jgraph-launches-") as directory:
        with traced(directory):
            yield count
        (file,) = Path(directory).rglob("*.xplane.pb")
        vars(count).update(vars(launches_of(graph_events(jax.profiler.ProfileData.from_file(str(file))))))


@contextlib.contextmanager
def traced(directory: str) -> Iterator[None]:
    """Runs JAX's profiler during a `with` block. Waits for all live arrays at its end. The trace is complete after it."""
    try:
        jax.profiler.start_trace(directory, profiler_options=profiler_options())
    except RuntimeError as e:
        raise JgraphError(f"the profiler cannot be started: {e}; end the other profile first") from e
    try:
        yield
        jax.block_until_ready(jax.live_arrays())
    finally:
        jax.profiler.stop_trace()


def profiler_options() -> jax.profiler.ProfileOptions:
    """Returns options that record devices and XLA's host events, but not Python calls, which slows down programs."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def graph_events(profile: ProfileData) -> dict[str, list[float]]:
    """Returns the durations in ms of host events about command buffers, by name without arguments, e.g. `cuGraphLaunch`."""
    # An event that did not occur has an empty list.
    found: dict[str, list[float]] = defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/host:") else ():
            for event in line.events:
                if event.name.startswith(_GRAPH_EVENTS):
                    # Remove a suffix such as "(CudaGraph:496)", and arguments.
                    found[re.split(r"[ (#]", event.name)[0]].append(event.duration_ns / 1e6)
    return found


def launches_of(events: Mapping[str, Sequence[float]]) -> Launches:
    """Counts launches, updates and new graphs in the events of a profile, from `graph_events`."""
    count = {name: len(durations) for name, durations in events.items()}
    first = sum(count.get(name, 0) for name in _FIRST)
    # Prefer calls of the CUDA driver to XLA's events, if the profiler recorded them.
    driver = [name for name in count if name.startswith("cuGraph")]
    launches = sum(count[name] for name in driver if name.startswith("cuGraphLaunch"))
    records = sum(count[name] for name in driver if name.startswith("cuGraphInstantiate")) if driver else first
    return Launches(
        launches=launches or count.get("command_buffer::execute", 0),
        updates=count.get("command_buffer::update", 0) + max(first - records, 0),
        records=records,
    )
