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
    """Counts of command buffer events on all devices of this process. A command buffer is XLA's name for a CUDA graph.

    All counts are 0 on a CPU.

    Attributes:
        launches: The number of graph launches.
        updates: The number of times that an existing graph was recorded again, because an array has another address.
        records: The number of graphs that were created.
    """

    launches: int
    updates: int
    records: int

    def __getattr__(self, name: str) -> NoReturn:
        """Raises JgraphError for a count that is not available yet. Python calls this for absent attributes only."""
        if name in Launches.__annotations__:
            raise JgraphError(f"`{name}` is counted when the block of count_launches() ends: read it after the block")
        raise AttributeError(name)


@contextlib.contextmanager
def count_launches() -> Iterator[Launches]:
    """Counts launches of CUDA graphs inside a `with` block, on all devices of this process.

    Runs JAX's profiler, which writes to a temporary directory that is removed, so do not measure time inside the block. Waits
    for all live arrays at the end of the block. Example:

        with count_launches() as count:
            state, metrics = step(state, batch)
        assert (count.launches, count.updates) == (1, 0)

    Yields:
        The counts, which are set when the block ends without an exception.

    Raises:
        JgraphError: If a profiler is already running when the block begins. Also, from the attributes of the result, if the
            counts are read inside the block.
    """
    count = Launches.__new__(Launches)
    with tempfile.TemporaryDirectory(prefix="jgraph-launches-") as directory:
        with traced(directory):
            yield count
        (file,) = Path(directory).rglob("*.xplane.pb")
        vars(count).update(vars(launches_of(graph_events(jax.profiler.ProfileData.from_file(str(file))))))


@contextlib.contextmanager
def traced(directory: str) -> Iterator[None]:
    """Runs JAX's profiler during a `with` block. Waits for all live arrays at the end of the block.

    Args:
        directory: The directory to write the trace to.

    Yields:
        None. The trace is complete after the block.

    Raises:
        JgraphError: If a profiler is already running when the block begins.
    """
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
    """Returns options for `jax.profiler.start_trace` that record devices and XLA's host events, but not Python calls.

    Recording Python calls would slow down the program.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def graph_events(profile: ProfileData) -> dict[str, list[float]]:
    """Reads the host events about command buffers from a recorded profile.

    Returns:
        The durations in ms of all occurrences of each event, by its name without arguments, e.g. `cuGraphLaunch` or
        `command_buffer::update`. Only names that start with `cuGraph` or `command_buffer::`. The result is a `defaultdict`, so
        an event that did not occur has an empty list.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/host:") else ():
            for event in line.events:
                if event.name.startswith(_GRAPH_EVENTS):
                    # Remove a suffix such as "(CudaGraph:496)", and arguments.
                    found[re.split(r"[ (#]", event.name)[0]].append(event.duration_ns / 1e6)
    return found


def launches_of(events: Mapping[str, Sequence[float]]) -> Launches:
    """Counts launches, updates and new graphs in the events of a profile.

    Calls of the CUDA driver are counted where the profile has them, otherwise XLA's events.

    Args:
        events: Durations of events by name, from `graph_events`. Only their number is used.

    Returns:
        The counts.
    """
    count = {name: len(durations) for name, durations in events.items()}
    first = sum(count.get(name, 0) for name in _FIRST)
    # Prefer calls of the CUDA driver, if the profiler recorded them.
    driver = [name for name in count if name.startswith("cuGraph")]
    launches = sum(count[name] for name in driver if name.startswith("cuGraphLaunch"))
    records = sum(count[name] for name in driver if name.startswith("cuGraphInstantiate")) if driver else first
    return Launches(
        launches=launches or count.get("command_buffer::execute", 0),
        updates=count.get("command_buffer::update", 0) + max(first - records, 0),
        records=records,
    )
