"""A plan: a schedule as a list of instructions that a host can follow without thinking.

An instruction runs one executable on arrays by register, sends some results to other devices, and frees what nothing reads any
more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.callables.compile import Copies, Executable, compile_tasks, interface
from jgraph.callables.dataflow import Flow, Join, Outputs, Unit, segments_of, units_of
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError
from jgraph.schedule.schedule import Schedule

# Instructions that have an executable each; of longer plans equal ones share it.
_MOST_EXECUTABLES = 512


@dataclass(frozen=True)
class Instruction:
    """Run `executable`; send `sends` (from register, to register, device), put back `returns` (from, to), free `frees`."""

    executable: Executable
    sends: tuple[tuple[int, int, Any], ...]
    returns: tuple[tuple[int, int], ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """Instructions, and the registers that they read and write.

    Attributes:
        instructions: in the order in which to run them.
        flow: the registers.
        outputs: for each microbatch, registers of the last y; empty where they are dropped.
        in_send_buffers: arrays in the send buffers, kept from one run to the next; empty before the first.
    """

    instructions: tuple[Instruction, ...]
    flow: Flow
    outputs: list[list[int]]
    in_send_buffers: dict[int, jax.Array] = field(default_factory=dict)


def make_plan(
    callables: Sequence[Shaped],
    schedule: Schedule,
    *,
    aliased: Sequence[Sequence[int]],
    reuse: bool,
    join: Join,
    outputs: Outputs,
    keyed: Literal["folded", "given"],
    loss_fn: Callable[..., Any],
    loss_args: Any,
    options: Mapping[str, Any],
    loss_params: Any = None,
    copies: Copies = "each",
) -> ExecutionPlan:
    """Returns a schedule as instructions, compiled.

    `aliased` are, for each callable, the places of the parameters whose sums lie in main_grad. With `reuse`, buffers are
    donated to their last consumer, or freed after it. Random keys are `folded` here or, `given`, come with `extra`. `loss_args`
    are the arguments of `loss_fn` after y, one microbatch's as shapes. `loss_params`, a tree of shapes, come before y; their
    places in `aliased` are those of one callable more. On a GPU `each` instruction has an executable of its own, or equal ones
    have a `shared` one.
    """
    loss_side, loss_weights, last = Side.of(tuple(loss_args)), Side.of(loss_params), callables[-1]

    def loss_of_leaves(params: Sequence[Any], y: Any, leaves: Sequence[Any]) -> Any:
        given = () if loss_params is None else (loss_weights.unflatten(params),)
        return loss_fn(*given, y, *loss_side.unflatten(leaves))

    loss = jax.eval_shape(loss_of_leaves, loss_weights.avals, last.y.shapes(), loss_side.avals)
    if not isinstance(loss, jax.ShapeDtypeStruct):
        raise CallableError(f"loss_fn gives a {type(loss).__name__}: must be a floating scalar alone")
    loss_aval = shape_of(loss)
    if loss_aval.shape != () or not jnp.issubdtype(loss_aval.dtype, jnp.floating):
        raise CallableError(f"loss_fn gives {loss_aval.dtype}{list(loss_aval.shape)}: must be a floating scalar")
    ranks = np.repeat(schedule.rank_of_stage, schedule.num_layers).tolist()
    of_rank = dict(zip(ranks, (shaped.device for shaped in callables), strict=True))
    devices = [of_rank[rank] for rank in range(schedule.num_ranks)]
    flow = Flow(callables, devices, aliased, reuse, loss_weights, loss_side, loss_aval)
    for i, shaped in enumerate(callables):
        for place in shaped.keys if keyed == "folded" else ():
            flow.given(shaped.extra.avals[place], "keys", i, place)
    units = units_of(flow, schedule)
    segments = segments_of(units, join)
    result = set(flow.losses.values()) | set(flow.sums.values()) | {r for group in flow.aux.values() for r in group}
    count = schedule.num_microbatches
    outs = [flow.values["y", len(callables) - 1, m] for m in range(count)] if outputs == "keep" else []
    result |= {r for group in outs for r in group}
    return ExecutionPlan(tuple(_compile(flow, segments, result, options, loss_of_leaves, copies)), flow, outs)


def _compile(
    flow: Flow,
    segments: Sequence[Sequence[Unit]],
    result: set[int],
    options: Mapping[str, Any],
    loss_fn: Callable[..., Any],
    copies: Copies,
) -> list[Instruction]:
    """Finds the registers that leave each segment and where each is read last, and compiles the segments."""
    kept = result | set(flow.named.values())
    every = [[task for unit in segment for task in unit.tasks] for segment in segments]
    sends = [tuple(send for unit in segment for send in unit.sends) for segment in segments]
    sent = {a for segment in sends for a, _, _ in segment}
    last: dict[int, int] = {}
    made_in: dict[int, int] = {}
    for n, tasks in enumerate(every):
        last |= dict.fromkeys((*(r for task in tasks for r in task.ins), *(a for a, _, _ in sends[n])), n)
        made_in |= dict.fromkeys((*(r for task in tasks for r in task.outs if r is not None), *(b for _, b, _ in sends[n])), n)
    interfaces = []
    for n, tasks in enumerate(every):
        outs = {r for task in tasks for r in task.outs if r is not None}
        wanted = {r for r in outs if r in result or r in sent or last.get(r, n) > n}
        wanted |= {register for task in tasks for _, register, _ in task.grads}
        dying: set[int] = set()
        stored: list[tuple[int, int]] = []
        if flow.reuse:
            dying = {r for task in tasks for r in task.ins if last[r] == n and r not in kept and r not in sent}
            busy: set[int] = set()
            stored = [(a, flow.send_buffer(a, segments[n][0].rank, busy)) for a, _, _ in sends[n]]
        interfaces.append(interface(tasks, flow.avals, wanted, dying=dying, stored=stored))
    # A command buffer whose arrays lie elsewhere than at its last launch is updated first, which takes as long as the launch.
    # With an executable to itself, an instruction finds them where they were a step ago (notes/develop/measurements.md).
    captures = any(shaped.device.platform != "cpu" for shaped in flow.callables)
    copies = copies if captures and len(interfaces) <= _MOST_EXECUTABLES else "shared"
    executables = compile_tasks(interfaces, flow.callables, options, loss_fn=loss_fn, copies=copies)
    ended: list[list[int]] = [[] for _ in segments]
    for r, n in last.items():
        if r not in kept and r not in flow.send_buffers and (made_in[r] < n or r in sent):
            ended[n if flow.reuse else len(segments) - 1].append(r)
    instructions = []
    for send, executable, frees in zip(sends, executables, ended, strict=True):
        returns = tuple((a, flow.send_buffers[a]) for a, _, _ in send if a in flow.send_buffers)
        instructions.append(Instruction(executable, send, returns, tuple(r for r in frees if r not in executable.io.donated)))
    return instructions


def play(plan: ExecutionPlan, registers: list[Any]) -> None:
    """Runs the instructions on filled registers, which are updated."""
    buffers = [(r, plan.flow.devices[rank]) for (rank, *_), turns in plan.flow.turns.items() for r in turns]
    for r, device in buffers:
        # Also after a run that failed half-way.
        array, aval = plan.in_send_buffers.pop(r, None), plan.flow.avals[r]
        registers[r] = jnp.zeros(aval.shape, aval.dtype, device=device) if array is None else array
    for instruction in plan.instructions:
        io = instruction.executable.io
        given = ([registers[r] for r in group] for group in (io.sums, io.donated, io.read))
        sums, outs = instruction.executable.compiled(*given)
        for r in io.donated:
            registers[r] = None
        for r, value in zip((*io.sums, *io.outs), (*sums, *outs), strict=True):
            registers[r] = value
        for source, target, device in instruction.sends:
            registers[target] = jax.device_put(registers[source], device)
        for source, target in instruction.returns:
            registers[target], registers[source] = registers[source], None
        for r in instruction.frees:
            registers[r].delete()
            registers[r] = None
    plan.in_send_buffers.update((r, registers[r]) for r, _ in buffers)
