"""Attributes the time of a traced step to categories, ranks, source lines, scopes, and groups of equal kernels."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from jgraph.device import Device
from jgraph.profile._categories import CATEGORIES, Purpose, purposes, scope_of
from jgraph.profile._steps import find_steps, name_captured, programs_of
from jgraph.profile.program import Program
from jgraph.profile.trace import Events, Trace, owners, steps
from jgraph.xla.hlo import COLLECTIVES, Instruction, source_of
from jgraph.xla.launches import launches_of

_COMMUNICATION = frozenset(COLLECTIVES.values())
_MOST_HIDING = 3


class Total(TypedDict):
    """The time of a step in one source line or named scope."""

    name: str  # empty for events without a line or scope
    count: int
    ms: float  # `Step.own_ms` of the events


class Graph(TypedDict):
    """The launches of one CUDA graph in a step."""

    launches: int
    count: int  # of kernels and copies
    ms: float  # sum of their durations
    named_ms: float  # the part of `ms` in kernels with the name of an instruction
    graph: str  # number of the graph
    module: str


@dataclass(frozen=True)
class Step:
    """One step of a trace on one device. Its n events are those that begin in the step."""

    events: Events  # times in ms after the start of the step
    purposes: tuple[Purpose, ...]  # one per event
    ms: float  # until the next step starts, or until the end of the last event if only one step was traced
    all_ms: tuple[float, ...]  # of all steps of the trace on this device, in order
    programs: Mapping[str, Program]  # by the module in `events`; modules without a known program are absent
    found_by: str  # the rule that found the steps, as a sentence; empty if their number was given

    @cached_property
    def is_collective(self) -> np.ndarray:
        return np.array([purpose.category in _COMMUNICATION for purpose in self.purposes], bool)

    @cached_property
    def own_ms(self) -> np.ndarray:
        """The time in ms that each event owns, float64 [n].

        Each instant has one owner (see `trace.owners`), so the sum is the time when at least one event runs.
        """
        start, end, owner = owners(self.events, self.is_collective)
        return np.bincount(owner, end - start, len(self.events))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """`Program.label` of each event, or the name of its kernel without C++ arguments."""
        labels = self._describe(Program.label)
        return tuple(label or name.partition("(")[0] or name for label, name in zip(labels, self.events.name, strict=True))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The source line of each event as `file:line`, empty if unknown."""
        return self._describe(
            lambda program, instruction: _first(source_of(program, part) for part in program.parts(instruction))
        )

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """The path of named scopes of each event, such as `decoder/layer`. Empty outside of scopes."""
        names = self._describe(lambda program, instruction: _first(part.op_name for part in program.parts(instruction)))
        return tuple(scope_of(name or given) for name, given in zip(names, self.events.scopes, strict=True))

    def _describe(self, describe: Callable[[Program, Instruction], str]) -> tuple[str, ...]:
        """Describes the instruction of each event. Empty for an event without a known instruction."""
        events = list(zip(self.events.module, self.events.op, strict=True))
        found: dict[tuple[str, str], str] = {}
        for module, op in set(events):
            if instruction := module in self.programs and self.programs[module].instructions.get(op):
                found[module, op] = describe(self.programs[module], instruction)
        return tuple(found.get(event, "") for event in events)


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def choose_step(trace: Trace, program: Program | None = None, count: int | None = None) -> dict[int, Step]:
    """Selects the step to report, by device: the last step but one, or the only step.

    It has the same start and end on all devices: the earliest event of any device starts it.
    """
    programs = programs_of(trace, program)
    trace = replace(trace, devices={device: name_captured(events, programs) for device, events in trace.devices.items()})
    bounds, found_by = find_steps(trace, programs, program, count)
    count = len(next(iter(bounds.values())))
    # The first steps are faster, because the GPU was idle before. The last one has no next step to end it.
    k = max(count - 2, 0)
    start = min(found[k][0] for found in bounds.values())
    stop = min(found[k + 1][0] for found in bounds.values()) if count > 1 else max(found[k][1] for found in bounds.values())
    chosen = {}
    for device, events in trace.devices.items():
        # A fast rank may begin its next step before the slowest rank ends this one.
        inside = events.between(start, stop)
        of_device = bounds.get(device) or next(iter(bounds.values()))
        starts = [found[0] for found in of_device]
        all_ms = tuple(map(float, (*np.diff(starts), of_device[-1][1] - starts[-1])))
        chosen[device] = Step(inside, purposes(inside, programs), stop - start, all_ms, programs, found_by)
    return chosen


