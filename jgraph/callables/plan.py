"""An execution plan: a schedule as a list of instructions for the host.

An instruction runs one executable on arrays by register, sends results to other devices, and frees arrays that nothing reads
any more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.callables._compile import Copies, Executable, compile_tasks, interface
from jgraph.callables._dataflow import Flow, Join, Loss as Loss, Outputs, PlanFunction as PlanFunction, segments_of
from jgraph.callables.shaped import Shaped
from jgraph.schedule.schedule import Schedule
from jgraph.xla import CaptureReport

# Up to this number of instructions, each has an executable of its own; in longer plans equal ones share it.
_MOST_EXECUTABLES = 512

Reports = list[tuple[str, CaptureReport | None]]


@dataclass(frozen=True)
class Instruction:
    """Runs `executable`, sends arrays (from register, to register, device), returns send buffers (from, to), frees arrays."""

    executable: Executable
    sends: tuple[tuple[int, int, Any], ...]
    returns: tuple[tuple[int, int], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """Instructions, and the registers that they read and write. One thread at a time plays a plan.

    Attributes:
        instructions: In running order.
        flow: The registers.
        buffers: Arrays in standing registers, kept from one run to the next. Empty before the first run.
    """

    instructions: tuple[Instruction, ...]
    flow: Flow
    buffers: dict[int, jax.Array] = field(default_factory=dict)

    @property
    def reports(self) -> Reports:
        """The name and capture report of each executable."""
        executables = [instruction.executable for instruction in self.instructions]
        return [(e.io.name, e.report) for e in {id(e.compiled): e for e in executables}.values()]

    def fill(self, give: Mapping[str, Callable[..., Any]]) -> list[Any]:
        """Returns arrays by register, None for arrays that the plan makes.

        Args:
            give: Functions by the first element of a name, such as `params`. They map the rest of the name to an array.
        """
        registers: list[Any] = [None] * len(self.flow.avals)
        for (kind, *where), register in self.flow.named.items():
            registers[register] = give[kind](*where)
        return registers


def make_plan(
    callables: Sequence[Shaped],
    schedule: Schedule,
    loss: Loss,
    *,
    aliased: Sequence[Sequence[int]],
    reuse: bool,
    options: Mapping[str, Any],
    join: Join = "segments",
    outputs: Outputs = "drop",
    copies: Copies = "each",
    before: Sequence[PlanFunction] = (),
    after: Sequence[PlanFunction] = (),
) -> ExecutionPlan:
    """Compiles a schedule into instructions.

    Args:
        callables: In the order of the data.
        schedule: The order of every rank.
        loss: The loss of a microbatch.
        aliased: For each callable and the loss, the parameters with sums in standing registers: in main_grad, or in buffers
            of the plan if `play` is not given an array.
        reuse: True donates buffers to their last consumer, or frees them after it.
        options: XLA's.
        join: Whether consecutive actions form one executable.
        outputs: Whether the last y of every microbatch is a result.
        copies: Whether equal instructions share an executable. `each` has no effect on a CPU.
        before, after: Functions to run before and after the schedule.
    """
    flow = Flow(callables, schedule, loss, aliased, outputs)
    segments = [[flow.function(one)] for one in before] + segments_of(flow.units(schedule), join)
    segments += [[flow.function(one)] for one in after]
    # Find the registers that leave each segment, and the last reader of each register.
    results, given = set(flow.results.values()), set(flow.named.values())
    every = [[task for unit in segment for task in unit.tasks] for segment in segments]
    sends = [tuple(send for unit in segment for send in unit.sends) for segment in segments]
    sent = {a for segment in sends for a, _, _ in segment}
    last: dict[int, int] = {}
    for n, tasks in enumerate(every):
        last |= dict.fromkeys((*(r for task in tasks for r in task.ins), *(a for a, _, _ in sends[n])), n)
    interfaces, stored = [], []
    for n, tasks in enumerate(every):
        outs = {r for task in tasks for r in task.outs if r is not None}
        wanted = {r for r in outs if r in results or r in sent or last.get(r, n) > n}
        wanted |= {register for task in tasks for _, register, _ in task.grads}
        dying = {r for task in tasks for r in task.ins if reuse and last[r] == n} - results - given - sent
        busy: set[int] = set()
        stored.append({a: flow.send_buffer(a, segments[n][0].rank, busy) for a, _, _ in sends[n]} if reuse else {})
        interfaces.append(interface(tasks, flow.avals, wanted, standing=flow.standing, dying=dying, stored=stored[n]))
    # If its arrays have moved since the last launch, a command buffer is updated first, which takes as long as the launch. With
    # an executable of its own, an instruction finds its arrays at their last addresses
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
    return ExecutionPlan(tuple(Instruction(*one) for one in parts), flow)


def play(plan: ExecutionPlan, registers: list[Any]) -> None:
    """Runs a plan.

    Args:
        plan: The plan.
        registers: Arrays by register, as `ExecutionPlan.fill` returns them. Updated in place. Standing registers without an
            array get the plan's own buffer.
    """
    own = [r for r in plan.flow.standing if registers[r] is None]
    for r in own:
        # Removed from the buffers, so that a failed run leaves none that was donated.
        array, aval, device = plan.buffers.pop(r, None), plan.flow.avals[r], plan.flow.standing[r]
        registers[r] = jnp.zeros(aval.shape, aval.dtype, device=device) if array is None else array
    for instruction in plan.instructions:
        _follow(instruction, registers)
    plan.buffers.update((r, registers[r]) for r in own)


def _follow(instruction: Instruction, registers: list[Any]) -> None:
    """Runs one instruction. Returns without references to arrays, so that clearing a register frees its array."""
    executable, io = instruction.executable, instruction.executable.io
    sums, outs = executable.compiled(*(select(registers) for select in executable.select))
    for r in io.donated:
        registers[r] = None
    for r, value in zip((*io.sums, *io.outs), (*sums, *outs), strict=True):
        registers[r] = value
    for source, target, device in instruction.sends:
        registers[target] = jax.device_put(registers[source], device)
    for source, target in instruction.returns:
        registers[target], registers[source] = registers[source], None
    for r in instruction.frees:
        registers[r] = None
