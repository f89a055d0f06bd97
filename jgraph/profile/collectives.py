"""Collectives of a traced step: how long they took, how much of that nothing hid, and behind what the rest was hidden.

XLA plans it: what its schedule has between the start of an asynchronous collective and its end can run meanwhile. Whether it
did is measured.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from jgraph.profile.attribution import COMMUNICATION, Step
from jgraph.profile.categories import COLLECTIVES, purpose_of
from jgraph.profile.program import Program
from jgraph.xla.hlo import Instruction

# What no kernel is launched for.
_NAMES = frozenset(("bitcast", "constant", "get-tuple-element", "parameter", "tuple"))


def collectives(step: Step, program: Program | None) -> list[dict[str, Any]]:
    """Returns `collectives` of profile.json: those of a device, alike ones together, the most exposed first.

    What hides one is what has the device's time meanwhile. With the program they are told apart by shape and pass, and have
    `planned`: how many kernels of each category XLA put between start and end; None where it starts none by itself.
    """
    events, (start, end, owner) = step.events, step.pieces
    planned = _planned(step, program)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for i, purpose in enumerate(step.purposes):
        if purpose.category not in COMMUNICATION:
            continue
        instruction, between = planned.get(i, (None, None))
        if program and instruction is None:
            instruction = program.instructions.get(events.op[i])
        name = _label(instruction) if instruction else events.name[i].partition("(")[0]
        row = rows.setdefault(
            (purpose.category, name),
            {"label": name, "category": purpose.category, "source": "", "count": 0, "ms": 0.0, "exposed_ms": 0.0}
            | {"behind": defaultdict(float), "planned": None},
        )
        if program and instruction and not row["source"]:
            row["source"] = program.sources([instruction.name]).get(instruction.name, "")
        row["count"] += 1
        row["ms"] += float(events.end[i] - events.start[i])
        row["exposed_ms"] += float(step.own_ms[i])
        first, last = np.searchsorted(end, events.start[i], "right"), np.searchsorted(start, events.end[i])
        took = np.minimum(end[first:last], events.end[i]) - np.maximum(start[first:last], events.start[i])
        for other, ms in zip(owner[first:last], took, strict=True):
            if other != i:
                row["behind"][step.purposes[other].category] += float(ms)
        if between is not None:
            row["planned"] = (row["planned"] or Counter()) + between
    for row in rows.values():
        row["behind"] = dict(sorted(row["behind"].items(), key=lambda item: -item[1]))
        row["planned"] = None if row["planned"] is None else dict(row["planned"].most_common())
    return sorted(rows.values(), key=lambda row: -row["exposed_ms"])


def _planned(step: Step, program: Program | None) -> dict[int, tuple[Instruction, Counter[str]]]:
    """Maps an event to what started it, and the kernels between that and its end by category.

    A trace names an asynchronous collective after an instruction that the program's text does not show. So the k-th that ran is
    taken for the k-th that was started, where as many ran as are started: in a loop they are not told apart.
    """
    if program is None:
        return {}
    started: dict[str, list[tuple[Instruction, Sequence[Instruction]]]] = defaultdict(list)
    for one in sorted(program.overlaps(), key=lambda one: list(program.home[one[0].name].instructions).index(one[0].name)):
        started[COLLECTIVES[program.collective(one[0])]].append(one)
    ran: dict[str, list[int]] = defaultdict(list)
    for i, (op, purpose) in enumerate(zip(step.events.op, step.purposes, strict=True)):
        if purpose.category in COMMUNICATION and op not in program.instructions:
            ran[purpose.category].append(i)
    return {
        i: (start, _by_category(program, between))
        for category, found in ran.items()
        if len(found) == len(started[category])
        for i, (start, between) in zip(found, started[category], strict=True)
    }


def _by_category(program: Program, between: Sequence[Instruction]) -> Counter[str]:
    launched = (one for one in between if one.opcode not in _NAMES and not one.opcode.endswith("-done"))
    found = Counter(purpose_of(program, one).category for one in launched)
    return Counter({category: number for category, number in found.items() if category not in COMMUNICATION})


def _label(instruction: Instruction) -> str:
    """Names the kind, the shapes that come out, and the pass."""
    opcode, shapes = instruction.opcode.removesuffix("-start"), instruction.shapes
    if instruction.opcode.endswith("-start"):  # which has what goes in among its results
        shapes = shapes[len(shapes) // 2 :]
    scopes = instruction.op_name
    way = ", backward" if "transpose(" in scopes else ", forward" if "jvp(" in scopes else ""
    return f"{opcode} {' '.join(map(str, shapes[:3]))}{' ...' * (len(shapes) > 3)}{way}"
