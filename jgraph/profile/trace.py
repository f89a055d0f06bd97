"""A profiler's trace as arrays: when each device ran what, and what the host did about command buffers meanwhile.

Written by `jax.profiler`, read by `jax.profiler.ProfileData`. On GPUs an event of a stream is a kernel or a copy, with the HLO
instruction that it was launched for, unless it came out of a CUDA graph. On CPUs it is a thunk that XLA ran, on any thread.
"""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgraph.errors import ProfileError

_GPU = re.compile(r"/device:GPU:(\d+)")
# What the host's events about command buffers begin with, after which come numbers and arguments.
_HOST = ("cuGraphLaunch", "cuGraphInstantiate", "command_buffer::")


@dataclass(frozen=True)
class Events:
    """What one device ran, sorted by start.

    Attributes:
        start, end: float64 [n], ms from the trace's first event of any device.
        name: of kernels.
        op: HLO instructions; empty where the trace does not tell.
        scopes: jax's names of the operations, where the trace has them.
        module: HLO modules.
        stream: where it ran: names of streams or threads.
    """

    start: np.ndarray
    end: np.ndarray
    name: tuple[str, ...]
    op: tuple[str, ...]
    scopes: tuple[str, ...]
    module: tuple[str, ...]
    stream: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.name)

    def where(self, mask: np.ndarray) -> "Events":
        """Returns those that the mask chooses."""
        chosen = np.flatnonzero(mask)
        texts = ([values[i] for i in chosen] for values in (self.name, self.op, self.scopes, self.module, self.stream))
        return Events(self.start[chosen], self.end[chosen], *map(tuple, texts))

    def between(self, start: float, stop: float) -> "Events":
        """Returns those that begin in this time, cut at its end, in ms from its start."""
        found = self.where((self.start >= start) & (self.start < stop))
        return replace(found, start=found.start - start, end=np.minimum(found.end, stop) - start)


@dataclass(frozen=True)
class Trace:
    """What was read.

    Attributes:
        kind: of the devices: `GPU` or `CPU`.
        device: the GPU's name; empty where the trace has none.
        devices: events by the number of the device.
        host: name of an event about command buffers -> durations in ms, one an occurrence.
        counts: how often each (plane, name of an event) occurs on the host, as `jgraph.xla.launches.launches_of` takes them.
    """

    kind: str
    device: str
    devices: Mapping[int, Events]
    host: Mapping[str, list[float]]
    counts: Mapping[tuple[str, str], int]


def find(path: Path) -> Path:
    """Returns the trace that a path means: itself, or the newest under a directory. Raises ProfileError if there is none."""
    if not path.exists():
        raise ProfileError(f"{path}: no such file or directory; must be, or have in it, a *.xplane.pb")
    if path.is_file():
        return path
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ProfileError(f"{path} has no trace: must be, or have in it, a *.xplane.pb that jax.profiler has written")
    return files[-1]


