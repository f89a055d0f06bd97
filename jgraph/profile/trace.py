"""Reads a trace of the profiler into arrays: the events of each device, and the events of the host about command buffers.

`jax.profiler` writes and reads traces. On a GPU, an event is a kernel or copy on a stream. It has its HLO instruction,
unless it ran in a CUDA graph. On a CPU, an event is a thunk of XLA on any thread. The profiler stores the programs that ran.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from jgraph.errors import ProfileError
from jgraph.xla._protobuf import fields, submessages, text
from jgraph.xla.launches import ProfileData, graph_events

_GPU = re.compile(r"/device:GPU:(\d+)")
# Start and end in ns, then the texts of `Events` in their order.
_Row: TypeAlias = tuple[float, float, str, str, str, str, str, str]


@dataclass(frozen=True)
class Events:
    """The n events of one device, sorted by start. On a GPU an event is a kernel or copy, on a CPU a thunk of XLA."""

    start: np.ndarray  # float64 [n] in ms; from `read`, 0 is the start of the first event of any device
    end: np.ndarray
    # Texts, one per event. Empty if unknown.
    name: tuple[str, ...]  # kernels, copies or thunks
    op: tuple[str, ...]  # HLO instructions; unknown for a kernel in a CUDA graph
    scopes: tuple[str, ...]  # JAX's names of the operations, such as `jit(step)/dot_general`
    module: tuple[str, ...]  # HLO modules (programs) with their numbers, such as `jit_step(3)`
    stream: tuple[str, ...]  # streams of the GPU, or threads of the CPU
    graph: tuple[str, ...]  # launches of CUDA graphs as `GRAPH/LAUNCH`, a number each; empty outside of graphs

    def __len__(self) -> int:
        return len(self.name)

    def where(self, mask: np.ndarray) -> "Events":
        chosen = np.flatnonzero(mask)
        texts = (self.name, self.op, self.scopes, self.module, self.stream, self.graph)
        return Events(self.start[chosen], self.end[chosen], *(tuple(values[i] for i in chosen) for values in texts))

    def between(self, start: float, stop: float) -> "Events":
        """Selects the events that begin in [start, stop) in ms, with times after `start`. Shortens them to end at `stop`."""
        found = self.where((self.start >= start) & (self.start < stop))
        return replace(found, start=found.start - start, end=np.minimum(found.end, stop) - start)


@dataclass(frozen=True)
class Trace:
    """The events in a trace of JAX's profiler."""

    device: str  # such as `NVIDIA H200`; `GPU` if the trace does not have the name; or `CPU`
    devices: Mapping[int, Events]  # a device without events is absent
    host: Mapping[str, list[float]]  # durations in ms of the host's events for command buffers, such as `cuGraphLaunch`
    programs: Mapping[str, bytes] = field(default_factory=dict)  # serialized `HloModuleProto` by name and number of the module
    annotated: int = 0  # number of steps that `jax.profiler.StepTraceAnnotation` marks
    versions: Mapping[str, str] = field(default_factory=dict)


def find(path: Path) -> Path:
    """Returns the file itself, or the newest *.xplane.pb below a directory. Raises ProfileError if there is none."""
    if not path.exists():
        raise ProfileError(f"{path}: no such file or directory; must be a *.xplane.pb, or a directory that contains one")
    if path.is_file():
        return path
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ProfileError(f"{path} has no trace: must contain a *.xplane.pb, which jax.profiler writes")
    return files[-1]


def read(path: Path) -> Trace:
    """Reads a trace: a file, or the newest one in a directory. Raises ProfileError if it is damaged or no device ran."""
    file = find(path)
    try:
        with warnings.catch_warnings():
            # jaxlib's event types have no module name.
            warnings.simplefilter("ignore", DeprecationWarning)
            trace = _trace(jax.profiler.ProfileData.from_file(str(file)), file)
        return replace(trace, programs=_programs(file.read_bytes()))
    except ProfileError:
        raise
    except (RuntimeError, ValueError) as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ProfileError(f"{file} cannot be read as a trace ({reason}): it is damaged, truncated or not a trace") from e


