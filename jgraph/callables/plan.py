"""An execution plan: a schedule as a list of instructions for the host.

An instruction runs one executable on arrays by register, sends results to other devices, and frees arrays after their last
read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.callables._compile import Copies, Executable, compile_tasks, interface
from jgraph.callables._dataflow import (
    Flow,
    Join,
    Loss as Loss,
    Name as Name,
    Outputs,
    PlanFunction as PlanFunction,
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
    """One step of an execution plan: run an executable, send results to other devices, and free arrays.

    A *register* is an index in the list of arrays of a run. A *standing* register holds a buffer that is updated in place.

    Attributes:
        executable: The executable to run. It reads and writes registers.
        sends: Transfers after the executable, each as (source register, target register, target device).
        returns: Moves after the transfers, each as (source register, target register). The array in the source register was
            written into a send buffer, and moves to the standing register of this buffer. The source register becomes None.
        frees: Registers that become None at the end. This frees each array without another reference.
    """

    executable: Executable
    sends: tuple[tuple[int, int, JaxDevice], ...]
    returns: tuple[tuple[int, int], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """Instructions, and the registers that they read and write. Only one thread at a time may play a plan.

    A *register* is an index in the list of arrays of a run. A *standing* register holds a buffer that is updated in place: a
    gradient sum, a send buffer (an array before its transfer to another device) or the result of a plan function.

    Attributes:
        instructions: The instructions in the order of execution.
        flow: The registers by name: those of the arguments (`named`), of the results (`results`) and the standing ones
            (`standing`), and the shape and dtype of each register (`avals`).
        buffers: Arrays in standing registers between two runs, by register. Empty before the first run. `play` changes this
            dict.
    """

    instructions: tuple[Instruction, ...]
    flow: Flow
    buffers: dict[int, jax.Array] = field(default_factory=dict)

    @property
    def reports(self) -> Reports:
        """List of (name, capture report) with one entry for each distinct executable, in the order of first execution.

        The report describes the command buffers (CUDA graphs) of the executable. It is None if XLA gave no report.
        """
        executables = [instruction.executable for instruction in self.instructions]
        return [(e.io.name, e.report) for e in {id(e.compiled): e for e in executables}.values()]

    def fill(self, give: Mapping[str, Callable[..., jax.Array]]) -> list[Any]:
        """Fills the registers with the arguments of the plan.

        Args:
            give: Functions that return the arguments, by the kind of argument. A name in `flow.named` is a tuple of a kind and
                indices, such as ("params", callable, parameter). For each name, `give[kind](*indices)` is called once. It
                returns the array of this argument.

        Returns:
            A new list with one element for each register: the array of an argument, or None for any other register.
        """
        registers: list[Any] = [None] * len(self.flow.avals)
        for (kind, *place), register in self.flow.named.items():
            registers[register] = give[kind](*place)
        return registers


def make_plan(
    callables: Sequence[Shaped],
    schedule: Schedule,
    loss: Loss,
    *,
    aliased: Sequence[Sequence[int]],
    reuse: bool,
    options: Mapping[str, OptionValue],
    join: Join = "segments",
    outputs: Outputs = "drop",
    copies: Copies = "each",
    before: Sequence[PlanFunction] = (),
    after: Sequence[PlanFunction] = (),
) -> ExecutionPlan:
    """Compiles a schedule into instructions. Does not run them.

    A *register* is an index in the list of arrays of a run. A *standing* register holds a buffer that is updated in place. A
    *rank* is a device of the schedule.

    Args:
        callables: The callables in the order in which a microbatch passes through them.
        schedule: For every rank, its actions in the order of execution.
        loss: The loss of a microbatch.
        aliased: One sequence for each callable, and a last one for the loss if the loss has parameters. Each has the indices of
            the parameters whose gradient sums are in standing registers. The buffer of a sum is the array that the caller puts
            in its register before `play` (main_grad), or else a buffer of the plan.
        reuse: True donates buffers to their last reader, or frees them after it. False keeps all arrays of a run until its end.
        options: XLA options, values by name.
        join: `segments` compiles consecutive actions of a rank into one executable, `nothing` compiles each action of a
            callable separately.
        outputs: `keep` makes y of the last callable a result for every microbatch, `drop` does not.
        copies: `shared` if equal instructions share an executable, `each` if every instruction has its own. `each` has no
            effect on a CPU, or with more than 512 instructions.
        before: Functions to run before the schedule, in order, each as a separate executable.
        after: Functions to run after the schedule, in order, each as a separate executable.

    Returns:
        The compiled plan. Its `buffers` is an empty dict.

    Raises:
        CompilerOptionError: If XLA refuses an option.
        DonationError: If an executable does not update a standing register in place.
    """
    flow = Flow(callables, schedule, loss, aliased, outputs)
    segments = [[flow.function(function)] for function in before] + segments_of(flow.units(schedule), join)
    segments += [[flow.function(function)] for function in after]
    # Find the registers that leave each segment, and the last reader of each register.
    results, given = set(flow.results.values()), set(flow.named.values())
    tasks_of = [[task for unit in segment for task in unit.tasks] for segment in segments]
    sends = [tuple(send for unit in segment for send in unit.sends) for segment in segments]
    sent = {a for segment in sends for a, _, _ in segment}
    last: dict[int, int] = {}
    for n, tasks in enumerate(tasks_of):
        last |= dict.fromkeys((*(r for task in tasks for r in task.ins), *(a for a, _, _ in sends[n])), n)
    interfaces, stored = [], []
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

    Args:
        plan: The plan. Its dict `buffers` is changed in place.
        registers: The list from `ExecutionPlan.fill`, changed in place. Afterwards, the results are at the indices in
            `plan.flow.results`. Arrays in standing registers are donated. If a standing register is None, it gets its array
            from `plan.buffers`, or zeros if there is none (first run), and the array is put into `plan.buffers` at the end.
    """
    from_plan = [r for r in plan.flow.standing if registers[r] is None]
    for r in from_plan:
        # Removed from the buffers, so that no donated array remains there after a failed run.
        array, aval, device = plan.buffers.pop(r, None), plan.flow.avals[r], plan.flow.standing[r]
        registers[r] = jnp.zeros(aval.shape, aval.dtype, device=device) if array is None else array
    for instruction in plan.instructions:
        _run(instruction, registers)
    plan.buffers.update((r, registers[r]) for r in from_plan)


def _run(instruction: Instruction, registers: list[Any]) -> None:
    """Runs one instruction. In a separate function, so that no local variable keeps an array of a cleared register alive."""
    executable, io = instruction.executable, instruction.executable.io
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
