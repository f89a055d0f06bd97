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
from jgraph.xla.hlo import COLLECTIVES, Instruction, Op, operations
from jgraph.xla.launches import launches_of

_COMMUNICATION = frozenset(COLLECTIVES.values())
_MOST_HIDING = 3


class Total(TypedDict):
    """The time of a step in one source line or named scope.

    Attributes:
        name: The line or scope, empty for events without one.
        count: Number of events.
        ms: The time that the events own (see `Step.own_ms`).
    """

    name: str
    count: int
    ms: float


class Graph(TypedDict):
    """The launches of one CUDA graph in a step.

    Attributes:
        launches: Number of launches.
        count: Number of kernels and copies.
        ms: Sum of their durations.
        named_ms: The part of `ms` in kernels with the name of an instruction.
        graph: Number of the graph.
        module: Name of the program.
    """

    launches: int
    count: int
    ms: float
    named_ms: float
    graph: str
    module: str


@dataclass(frozen=True)
class Step:
    """One step of a trace on one device.

    Attributes:
        events: The n events that begin in the step. Their times are in ms after the start of the step.
        purposes: A tuple of n `Purpose`s, one per event. A purpose has the category of the event, such as `forward` or
            `all-reduce`, and its pipeline action.
        ms: Time in ms until the next step starts, or until the end of the last event if only one step was traced.
        all_ms: Times in ms of all steps of the trace on this device, in order, a tuple of floats.
        programs: The programs that ran, by the name of the module in `events`. Modules without a known program are absent.
        found_by: The rule that found the steps, as a sentence. Empty if their number was given.
    """

    events: Events
    purposes: tuple[Purpose, ...]
    ms: float
    all_ms: tuple[float, ...]
    programs: Mapping[str, Program]
    found_by: str

    @cached_property
    def is_collective(self) -> np.ndarray:
        """True for each event that is a collective, bool [n]. A property."""
        return np.array([purpose.category in _COMMUNICATION for purpose in self.purposes], bool)

    @cached_property
    def own_ms(self) -> np.ndarray:
        """The time in ms that each event owns, float64 [n]. A property.

        At each instant, only one of the running events owns the time: the one that began last. A collective owns only the time
        when no other event runs. The sum is the time when at least one event runs.
        """
        start, end, owner = owners(self.events, self.is_collective)
        return np.bincount(owner, end - start, len(self.events))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """`Program.label` of each event, or the name of its kernel without C++ arguments. A property."""
        labels = self._describe(Program.label)
        return tuple(label or name.partition("(")[0] or name for label, name in zip(labels, self.events.name, strict=True))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """The source line of each event as `file:line`, empty if unknown. A property."""
        return self._describe(lambda program, instruction: _first(op.source for op in _parts(program, instruction)))

    @cached_property
    def scopes(self) -> tuple[str, ...]:
        """The path of named scopes of each event, such as `decoder/layer`. Empty outside of scopes. A property."""
        names = self._describe(lambda program, instruction: _first(op.name for op in _parts(program, instruction)))
        return tuple(scope_of(name or given) for name, given in zip(names, self.events.scopes, strict=True))

    def _describe(self, describe: Callable[[Program, Instruction], str]) -> tuple[str, ...]:
        """Describes the instruction of each event. The description of an event without a known instruction is empty."""
        events, found = list(zip(self.events.module, self.events.op, strict=True)), dict[tuple[str, str], str]()
        for module, op in set(events):
            if instruction := module in self.programs and self.programs[module].instructions.get(op):
                found[module, op] = describe(self.programs[module], instruction)
        return tuple(found.get(event, "") for event in events)


def _parts(program: Program, instruction: Instruction) -> list[Op]:
    """Returns an instruction and those inside it. The root of a fusion, which determines its purpose, is the second."""
    first, *inner = program.inside(instruction)
    names = [part.name for part in reversed(inner) if part.opcode not in ("parameter", "constant")]
    return list(operations(program, [first.name, *names]).values())


