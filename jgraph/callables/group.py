"""All graphed callables together: playing an order, placing parameters, freeing everything."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import jax

from jgraph.callables.arguments import check_wgrads, each
from jgraph.callables.callable import Graphed
from jgraph.callables.dataflow import Join, Outputs
from jgraph.callables.fill import check_extra, filled, put, tuples
from jgraph.callables.match import signature
from jgraph.callables.plan import ExecutionPlan, make_plan, play
from jgraph.callables.shaped import shape_of
from jgraph.errors import CallableError, OrderError, OwnershipError, check_choice
from jgraph.schedule.schedule import Schedule
from jgraph.xla import CaptureReport

Tree = Any

# Orders that `run` keeps compiled; a training has one or two.
_MOST_PLANS = 8


@dataclass(frozen=True)
class RunResult:
    """Losses, gradients and outputs of an order that was played.

    Attributes:
        losses: of each microbatch, scalars on the last device.
        grads: of each callable, as params: float32 sums over the microbatches, your arrays or `Borrowed`; None for integers.
        outputs: of each microbatch, of the last callable; None where they were dropped.
    """

    losses: tuple[jax.Array, ...]
    grads: tuple[Tree, ...]
    outputs: tuple[Tree, ...] | None


class GraphedCallables(Sequence[Graphed]):
    """Graphed callables in the order of the data. `run` plays an order of them. Made by `make_graphed_callables`."""

    def __init__(
        self,
        graphed: tuple[Graphed, ...],
        params: Sequence[Tree] | None,
        schedule: Schedule | None,
        *,
        parse: Callable[[Any], tuple[Schedule | None, Any]],
        homes: Callable[[Schedule], list[Any]],
        reuse_buffers: bool,
        options: Mapping[str, Any],
    ):
        self._graphed, self._params, self._schedule = graphed, params, schedule
        self._parse, self._homes, self._options = parse, homes, dict(options)
        self._reuse_buffers = reuse_buffers
        self._plans: dict[Any, ExecutionPlan] = {}
        self._runs = 0

    def __len__(self) -> int:
        return len(self._graphed)

    def __getitem__(self, index):
        return self._graphed[index]

    def __repr__(self) -> str:
        return f"GraphedCallables({len(self)} callable{'s' * (len(self) > 1)}, {self._schedule or 'no order'})"

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that `run` plays by default."""
        return self._schedule

    def reports(self) -> list[tuple[str, CaptureReport | None]]:
        """Returns the name of each executable and its capture report; None where there are no command buffers."""
        executables = [part for graphed in self._graphed for part in graphed.entry.parts.values()]
        executables += [instruction.executable for plan in self._plans.values() for instruction in plan.instructions]
        return [(executable.io.name, executable.report) for executable in executables]

    def place(self, params: Sequence[Tree]) -> tuple[Tree, ...]:
        """Puts the params of every callable on its device; returns them."""
        given = each("params", params, len(self))
        return tuple(
            jax.tree.map(lambda leaf, g=g: put(g.entry.shaped.device, leaf), tree)
            for tree, g in zip(given, self._graphed, strict=True)
        )

    def zero_grads(self) -> None:
        """Sets every main_grad to zero, in place. Raises CallableError while microbatches wait for their backward."""
        with self._turns():
            for graphed in self._graphed:
                graphed.check_idle()
            for graphed in self._graphed:
                graphed.zero_grads()

    def drop(self) -> None:
        """Forgets the microbatches of every callable that wait, and frees their buffers."""
        for graphed in self._graphed:
            graphed.drop()

    def reset(self) -> None:
        """Frees buffers and executables of every callable and order. Any later use raises CallableError."""
        for graphed in self._graphed:
            graphed.reset()
        self._params = None
        self._plans.clear()

    def run(
        self,
        order: Any,
        inputs: Sequence[Tree],
        loss_fn: Callable[..., jax.Array],
        *,
        params: Sequence[Tree] | None = None,
        extra: Sequence[tuple[Tree, ...]] | None = None,
        loss_args: Sequence[tuple[Tree, ...]] | None = None,
        key: jax.Array | None = None,
        step: int = 0,
        outputs: Outputs = "drop",
        join: Join = "segments",
    ) -> RunResult:
        """Plays an order: every forward and backward of all microbatches, transfers between devices included.

        The first call with an order and a loss function compiles. Give the same function at every call: a new lambda compiles.

        Args:
            order: as in `make_graphed_callables`; None for the one given there.
            inputs: x of each microbatch, for the first callable; never donated.
            loss_fn: `loss_fn(y, *loss_args) -> scalar` of the last callable's y. Gradients are those of the sum over the
                microbatches.
            params: of each callable, where it runs (`place`); never donated. None takes those given when it was built, which
                are held until `run` is given others.
            extra: of each microbatch, the arguments after x, given to every callable that has any.
            loss_args: of each microbatch, arguments of `loss_fn` after y.
            key: folded by `step`, callable and microbatch into every keyword argument that is a random key.
            step: number of the training step.
            outputs: whether to `keep` the last callable's y.
            join: `segments` makes one executable of consecutive actions of a rank that have no transfer between them: fewer
                launches. `nothing` makes one of each action.

        Returns:
            RunResult. Gradients in main_grad start from zero at every run.

        Raises:
            OrderError: the order cannot run or does not fit.
            ConfigError: `outputs` or `join` is not one of its choices.
            CallableError: an argument is not as it was built (the message lists every difference); microbatches of single
                calls wait for their backward; another thread is in a call.
            OwnershipError: an argument is an array of main_grad.
        """
        check_choice("outputs", outputs, get_args(Outputs))
        check_choice("join", join, get_args(Join))
        if not callable(loss_fn):
            wrong = f"`loss_fn` is {type(loss_fn).__name__}: must be a function of the last y and loss_args"
            raise CallableError(wrong, field="loss_fn")
        if not isinstance(step, int) or not 0 <= step < 2**31:
            raise CallableError(f"`step` is {step!r}: must be a whole number from 0 to {2**31 - 1}", field="step")
        with self._turns():
            for graphed in self._graphed:
                graphed.check_idle()
            schedule = self._schedule if order is None else self._parse(order)[0]
            if schedule is None:
                wrong = "`order` is None, and no order was given when the callables were built: give one, e.g. [1, -1]"
                raise OrderError(wrong, field="order")
            count = schedule.num_microbatches
            inputs = each("inputs", inputs, count, of="microbatches")
            rest, more = tuples("loss_args", loss_args, count), tuples("extra", extra, count)
            if params is not None:
                self._params = None
            elif (params := self._params) is None:
                wrong = "`params` is None, but run was given params before and keeps none since: give them at every run"
                raise CallableError(wrong, field="params")
            shaped = [graphed.entry.shaped for graphed in self._graphed]
            check_extra(shaped, extra, key)
            keyed = "given" if key is None else "folded"
            plan = self._plan(schedule, loss_fn, rest[0], outputs=outputs, join=join, keyed=keyed)
            given = {"params": params, "inputs": inputs, "extra": more, "loss_args": rest}
            return self._play(plan, filled(plan.flow, shaped, **given, key=key, step=step))

    def _turns(self) -> ExitStack:
        """Takes every callable's turn, for this thread."""
        with ExitStack() as stack:
            for graphed in self._graphed:
                stack.enter_context(graphed.turn)
            return stack.pop_all()

    def _plan(self, schedule: Schedule, loss_fn: Callable[..., Any], loss_args: tuple[Tree, ...], **how: Any) -> ExecutionPlan:
        """Returns the plan for a schedule, a loss and choices as `make_plan` takes them; compiled, if it is new."""
        ticks = tuple(row.tobytes() for row in schedule.ticks)
        name = (schedule.orders, schedule.placement, ticks, loss_fn, signature(loss_args), *how.values())
        if name not in self._plans:
            shaped = [graphed.entry.shaped for graphed in self._graphed]
            if self._homes(schedule) != [one.device for one in shaped]:
                raise OrderError("the order puts callables on other devices than those they were built for; build them for it")
            check_wgrads(schedule, shaped)
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[name] = make_plan(
                shaped,
                schedule,
                aliased=[graphed.gradients.places for graphed in self._graphed],
                reuse=self._reuse_buffers,
                loss_fn=loss_fn,
                loss_args=jax.tree.map(shape_of, loss_args),
                options=self._options,
                **how,
            )
        return self._plans[name]

    def _play(self, plan: ExecutionPlan, registers: list[Any]) -> RunResult:
        self._runs += 1
        aliased, owned = ([{} for _ in self._graphed] for _ in range(2))
        for (i, place), register in plan.flow.sums.items():
            (aliased if place in self._graphed[i].gradients.places else owned)[i][place] = register
        given = {id(array) for array in registers if array is not None}
        for i, graphed in enumerate(self._graphed):
            sums = graphed.gradients.renew()
            if any(id(sums[place]) in given for place in aliased[i]):
                raise OwnershipError(
                    f"run updates main_grad of callable {i} in place and was given that array as an argument; pass a copy",
                    owner=f"main_grad of callable {i}",
                )
            for place, register in aliased[i].items():
                registers[register] = sums[place]
        try:
            play(plan, registers)
        finally:
            # What a run that failed left undone is made anew by the next run or zero_grads.
            for places, graphed in zip(aliased, self._graphed, strict=True):
                if places:
                    graphed.gradients.update({place: registers[r] for place, r in places.items()}, f"run {self._runs}")
        grads = tuple(
            graphed.gradients.tree({place: registers[r] for place, r in places.items()})
            for places, graphed in zip(owned, self._graphed, strict=True)
        )
        y = self._graphed[-1].entry.shaped.y
        outputs = tuple(y.unflatten([registers[r] for r in group]) for group in plan.outputs) if plan.outputs else None
        return RunResult(tuple(registers[r] for _, r in sorted(plan.flow.losses.items())), grads, outputs)
