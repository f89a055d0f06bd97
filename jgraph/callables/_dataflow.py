"""Dataflow of a schedule: assigns registers to the inputs and outputs of every task, and groups tasks into executables.

The actions of all ranks are visited in the order of ticks, layer by layer. Every array gets its register at its definition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgraph.callables._compile import Grad, How, Registers, Task
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, KINDS, Kind
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.tables import tick_table
from jgraph.types import JaxDevice, Params, Tree

Join = Literal["segments", "nothing"]
Outputs = Literal["drop", "keep"]
# Maximum number of tasks per executable. Compiling more takes longer than the launches that it saves.
_MOST_JOINED = 64
# Number of send buffers per rank and shape, used in turn: one is written while another is sent. Without send buffers, an array
# is freed at the end of its transfer. This time varies, so later arrays would get different addresses in every step.
_SEND_BUFFERS = 3
_NEVER = 1 << 62


class Name(NamedTuple):
    """The name of an argument or result of a plan: its kind, and the indices that this kind has."""

    kind: str
    callable: int = 0
    microbatch: int = 0
    leaf: int = 0
    rank: int = 0


def ranks_of(schedule: Schedule) -> list[int]:
    """Returns the rank of each callable."""
    return np.repeat(schedule.rank_of_stage, schedule.num_layers).tolist()


def layers_of(schedule: Schedule) -> list[range]:
    """Returns the range of callables of each stage, in the order of the stages."""
    ends = np.cumsum(schedule.num_layers).tolist()
    return [range(end - count, end) for end, count in zip(ends, schedule.num_layers, strict=True)]


@dataclass(frozen=True, eq=False)
class PlanLoss:
    """The loss of a microbatch, for fixed shapes. Made by `PlanLoss.trace`."""

    fn: Callable[..., jax.Array]  # fn(params, y, *args) -> scalar
    params: Side
    args: Side  # arguments after y
    y: Side  # the output of the last callable
    aval: jax.ShapeDtypeStruct  # of the loss, a floating scalar

    @classmethod
    def trace(cls, fn: Callable[..., jax.Array], y: Side, args: tuple[Tree, ...], params: Params = ()) -> "PlanLoss":
        """Traces a loss. Raises CallableError if the result is not one floating scalar."""
        weights = Side.from_tree(params)
        given = Side.from_tree(args)
        loss = jax.eval_shape(fn, weights.shapes(), y.shapes(), *given.shapes())
        if not isinstance(loss, jax.ShapeDtypeStruct):
            raise CallableError(f"loss_fn returns a {type(loss).__name__}: must be one floating scalar")
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise CallableError(f"loss_fn returns {loss.dtype}{list(loss.shape)}: must be a floating scalar")
        return cls(fn, weights, given, y, shape_of(loss))

    def differentiated(self, params: list[jax.Array], ins: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the leaves of (loss, dy) and the gradients of the parameters, from leaves of params and (y, args)."""
        y, args = self.y.unflatten(ins[: len(self.y)]), self.args.unflatten(ins[len(self.y) :])
        loss, (gradients, dy) = jax.value_and_grad(self.fn, argnums=(0, 1))(self.params.unflatten(params), y, *args)
        return [loss, *jax.tree.leaves(dy)], jax.tree.leaves(gradients)


@dataclass(frozen=True, eq=False)
class PlanFunction:
    """A function that a plan runs once before or after the schedule, as a separate executable.

    Its results stay in the same buffers in every run.
    """

    fn: Callable[[list[jax.Array]], list[jax.Array]]  # arrays of `ins` to arrays of `outs`; `__name__` names the executable
    index: int  # of a callable on the device that runs the function
    ins: Sequence[Name]  # results of the plan, or arguments of the plan
    outs: Sequence[Name]  # the kind `params` provides a parameter of a callable to the schedule
    # Shapes of the inputs that are arguments of the plan.
    shapes: dict[Name, jax.ShapeDtypeStruct] = field(default_factory=dict)


@dataclass
class Unit:
    """An action of one callable: tasks that are always in the same executable, and the transfers of their results."""

    rank: int
    tick: int  # time slot of the schedule; 0 for a plan function
    tasks: list[Task] = field(default_factory=list)
    sends: list[tuple[int, int, JaxDevice]] = field(default_factory=list)  # (source register, target register, target device)
    needed_at: int = -1  # tick of the action on another rank that computes an input; -1 if there is none
    used_at: int = _NEVER  # tick of the action on another rank that reads a result