def _first(texts: Iterable[str]) -> str:
    """Returns the first text that is not empty."""
    return next(filter(None, texts), "")


def choose_step(trace: Trace, program: Program | None = None, count: int | None = None) -> dict[int, Step]:
    """Selects the step to report: the last step but one, or the only step.

    The first steps are not used, because they are faster: the GPU was idle before. The last step is not used, because a step
    ends when the next one starts. The step has the same start and end on all devices. It starts at the earliest event of any
    device.

    Kernels in a CUDA graph have no instruction. They get the instruction with the name of the kernel, if there is one. Equal
    fusions share a kernel, which has the name of one of them.

    Args:
        trace: A trace.
        program: A program that ran, which replaces the one in the trace.
        count: The number of equal steps in the trace. By default, it is the number of steps that
            `jax.profiler.StepTraceAnnotation` marks. Otherwise, each execution of the program with the longest total time is a
            step. If no program was repeated, the whole trace is one step.

    Returns:
        The step of each device, by device number.

    Raises:
        ProfileError: If the trace has no kernel of the program, no instruction ran `count` times, or the text of a program is
            damaged.
    """
    programs = programs_of(trace, program)
    trace = replace(trace, devices={device: name_captured(events, programs) for device, events in trace.devices.items()})
    bounds, found_by = find_steps(trace, programs, program, count)
    count = len(next(iter(bounds.values())))
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
    """Returns the entry of one device in `uncaptured.ranks` of profile.json.

    The step ran without command buffers (CUDA graphs). An event is a kernel or a copy.

    Args:
        rank: The device number.
        step: The step on this device, from `choose_step`.

    Returns:
        A dict of JSON values: `rank`; `busy_ms`, the time when at least one event runs; `idle_ms`, the rest of the step;
        `attributed`, the fraction of `busy_ms` outside the category `other`, 1 if nothing ran; and `categories`, a dict by
        category, in display order. Each of its values is a dict of `ms`, the time that the events of the category own (see
        `Step.own_ms`); `kernel_ms`, the sum of their durations; and `kernels`, their number. Categories without events are
        absent.
    """
    events, own_ms = step.events, step.own_ms
    categories: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        chosen = np.array([purpose.category == category for purpose in step.purposes], bool)
        if chosen.any():
            kernel_ms = float((events.end - events.start)[chosen].sum())
            categories[category] = {"ms": float(own_ms[chosen].sum()), "kernel_ms": kernel_ms, "kernels": int(chosen.sum())}
    busy_ms = float(own_ms.sum())
    other_ms = categories["other"]["ms"] if "other" in categories else 0.0
    return {
        "rank": rank,
        "busy_ms": busy_ms,
        "idle_ms": max(step.ms - busy_ms, 0.0),
        "attributed": 1 - other_ms / busy_ms if busy_ms else 1.0,
        "categories": categories,
    }


