"""Finds the programs and the steps in a trace."""

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np

from jgraph.errors import ProfileError
from jgraph.profile.program import Program
from jgraph.profile.trace import Events, Trace, steps

_Bounds: TypeAlias = Mapping[int, list[tuple[float, float]]]


def name_of(module: str) -> str:
    """Returns the name of a module without its number: `jit_step` for `jit_step(3)`."""
    return module.partition("(")[0]


def programs_of(trace: Trace, program: Program | None) -> dict[str, Program]:
    """Returns the programs that ran, by module. `program` replaces one in the trace, or ProfileError if it did not run."""
    ops: dict[str, set[str]] = defaultdict(set)
    for events in trace.devices.values():
        for module, op in zip(events.module, events.op, strict=True):
            ops[module].add(op)
    ran = dict.fromkeys(map(name_of, filter(None, ops)))
    if program and program.name not in ran:
        others = ", ".join(ran)
        raise ProfileError(f"the trace has no kernel of the program {program.name}, but of {others}: pass the program that ran")
    stored: dict[str, list[tuple[str, Program]]] = defaultdict(list)
    for module, proto in trace.programs.items():
        # Another version of XLA may have written the program.
        with contextlib.suppress(ProfileError):
            if name_of(module) in ran:
                stored[name_of(module)].append((module, Program.of_proto(proto)))
    if program:
        stored[program.name] = [(program.name, program)]

    def fit(module: str, candidate: tuple[str, Program]) -> tuple[int, bool]:
        return len(ops[module].intersection(candidate[1].instructions)), candidate[0] == module

    # An executable from the compilation cache has another number in its events.
    found = {module: max(stored[name_of(module)], key=partial(fit, module)) for module in ops if stored.get(name_of(module))}
    return {module: chosen for module, (_, chosen) in found.items()}


def name_captured(events: Events, programs: Mapping[str, Program]) -> Events:
    """Gives kernels in CUDA graphs, which have no instruction, the one with the name of the kernel, if there is one.

    Equal fusions share a kernel, which has the name of one of them.
    """
    if not any(events.graph):
        return events
    # XLA replaces `.` in names of kernels by `_`.
    ops = {module: {re.sub(r"\W", "_", op): op for op in program.instructions} for module, program in programs.items()}
    given = zip(events.op, events.module, events.name, events.graph, strict=True)
    return replace(events, op=tuple(ops.get(of, {}).get(name, "") if graph else op for op, of, name, graph in given))


def find_steps(
    trace: Trace, programs: Mapping[str, Program], program: Program | None, count: int | None
) -> tuple[_Bounds, str]:
    """Returns start and end in ms of each step, by device, and the rule that found them, as a sentence.

    Devices without a kernel of the step are absent. With `count`, there is no rule; ProfileError if nothing ran `count` times.
    """
    ms: dict[str, float] = defaultdict(float)
    for events in trace.devices.values():
        for module, took in zip(events.module, events.end - events.start, strict=True):
            ms[name_of(module)] += took
    every = {module for events in trace.devices.values() for module in events.module} - {""} or {""}
    name = program.name if program else max(map(name_of, every), key=ms.__getitem__)
    # A function that was compiled several times is several modules.
    executions = {module: _executions(trace, module, programs) for module in every if name_of(module) == name}
    main = max(executions, key=executions.__getitem__)
    if count:
        return _bounds(trace, {main}, count), ""
    annotated = f"{trace.annotated} steps, marked by jax.profiler.StepTraceAnnotation."
    repeated = f"{executions[main]} steps: the executions of {name}, the program with the longest time."
    # In this order: marked steps, executions of the program with the longest total time, the whole trace.
    rules = ({main}, trace.annotated, annotated), (every, trace.annotated, annotated), ({main}, executions[main], repeated)
    for modules, number, found_by in rules:
        with contextlib.suppress(ProfileError):
            if number > 1:
                return _bounds(trace, modules, number), found_by
    return _bounds(trace, every, 1), "The whole trace is one step, because no program was repeated."


def _executions(trace: Trace, module: str, programs: Mapping[str, Program]) -> int:
    """Counts the executions of a module: the runs of its rarest instruction outside of loops and branches."""
    events = next(events for events in trace.devices.values() if module in events.module)
    given = zip(events.module, events.op, events.name, strict=True)
    runs = Counter(op or name for of, op, name in given if of == module)
    program = programs.get(module)
    entry = program.computations[program.entry].instructions if program and program.entry else {}
    return min([number for op, number in runs.items() if op in entry] or runs.values())


def _bounds(trace: Trace, modules: Collection[str], count: int) -> _Bounds:
    """Returns the start and end of each step by device, from the events of some modules. Raises ProfileError as `steps`."""
    masks = {device: np.array([of in modules for of in events.module]) for device, events in trace.devices.items()}
    return {device: steps(trace.devices[device].where(mask), count) for device, mask in masks.items() if mask.any()}
