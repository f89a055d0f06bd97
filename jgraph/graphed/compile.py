"""From a run of tasks to one executable.

Tasks name the arrays they read and write by register, a number. What is made and used inside a program never leaves it; what
comes in for the last time is donated; gradient sums are argument 0 and output 0, updated in place, which is checked.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.graphed.shaped import Shaped
from jgraph.xla import CaptureReport, check_identity, compile_and_report, option_errors

# What becomes of a gradient: an array of the parameter's dtype; the first of a float32 sum; the first of one whose buffer is
# there already; one more of a sum.
How = Literal["new", "start", "over", "add"]


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


@dataclass(frozen=True)
class TaskGroup:
    """Tasks that become one executable.

    Attributes:
        tasks: in their order.
        wanted: registers that are read outside.
        dying: registers that nothing reads afterwards.
        stored: (register to write, register in whose buffer): both of one shape; what was in the buffer is not read.
    """

    tasks: Sequence[Task]
    wanted: Collection[int]
    dying: Collection[int] = ()
    stored: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Signature:
    """What an executable is made from; equal ones are the same executable.

    Attributes:
        tasks: with registers of its own numbering.
        sums: registers updated in place, argument 0 and output 0.
        donated: read for the last time, in buffers that outputs fit into.
        read: the other inputs.
        outs: what leaves, besides the sums.
        avals: of sums, donated, read.
    """

    tasks: tuple[Task, ...]
    sums: tuple[int, ...]
    donated: tuple[int, ...]
    read: tuple[int, ...]
    outs: tuple[int, ...]
    avals: tuple[tuple[tuple[int, ...], Any], ...]


@dataclass(frozen=True, eq=False)
class Executable:
    """An executable and the registers that it reads and writes: `sums, outs = compiled(sums, donated, read)`.

    Attributes:
        compiled: the executable.
        report: what of it is captured; None where there are no command buffers.
        tasks: what it computes, with the registers of whoever asked for it.
    """

    compiled: jax.stages.Compiled
    report: CaptureReport | None
    sums: tuple[int, ...]
    donated: tuple[int, ...]
    read: tuple[int, ...]
    outs: tuple[int, ...]
    tasks: tuple[Task, ...]

    @property
    def name(self) -> str:
        """As profiles show it."""
        return _name(self.tasks)


class Compiler:
    """Makes executables of a set of callables.

    Args:
        callables: by index.
        options: for XLA.
        loss_fn: of `loss` tasks.
    """

    def __init__(self, callables: Mapping[int, Shaped], options: Mapping[str, Any], loss_fn: Callable[..., Any] | None = None):
        self._callables, self._options, self._loss = callables, dict(options), loss_fn

    def compile(
        self,
        groups: Sequence[TaskGroup],
        avals: Mapping[int, jax.ShapeDtypeStruct],
        loss_tree: Any = None,
        *,
        copies: Literal["shared", "each"] = "shared",
    ) -> list[Executable]:
        """Compiles, several at a time.

        Args:
            groups: for each executable.
            avals: of all registers.
            loss_tree: structure of the loss's arguments after y.
            copies: whether equal groups are one executable, or `each` has its own; the latter on a GPU only.

        Raises:
            DonationError: a sum is not updated in place.
        """
        plans = [_plan(group, avals) for group in groups]
        lowered = {}
        for signature, _ in plans:
            if signature not in lowered:
                lowered[signature] = self._lower(signature, loss_tree)
        wanted = [(signature, n if copies == "each" else 0) for n, (signature, _) in enumerate(plans)]
        distinct = list(dict.fromkeys(wanted))
        with ThreadPoolExecutor(min(16, len(distinct))) as pool, option_errors():
            made = dict(zip(distinct, pool.map(lambda name: self._compile(*lowered[name[0]]), distinct), strict=True))
        for (signature, _), (compiled, _) in made.items():
            if signature.sums:
                check_identity(compiled, [jax.ShapeDtypeStruct(*aval) for aval in signature.avals[: len(signature.sums)]])
        return [
            _bind(made[name], name[0], names, group.tasks)
            for name, (_, names), group in zip(wanted, plans, groups, strict=True)
        ]

    def _compile(self, lowered: Any, platform: str) -> tuple[jax.stages.Compiled, CaptureReport | None]:
        # On a GPU the report's own directory is among the options, so that jax does not give back an executable it has.
        return compile_and_report(lowered, self._options, platform=platform)

    def _lower(self, signature: Signature, loss_tree: Any) -> tuple[Any, str]:
        callables, loss_fn = self._callables, self._loss

        def run(sums, donated, read):
            env = dict(zip((*signature.sums, *signature.donated, *signature.read), (*sums, *donated, *read), strict=True))
            for task in signature.tasks:
                _run(task, callables[task.index], env, loss_fn, loss_tree)
            return [env[r] for r in signature.sums], [env[r] for r in signature.outs]

        run.__name__ = run.__qualname__ = _name(signature.tasks)
        device = callables[signature.tasks[0].index].device
        sharding = jax.sharding.SingleDeviceSharding(device)
        avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in signature.avals]
        a, b = len(signature.sums), len(signature.sums) + len(signature.donated)
        jitted = jax.jit(run, donate_argnums=(0, 1), keep_unused=True)
        return jitted.lower(avals[:a], avals[a:b], avals[b:]), device.platform


def _plan(group: TaskGroup, avals: Mapping[int, jax.ShapeDtypeStruct]) -> tuple[Signature, dict[int, int]]:
    """What the program takes and gives, in registers of its own; and their numbers by those of the group."""
    sums: dict[int, None] = {}
    made: dict[int, None] = {}
    taken: dict[int, None] = {}
    for task in group.tasks:
        taken |= dict.fromkeys(r for r in (*task.params, *task.ins) if r not in made)
        made |= dict.fromkeys(r for r in task.outs if r is not None)
        for _, register, how in task.grads:
            if register not in made and how in ("over", "add"):
                sums[register] = None
            made[register] = None
    # jax pairs donated arguments with outputs of their shape in the order of both: what has a buffer to go to comes first.
    stored = dict(group.stored)
    outs = [*stored, *(r for r in made if r in group.wanted and r not in sums and r not in stored)]
    room = Counter((avals[r].shape, avals[r].dtype) for r in outs[len(stored) :])
    donated = list(stored.values())
    for r in taken:
        kind = (avals[r].shape, avals[r].dtype)
        if r in group.dying and room[kind]:
            room[kind] -= 1
            donated.append(r)
    read = [r for r in taken if r not in donated]
    names: dict[int, int] = {}
    for r in (*sums, *donated, *read, *made):
        names.setdefault(r, len(names))

    def renamed(registers: Iterable[int]) -> tuple[int, ...]:
        return tuple(names[r] for r in registers)

    tasks = tuple(
        Task(
            t.kind,
            t.index,
            renamed(t.ins),
            tuple(r if r is None else names[r] for r in t.outs),
            renamed(t.params),
            tuple((leaf, names[r], how) for leaf, r, how in t.grads),
        )
        for t in group.tasks
    )
    shapes = tuple((avals[r].shape, avals[r].dtype) for r in (*sums, *donated, *read))
    return Signature(tasks, renamed(sums), renamed(donated), renamed(read), renamed(outs), shapes), names


def _bind(
    made: tuple[jax.stages.Compiled, CaptureReport | None], signature: Signature, names: dict[int, int], tasks: Sequence[Task]
) -> Executable:
    """An executable with the registers of whoever asked for it."""
    outer = {inner: register for register, inner in names.items()}

    def renamed(registers: Iterable[int]) -> tuple[int, ...]:
        return tuple(outer[r] for r in registers)

    return Executable(
        *made,
        sums=renamed(signature.sums),
        donated=renamed(signature.donated),
        read=renamed(signature.read),
        outs=renamed(signature.outs),
        tasks=tuple(tasks),
    )


def fold_key(key: Array, *, step: Any, microbatch: Any, layer: Any) -> Array:
    """Returns the random key of a layer for a microbatch of a step, as pipelines and graphed callables derive it.

    Args:
        key: of the whole training.
        step, microbatch, layer: numbers from 0; a layer of a graphed callable is its place among them.
    """
    for number in (step, microbatch, layer):
        key = jax.random.fold_in(key, number)
    return key


def _name(tasks: Sequence[Task]) -> str:
    """For profiles: `forward_0_dgrad_0`, shortened."""
    words = [f"{t.kind}_{t.index}" for t in tasks if t.kind not in ("key", "loss")]
    return "_".join(words[:3]) + (f"_and_{len(words) - 3}" if len(words) > 3 else "")


def _run(task: Task, shaped: Shaped, env: dict[int, Any], loss_fn: Callable[..., Any] | None, loss_tree: Any) -> None:
    """Computes a task and writes what it gives into `env`."""
    ins, read = [env[r] for r in task.ins], [env[r] for r in task.params]
    outs: list[Any]
    if task.kind == "key":
        key, step, microbatch = ins
        outs = [fold_key(key, step=step, microbatch=microbatch, layer=shaped.index)]
    elif task.kind == "loss":
        assert loss_fn is not None
        y, arguments = shaped.y.unflatten(ins[: len(shaped.y)]), jax.tree.unflatten(loss_tree, ins[len(shaped.y) :])
        loss, dy = jax.value_and_grad(loss_fn)(y, *arguments)
        outs = [loss, *jax.tree.leaves(dy)]
    elif task.kind == "forward":
        outs = shaped.forward(shaped.fill("forward", read), ins)
    else:
        outs = _backward(task, shaped, ins, read, env)
    for register, value in zip(task.outs, outs, strict=True):
        if register is not None:
            env[register] = value


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
            register, how = registers[place]
            wide = gradient if how == "new" else gradient.astype(jnp.float32)
            gradients[place] = env[register] + wide if how == "add" else wide
    if task.kind != "dgrad" and shaped.late:
        sums = None
        if registers[shaped.late[0]][1] != "new":
            sums = {place: _sum(*registers[place], shaped.params.avals[place], env) for place in shaped.late}
        gradients |= shaped.wgrad(shaped.fill("wgrad", read), residuals, stash, sums)
    env |= {registers[place][0]: gradient for place, gradient in gradients.items()}
    return [*dx, *stash] if task.kind == "dgrad" else dx


def _sum(register: int, how: How, aval: Any, env: dict[int, Any]) -> Any:
    """What a gradient is added to."""
    return env[register] if how == "add" else jnp.zeros(aval.shape, jnp.float32)