def read(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        ProfileError: there is none, it is damaged or no trace at all, or no device ran anything in it.
    """
    file = find(path)
    try:
        with warnings.catch_warnings():
            # Of jaxlib's own types, whose module has no name.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _trace(jax.profiler.ProfileData.from_file(str(file)), file)
    except ProfileError:
        raise
    except (RuntimeError, ValueError) as e:
        said = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ProfileError(f"{file} cannot be read as a trace ({said}): damaged, cut short, or of another kind") from e


def _trace(data: Any, file: Path) -> Trace:
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    host: dict[str, list[float]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    planes = list(data.planes)
    gpus = {int(match[1]): plane for plane in planes if (match := _GPU.fullmatch(plane.name))}
    device = ""
    for number, plane in gpus.items():
        device = str(dict(plane.stats).get("gpu_device_name", ""))
        for line in plane.lines:
            if line.name.startswith("Stream"):
                rows[number] += [_row(event, line.name) for event in line.events]
    for plane in planes:
        if not plane.name.startswith("/host:"):
            continue
        for line in plane.lines:
            for event in line.events:
                name = event.name
                counts[plane.name, name] += 1
                if name.startswith(_HOST):
                    host[re.split(r"[ (#]", name)[0]].append(event.duration_ns / 1e6)
                elif not gpus and not name.startswith("$"):
                    stats = dict(event.stats)
                    if "hlo_op" in stats and "device_ordinal" in stats:
                        rows[int(stats["device_ordinal"])].append(_row(event, line.name, stats))
    rows = {number: found for number, found in rows.items() if found}
    if not rows:
        what = "its GPUs ran nothing" if gpus else "it has no GPU and no CPU program in it"
        raise ProfileError(f"{file}: {what}; trace at least one whole step, e.g. with `profile` 10:13")
    first = min(row[0] for found in rows.values() for row in found)
    devices = {number: _events(rows[number], first) for number in sorted(rows)}
    return Trace("GPU" if gpus else "CPU", device, devices, dict(host), dict(counts))


def _row(event: Any, stream: str, stats: dict[str, Any] | None = None) -> tuple[Any, ...]:
    stats = dict(event.stats) if stats is None else stats
    op = "" if "cuda_graph_node_id" in stats else str(stats.get("hlo_op", ""))
    texts = (op, str(stats.get("name", "")), str(stats.get("hlo_module", "")))
    return event.start_ns, event.start_ns + event.duration_ns, event.name, *texts, stream


def _events(rows: list[tuple[Any, ...]], first: float) -> Events:
    rows = sorted(rows, key=lambda row: row[:2])
    start, end, *texts = zip(*rows, strict=True)
    return Events((np.array(start) - first) / 1e6, (np.array(end) - first) / 1e6, *map(tuple, texts))


def steps(events: Events, count: int) -> list[tuple[float, float]]:
    """Returns start and end in ms of each of `count` equal steps. Raises ProfileError where there are not so many.

    What runs exactly once a step says where steps begin and end: the k-th time belongs to step k.
    """
    places: dict[str, list[int]] = defaultdict(list)
    for i, (name, op) in enumerate(zip(events.name, events.op, strict=True)):
        places[op or name].append(i)
    once = np.array([found for found in places.values() if len(found) == count])
    if not len(once):
        raise ProfileError(
            f"the trace does not have {count} steps: no kernel ran {count} times; give their number", field="steps"
        )
    return [(float(events.start[once[:, k]].min()), float(events.end[once[:, k]].max())) for k in range(count)]


def guess_steps(events: Events) -> int:
    """Guesses the number of equal steps: how often most kernels ran that did not run more than once a step."""
    counts = Counter(op or name for name, op in zip(events.name, events.op, strict=True))
    values, numbers = np.unique(list(counts.values()), return_counts=True)
    return int(values[np.argmax(numbers)])


def busy(start: np.ndarray, end: np.ndarray) -> float:
    """Returns milliseconds in which at least one of these intervals, sorted by start, goes on."""
    if not len(start):
        return 0.0
    reached = np.maximum.accumulate(end)
    gaps = np.maximum(start[1:] - reached[:-1], 0)
    return float(reached[-1] - start[0] - gaps.sum())


def owners(events: Events, yields: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns pieces of the device's busy time, one after the other: start and end in ms, and the event whose own each is.

    It is the one that began last of those going on, since thunks run within thunks; but those that `yields` marks, the
    collectives, have only what no other covers, since they are there to be hidden.
    """
    order = [(s, 1, i) for i, s in enumerate(events.start)] + [(e, 0, i) for i, e in enumerate(events.end)]
    pieces, active, ended, at = [], ([], []), set(), 0.0
    for time, begins, i in sorted(order):
        for stack in active:
            while stack and stack[-1] in ended:
                ended.discard(stack.pop())
        owner = next((stack[-1] for stack in active if stack), None)
        if owner is not None and time > at:
            pieces.append((at, time, owner))
        if begins:
            active[int(yields[i])].append(i)
        else:
            ended.add(i)
        at = time
    start, end, owner = zip(*pieces, strict=True) if pieces else ((), (), ())
    return np.array(start, float), np.array(end, float), np.array(owner, int)