class Flow(Registers):
    """The registers of a schedule. A register is the number of an array; `avals[r]` has the shape and dtype of the array."""

    def __init__(
        self,
        callables: Sequence[Shaped],
        schedule: Schedule,
        loss: PlanLoss,
        aliased: Sequence[Sequence[int]],
        outputs: Outputs,
    ):
        super().__init__()
        self._callables = callables
        self.loss = loss
        self._aliased = aliased
        self._outputs = outputs
        self._params = [*(shaped.params for shaped in callables), loss.params]
        self._rank_of = ranks_of(schedule)
        by_rank = dict(zip(self._rank_of, (shaped.device for shaped in callables), strict=True))
        self.devices = [by_rank[rank] for rank in range(schedule.num_ranks)]
        # Arguments of the plan: `params` (callable, leaf), where the loss counts as an additional last callable; `x` and
        # `loss_args` (microbatch, leaf); `extra` (callable, microbatch, leaf); `keys` (callable, leaf) for a random key to be
        # folded; `step` (rank); `microbatch` (microbatch, rank); and the inputs of plan functions.
        self.named: dict[Name, int] = {}
        # `loss` (microbatch); `sum` (callable, leaf) for gradients, where the loss counts as an additional last callable; `aux`
        # (callable, microbatch, leaf); `y` (microbatch, leaf) if outputs are kept; and the results of plan functions.
        self.results: dict[Name, int] = {}
        # Registers that are updated in place, with their devices.
        self.standing: dict[int, JaxDevice] = {}
        # Registers of arrays with a later reader, by (callable, microbatch).
        self._x: dict[tuple[int, int], list[int]] = {}
        self._dy: dict[tuple[int, int], list[int]] = {}
        self._residuals: dict[tuple[int, int], list[int]] = {}
        self._stash: dict[tuple[int, int], list[int]] = {}
        self._buffers: dict[tuple[int, tuple[int, ...], DTypeLike], list[int]] = {}

    def send_buffer(self, source: int, rank: int, busy: set[int]) -> int:
        """Selects the send buffer of an array and adds it to `busy`, those that the same executable already writes."""
        aval = self.avals[source]
        # The buffers of this shape and dtype, least recently used first.
        turns = self._buffers.setdefault((rank, aval.shape, aval.dtype), [])
        free = [r for r in turns if r not in busy]
        if free and len(turns) >= _SEND_BUFFERS:
            buffer = free[0]
        else:
            buffer = self.register(aval)
            self.standing[buffer] = self.devices[rank]
        turns[:] = [*(r for r in turns if r != buffer), buffer]
        busy.add(buffer)
        return buffer

    def function(self, function: PlanFunction) -> Unit:
        """Assigns registers to the inputs and results of a plan function, and traces it."""
        ins = [self.results[n] if n in self.results else self._given(n, function.shapes[n]) for n in function.ins]
        outs = self.new(map(shape_of, jax.eval_shape(function.fn, [self.avals[r] for r in ins])))
        self.results |= dict(zip(function.outs, outs, strict=True))
        self.standing |= dict.fromkeys(outs, self._callables[function.index].device)
        task = Task("function", function.index, tuple(ins), tuple(outs), fn=function.fn)
        return Unit(self._rank_of[function.index], 0, [task])

    def units(self, schedule: Schedule) -> list[Unit]:
        """Assigns registers to the actions of all ranks. Returns one unit per action and callable, by tick, then rank."""
        layers = layers_of(schedule)
        # Ticks of forwards and dgrads, [stage, microbatch], padded with -1 before the first stage and after the last.
        forward, dgrad = (
            np.pad(schedule.when(schedule.ticks, kinds), ((1, 1), (0, 0)), constant_values=-1)
            for kinds in ((FORWARD,), (DGRAD, BACKWARD))
        )
        home = np.pad(schedule.rank_of_stage, 1, constant_values=-1)
        table = tick_table(schedule)
        units: list[Unit] = []
        for tick, r in np.argwhere(table.kind != IDLE).tolist():
            kind, stage, m = KINDS[table.kind[tick, r]], int(table.stage[tick, r]), int(table.microbatch[tick, r])
            # The inputs of an action come from one neighboring stage, and its results go to the other.
            ticks, step = (forward, 1) if kind == "forward" else (dgrad, -1)
            before, after = stage + 1 - step, stage + 1 + step
            for i in layers[stage] if kind == "forward" else reversed(layers[stage]):
                unit = Unit(r, tick)
                if kind == "forward":
                    self._forward(unit, i, m)
                else:
                    self._backward(unit, kind, i, m)
                if kind != "wgrad" and home[before] != r:
                    unit.needed_at = int(ticks[before, m])
                if unit.sends:
                    unit.used_at = int(ticks[after, m])
                # A callable without late parameters has no wgrad task.
                if unit.tasks:
                    units.append(unit)
        return units

    def _given(self, name: Name, aval: jax.ShapeDtypeStruct) -> int:
        """Returns the register of an argument of the plan, or of the plan function's result with the same name."""
        if name in self.results:
            return self.results[name]
        if name not in self.named:
            self.named[name] = self.register(aval)
        return self.named[name]

    def _param(self, i: int, place: int) -> int:
        return self._given(Name("params", callable=i, leaf=place), self._params[i].avals[place])

    def _forward(self, unit: Unit, i: int, m: int) -> None:
        shaped = self._callables[i]
        if i == 0:
            x = enumerate(shaped.x.avals)
            self._x[0, m] = [self._given(Name("x", microbatch=m, leaf=place), aval) for place, aval in x]
        ins = [*self._x.pop((i, m)), *self._extra(unit, i, m)]
        task, y, residuals = self.task("forward", shaped, ins, partial(self._param, i), ())
        unit.tasks.append(task)
        aux = enumerate(task.outs[len(task.outs) - len(shaped.aux) :])
        self.results |= {Name("aux", i, m, n): register for n, register in aux if register is not None}
        self._residuals[i, m] = residuals
        if i + 1 == len(self._callables):
            self._add_loss(unit, m, y)
        else:
            self._x[i + 1, m] = self._send(unit, y, self._rank_of[i + 1])

    def _extra(self, unit: Unit, i: int, m: int) -> list[int]:
        registers: list[int] = []
        scalar = jax.ShapeDtypeStruct((), np.int32)
        for place, aval in enumerate(self._callables[i].extra.avals):
            if place in self._callables[i].keys:
                key = self.register(aval)
                step = self._given(Name("step", rank=unit.rank), scalar)
                microbatch = self._given(Name("microbatch", microbatch=m, rank=unit.rank), scalar)
                root = self._given(Name("keys", callable=i, leaf=place), aval)
                unit.tasks.append(Task("key", i, (root, step, microbatch), (key,)))
                registers.append(key)
            else:
                registers.append(self._given(Name("extra", i, m, place), aval))
        return registers

    def _add_loss(self, unit: Unit, m: int, y: list[int]) -> None:
        last = len(self._callables) - 1
        loss = self.loss
        avals = enumerate(loss.args.avals)
        args = [self._given(Name("loss_args", microbatch=m, leaf=place), aval) for place, aval in avals]
        dy = self.new(loss.y.avals)
        value = self.results[Name("loss", microbatch=m)] = self.register(loss.aval)
        places = range(len(loss.params))
        read = tuple(self._param(last + 1, place) for place in places)
        grads = self._grads(last + 1, places)
        unit.tasks.append(Task("loss", last, (*y, *args), (value, *dy), read, grads, fn=loss.differentiated))
        self._dy[last, m] = dy
        if self._outputs == "keep":
            self.results |= {Name("y", microbatch=m, leaf=n): register for n, register in enumerate(y)}

    def _backward(self, unit: Unit, kind: Kind, i: int, m: int) -> None:
        shaped = self._callables[i]
        if kind == "wgrad":
            ins = [*self._residuals.pop((i, m))[shaped.num_dgrad :], *self._stash.pop((i, m))]
            if not shaped.late:
                return
        else:
            ins = [*self._residuals[i, m], *self._dy.pop((i, m))]
        task, dx, left = self.task(kind, shaped, ins, partial(self._param, i), self._grads(i, shaped.grads[kind]))
        unit.tasks.append(task)
        if kind == "dgrad":
            self._stash[i, m] = left
        if i and dx:
            self._dy[i - 1, m] = self._send(unit, dx, self._rank_of[i - 1])

    def _grads(self, i: int, places: Sequence[int]) -> tuple[Grad, ...]:
        grads: list[Grad] = []
        for place in places:
            name = Name("sum", callable=i, leaf=place)
            how: How = "add" if name in self.results else "start"
            if how == "start":
                self.results[name] = self.register(jax.ShapeDtypeStruct(self._params[i].avals[place].shape, np.float32))
                if place in self._aliased[i]:
                    self.standing[self.results[name]] = self._callables[min(i, len(self._callables) - 1)].device
            grads.append((place, self.results[name], how))
        return tuple(grads)

    def _send(self, unit: Unit, registers: list[int], rank: int) -> list[int]:
        if self.devices[rank] == self.devices[unit.rank]:
            return registers
        arrived = self.new(self.avals[r] for r in registers)
        unit.sends += [(a, b, self.devices[rank]) for a, b in zip(registers, arrived, strict=True)]
        return arrived


def segments_of(units: Sequence[Unit], join: Join) -> list[list[Unit]]:
    """Groups units into segments, one per executable, by first tick. `join` nothing makes one segment per unit."""
    # Consecutive actions of a rank are joined if no transfer is needed between them: in the ticks of the schedule, other ranks
    # compute the inputs before the first action starts, and read the results after the last action ends. Every segment
    # therefore depends only on segments that start earlier, so playing segments in the order of their first ticks cannot
    # deadlock.
    done: list[list[Unit]] = []
    open_: dict[int, list[Unit]] = {}
    for unit in units:
        segment = open_.get(unit.rank, [])
        if (
            join == "segments"
            and segment
            and unit.needed_at < segment[0].tick
            and all(other.used_at > unit.tick for other in segment)
            and sum(len(other.tasks) for other in segment) < _MOST_JOINED
        ):
            segment.append(unit)
        else:
            open_[unit.rank] = [unit]
            done.append(open_[unit.rank])
    return sorted(done, key=lambda segment: segment[0].tick)
