"""An execution plan: a schedule as a list of instructions for the host.

An instruction runs one executable on arrays by register, sends results to other devices, and frees arrays after their last
read. A *register* is an index in the list of arrays of a run. A *standing* register holds a buffer that is updated in place: a
gradient sum, a send buffer (an array before its transfer to another device) or the result of a plan function.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.callables._compile import Copies, Executable, Interface, compile_tasks, interface
from jgraph.callables._dataflow import (
    Flow,
    Join,
    Name as Name,
    Outputs,
    PlanFunction as PlanFunction,
    PlanLoss as PlanLoss,
    segments_of,
)
from jgraph.callables.shaped import Shaped
from jgraph.schedule.schedule import Schedule
from jgraph.types import JaxDevice
from jgraph.xla import CaptureReport
from jgraph.xla.options import OptionValue

# Maximum number of instructions with separate executables. In longer plans, equal instructions share an executable.
_MOST_EXECUTABLES = 512

Reports = list[tuple[str, CaptureReport | None]]


@dataclass(frozen=True)
class Instruction:
    """One step of an execution plan: runs an executable, sends results to other devices, and frees arrays."""

    executable: Executable
    sends: tuple[tuple[int, int, JaxDevice], ...]  # (source register, target register, target device)
    returns: tuple[tuple[int, int], ...]  # moves a sent array (source register, send buffer) back to its standing register
    frees: tuple[int, ...]  # registers that become None, which frees each array without another reference


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """Instructions, and the registers that they read and write. Only one thread at a time may play a plan."""

    instructions: tuple[Instruction, ...]
    flow: Flow
    # Arrays in standing registers between two runs. Empty before the first run. `play` changes it.
    buffers: dict[int, jax.Array] = field(default_factory=dict)

    @property
    def reports(self) -> Reports:
        """(name, capture report) of each distinct executable, in the order of first execution."""
        executables = [instruction.executable for instruction in self.instructions]
        return [(e.io.name, e.report) for e in {id(e.compiled): e for e in executables}.values()]

    # Registers of the results of a run, found once, because making a name takes longer than reading a register.

    @cached_property
    def losses(self) -> list[int]:
        """Registers of the losses, one per microbatch."""
        return self._results("loss")

    @cached_property
    def outputs(self) -> list[int]:
        """Registers of the leaves of y, microbatch by microbatch. Empty if outputs are dropped."""
        return self._results("y")

    @cached_property
    def sums(self) -> Mapping[int, Mapping[int, int]]:
        """Registers of the gradient sums, by callable, then by leaf of its parameters."""
        found: dict[int, dict[int, int]] = defaultdict(dict)
        for name, register in self.flow.results.items():
            if name.kind == "sum":
                found[name.callable][name.leaf] = register
        return found

    def _results(self, kind: str) -> list[int]:
        return [register for name, register in sorted(self.flow.results.items()) if name.kind == kind]

    def fill(self, give: Mapping[str, Callable[[Name], jax.Array]]) -> list[Any]:
        """Returns the arrays by register: `give[name.kind](name)` for an argument, None for any other."""
        registers: list[Any] = [None] * len(self.flow.avals)
        for name, register in self.flow.named.items():
            registers[register] = give[name.kind](name)
        return registers


def make_plan(
    callables: Sequence[Shaped],
    schedule: Schedule,
    loss: PlanLoss,
    *,
    aliased: Sequence[Sequence[int]],  # parameters with sums in standing registers, for each callable and perhaps the loss
    reuse: bool,  # donates buffers to their last reader, or frees them after it, instead of at the end of a run
    options: Mapping[str, OptionValue],
    join: Join = "segments",
    outputs: Outputs = "drop",
    copies: Copies = "each",
    # Functions to run before and after the schedule, in order, each as a separate executable.
    before: Sequence[PlanFunction] = (),
    after: Sequence[PlanFunction] = (),
) -> ExecutionPlan:
    """Compiles a schedule into instructions. Does not run them."""
    flow = Flow(callables, schedule, loss, aliased, outputs)
    segments = [[flow.function(function)] for function in before] + segments_of(flow.units(schedule), join)
    segments += [[flow.function(function)] for function in after]
    # Find the registers that leave each segment, and the last reader of each register.
    results = set(flow.results.values())
    given = set(flow.named.values())
    tasks_of = [[task for unit in segment for task in unit.tasks] for segment in segments]
    sends = [tuple(send for unit in segment for send in unit.sends) for segment in segments]
    sent = {a for segment in sends for a, _, _ in segment}
    last: dict[int, int] = {}
    for n, tasks in enumerate(tasks_of):
        last |= dict.fromkeys((*(r for task in tasks for r in task.ins), *(a for a, _, _ in sends[n])), n)
    interfaces: list[Interface] = []
    stored: list[dict[int, int]] = []
    for n, tasks in enumerate(tasks_of):
        outs = {r for task in tasks for r in task.outs if r is not None}
        wanted = {r for r in outs if r in results or r in sent or last.get(r, n) > n}
        wanted |= {register for task in tasks for _, register, _ in task.grads}
        dying = {r for task in tasks for r in task.ins if reuse and last[r] == n} - results - given - sent
        busy: set[int] = set()
        stored.append({a: flow.send_buffer(a, segments[n][0].rank, busy) for a, _, _ in sends[n]} if reuse else {})
        interfaces.append(interface(tasks, flow.avals, wanted, standing=flow.standing, dying=dying, stored=stored[n]))
    # XLA updates a command buffer before a launch if its arrays have moved since the last launch, which takes as long as the
    # launch. With separate executables, every instruction finds its arrays at the addresses of the last launch
    # (notes/develop/measurements/callables.md).
    captures = any(shaped.device.platform != "cpu" for shaped in callables)
    copies = copies if captures and len(interfaces) <= _MOST_EXECUTABLES else "shared"
    executables = compile_tasks(interfaces, callables, options, copies=copies)
    frees: list[list[int]] = [[] for _ in segments]
    for r, n in last.items() if reuse else ():
        if r not in results and r not in stored[n]:
            frees[n].append(r)
    returns = [tuple(buffers.items()) for buffers in stored]
    parts = zip(executables, sends, returns, map(tuple, frees), strict=True)
    return ExecutionPlan(tuple(Instruction(*fields) for fields in parts), flow)


def play(plan: ExecutionPlan, registers: list[Any]) -> None:
    """Runs a plan: dispatches every instruction. On GPUs, returns before the devices finish.

    Results are then in `registers` at `plan.flow.results`. Donates standing registers; one that is None is filled by the plan.
    """
    from_plan = [r for r in plan.flow.standing if registers[r] is None]
    for r in from_plan:
        # Removed from the buffers, so that no donated array remains there after a failed run.
        array = plan.buffers.pop(r, None)
        if array is None:
            aval = plan.flow.avals[r]
            array = jnp.zeros(aval.shape, aval.dtype, device=plan.flow.standing[r])
        registers[r] = array
    for instruction in plan.instructions:
        _run(instruction, registers)
    plan.buffers.update((r, registers[r]) for r in from_plan)


def _run(instruction: Instruction, registers: list[Any]) -> None:
    """Runs one instruction. In a separate function, so that no local variable keeps an array of a cleared register alive."""
    executable = instruction.executable
    io = executable.io
    values = executable.compiled(*executable.select(registers))
    for r in io.donated:
        registers[r] = None
    for r, value in zip((*io.sums, *io.outs), values, strict=True):
        registers[r] = value
    for source, target, device in instruction.sends:
        registers[target] = jax.device_put(registers[source], device)
    for source, target in instruction.returns:
        registers[target], registers[source] = registers[source], None
    for r in instruction.frees:
        registers[r] = None
