"""Compiles tasks into executables.

A task refers to the arrays that it reads and writes by register, a number. An array that is only used inside an executable is
not an output. An input is donated to its last reader. Standing registers (main_grad, send buffers) are the first arguments and
outputs of an executable, and are updated in place; the compiled program is checked for this.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.callables.shaped import Shaped
from jgraph.schedule.action import Kind
from jgraph.xla import CaptureReport, check_identity, compile_and_report
from jgraph.xla.cache import UNREADABLE
from jgraph.xla.donation import without_warning
from jgraph.xla.options import OptionValue

_T = TypeVar("_T")

# A gradient is returned as a new array of the parameter's dtype, as a new float32 sum, or added to a float32 sum.
How = Literal["new", "start", "add"]
# Equal tasks with equal shapes share an executable, or each has a separate one.
Copies = Literal["shared", "each"]
# (index of the parameter, register of the gradient, how it is returned)
Grad = tuple[int, int, How]
# Selects arrays of a sequence.
Select: TypeAlias = Callable[[Sequence[Array]], tuple[Array, ...]]
# Shape and dtype.
_Shape: TypeAlias = tuple[tuple[int, ...], DTypeLike]


@dataclass(frozen=True)
class Task:
    """One computation of an executable. A *register* is the number of an array: `Registers.avals` has its shape and dtype."""

    # The action, or: `key` folds a random key, `loss` also computes its gradients, `pack` joins or splits residuals.
    kind: Kind | Literal["key", "loss", "pack", "function"]
    index: int  # of the callable; a loss or function runs on its device
    ins: tuple[int, ...]  # registers of the inputs besides parameters
    outs: tuple[int | None, ...]  # None for an output that is dropped or passed through
    params: tuple[int, ...] = ()  # registers of the parameters that the task reads
    grads: tuple[Grad, ...] = ()
    # A loss maps the arrays of `params` and `ins` to (outputs, gradients in the order of `grads`). A pack or function maps the
    # arrays of `ins` to outputs. None for other kinds.
    fn: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """Name in profiles, such as `forward_0`: the name of `fn`, or kind and callable."""
        return getattr(self.fn, "__name__", f"{self.kind}_{self.index}")


class Registers:
    """Numbers arrays: register r holds an array with the shape and dtype `avals[r]`."""

    def __init__(self, avals: Iterable[jax.ShapeDtypeStruct] = ()):
        self.avals = list(avals)  # methods append to it

    def register(self, aval: jax.ShapeDtypeStruct) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def new(self, avals: Iterable[jax.ShapeDtypeStruct]) -> list[int]:
        """Adds one register per aval, and returns their numbers in order."""
        return [self.register(aval) for aval in avals]

    def task(
        self, kind: Kind, shaped: Shaped, ins: Sequence[int], param: Callable[[int], int], grads: Sequence[Grad]
    ) -> tuple[Task, list[int], list[int]]:
        """Makes the task of an action. Returns it, the registers of y or dx, and those of the residuals or the stash.

        `ins` are (x, extra), (residuals, dy) or (residuals of the pool forward_wgrad, stash). Adds registers for outputs.
        """
        results = {"forward": shaped.y.avals, "wgrad": ()}.get(kind, shaped.x.avals[: shaped.num_dx])
        left, sources = {
            "forward": (shaped.residuals.avals, shaped.residuals_from),
            "dgrad": (shaped.stash.avals, shaped.stash_from),
        }.get(kind, ((), ()))
        made = self.new(results)
        # An array that is passed through keeps the register of the input.
        kept = [self.register(a) if source is None else ins[source] for a, source in zip(left, sources, strict=True)]
        written = [r if source is None else None for r, source in zip(kept, sources, strict=True)]
        aux = self.new(shaped.aux.avals if kind == "forward" else ())
        reads = tuple(map(param, shaped.reads[kind]))
        return Task(kind, shaped.index, tuple(ins), (*made, *written, *aux), reads, tuple(grads)), made, kept


@dataclass(frozen=True)
class Interface:
    """The tasks of an executable, and its registers: `(*sums, *outs) = compiled(*sums, *donated, *read)`."""

    # Every input is a positional argument, because JAX takes 0.5 us less to flatten them than a tuple of tuples.
    tasks: tuple[Task, ...]
    sums: tuple[int, ...]  # updated in place: donated, and the first outputs
    donated: tuple[int, ...]  # donated to outputs of equal shape and dtype
    read: tuple[int, ...]  # the other inputs
    outs: tuple[int, ...]  # the outputs besides `sums`
    shapes: tuple[_Shape, ...]  # of each input, in the order `sums`, `donated`, `read`

    @property
    def name(self) -> str:
        """Name in profiles, such as `forward_0_dgrad_0`; at most three tasks are named, without keys, losses and packs."""
        words = [t.name for t in self.tasks if t.kind not in ("key", "loss", "pack")]
        return "_".join(words[:3]) + (f"_and_{len(words) - 3}" if len(words) > 3 else "")

    def numbered(self) -> "Interface":
        """Returns a copy with registers renumbered by first use, so that equal computations have equal interfaces."""
        names: dict[int, int] = {}

        def renamed(registers: Iterable[int]) -> tuple[int, ...]:
            return tuple(names.setdefault(r, len(names)) for r in registers)

        def of_task(task: Task) -> Task:
            grads = tuple((place, *renamed([register]), how) for place, register, how in task.grads)
            ins = renamed(task.ins)
            outs = tuple(r if r is None else renamed([r])[0] for r in task.outs)
            return replace(task, ins=ins, outs=outs, params=renamed(task.params), grads=grads)

        ins = {name: renamed(getattr(self, name)) for name in ("sums", "donated", "read")}
        return replace(self, **ins, tasks=tuple(map(of_task, self.tasks)), outs=renamed(self.outs))


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program with the registers of its caller."""

    compiled: jax.stages.Compiled
    report: CaptureReport | None  # None on platforms without command buffers
    io: Interface

    @cached_property
    def select(self) -> Select:
        """A function from a sequence of arrays by register to the arguments of `compiled`."""
        return gather((*self.io.sums, *self.io.donated, *self.io.read))

    @cached_property
    def read(self) -> Select:
        """A function from a sequence of arrays by register to the arguments after `sums` and `donated`."""
        return gather(self.io.read)

    @cached_property
    def adds(self) -> tuple[int, ...]:
        """Indices of the parameters with a gradient that is added to main_grad, in the order of the tasks."""
        return tuple(place for task in self.io.tasks for place, _, how in task.grads if how == "add")

    @cached_property
    def news(self) -> tuple[int, ...]:
        """Indices of the parameters with a gradient that is a new array. These gradients are the last outputs, in order."""
        return tuple(place for task in self.io.tasks for place, _, how in task.grads if how == "new")


