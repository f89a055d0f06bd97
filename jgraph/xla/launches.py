"""How often command buffers were really launched, updated and recorded, counted by the profiler.

What XLA captured (`capture`) is what could be launched as graphs. Whether a step launches them, and whether it has to change
them first because its arguments moved, only a run shows. XLA can leave its command buffers aside while a profiler watches; a
program that is compiled with `xla_enable_command_buffers_during_profiling` uses them in any case.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jgraph.errors import JgraphError

# XLA's names for recording into a graph that is new, or for the first time in this way; jax 0.10 has the last, 0.12 the second.
_FIRST = ("command_buffer::initialize", "command_buffer::record", "command_buffer::record_for_va_remapping")


@dataclass(frozen=True)
class Launches:
    """What happened to command buffers on all devices; all 0 where there are none, as on a CPU.

    `records` are graphs made anew, `updates` recordings into one that was there, since an array lies elsewhere than last time.
    """

    launches: int
    updates: int
    records: int


class LaunchCount:
    """What `count_launches` hands out: `launches`, `updates` and `records` of `counts`, once the block is over."""

    _counts: Launches | None = None

    @property
    def counts(self) -> Launches:
        if self._counts is None:
            raise JgraphError("launches are counted when the block of count_launches() has ended: read them after it")
        return self._counts

    launches = property(lambda self: self.counts.launches)
    updates = property(lambda self: self.counts.updates)
    records = property(lambda self: self.counts.records)

    def __repr__(self) -> str:
        return f"LaunchCount({self._counts or 'still counting'})"


@contextlib.contextmanager
def count_launches() -> Iterator[LaunchCount]:
    """Counts graph launches in its block, on all devices of this process.

        with count_launches() as count:
            state, metrics = step(state, batch)
        assert (count.launches, count.updates) == (1, 0)

    Arrays that are alive at the end of the block are waited for. Times mean nothing in it: the profiler is on.

    Raises:
        JgraphError: a profiler is on already, or the counts are read inside the block.
    """
    count = LaunchCount()
    with tempfile.TemporaryDirectory(prefix="jgraph-launches-") as directory:
        try:
            jax.profiler.start_trace(directory, profiler_options=profiler_options())
        except RuntimeError as e:
            raise JgraphError(f"launches cannot be counted: {e}; end the other profile first") from e
        try:
            yield count
            jax.block_until_ready(jax.live_arrays())
        finally:
            jax.profiler.stop_trace()
        count._counts = launches_of(_events(Path(directory)))


def profiler_options() -> jax.profiler.ProfileOptions:
    """Returns options that record devices and XLA's host, not every Python call, which would slow down what is watched."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def launches_of(events: Mapping[tuple[str, str], int]) -> Launches:
    """Returns the counts in a profile, from how often each (plane, name of an event) occurs in it."""
    names: Counter[str] = Counter()
    for (plane, name), number in events.items():
        if plane.startswith("/host:"):
            names[name.partition(" ")[0].partition("#")[0]] += number  # without "(CudaGraph:496)", without arguments
    first = sum(names[name] for name in _FIRST)
    # The driver's own calls are the truth, where the profiler sees them.
    driver = [name for name in names if name.startswith("cuGraph")]
    launches = sum(names[name] for name in driver if name.startswith("cuGraphLaunch"))
    records = sum(names[name] for name in driver if name.startswith("cuGraphInstantiate")) if driver else first
    return Launches(
        launches=launches or names["command_buffer::execute"],
        updates=names["command_buffer::update"] + max(first - records, 0),
        records=records,
    )


def _events(directory: Path) -> Counter[tuple[str, str]]:
    return Counter(
        (plane.name, event.name)
        for file in directory.glob("**/*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
    )