def groups(step: Step, device: Device | None) -> list[dict[str, Any]]:
    """Returns `groups` of profile.json: groups of equal kernels. The group that exceeds its roofline most is the first.

    Kernels are equal if they have the same category and label (see `Step.labels`). The roofline of a group is the least time
    that its work takes: the time of its FLOPs at the GPU's matmul rate, or the time of its bytes at the GPU's copy rate,
    whichever is longer (Williams et al., "Roofline", doi:10.1145/1498765.1498785). For a collective it is the time of its bytes
    at the link rate.

    Args:
        step: The step of one device.
        device: The GPU, which has the rates. If None, all rooflines are unknown.

    Returns:
        A list of one dict of JSON values per group: `label`; `category`; `source`, the source line of one operation of the
        group, or an empty string; `count`, the number of events; `ms`, the time that the events own (see `Step.own_ms`);
        `flops` and `bytes`, the sums over all events; `roofline_ms`, None if unknown; `bound`, the rate that determines the
        roofline: `compute`, `memory` or `link`, or an empty string if unknown; `over_ms`, which is `ms` minus `roofline_ms`,
        None if unknown. The list is sorted by `over_ms`, or by `ms` where `over_ms` is None, the largest first.

    Raises:
        ProfileError: If the text of the program is damaged.
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
        row = {"label": label, "category": category, "source": _first(step.sources[i] for i in found)}
        row |= {"count": len(found), "ms": ms, "flops": flops, "bytes": nbytes, "roofline_ms": roofline_ms, "bound": bound}
        rows.append(row | {"over_ms": None if roofline_ms is None else ms - roofline_ms})
    return sorted(rows, key=lambda row: -(row["ms"] if row["over_ms"] is None else row["over_ms"]))


def totals(step: Step, names: Sequence[str]) -> list[Total]:
    """Returns `lines` or `scopes` of profile.json: the time of a step by source line or by named scope.

    Args:
        step: The step of one device.
        names: One name for each event, `step.sources` or `step.scopes`.

    Returns:
        One entry per name, the largest time first. Empty if no event has a name.
    """
    if not any(names):
        return []
    members: dict[str, list[int]] = defaultdict(list)
    for i, name in enumerate(names):
        members[name].append(i)
    rows = [Total(name=name, count=len(found), ms=float(step.own_ms[found].sum())) for name, found in members.items()]
    return sorted(rows, key=lambda row: -row["ms"])


def collectives(step: Step) -> list[dict[str, Any]]:
    """Returns `collectives` of profile.json: exposed and hidden time of each collective, and the kernels that hide it.

    Args:
        step: The step of one device.

    Returns:
        A list of one dict of JSON values for each category and label: `label`; `category`; `count`, the number of events; `ms`,
        the sum of their durations; `exposed_ms`, the time when no other event runs; `hidden_ms`, the rest of `ms`; and
        `hidden_by`, the labels of up to 3 kernels that run at the same time the longest, as a list of (label, ms). The largest
        `exposed_ms` is first.
    """
    events, rows = step.events, dict[tuple[str, str], dict[str, Any]]()
    hiding: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for i in np.flatnonzero(step.is_collective):
        key = step.purposes[i].category, step.labels[i]
        row = rows.setdefault(key, {"label": key[1], "category": key[0], "count": 0, "ms": 0.0, "exposed_ms": 0.0})
        row["count"] += 1
        row["ms"] += float(events.end[i] - events.start[i])
        row["exposed_ms"] += float(step.own_ms[i])
        overlap = np.minimum(events.end, events.end[i]) - np.maximum(events.start, events.start[i])
        for j in np.flatnonzero((overlap > 0) & ~step.is_collective):
            hiding[key][step.labels[j]] += float(overlap[j])
    for key, row in rows.items():
        longest = sorted(hiding[key].items(), key=lambda found: -found[1])[:_MOST_HIDING]
        row |= {"hidden_ms": max(row["ms"] - row["exposed_ms"], 0.0), "hidden_by": longest}
    return sorted(rows.values(), key=lambda row: -row["exposed_ms"])


def graphs(step: Step) -> list[Graph]:
    """Returns `graphs` of profile.json: the launches of each CUDA graph.

    Args:
        step: The step of one device.

    Returns:
        One entry for each graph, in the order of their first launches. Empty without graphs.
    """
    events, rows, launches = step.events, dict[str, Graph](), set[str]()
    for i, launch in enumerate(events.graph):
        if not launch:
            continue
        graph, took = launch.partition("/")[0], float(events.end[i] - events.start[i])
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
    if device is None or not nbytes:
        return None, ""
    if communicates:
        links = device.link_bytes_per_second
        return (nbytes / links * 1e3, "link") if links else (None, "")
    compute, memory = flops / device.product_flops_per_second, nbytes / device.copy_bytes_per_second
    return max((compute * 1e3, "compute"), (memory * 1e3, "memory"))


def captured(trace: Trace, count: int) -> dict[str, Any]:
    """Returns `captured` of profile.json: the times of steps that ran in command buffers (CUDA graphs).

    A step lasts until the start of the next step. The last step lasts until the end of its last event. `step_ms`, `busy_ms` and
    `idle_ms` are means over all steps but the last, or of the only step.

    Args:
        trace: A trace of a run with command buffers.
        count: The number of equal steps in the trace.

    Returns:
        A dict of JSON values: `steps_ms`, a list of the time of each step; `step_ms`, the mean time of a step; `launches`,
        `updates` and `records`, the numbers of launches, updates and recordings of command buffers per step, summed over all
        devices; `launch_ms` and `update_ms`, the time that the host takes for the launches and the updates of a step;
        `busy_ms`, the time per step when at least one event runs, a mean over the devices; `idle_ms`, which is `step_ms` minus
        `busy_ms`. Times are in ms.

    Raises:
        ProfileError: If no kernel ran `count` times.
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
        **{name: number / count for name, number in vars(launches).items()},
        "launch_ms": host.get("cuGraphLaunch", host.get("command_buffer::execute", 0.0)),
        "update_ms": host.get("command_buffer::update", 0.0),
        "busy_ms": busy_ms,
        "idle_ms": max(step_ms - busy_ms, 0.0),
    }


