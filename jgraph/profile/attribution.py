"""Where the time of a traced step went: by category and rank, and by groups of like kernels."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jgraph.device import Device
from jgraph.errors import ProfileError
from jgraph.profile.categories import CATEGORIES, COLLECTIVES, Purpose, purposes
from jgraph.profile.program import Program
from jgraph.profile.trace import Events, Trace, busy, guess_steps, owners, steps
from jgraph.xla.launches import launches_of

_MOST_OTHERS = 5
COMMUNICATION = frozenset(COLLECTIVES.values())
"""Categories of what moves between devices, which is there to be hidden."""


@dataclass(frozen=True)
class Step:
    """One step of a trace on one device: its events in ms from its start, and what each was for.

    It took `ms`, to the start of the next one where that was traced too; `all_ms` are those of all steps of the trace.
    """

    events: Events
    purposes: tuple[Purpose, ...]
    ms: float
    all_ms: tuple[float, ...]

    @cached_property
    def pieces(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pieces of the device's busy time: start and end in ms, and the event whose own each is."""
        return owners(self.events, np.array([purpose.category in COMMUNICATION for purpose in self.purposes], bool))

    @cached_property
    def own_ms(self) -> np.ndarray:
        """Milliseconds of the device's time that count as each event's own."""
        start, end, owner = self.pieces
        return np.bincount(owner, end - start, len(self.events))


def choose_step(trace: Trace, program: Program | None, count: int | None) -> dict[int, Step]:
    """Returns one step, by device: of several the last but one, so that what comes after it counts too.

    The first ones run faster, on a GPU that has just rested. All devices begin when the first of them does.

    Args:
        trace: of a run without capture.
        program: what ran; None: attributed by what the trace says of scopes.
        count: steps in the trace; None: guessed.
    """
    modules = {device: _of_step(events, program) for device, events in trace.devices.items()}
    count = count or guess_steps(next(iter(modules.values())))
    bounds = {device: steps(events, count) for device, events in modules.items()}
    k = max(count - 2, 0)
    start = min(found[k][0] for found in bounds.values())
    stop = min(found[k + 1][0] for found in bounds.values()) if count > 1 else max(found[k][1] for found in bounds.values())
    chosen = {}
    for device, events in trace.devices.items():
        # A rank that is ahead has begun the next step when the slowest has not ended this one.
        inside = events.between(start, stop)
        starts = [found[0] for found in bounds[device]]
        all_ms = (*np.diff(starts), bounds[device][-1][1] - starts[-1])
        chosen[device] = Step(inside, purposes(inside, program), stop - start, tuple(map(float, all_ms)))
    return chosen


def by_category(rank: int, step: Step) -> dict[str, Any]:
    """Returns an entry of `uncaptured.ranks` of profile.json."""
    events, own = step.events, step.own_ms
    categories: dict[str, dict[str, float]] = {}
    for category in CATEGORIES:
        chosen = np.array([purpose.category == category for purpose in step.purposes], bool)
        if chosen.any():
            kernel_ms = float((events.end - events.start)[chosen].sum())
            categories[category] = {"ms": float(own[chosen].sum()), "kernel_ms": kernel_ms, "kernels": int(chosen.sum())}
    busy_ms = busy(events.start, events.end)
    others: dict[str, float] = defaultdict(float)
    for name, purpose, ms in zip(events.name, step.purposes, own, strict=True):
        if purpose.category == "other":
            others[name] += float(ms)
    top = sorted(others.items(), key=lambda item: -item[1])[:_MOST_OTHERS]
    return {
        "rank": rank,
        "busy_ms": busy_ms,
        "idle_ms": max(step.ms - busy_ms, 0.0),
        "attributed": 1 - sum(others.values()) / busy_ms if busy_ms else 1.0,
        "other": [{"name": name, "ms": ms} for name, ms in top],
        "categories": categories,
    }


def groups(step: Step, program: Program | None, device: Device | None) -> list[dict[str, Any]]:
    """Returns `groups` of profile.json: kernels that do the same with the same shapes, the furthest above its roofline first.

    The roofline is the longer of two times: FLOPs at the rate of products, and bytes at that of copies (Williams et al.,
    "Roofline", doi:10.1145/1498765.1498785); of a collective, bytes at the rate of the links.
    """
    events, own, known = step.events, step.own_ms, program.instructions if program else {}
    labels = {op: program.label(known[op]) for op in set(events.op) if op in known} if program else {}
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    kernels: dict[str, Counter[str]] = defaultdict(Counter)
    for i, (op, name, purpose) in enumerate(zip(events.op, events.name, step.purposes, strict=True)):
        # A kernel's arguments in C++ say nothing.
        members[purpose.category, labels.get(op) or name.partition("(")[0] or name].append(i)
        kernels[op][name] += 1
    # An instruction may have several kernels, and be run several times; its rarest kernel tells how often.
    runs = {op: min(names.values()) for op, names in kernels.items()}
    sources = program.sources(list(kernels)) if program else {}
    rows = []
    for (category, label), found in members.items():
        ops = dict.fromkeys(events.op[i] for i in found)
        flops = nbytes = 0
        for op in ops:
            if program and op in known and category in COMMUNICATION:
                nbytes += program.sent_bytes(known[op]) * runs[op]
            elif program and op in known:
                flops += program.flops(known[op]) * runs[op]
                nbytes += program.nbytes(known[op]) * runs[op]
        ms = float(own[found].sum())
        least, bound = _roofline(device, flops, nbytes, category in COMMUNICATION)
        row = {"label": label, "category": category, "source": next((sources[op] for op in ops if op in sources), "")}
        row |= {"count": len(found), "ms": ms, "flops": flops, "bytes": nbytes}
        row |= {"roofline_ms": least, "bound": bound, "over_ms": None if least is None else ms - least}
        rows.append(row)
    return sorted(rows, key=lambda row: -(row["ms"] if row["over_ms"] is None else row["over_ms"]))


