"""Reports the collectives of a traced step: their time, the exposed part of it, and the kernels that hide the rest."""

from collections import defaultdict
from typing import Any

import numpy as np

from jgraph.profile._categories import COLLECTIVES
from jgraph.profile.attribution import COMMUNICATION, Step
from jgraph.profile.program import Program
from jgraph.xla.hlo import Instruction


def collectives(step: Step, program: Program | None) -> list[dict[str, Any]]:
    """Returns `collectives` of profile.json: groups of equal collectives of one device, the most exposed first.

    A collective is hidden by the events that own the device's time while it runs.

    Args:
        step: The step of the device.
        program: The program. Without it, collectives are not distinguished by shape and pass.
    """
    events, (start, end, owner) = step.events, step.pieces
    started = _started(step, program)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for i, purpose in enumerate(step.purposes):
        if purpose.category not in COMMUNICATION:
            continue
        instruction = started.get(i) or (program.instructions.get(events.op[i]) if program else None)
        name = _label(instruction) if instruction else events.name[i].partition("(")[0]
        row = rows.setdefault(
            (purpose.category, name),
            {"label": name, "category": purpose.category, "source": "", "count": 0, "ms": 0.0, "exposed_ms": 0.0}
            | {"behind": defaultdict(float)},
        )
        if program and instruction and not row["source"]:
            row["source"] = program.sources([instruction.name]).get(instruction.name, "")
        row["count"] += 1
        row["ms"] += float(events.end[i] - events.start[i])
        row["exposed_ms"] += float(step.own_ms[i])
        first, last = np.searchsorted(end, events.start[i], "right"), np.searchsorted(start, events.end[i])
        overlap_ms = np.minimum(end[first:last], events.end[i]) - np.maximum(start[first:last], events.start[i])
        for other, ms in zip(owner[first:last], overlap_ms, strict=True):
            if other != i:
                row["behind"][step.purposes[other].category] += float(ms)
    for row in rows.values():
        row["behind"] = dict(sorted(row["behind"].items(), key=lambda item: -item[1]))
    return sorted(rows.values(), key=lambda row: -row["exposed_ms"])


def _started(step: Step, program: Program | None) -> dict[int, Instruction]:
    """Maps events to the instructions that started them.

    A trace names an asynchronous collective after an instruction that is not in the program's text. So run k is matched with
    start k, if the numbers of runs and starts are equal. They differ in loops.
    """
    if program is None:
        return {}
    starts: dict[str, list[Instruction]] = defaultdict(list)
    started = {start.name: start for start, _ in program.overlaps()}
    for name in program.computations[program.entry].instructions:
        if name in started:
            starts[COLLECTIVES[program.collective(started[name])]].append(started[name])
    runs: dict[str, list[int]] = defaultdict(list)
    for i, (op, purpose) in enumerate(zip(step.events.op, step.purposes, strict=True)):
        if purpose.category in COMMUNICATION and op not in program.instructions:
            runs[purpose.category].append(i)
    equal = {category for category, found in runs.items() if len(found) == len(starts[category])}
    return {i: start for category in equal for i, start in zip(runs[category], starts[category], strict=True)}


def _label(instruction: Instruction) -> str:
    """Returns the kind, the result shapes and the pass."""
    opcode, shapes = instruction.opcode.removesuffix("-start"), instruction.shapes
    if instruction.opcode.endswith("-start"):  # the operands are part of its result
        shapes = shapes[len(shapes) // 2 :]
    scopes = instruction.op_name
    way = ", backward" if "transpose(" in scopes else ", forward" if "jvp(" in scopes else ""
    return f"{opcode} {' '.join(map(str, shapes[:3]))}{' ...' * (len(shapes) > 3)}{way}"
