"""All graphed callables together: playing an order, placing parameters, freeing everything."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CallableError, OrderError, OwnershipError, check_choice
from jgraph.graphed.arguments import check_wgrads, each
from jgraph.graphed.borrowed import arrays_of, handles_in
from jgraph.graphed.callable import Graphed
from jgraph.graphed.dataflow import Join, Outputs
from jgraph.graphed.entry import check_concrete, differences
from jgraph.graphed.plan import ExecutionPlan, make_plan, play
from jgraph.graphed.pool import Pool
from jgraph.graphed.shaped import Side, shape_of
from jgraph.schedule.schedule import Schedule
from jgraph.xla import CaptureReport

Tree = Any

# Orders that `run` keeps compiled; a training has one or two.
_MOST_PLANS = 8


@dataclass(frozen=True)
class Run:
    """What a played order gives.

    Attributes:
        losses: of each microbatch, scalars on the last device.
        grads: of each callable, as params: float32 sums over the microbatches, owned arrays or `Borrowed`; None for integers.
        outputs: of each microbatch, of the last callable; None where they were dropped.
    """

    losses: tuple[jax.Array, ...]
    grads: tuple[Tree, ...]
    outputs: tuple[Tree, ...] | None


class GraphedCallables(Sequence[Graphed]):
    """Graphed callables in the order of the data. Made by `make_graphed_callables`."""

    def __init__(
        self,
        graphed: tuple[Graphed, ...],
        params: Sequence[Tree] | None,
        schedule: Schedule | None,
        *,
        parse: Callable[[Any], tuple[Schedule | None, Any]],
        homes: Callable[[Schedule], list[Any]],
        reuse: bool,
        pools: dict[str, Pool] | None,
        options: Mapping[str, Any],
    ):
        self._graphed, self._params, self._schedule = graphed, params, schedule
        self._parse, self._homes, self._reuse, self._pools, self._options = parse, homes, reuse, pools, dict(options)
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
        """What `run` plays by default."""
        return self._schedule

    @property
    def pools(self) -> Mapping[str, Pool]:
        """Of single calls with `reuse_buffers`, by name; empty without."""
        return self._pools or {}

    def reports(self) -> list[tuple[str, CaptureReport | None]]:
        """Name of each executable, and what of it is captured; None where there are no command buffers."""
        programs = [part.program for graphed in self._graphed for part in graphed.entry.parts.values()]
        programs += [instruction.program for plan in self._plans.values() for instruction in plan.instructions]
        return [(program.name, program.report) for program in programs]

    def place(self, params: Sequence[Tree]) -> tuple[Tree, ...]:
        """Params of all callables, each on the device of its callable."""
        given = each("params", params, len(self))
        return tuple(
            jax.tree.map(lambda leaf, g=g: _put(g.entry.shaped.device, leaf), tree)
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
        """Forgets the microbatches that wait, of every callable, and frees their buffers."""
        for graphed in self._graphed:
            graphed.drop()

    def reset(self) -> None:
        """Resets every callable and forgets the orders that were compiled."""
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
    ) -> Run:
        """Plays an order: every forward and backward of all microbatches, transfers between devices included.

        The first call with an order and a loss function compiles; give the same function again, not a new lambda.

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
            join: `segments` makes one executable of consecutive actions of a rank that have no transfer between them;
                `nothing` one of each action.

        Returns:
            Run. Gradients in main_grad start from zero at every run.

        Raises:
            OrderError: the order cannot run or does not fit.
            CallableError: an argument is not as it was built, every difference is listed; microbatches of single calls wait for
                their backward; another thread is in a call.
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
            return self._run(order, inputs, loss_fn, params, extra, loss_args, key, step, outputs, join)

    def _turns(self) -> ExitStack:
        """Every callable's turn, for this thread."""
        with ExitStack() as stack:
            for turn in {id(graphed.turn): graphed.turn for graphed in self._graphed}.values():
                stack.enter_context(turn)
            return stack.pop_all()

    def _run(
        self,
        order: Any,
        inputs: Sequence[Tree],
        loss_fn: Callable[..., jax.Array],
        params: Sequence[Tree] | None,
        extra: Sequence[tuple[Tree, ...]] | None,
        loss_args: Sequence[tuple[Tree, ...]] | None,
        key: jax.Array | None,
        step: int,
        outputs: Outputs,
        join: Join,
    ) -> Run:
        for graphed in self._graphed:
            graphed.check_idle()
        schedule = self._schedule if order is None else self._parse(order)[0]
        if schedule is None:
            wrong = "`order` is None, and no order was given when the callables were built: give one, e.g. [1, -1]"
            raise OrderError(wrong, field="order")
        count = schedule.num_microbatches
        inputs = _per_microbatch("inputs", inputs, count)
        more = _tuples("extra", extra, count)
        rest = _tuples("loss_args", loss_args, count)
        if params is None:
            if self._params is None:
                wrong = "`params` is None, but run was given params before and keeps none since: give them at every run"
                raise CallableError(wrong, field="params")
            params = self._params
        else:
            self._params = None
        self._check_extra(extra, key)
        plan = self._plan(schedule, loss_fn, rest[0], outputs, join, "given" if key is None else "folded")
        registers: list[Any] = [None] * plan.size
        try:
            self._fill_params(plan, registers, params)
            self._fill_inputs(plan, registers, inputs, more, rest)
            if key is not None:
                self._fill_keys(plan, registers, key, step)
        except jax.errors.ConcretizationTypeError:
            check_concrete("run", (params, inputs, more, rest, key))
            raise
        return self._play(plan, registers)

    def _plan(
        self,
        schedule: Schedule,
        loss_fn: Callable[..., jax.Array],
        loss_args: tuple[Tree, ...],
        outputs: Outputs,
        join: Join,
        keyed: Any,
    ) -> ExecutionPlan:
        shapes = jax.tree.map(shape_of, tuple(loss_args))
        leaves, tree = jax.tree.flatten(shapes)
        ticks = tuple(row.tobytes() for row in schedule.ticks)
        avals = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        name = (schedule.orders, schedule.placement, ticks, loss_fn, tree, avals, outputs, join, keyed)
        if name not in self._plans:
            shaped = [graphed.entry.shaped for graphed in self._graphed]
            devices = self._homes(schedule)
            if devices != [part.device for part in shaped]:
                raise OrderError("the order puts callables on other devices than those they were built for; build them for it")
            check_wgrads(schedule, shaped)
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[name] = make_plan(
                shaped,
                schedule,
                aliased=[graphed.gradients.places for graphed in self._graphed],
                reuse=self._reuse,
                join=join,
                outputs=outputs,
                keyed=keyed,
                loss_fn=loss_fn,
                loss_args=shapes,
                options=self._options,
            )
        return self._plans[name]

    def _check_extra(self, extra: Sequence[Any] | None, key: jax.Array | None) -> None:
        """That what callables take besides params and x can be given."""
        takes_any = False
        for i, graphed in enumerate(self._graphed):
            part = graphed.entry.shaped
            takes_any |= bool(part.extra.shapes()[0])
            for place in range(len(part.positional), len(part.extra)):
                name = part.extra.paths[place].removeprefix("1/")
                if place not in part.keys:
                    raise CallableError(
                        f"callable {i} takes the keyword argument {name}, which is no random key: run gives keys only; take it "
                        f"as an argument after x"
                    )
                if key is None:
                    raise CallableError(f"callable {i} takes the keyword argument {name}: give run a `key`", field="key")
                if not isinstance(key, jax.Array) or shape_of(key) != part.extra.avals[place]:
                    wrong = f"`key` is {key!r}: must be one random key like the sample's, {part.extra.avals[place].dtype}"
                    raise CallableError(wrong, field="key")
        if extra is not None and not takes_any:
            raise CallableError("`extra` is given, but no callable takes arguments after x: leave it out", field="extra")

    def _fill_params(self, plan: ExecutionPlan, registers: list[Any], params: Sequence[Tree]) -> None:
        for i, (tree, graphed) in enumerate(zip(each("params", params, len(self)), self._graphed, strict=True)):
            part = graphed.entry.shaped
            leaves = _leaves(part.params, tree, f"params[{i}]", part.device)
            for register, leaf, path in zip(plan.params[i], leaves, part.params.paths, strict=True):
                if isinstance(leaf, jax.Array) and leaf.devices() == {part.device}:
                    registers[register] = leaf
                    continue
                where = ", ".join(sorted(map(str, leaf.devices()))) if isinstance(leaf, jax.Array) else "the host"
                text = f"params[{i}]/{path} is on {where}, used on {part.device}"
                raise CallableError(f"{text}; give run graphed.place(params)", mismatches=(text,))

    def _fill_inputs(
        self, plan: ExecutionPlan, registers: list[Any], inputs: Sequence[Tree], extra: Sequence[Any], loss_args: Sequence[Any]
    ) -> None:
        first, last = self._graphed[0].entry.shaped, self._graphed[-1].entry.shaped
        for m, (x, rest) in enumerate(zip(inputs, loss_args, strict=True)):
            for register, leaf in zip(plan.inputs[m], _leaves(first.x, x, f"inputs[{m}]"), strict=True):
                registers[register] = _on(first.device, leaf)
            for register, leaf in zip(plan.loss_args[m], _leaves(plan.loss_side, tuple(rest), f"loss_args[{m}]"), strict=True):
                registers[register] = _on(last.device, leaf)
        sent: dict[Any, Any] = {}
        for (i, m, place), register in plan.extra.items():
            part = self._graphed[i].entry.shaped
            leaves = _leaves(part.positional, tuple(extra[m]), f"extra[{m}]")
            where = (id(leaves[place]), part.device)
            if where not in sent:
                sent[where] = _on(part.device, leaves[place])
            registers[register] = sent[where]

    def _fill_keys(self, plan: ExecutionPlan, registers: list[Any], key: jax.Array, step: int) -> None:
        for (i, _), register in plan.keys.items():
            registers[register] = _on(self._graphed[i].entry.shaped.device, key)
        for rank, register in enumerate(plan.steps):
            if register >= 0:
                registers[register] = jnp.asarray(step, jnp.int32, device=plan.devices[rank])
        for (rank, m), register in plan.microbatches.items():
            registers[register] = jnp.asarray(m, jnp.int32, device=plan.devices[rank])

    def _play(self, plan: ExecutionPlan, registers: list[Any]) -> Run:
        self._runs += 1
        if plan.starts == "zeros":
            for i, graphed in enumerate(self._graphed):
                graphed.gradients.zero()
                owned = [place for j, place in plan.sums if i == j and (i, place) not in plan.main_grad]
                for place, zeros in zip(owned, graphed.gradients.blank(tuple(owned)), strict=True):
                    registers[plan.sums[i, place]] = zeros
        given = {id(array) for array in registers if array is not None}
        sums = [graphed.gradients.renew() for graphed in self._graphed]
        for (i, place), register in plan.main_grad.items():
            total = sums[i][place]
            if id(total) in given:
                raise OwnershipError(
                    f"run updates main_grad of callable {i} in place and was given that array as an argument; pass a copy",
                    owner=f"main_grad of callable {i}",
                )
            registers[register] = total
        try:
            play(plan, registers)
        finally:
            # What a run that failed left undone is made anew by the next run or zero_grads.
            for i, graphed in enumerate(self._graphed):
                places = {place: registers[r] for (j, place), r in plan.main_grad.items() if i == j}
                if places:
                    graphed.gradients.update(places, f"run {self._runs}")
        grads = []
        for i, graphed in enumerate(self._graphed):
            aliased = set(graphed.gradients.places)
            grads.append(
                graphed.entry.shaped.params.unflatten(
                    [
                        graphed.gradients.handle(place)
                        if place in aliased
                        else registers[plan.sums[i, place]]
                        if (i, place) in plan.sums
                        else None
                        for place in range(len(graphed.entry.shaped.params))
                    ]
                )
            )
        y = self._graphed[-1].entry.shaped.y
        outputs = tuple(y.unflatten([registers[r] for r in group]) for group in plan.outputs) if plan.outputs else None
        return Run(tuple(registers[r] for r in plan.losses), tuple(grads), outputs)