def _roofline(device: Device | None, flops: int, nbytes: int, communicates: bool) -> tuple[float | None, str]:
    """Returns the least time in ms, and the rate that bounds it; (None, "") where the rate or the work is not known."""
    if device is None or not nbytes:
        return None, ""
    if communicates:
        links = device.link_bytes_per_second
        return (nbytes / links * 1e3, "link") if links else (None, "")
    compute, memory = flops / device.product_flops_per_second, nbytes / device.copy_bytes_per_second
    return max((compute * 1e3, "compute"), (memory * 1e3, "memory"))


def captured(trace: Trace, count: int) -> dict[str, Any]:
    """Returns `captured` of profile.json, from a trace of so many steps with command buffers.

    A step is from its beginning to that of the next one: of several the last, which nothing follows, counts in no mean.
    """
    launches = launches_of(trace.counts)
    host = {name: sum(ms) / count for name, ms in trace.host.items()}
    bounds = [steps(events, count) for events in trace.devices.values()]
    starts = np.array([[start for start, _ in found] for found in bounds]).min(0)
    end = max(found[-1][1] for found in bounds)
    steps_ms = [*map(float, np.diff(starts)), float(end - starts[-1])]
    stop, whole = (starts[-1], count - 1) if count > 1 else (end, 1)
    inside = [events.between(starts[0], stop) for events in trace.devices.values()]
    busy_ms = float(np.mean([busy(events.start, events.end) for events in inside])) / whole
    step_ms = float(stop - starts[0]) / whole
    return {
        "steps_ms": steps_ms,
        "step_ms": step_ms,
        **{name: getattr(launches, name) / count for name in ("launches", "updates", "records")},
        "launch_ms": host.get("cuGraphLaunch", host.get("command_buffer::execute", 0.0)),
        "update_ms": host.get("command_buffer::update", 0.0),
        "busy_ms": busy_ms,
        "idle_ms": max(step_ms - busy_ms, 0.0),
    }


def timeline(chosen: Mapping[int, Step]) -> dict[str, Any]:
    """Returns `timeline` of profile.json: every event of the step, by device and stream."""
    names: dict[str, int] = {}
    tracks = []
    for rank, step in chosen.items():
        events = step.events
        for stream in sorted(set(events.stream)):
            found = [i for i, where in enumerate(events.stream) if where == stream]
            tracks.append(
                {
                    "rank": rank,
                    "stream": stream,
                    "start_ms": [round(float(events.start[i]), 4) for i in found],
                    "ms": [round(float(events.end[i] - events.start[i]), 4) for i in found],
                    "name": [names.setdefault(events.op[i] or events.name[i], len(names)) for i in found],
                    "category": [CATEGORIES.index(step.purposes[i].category) for i in found],
                }
            )
    return {"names": list(names), "categories": list(CATEGORIES), "tracks": tracks}


def action_kernels(step: Step) -> dict[str, np.ndarray]:
    """Returns start and end in ms, [n, 2], of the products and attention kernels of each kind of action, by start."""
    events = step.events
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    op, names = "", set()
    for i, purpose in enumerate(step.purposes):
        if not (purpose.works and purpose.action):
            continue
        times, start, end = found[purpose.action], float(events.start[i]), float(events.end[i])
        # An instruction may have several kernels; the same one again is another run of it.
        if events.op[i] == op and events.name[i] not in names:
            times[-1] = times[-1][0], end
            names.add(events.name[i])
        else:
            times.append((start, end))
            op, names = events.op[i], {events.name[i]}
    return {action: np.array(times) for action, times in found.items()}


def categories_between(step: Step, starts: np.ndarray, ends: np.ndarray) -> list[dict[str, float]]:
    """Returns milliseconds by category of what a device began within each of these intervals, the largest first."""
    found = []
    firsts, lasts = (np.searchsorted(step.events.start, times) for times in (starts, ends))
    for first, last in zip(firsts, lasts, strict=True):
        categories: dict[str, float] = defaultdict(float)
        for purpose, ms in zip(step.purposes[first:last], step.own_ms[first:last], strict=True):
            categories[purpose.category] += float(ms)
        found.append(
            {category: round(ms, 4) for category, ms in sorted(categories.items(), key=lambda item: -item[1]) if ms > 0}
        )
    return found


def _of_step(events: Events, program: Program | None) -> Events:
    """Leaves out what other programs ran. Raises ProfileError where nothing is left, or nothing has a name."""
    if not any(events.op):
        raise ProfileError(
            "the trace's kernels came out of CUDA graphs, which hides what they were for: trace a run whose `graph` is off"
        )
    if program is None:
        return events
    own = np.array([module == program.name for module in events.module], bool)
    if not own.any():
        ran = ", ".join(dict.fromkeys(filter(None, events.module)))
        raise ProfileError(f"the trace has nothing of the program {program.name}, but {ran}: give the program that ran")
    return events.where(own)