def timeline(chosen: Mapping[int, Step]) -> dict[str, Any]:
    """Returns `timeline` of profile.json: every event of the step, by device and stream.

    Args:
        chosen: The step of each device, by device number.

    Returns:
        A dict of JSON values: `names`, a list of the names of instructions, or of kernels that have no instruction;
        `categories`, a list of all categories; and `tracks`, a list of one dict per device and stream. A track has `rank`, the
        device number; `stream`, the name of the stream; and four lists with one entry per event, in the order of start:
        `start_ms`, after the start of the step; `ms`, the duration; `name`, an index into `names`; and `category`, an index
        into `categories`.
    """
    names: dict[str, int] = {}
    tracks = []
    for rank, step in chosen.items():
        for stream in sorted(set(step.events.stream)):
            mask = np.array([found == stream for found in step.events.stream])
            events = step.events.where(mask)
            purposes = [step.purposes[i] for i in np.flatnonzero(mask)]
            track = {"rank": rank, "stream": stream, "start_ms": events.start.round(4).tolist()}
            track["ms"] = (events.end - events.start).round(4).tolist()
            track["name"] = [names.setdefault(op or name, len(names)) for op, name in zip(events.op, events.name, strict=True)]
            track["category"] = [CATEGORIES.index(purpose.category) for purpose in purposes]
            tracks.append(track)
    return {"names": list(names), "categories": list(CATEGORIES), "tracks": tracks}


def action_kernels(step: Step) -> dict[str, np.ndarray]:
    """Returns the times of the matmuls and attention kernels of a pipeline step, by pipeline action.

    The actions are `forward`, `dgrad` (the gradients of activations) and `wgrad` (the gradients of weights). An instruction may
    launch several kernels in one run. They count as one entry, from the start of the first to the end of the last.

    Args:
        step: The step on one device of the pipeline, from `choose_step`.

    Returns:
        A dict with some of the keys `forward`, `dgrad` and `wgrad`. A value is a float64 array [number of entries, 2], sorted
        by start: the start and end of each entry, in ms after the start of the step. Actions without such kernels are absent.
    """
    events = step.events
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    op, names = "", set()
    for i, purpose in enumerate(step.purposes):
        if not (purpose.is_work and purpose.action):
            continue
        times, start, end = found[purpose.action], float(events.start[i]), float(events.end[i])
        # Merge the kernels of one run of an instruction. A kernel that repeats belongs to the next run.
        if events.op[i] == op and events.name[i] not in names:
            times[-1] = times[-1][0], end
            names.add(events.name[i])
        else:
            times.append((start, end))
            op, names = events.op[i], {events.name[i]}
    return {action: np.array(times) for action, times in found.items()}
