"""From a run of tasks to one executable.

Tasks name the arrays they read and write by register, a number. What is made and used inside a program never leaves it; what
comes in for the last time is donated; gradient sums are argument 0 and output 0, updated in place, which is checked.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.callables.shaped import Shaped, Side
from jgraph.xla import CaptureReport, check_identity, compile_and_report
from jgraph.xla.cache import for_elsewhere

# What becomes of a gradient: an array of the parameter's dtype; the first of a float32 sum; the first of one whose buffer is
# there already; one more of a sum.
How = Literal["new", "start", "over", "add"]
# Whether equal tasks on equal shapes have an executable together, or each its own.
Copies = Literal["shared", "each"]


@dataclass(frozen=True)
class Task:
    """One thing to compute.

    Attributes:
        kind: of an action, or `key` (a random key folded), or `loss` (the loss and the gradient of the last output).
        index: of the callable.
        ins: registers read, besides parameters.
        outs: registers written; None where the result is not wanted or only handed on.
        params: registers of the parameters that it reads.
        grads: (place of the parameter, register of its gradient, how it gets there).
    """

    kind: Literal["forward", "dgrad", "wgrad", "backward", "key", "loss"]
    index: int
    ins: tuple[int, ...]
    outs: tuple[int | None, ...]
    params: tuple[int, ...] = ()
    grads: tuple[tuple[int, int, How], ...] = ()


def left_by(
    side: Side, sources: Sequence[int | None], given: Sequence[int], new: Callable[[Any], int]
) -> tuple[list[int], list[int | None]]:
    """Returns the registers of what a part leaves for a later one; and those that it writes, None for what is `given` to it."""
    left = [new(aval) if source is None else given[source] for aval, source in zip(side.avals, sources, strict=True)]
    return left, [r if source is None else None for r, source in zip(left, sources, strict=True)]


@dataclass(frozen=True)
class Interface:
    """The tasks of an executable, and the registers that it reads and writes: `sums, outs = compiled(sums, donated, read)`.

    Attributes:
        tasks: in their order.
        sums: registers updated in place, argument 0 and output 0.
        donated: read for the last time, in buffers that outputs fit into.
        read: the other inputs.
        outs: registers that leave, besides the sums.
        shapes: shape and dtype of each input.
    """

    tasks: tuple[Task, ...]
    sums: tuple[int, ...]
    donated: tuple[int, ...]
    read: tuple[int, ...]
    outs: tuple[int, ...]
    shapes: tuple[tuple[Any, Any], ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        return (*self.sums, *self.donated, *self.read)

    @property
    def name(self) -> str:
        """The name in profiles: `forward_0_dgrad_0`, shortened."""
        words = [f"{t.kind}_{t.index}" for t in self.tasks if t.kind not in ("key", "loss")]
        return "_".join(words[:3]) + (f"_and_{len(words) - 3}" if len(words) > 3 else "")

    def numbered(self) -> "Interface":
        """Returns the same with registers of its own numbering: equal ones are the same executable."""
        names: dict[int, int] = {}

        def renamed(registers: Iterable[int | None]) -> tuple[Any, ...]:
            return tuple(r if r is None else names.setdefault(r, len(names)) for r in registers)

        def of_task(task: Task) -> Task:
            grads = tuple((place, *renamed([register]), how) for place, register, how in task.grads)
            return replace(task, ins=renamed(task.ins), outs=renamed(task.outs), params=renamed(task.params), grads=grads)

        ins = {name: renamed(getattr(self, name)) for name in ("sums", "donated", "read")}
        return replace(self, **ins, tasks=tuple(map(of_task, self.tasks)), outs=renamed(self.outs))


@dataclass(frozen=True, eq=False)
class Executable:
    """An executable with the registers of whoever asked for it.

    Attributes:
        compiled: the executable.
        report: what of it is captured; None where there are no command buffers.
        io: its tasks, and the registers that it reads and writes.
    """

    compiled: jax.stages.Compiled
    report: CaptureReport | None
    io: Interface


def compile_tasks(
    interfaces: Sequence[Interface],
    callables: Sequence[Shaped],
    options: Mapping[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    copies: Copies = "shared",
) -> list[Executable]:
    """Compiles executables of the tasks of these callables, several at a time.

    `loss_fn`, of `loss` tasks, is a function of the leaves of its parameters, of y, and of the leaves of its other arguments.
    Equal tasks on equal shapes are one executable, or `each` has its own; the latter on a GPU only. Raises DonationError where
    a sum is not updated in place.
    """
    of_index = {shaped.index: shaped for shaped in callables}
    # The copies of a GPU are told apart by their number.
    names = [(io.numbered(), n * (copies == "each")) for n, io in enumerate(interfaces)]
    lowered = {io: _lower(io, of_index, loss_fn) for io in dict.fromkeys(io for io, _ in names)}
    distinct = list(dict.fromkeys(names))

    def compiled(name: tuple[Interface, int]) -> tuple[jax.stages.Compiled, CaptureReport | None]:
        # On a GPU the report's own directory is among the options, so that jax does not give back an executable it has.
        program, platform = lowered[name[0]]
        return compile_and_report(program, dict(options), platform=platform)

    with ThreadPoolExecutor(min(16, len(distinct))) as pool, for_elsewhere():
        made = dict(zip(distinct, pool.map(compiled, distinct), strict=True))
    for (io, _), (executable, _) in made.items():
        if io.sums:
            check_identity(executable, [jax.ShapeDtypeStruct(*shape) for shape in io.shapes[: len(io.sums)]])
    return [Executable(*made[name], io) for name, io in zip(names, interfaces, strict=True)]


def _lower(io: Interface, callables: Mapping[int, Shaped], loss_fn: Callable[..., Any] | None) -> tuple[Any, str]:
    def run(sums, donated, read):
        env = dict(zip(io.inputs, (*sums, *donated, *read), strict=True))
        for task in io.tasks:
            _run(task, callables[task.index], env, loss_fn)
        return [env[r] for r in io.sums], [env[r] for r in io.outs]

    run.__name__ = run.__qualname__ = io.name
    device = callables[io.tasks[0].index].device
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in io.shapes]
    a, b = len(io.sums), len(io.sums) + len(io.donated)
    jitted = jax.jit(run, donate_argnums=(0, 1), keep_unused=True)
    return jitted.lower(avals[:a], avals[a:b], avals[b:]), device.platform


def interface(
    tasks: Sequence[Task],
    avals: Any,
    wanted: Collection[int],
    *,
    dying: Collection[int] = (),
    stored: Sequence[tuple[int, int]] = (),
) -> Interface:
    """Returns the registers that an executable of these tasks, in this order, reads and writes.

    `avals` are by register. Those `wanted` are read outside, and nothing reads those `dying` afterwards. `stored` are pairs
    (register to write, register in whose buffer), both of one shape; what was in the buffer is not read.
    """

    def kind(register: int) -> tuple[Any, Any]:
        return avals[register].shape, avals[register].dtype

    sums: dict[int, None] = {}
    made: dict[int, None] = {}
    taken: dict[int, None] = {}
    for task in tasks:
        taken |= dict.fromkeys(r for r in (*task.params, *task.ins) if r not in made)
        made |= dict.fromkeys(r for r in task.outs if r is not None)
        for _, register, how in task.grads:
            if register not in made and how in ("over", "add"):
                sums[register] = None
            made[register] = None
    # jax pairs donated arguments with outputs of their shape in the order of both: what has a buffer to go to comes first.
    buffers = dict(stored)
    outs = [r for r in made if r in wanted and r not in sums and r not in buffers]
    room, donated = Counter(map(kind, outs)), list(buffers.values())
    for r in taken:
        if r in dying and room[kind(r)]:
            room[kind(r)] -= 1
            donated.append(r)
    read = [r for r in taken if r not in donated]
    shapes = tuple(map(kind, (*sums, *donated, *read)))
    return Interface(tuple(tasks), tuple(sums), tuple(donated), tuple(read), (*buffers, *outs), shapes)


def fold_key(key: Array, *, step: Any, microbatch: Any, layer: Any) -> Array:
    """Returns the random key that pipelines and graphed callables give a layer for a microbatch of a step.

    Args:
        key: of the whole training.
        step, microbatch, layer: numbers from 0; a layer of a graphed callable is its place among them.
    """
    for number in (step, microbatch, layer):
        key = jax.random.fold_in(key, number)
    return key


def _run(task: Task, shaped: Shaped, env: dict[int, Any], loss_fn: Callable[..., Any] | None) -> None:
    """Computes a task and writes its results into `env`."""
    ins, read = [env[r] for r in task.ins], [env[r] for r in task.params]
    outs: list[Any]
    if task.kind == "key":
        key, step, microbatch = ins
        outs = [fold_key(key, step=step, microbatch=microbatch, layer=shaped.index)]
    elif task.kind == "loss":
        assert loss_fn is not None
        y, rest = shaped.y.unflatten(ins[: len(shaped.y)]), ins[len(shaped.y) :]
        loss, (gradients, dy) = jax.value_and_grad(loss_fn, argnums=(0, 1))(read, y, rest)
        for (_, register, how), gradient in zip(task.grads, gradients, strict=True):
            env[register] = _summed(env, register, how, gradient)
        outs = [loss, *jax.tree.leaves(dy)]
    elif task.kind == "forward":
        outs = shaped.forward(shaped.fill("forward", read), ins)
    else:
        outs = _backward(task, shaped, ins, read, env)
    for register, value in zip(task.outs, outs, strict=True):
        if register is not None:
            env[register] = value


def _summed(env: Mapping[int, Any], register: int, how: How, gradient: Array, merge: Any = jnp.add) -> Array:
    """Returns what becomes of a gradient: as it is, or float32, perhaps merged with what the register has."""
    wide = gradient if how == "new" else gradient.astype(jnp.float32)
    return merge(env[register], wide) if how == "add" else wide


def _backward(task: Task, shaped: Shaped, ins: list[Any], read: list[Any], env: dict[int, Any]) -> list[Any]:
    """Writes the gradients of a dgrad, wgrad or backward; returns the leaves of dx and, of a dgrad, the stash."""
    registers: dict[int, tuple[int, How]] = {place: (register, how) for place, register, how in task.grads}
    gone = [None] * shaped.num_dgrad if task.kind == "wgrad" else []
    residuals, rest = [*gone, *ins][: len(shaped.residuals)], [*gone, *ins][len(shaped.residuals) :]
    gradients: dict[int, Any] = {}
    dx: list[Any] = []
    stash = rest
    if task.kind != "wgrad":
        count = len(shaped.reads["dgrad"])
        dx, early, stash = shaped.dgrad(shaped.fill("dgrad", read[:count]), residuals, rest)
        read = read[count:]
        for place, gradient in early.items():
            merge = jnp.maximum if place in shaped.maxima else jnp.add
            gradients[place] = _summed(env, *registers[place], gradient, merge)
    if task.kind != "dgrad" and shaped.late:
        sums = None
        if registers[shaped.late[0]][1] != "new":
            sums = {
                place: env[register] if how == "add" else jnp.zeros(shaped.params.avals[place].shape, jnp.float32)
                for place, (register, how) in registers.items()
                if place in shaped.late
            }
        gradients |= shaped.wgrad(shaped.fill("wgrad", read), residuals, stash, sums)
    env |= {registers[place][0]: gradient for place, gradient in gradients.items()}
    return [*dx, *stash] if task.kind == "dgrad" else dx
