"""A plan: a schedule as a list of instructions that a host can follow without thinking.

An instruction runs one executable on arrays by register, sends some results to other devices, and frees what nothing reads any
more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CallableError
from jgraph.graphed.compile import Compiler, Executable, TaskGroup
from jgraph.graphed.dataflow import Flow, Join, Outputs, Unit, segments_of, units_of
from jgraph.graphed.shaped import Shaped, Side, shape_of
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
    """Instructions, and which registers the host fills before and reads after.

    Attributes:
        instructions: in the order in which to run them.
        size: number of registers.
        params: for each callable, the register of each parameter.
        inputs: for each microbatch, registers of the first x.
        extra: (callable, microbatch, place) to register, of arguments after x.
        loss_args: for each microbatch.
        loss_side: their structure and shapes.
        keys: (callable, place) to the register of a key, to be folded.
        steps: for each rank, the register of the step's number; empty without keys.
        microbatches: (rank, microbatch) to the register of that number.
        main_grad: (callable, parameter) to register, of aliased gradients.
        losses: for each microbatch.
        outputs: for each microbatch; empty where they are dropped.
        sums: (callable, parameter) to register, of all gradients.
        starts: whether the sums are to be `zeros` before it is played; `anything` where its first executables write over them.
        devices: of each rank.
        send_buffers: registers of the buffers that are sent from, each with its shape and rank.
        in_send_buffers: arrays in them, kept from one run to the next; empty before the first.
        pool: registers of buffers that only the plan ever sees, each with its pool.
        home: rank of each register in `pool`.
    """

    instructions: tuple[Instruction, ...]
    size: int
    params: list[list[int]]
    inputs: list[list[int]]
    extra: dict[tuple[int, int, int], int]
    loss_args: list[list[int]]
    loss_side: Side
    keys: dict[tuple[int, int], int]
    steps: list[int]
    microbatches: dict[tuple[int, int], int]
    main_grad: dict[tuple[int, int], int]
    losses: list[int]
    outputs: list[list[int]]
    sums: dict[tuple[int, int], int]
    starts: Literal["zeros", "anything"]
    devices: Sequence[Any]
    send_buffers: Mapping[int, tuple[Any, int]]
    in_send_buffers: dict[int, jax.Array]
    pool: Mapping[int, str]
    home: Mapping[int, int]


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
) -> ExecutionPlan:
    """Plans and compiles.

    Args:
        callables: in the order of the data.
        schedule: its stages hold them, `num_layers_per_chunk` each.
        aliased: for each callable, places of the parameters whose sums lie in main_grad.
        reuse: whether buffers are donated to, or freed after, their last consumer.
        join: what is one executable.
        outputs: whether those of the last callable are wanted.
        keyed: whether random keys are folded here, or come with `extra`.
        loss_fn, loss_args: and its arguments after y, one microbatch's as shapes.
        options: for XLA.
    """
    loss_side, last = Side.of(tuple(loss_args)), callables[-1]
    loss = jax.eval_shape(loss_fn, last.y.shapes(), *loss_args)
    if not isinstance(loss, jax.ShapeDtypeStruct):
        raise CallableError(f"loss_fn gives a {type(loss).__name__}: must be a floating scalar alone")
    loss_aval = shape_of(loss)
    if loss_aval.shape != () or not jnp.issubdtype(loss_aval.dtype, jnp.floating):
        raise CallableError(f"loss_fn gives {loss_aval.dtype}{list(loss_aval.shape)}: must be a floating scalar")
    ranks = np.repeat(schedule.rank_of_stage, schedule.num_layers).tolist()
    of_rank = dict(zip(ranks, (shaped.device for shaped in callables), strict=True))
    devices = [of_rank[rank] for rank in range(schedule.num_ranks)]
    builder = Flow(callables, devices, aliased, reuse, join, outputs, loss_side, loss_aval)
    for i, shaped in enumerate(callables):
        for place in shaped.keys if keyed == "folded" else ():
            builder.given(shaped.extra.avals[place], "keys", i, place)
    units = units_of(builder, schedule)
    segments = segments_of(units, join)
    result = set(builder.losses.values()) | set(builder.sums.values())
    count = schedule.num_microbatches
    outs = [builder.values["y", len(callables) - 1, m] for m in range(count)] if outputs == "keep" else []
    result |= {r for group in outs for r in group}
    instructions = _compile(builder, segments, result, options, loss_fn)
    named = builder.named

    def group(kind: str) -> dict[Any, int]:
        return {name[1:]: register for name, register in named.items() if name[0] == kind}

    return ExecutionPlan(
        instructions=tuple(instructions),
        size=len(builder.avals),
        params=[
            [named.get(("params", i, place), -1) for place in range(len(shaped.params))] for i, shaped in enumerate(callables)
        ],
        inputs=[[named["x", m, place] for place in range(len(callables[0].x))] for m in range(count)],
        extra=group("extra"),
        loss_args=[[named["loss", m, place] for place in range(len(loss_side))] for m in range(count)],
        loss_side=loss_side,
        keys=group("keys"),
        steps=[named.get(("step", r), -1) for r in range(schedule.num_ranks)],
        microbatches=group("microbatch"),
        main_grad={name: r for name, r in builder.sums.items() if name[1] in aliased[name[0]]},
        losses=[builder.losses[m] for m in range(count)],
        outputs=outs,
        sums=builder.sums,
        # Then every addition is made by the same executable, whichever comes first: a sum's bits do not depend on the order.
        starts="zeros" if join == "nothing" else "anything",
        devices=devices,
        send_buffers={r: (builder.avals[r], rank) for (rank, *_), turns in builder.turns.items() for r in turns},
        in_send_buffers={},
        pool=builder.pool,
        home=builder.home,
    )


def _compile(
    builder: Flow,
    segments: Sequence[Sequence[Unit]],
    result: set[int],
    options: Mapping[str, Any],
    loss_fn: Callable[..., Any],
) -> list[Instruction]:
    """Which registers leave each segment, where each is read last, and the executables."""
    kept = result | builder.external
    last: dict[int, int] = {}
    for n, segment in enumerate(segments):
        for unit in segment:
            for task in unit.tasks:
                last |= dict.fromkeys(task.ins, n)
            last |= dict.fromkeys((a for a, _, _ in unit.sends), n)
    made_in = {
        r: n for n, segment in enumerate(segments) for unit in segment for t in unit.tasks for r in t.outs if r is not None
    }
    made_in |= {b: n for n, segment in enumerate(segments) for unit in segment for _, b, _ in unit.sends}
    sent = {a for segment in segments for unit in segment for a, _, _ in unit.sends}
    groups = []
    for n, segment in enumerate(segments):
        tasks = [task for unit in segment for task in unit.tasks]
        outs = {r for task in tasks for r in task.outs if r is not None}
        wanted = {r for r in outs if r in result or r in sent or last.get(r, n) > n} | {
            register for task in tasks for _, register, _ in task.grads
        }
        dying = (
            {r for task in tasks for r in task.ins if last[r] == n and r not in kept and r not in sent}
            if builder.reuse
            else set()
        )
        busy: set[int] = set()
        stored = [(a, builder.send_buffer(a, unit.rank, busy)) for unit in segment for a, _, _ in unit.sends if builder.reuse]
        groups.append(TaskGroup(tasks, wanted, dying, stored))
    # A command buffer whose arrays lie elsewhere than at its last launch is updated first, which takes as long as the launch.
    # With an executable to itself, an instruction finds them where they were a step ago (notes/develop/measurements.md).
    captures = any(shaped.device.platform != "cpu" for shaped in builder.callables)
    copies = "each" if captures and len(groups) <= _MOST_EXECUTABLES else "shared"
    compiler = Compiler(dict(enumerate(builder.callables)), options, loss_fn)
    executables = compiler.compile(groups, builder.avals, builder.loss_side.tree, copies=copies)
    ended: list[list[int]] = [[] for _ in segments]
    for r, n in last.items():
        if r not in kept and r not in builder.send_buffers and (made_in[r] < n or r in sent):
            ended[n if builder.reuse else len(segments) - 1].append(r)
    instructions = []
    for segment, executable, frees in zip(segments, executables, ended, strict=True):
        sends = tuple(send for unit in segment for send in unit.sends)
        returns = tuple((a, builder.send_buffers[a]) for a, _, _ in sends if a in builder.send_buffers)
        instructions.append(Instruction(executable, sends, returns, tuple(r for r in frees if r not in executable.donated)))
    return instructions


def play(plan: ExecutionPlan, registers: list[Any], watch: Callable[[int], None] | None = None) -> None:
    """Runs the instructions on filled registers.

    Args:
        plan: what to run.
        registers: arrays by register; updated.
        watch: called with each instruction's number after it was handed over; for tests.
    """
    for r, (aval, rank) in plan.send_buffers.items():
        # Also after a run that failed half-way.
        array = plan.in_send_buffers.pop(r, None)
        registers[r] = jnp.zeros(aval.shape, aval.dtype, device=plan.devices[rank]) if array is None else array
    for n, instruction in enumerate(plan.instructions):
        executable = instruction.executable
        sums, outs = executable.compiled(
            [registers[r] for r in executable.sums],
            [registers[r] for r in executable.donated],
            [registers[r] for r in executable.read],
        )
        for r, value in zip(executable.sums, sums, strict=True):
            registers[r] = value
        for r in executable.donated:
            registers[r] = None
        for r, value in zip(executable.outs, outs, strict=True):
            registers[r] = value
        for source, target, device in instruction.sends:
            registers[target] = jax.device_put(registers[source], device)
        for source, target in instruction.returns:
            registers[target], registers[source] = registers[source], None
        for r in instruction.frees:
            registers[r].delete()
            registers[r] = None
        if watch is not None:
            watch(n)
    plan.in_send_buffers.update((r, registers[r]) for r in plan.send_buffers)