def gather(places: Sequence[int]) -> Callable[[Sequence[_T]], tuple[_T, ...]]:
    """Returns a function that selects the items at `places` of a sequence. For two or more items, it runs in C."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda arrays: tuple([arrays[i] for i in places])


def compile_tasks(
    interfaces: Sequence[Interface],
    callables: Sequence[Shaped],
    options: Mapping[str, OptionValue],
    *,
    copies: Copies = "shared",
) -> list[Executable]:
    """Compiles executables, up to 16 at a time in threads, and checks that `sums` are updated in place. Does not run them."""
    of_index = {shaped.index: shaped for shaped in callables}
    # The number distinguishes equal interfaces if `copies` is each.
    names = [(io.numbered(), n if copies == "each" else 0) for n, io in enumerate(interfaces)]
    lowered = {io: _lower(io, of_index) for io in dict.fromkeys(io for io, _ in names)}
    distinct = list(dict.fromkeys(names))

    def compiled(name: tuple[Interface, int]) -> tuple[jax.stages.Compiled, CaptureReport | None]:
        # On a GPU, the options have a separate directory for each report, so JAX does not return an executable from its cache.
        # On a CPU it does, so that `copies` each has no effect.
        program, platform = lowered[name[0]]
        return compile_and_report(program, dict(options), platform=platform)

    with ThreadPoolExecutor(min(16, len(distinct))) as pool, without_warning(UNREADABLE):
        made = dict(zip(distinct, pool.map(compiled, distinct), strict=True))
    for (io, _), (executable, _) in made.items():
        if io.sums:
            check_identity(executable, tuple(jax.ShapeDtypeStruct(*shape) for shape in io.shapes[: len(io.sums)]))
    return [Executable(*made[name], io) for name, io in zip(names, interfaces, strict=True)]


def _lower(io: Interface, callables: Mapping[int, Shaped]) -> tuple[jax.stages.Lowered, str]:
    """Lowers an executable. Returns the lowered program and its platform."""

    def run(*arrays: Array) -> list[Array]:
        env = dict(zip((*io.sums, *io.donated, *io.read), arrays, strict=True))
        for task in io.tasks:
            _run(task, callables[task.index], env)
        return [env[r] for r in (*io.sums, *io.outs)]

    run.__name__ = run.__qualname__ = io.name
    device = callables[io.tasks[0].index].device
    sharding = jax.sharding.SingleDeviceSharding(device)
    avals = tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in io.shapes)
    jitted = jax.jit(run, donate_argnums=tuple(range(len(io.sums) + len(io.donated))), keep_unused=True)
    return jitted.lower(*avals), device.platform


def interface(
    tasks: Sequence[Task],
    avals: Sequence[jax.ShapeDtypeStruct],
    wanted: Collection[int],  # registers that are read outside of the executable
    *,
    standing: Collection[int] = (),  # registers that are updated in place, besides those of gradients that are added
    dying: Collection[int] = (),  # registers without a later reader, donated if an output has the same shape and dtype
    stored: Mapping[int, int] | None = None,  # output registers to registers of equal buffers, which are donated to them
) -> Interface:
    """Finds the inputs and outputs of an executable. Outputs with a buffer in `stored` come first. Compiles nothing."""

    def kind(register: int) -> _Shape:
        return avals[register].shape, avals[register].dtype

    sums: dict[int, None] = {}
    made: dict[int, None] = {}
    taken: dict[int, None] = {}
    for task in tasks:
        taken |= dict.fromkeys(r for r in (*task.params, *task.ins) if r not in made)
        added = {register for _, register, how in task.grads if how == "add"}
        for r in (*task.outs, *(register for _, register, _ in task.grads)):
            if r is not None and r not in made:
                made[r] = None
                if r in added or r in standing:
                    sums[r] = None
    # JAX pairs donated arguments and outputs of equal shape in order, so outputs with a buffer come first.
    buffers = stored or {}
    outs = [r for r in made if r in wanted and r not in sums and r not in buffers]
    unpaired = Counter(map(kind, outs))
    donated = list(buffers.values())
    for r in taken:
        if r in dying and unpaired[kind(r)]:
            unpaired[kind(r)] -= 1
            donated.append(r)
    read = [r for r in taken if r not in donated]
    shapes = tuple(map(kind, (*sums, *donated, *read)))
    return Interface(tuple(tasks), tuple(sums), tuple(donated), tuple(read), (*buffers, *outs), shapes)


def fold_key(key: Array, *, step: Array | int, microbatch: Array | int, layer: Array | int) -> Array:
    """Folds step, microbatch and layer into a random key, like pipelines and graphed callables do for every layer.

    Args:
        key: The random key of the training.
        step: Number of the step, from 0; an integer or an int32 scalar.
        microbatch: Number of the microbatch in the step, from 0; an integer or an int32 scalar.
        layer: Number of the layer, from 0; an integer or an int32 scalar. For a graphed callable, its index.

    Returns:
        The random key of the layer: `jax.random.fold_in` with step, microbatch and layer, in this order.
    """
    for number in (step, microbatch, layer):
        key = jax.random.fold_in(key, number)
    return key


def _run(task: Task, shaped: Shaped, env: dict[int, Array]) -> None:
    """Computes a task and writes its outputs into `env`, which maps registers to arrays."""
    ins = [env[r] for r in task.ins]
    read = [env[r] for r in task.params]
    outs: Sequence[Array]
    if task.fn is not None:
        outs, gradients = task.fn(read, ins) if task.kind == "loss" else (task.fn(ins), ())
        for (_, register, how), gradient in zip(task.grads, gradients, strict=True):
            env[register] = _summed(env, register, how, gradient)
    elif task.kind == "key":
        key, step, microbatch = ins
        outs = [fold_key(key, step=step, microbatch=microbatch, layer=shaped.index)]
    elif task.kind == "forward":
        outs = shaped.forward(shaped.fill("forward", read), ins)
    else:
        outs = _backward(task, shaped, ins, read, env)
    env |= {register: value for register, value in zip(task.outs, outs, strict=True) if register is not None}


def _summed(
    env: Mapping[int, Array],
    register: int,
    how: How,
    gradient: Array,
    merge: Callable[[Array, Array], Array] = jnp.add,
) -> Array:
    """Casts a gradient to float32 unless `how` is new, and merges it with the sum in its register if `how` is add."""
    wide = gradient if how == "new" else gradient.astype(jnp.float32)
    return merge(env[register], wide) if how == "add" else wide


def _backward(task: Task, shaped: Shaped, ins: list[Array], read: list[Array], env: dict[int, Array]) -> list[Array]:
    """Computes a dgrad, wgrad or backward, and writes its gradients into `env`. Returns dx, then the stash of a dgrad."""
    registers: dict[int, tuple[int, How]] = {place: (register, how) for place, register, how in task.grads}
    arrays = [*[None] * (shaped.num_dgrad if task.kind == "wgrad" else 0), *ins]
    residuals, rest = arrays[: len(shaped.residuals)], arrays[len(shaped.residuals) :]
    dx: list[Array] = []
    stash = rest
    gradients: dict[int, Array] = {}
    if task.kind != "wgrad":
        count = len(shaped.reads["dgrad"])
        dx, early, stash = shaped.dgrad(shaped.fill("dgrad", read[:count]), residuals, rest)
        read = read[count:]
        for place, gradient in early.items():
            merge = jnp.maximum if place in shaped.maxima else jnp.add
            gradients[place] = _summed(env, *registers[place], gradient, merge)
    if task.kind != "dgrad" and shaped.late:
        sums = {
            place: env[register] if how == "add" else jnp.zeros(shaped.params.avals[place].shape, jnp.float32)
            for place, (register, how) in registers.items()
            if place in shaped.late and how != "new"
        }
        gradients |= shaped.wgrad(shaped.fill("wgrad", read), residuals, stash, sums or None)
    env |= {registers[place][0]: gradient for place, gradient in gradients.items()}
    return [*dx, *stash] if task.kind == "dgrad" else dx