def _per_microbatch(name: str, given: Sequence[Any], count: int) -> list[Any]:
    if not isinstance(given, (tuple, list)):
        raise CallableError(
            f"`{name}` is {type(given).__name__}: must be a list of {count}, one for each microbatch", field=name
        )
    if len(given) != count:
        wrong = f"`{name}` has {len(given)} entries, but the order has {count} microbatches: give one for each"
        raise CallableError(wrong, field=name)
    return list(given)


def _tuples(name: str, given: Sequence[Any] | None, count: int) -> list[tuple[Any, ...]]:
    """Arguments of each microbatch."""
    if given is None:
        return [()] * count
    for m, arguments in enumerate(_per_microbatch(name, given, count)):
        if not isinstance(arguments, (tuple, list)):
            raise CallableError(f"`{name}[{m}]` is {type(arguments).__name__}: must be a tuple of arguments", field=name)
    return [tuple(arguments) for arguments in given]


def _leaves(side: Side, tree: Tree, name: str, device: Any = None) -> list[Any]:
    """The leaves of an argument that is as it was built. Raises CallableError with every difference."""
    if handles_in(tree):
        tree = arrays_of(tree)
    leaves, structure = jax.tree.flatten(tree)
    if structure != side.tree or not all(_fits(leaf, aval) for leaf, aval in zip(leaves, side.avals, strict=True)):
        texts = differences(side, tree, name, device)
        raise CallableError(f"run is given something else than was built: {'; '.join(texts)}", mismatches=tuple(texts))
    return leaves


def _fits(leaf: Any, aval: jax.ShapeDtypeStruct) -> bool:
    if not isinstance(leaf, jax.Array):
        leaf = shape_of(leaf)
    elif leaf.is_deleted():
        return False
    return leaf.shape == aval.shape and leaf.dtype == aval.dtype


def _on(device: Any, leaf: Any) -> jax.Array:
    """The array itself where it is already there."""
    return leaf if isinstance(leaf, jax.Array) and leaf.devices() == {device} else _put(device, leaf)


def _put(device: Any, leaf: Any) -> jax.Array:
    """The array on a device. One of numpy is copied: on a CPU its memory would be shared, and the caller may write to it."""
    return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, device)