def by_category(rank: int, step: Step) -> dict[str, Any]:
    """Returns the entry of one device in `uncaptured.ranks` of profile.json. An event is a kernel or a copy."""
    events, own_ms = step.events, step.own_ms
    categories: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        chosen = np.array([purpose.category == category for purpose in step.purposes], bool)
        if chosen.any():
            # `ms` is the time that the events own, `kernel_ms` the sum of their durations.
            kernel_ms = float((events.end - events.start)[chosen].sum())
            categories[category] = {"ms": float(own_ms[chosen].sum()), "kernel_ms": kernel_ms, "kernels": int(chosen.sum())}
    busy_ms = float(own_ms.sum())
    other_ms = categories["other"]["ms"] if "other" in categories else 0.0
    return {
        "rank": rank,
        "busy_ms": busy_ms,
        "idle_ms": max(step.ms - busy_ms, 0.0),
        # The fraction of `busy_ms` outside the category `other`.
        "attributed": 1 - other_ms / busy_ms if busy_ms else 1.0,
        "categories": categories,
    }


def groups(step: Step, device: Device | None) -> list[dict[str, Any]]:
    """Returns `groups` of profile.json: kernels of equal category and label. The one that exceeds its roofline most is first.

    A roofline is the least time that the work takes (Williams et al., "Roofline", doi:10.1145/1498765.1498785).
    """
    events = step.events
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    kernels: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for i, (label, purpose) in enumerate(zip(step.labels, step.purposes, strict=True)):
        members[purpose.category, label].append(i)
        kernels[events.module[i], events.op[i]][events.name[i]] += 1
    # An instruction may launch several kernels and run several times. The count of its rarest kernel is the number of runs.
    runs = {key: min(names.values()) for key, names in kernels.items()}
    rows = []
    for (category, label), found in members.items():
        flops = nbytes = 0
        for module, op in dict.fromkeys((events.module[i], events.op[i]) for i in found):
            program = step.programs.get(module)
            if program is None or op not in program.instructions:
                continue
            if category in _COMMUNICATION:
                nbytes += program.sent_bytes(program.instructions[op]) * runs[module, op]
            else:
                flops += program.flops(program.instructions[op]) * runs[module, op]
                nbytes += program.nbytes(program.instructions[op]) * runs[module, op]
        ms = float(step.own_ms[found].sum())
        roofline_ms, bound = _roofline(device, flops, nbytes, category in _COMMUNICATION)
        # `ms` is the time that the events own, `source` the line of one of them. FLOPs and bytes are sums over all events.
        row = {"label": label, "category": category, "source": _first(step.sources[i] for i in found)}
        row |= {"count": len(found), "ms": ms, "flops": flops, "bytes": nbytes, "roofline_ms": roofline_ms, "bound": bound}
        rows.append(row | {"over_ms": None if roofline_ms is None else ms - roofline_ms})
    return sorted(rows, key=lambda row: -(row["ms"] if row["over_ms"] is None else row["over_ms"]))