def _trace(data: ProfileData, file: Path) -> Trace:
    rows: dict[int, list[_Row]] = defaultdict(list)
    planes = list(data.planes)
    gpus = {int(match[1]): plane for plane in planes if (match := _GPU.fullmatch(plane.name))}
    device = "GPU" if gpus else "CPU"
    host_lines = [line for plane in planes if plane.name.startswith("/host:") for line in plane.lines]
    step_numbers: set[str] = set()
    facts: dict[str, Any] = {}
    for number, plane in gpus.items():
        device = str(dict(plane.stats).get("gpu_device_name") or device)
        for line in plane.lines:
            if line.name.startswith("Stream"):
                rows[number] += [_row(event, line.name, dict(event.stats)) for event in line.events]
    for plane in planes:
        if plane.name == "/host:metadata":
            facts |= dict(plane.stats)
    for thread, line in enumerate(host_lines, 1):
        for event in line.events:
            stats = {} if event.name.startswith("$") else dict(event.stats)  # $: calls of Python
            if "step_num" in stats:
                step_numbers.add(str(stats["step_num"]))
            if not gpus and "hlo_op" in stats and "device_ordinal" in stats:
                rows[int(stats["device_ordinal"])].append(_row(event, f"thread {thread}", stats))
    rows = {number: found for number, found in rows.items() if found}
    if not rows:
        problem = "no GPU ran a kernel" if gpus else "it has neither a GPU nor a CPU program"
        raise ProfileError(f"{file}: {problem}; trace at least one whole step")
    first = min(row[0] for found in rows.values() for row in found)
    devices = {}
    for number, found in sorted(rows.items()):
        start, end, *texts = zip(*sorted(found, key=lambda row: row[:2]), strict=True)
        devices[number] = Events((np.array(start) - first) / 1e6, (np.array(end) - first) / 1e6, *map(tuple, texts))
    versions = {name: str(facts[f"{name}_version"]) for name in ("jax", "jaxlib") if f"{name}_version" in facts}
    return Trace(device, devices, graph_events(data), annotated=len(step_numbers), versions=versions)


def _row(event: Any, stream: str, stats: Mapping[str, Any]) -> _Row:
    # The instruction of a kernel in a graph is the command buffer.
    is_captured = "cuda_graph_node_id" in stats
    op = "" if is_captured else str(stats.get("hlo_op", ""))
    graph = f"{stats.get('cuda_graph_id')}/{stats.get('correlation_id')}" if is_captured else ""
    module = f"{stats['hlo_module']}({stats.get('program_id')})" if "hlo_module" in stats else ""
    scopes = str(stats.get("name", ""))
    return event.start_ns, event.start_ns + event.duration_ns, event.name, op, scopes, module, stream, graph


def _programs(data: bytes) -> dict[str, bytes]:
    """Returns the programs in a serialized XSpace: a serialized HloModuleProto by the name and number of the module."""
    found = {}
    for plane in submessages(fields(data), 1):
        for entry in submessages(plane, 4) if text(plane, 2) == "/host:metadata" else ():
            for metadata in submessages(entry, 2):
                for stat in submessages(metadata, 5):
                    # An HloProto, which has the module and its buffers.
                    found |= {text(metadata, 2): dict(proto)[1] for proto in submessages(stat, 6) if 1 in dict(proto)}
    return found


def steps(events: Events, count: int) -> list[tuple[float, float]]:
    """Returns start and end of each of `count` equal steps, by the instructions or unnamed kernels that ran `count` times.

    One step is the whole trace. Raises ProfileError if nothing ran `count` times.
    """
    if count == 1:
        return [(float(events.start.min()), float(events.end.max()))]
    runs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, (module, name, op) in enumerate(zip(events.module, events.name, events.op, strict=True)):
        runs[module, op or name].append(i)
    once = np.array([found for found in runs.values() if len(found) == count])
    if not len(once):
        raise ProfileError(
            f"`steps` is {count}: must be the number of steps in the trace, but no kernel ran {count} times", field="steps"
        )
    return [(float(events.start[once[:, k]].min()), float(events.end[once[:, k]].max())) for k in range(count)]


def owners(events: Events, is_collective: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Divides a device's busy time into pieces, each owned by one event: the running one that began last.

    A collective owns only the time when no other event runs. Returns start, end and owner of each piece, in the order of time.
    """
    order = [(s, 1, i) for i, s in enumerate(events.start)] + [(e, 0, i) for i, e in enumerate(events.end)]
    pieces: list[tuple[float, float, int]] = []
    # Running events in the order of their start. An event that ended stays until all later ones have ended.
    kernels: list[int] = []
    collectives: list[int] = []
    ended: set[int] = set()
    at = 0.0
    for time, begins, i in sorted(order):
        for stack in (kernels, collectives):
            while stack and stack[-1] in ended:
                ended.discard(stack.pop())
        owner = next((stack[-1] for stack in (kernels, collectives) if stack), None)
        if owner is not None and time > at:
            pieces.append((at, time, owner))
        if begins:
            (collectives if is_collective[i] else kernels).append(i)
        else:
            ended.add(i)
        at = time
    start, end, owner = zip(*pieces, strict=True) if pieces else ((), (), ())
    return np.array(start, float), np.array(end, float), np.array(owner, int)