def totals(step: Step, names: Sequence[str]) -> list[Total]:
    """Returns `lines` or `scopes` of profile.json, largest time first. Empty if no event has a name. `names`: one per event."""
    if not any(names):
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        members[name].append(i)
    rows = [Total(name=name, count=len(found), ms=float(step.own_ms[found].sum())) for name, found in members.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def collectives(step: Step) -> list[dict[str, Any]]:
    """Returns `collectives` of profile.json, for each category and label. The largest exposed time is first."""
    events = step.events
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    hiding: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in np.flatnonzero(step.is_collective):
        key = step.purposes[i].category, step.labels[i]
        row = rows.setdefault(key, {"label": key[1], "category": key[0], "count": 0, "ms": 0.0, "exposed_ms": 0.0})
        row["count"] += 1
        row["ms"] += float(events.end[i] - events.start[i])
        # The time when no other event runs.
        row["exposed_ms"] += float(step.own_ms[i])
        overlap = np.minimum(events.end, events.end[i]) - np.maximum(events.start, events.start[i])
        for j in np.flatnonzero((overlap > 0) & ~step.is_collective):
            hiding[key][step.labels[j]] += float(overlap[j])
    for key, row in rows.items():
        longest = sorted(hiding[key].items(), key=lambda found: -found[1])[:_MOST_HIDING]
        # `hidden_by` has the labels and times of the kernels that run at the same time the longest.
        row |= {"hidden_ms": max(row["ms"] - row["exposed_ms"], 0.0), "hidden_by": longest}
    return sorted(rows.values(), key=lambda row: -row["exposed_ms"])


def graphs(step: Step) -> list[Graph]:
    """Returns `graphs` of profile.json: the launches of each CUDA graph, in the order of their first launches."""
    events = step.events
    rows: dict[str, Graph] = {}
    launches: set[str] = set()
    for i, launch in enumerate(events.graph):
        if not launch:
            continue
        graph = launch.partition("/")[0]
        took = float(events.end[i] - events.start[i])
        new = Graph(launches=0, count=0, ms=0.0, named_ms=0.0, graph=graph, module=events.module[i])
        row = rows.setdefault(graph, new)
        row["launches"] += launch not in launches
        row["count"] += 1
        row["ms"] += took
        row["named_ms"] += took if events.op[i] else 0.0
        launches.add(launch)
    return list(rows.values())


def _roofline(device: Device | None, flops: int, nbytes: int, communicates: bool) -> tuple[float | None, str]:
    """Returns the roofline in ms and the rate that bounds it, or (None, "") if the rate or the work is unknown."""
    # At the GPU's matmul rate and copy rate, whichever takes longer. A collective: at the link rate.
    if device is None or not nbytes:
        return None, ""
    if communicates:
        links = device.link_bytes_per_second
        return (nbytes / links * 1e3, "link") if links else (None, "")
    compute, memory = flops / device.product_flops_per_second, nbytes / device.copy_bytes_per_second
    return max((compute * 1e3, "compute"), (memory * 1e3, "memory"))


def captured(trace: Trace, count: int) -> dict[str, Any]:
    """Returns `captured` of profile.json: the times of the `count` equal steps of a run with command buffers, in ms.

    Means are over all steps but the last, or of the only step: the last step has no successor, so it ends with its last event.
    """
    launches = launches_of(trace.host)
    host = {name: sum(ms) / count for name, ms in trace.host.items()}
    bounds = [steps(events, count) for events in trace.devices.values()]
    starts = np.array([[start for start, _ in found] for found in bounds]).min(0)
    end = max(found[-1][1] for found in bounds)
    stop, whole = (starts[-1], count - 1) if count > 1 else (end, 1)
    inside = [events.between(starts[0], stop) for events in trace.devices.values()]
    pieces = [owners(events, np.zeros(len(events), bool)) for events in inside]
    busy_ms = float(np.mean([(ends - begins).sum() for begins, ends, _ in pieces])) / whole
    step_ms = float(stop - starts[0]) / whole
    return {
        "steps_ms": [*map(float, np.diff(starts)), float(end - starts[-1])],
        "step_ms": step_ms,
        # Per step, summed over all devices.
        **{name: number / count for name, number in vars(launches).items()},
        # Time of the host.
        "launch_ms": host.get("cuGraphLaunch", host.get("command_buffer::execute", 0.0)),
        "update_ms": host.get("command_buffer::update", 0.0),
        "busy_ms": busy_ms,  # when at least one event runs, a mean over the devices
        "idle_ms": max(step_ms - busy_ms, 0.0),
    }


def timeline(chosen: Mapping[int, Step]) -> dict[str, Any]:
    """Returns `timeline` of profile.json: every event of the step, by device and stream."""
    names: dict[str, int] = {}
    tracks = []
    for rank, step in chosen.items():
        for stream in sorted(set(step.events.stream)):
            mask = np.array([found == stream for found in step.events.stream])
            events = step.events.where(mask)
            purposes = [step.purposes[i] for i in np.flatnonzero(mask)]
            track = {"rank": rank, "stream": stream, "start_ms": events.start.round(4).tolist()}
            track["ms"] = (events.end - events.start).round(4).tolist()
            # Indices: of the instruction, or of a kernel that has none, in `names`; and in `categories`.
            track["name"] = [names.setdefault(op or name, len(names)) for op, name in zip(events.op, events.name, strict=True)]
            track["category"] = [CATEGORIES.index(purpose.category) for purpose in purposes]
            tracks.append(track)
    return {"names": list(names), "categories": list(CATEGORIES), "tracks": tracks}


def action_kernels(step: Step) -> dict[str, np.ndarray]:
    """Returns start and end, float64 [kernels, 2], of the matmuls and attention kernels of each pipeline action.

    Sorted by start, in ms after the start of the step. Actions without such kernels are absent.
    """
    events = step.events
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    op, names = "", set()
    for i, purpose in enumerate(step.purposes):
        if not (purpose.is_work and purpose.action):
            continue
        times = found[purpose.action]
        start, end = float(events.start[i]), float(events.end[i])
        # Merge the kernels of one run of an instruction. A kernel that repeats belongs to the next run.
        if events.op[i] == op and events.name[i] not in names:
            times[-1] = times[-1][0], end
            names.add(events.name[i])
        else:
            times.append((start, end))
            op, names = events.op[i], {events.name[i]}
    return {action: np.array(times) for action, times in found.items()}
