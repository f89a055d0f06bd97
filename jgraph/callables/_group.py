"""A sequence of graphed callables: plays an order, places parameters, and frees all buffers."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args, overload

import jax
import jax.numpy as jnp

from jgraph.callables import _arguments as arguments
from jgraph.callables._arguments import OrderLike
from jgraph.callables._callable import Graphed
from jgraph.callables._dataflow import Flow, Join, Name, Outputs, PlanLoss, ranks_of
from jgraph.callables.plan import ExecutionPlan, Reports, make_plan, play
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError, OrderError, OwnershipError, check_choice
from jgraph.schedule.schedule import Schedule
from jgraph.types import JaxDevice, Leaf, Params, Tree
from jgraph.xla.options import OptionValue

# Maximum number of compiled plans that `run` keeps. A training run uses one or two.
_MOST_PLANS = 8


@dataclass(frozen=True)
class RunResult:
    """The results of `GraphedCallables.run`.

    Attributes:
        losses: One scalar per microbatch, in the dtype of the loss, on the device of the last callable.
        grads: For each callable, gradients of the sum of the losses, in the structure of its params: float32 sums over the
            microbatches, as new arrays, or as `Borrowed` handles on main_grad, which the next update makes stale; None for
            integers.
        outputs: y of the last callable for each microbatch; None if outputs were dropped.
    """

    losses: tuple[jax.Array, ...]
    grads: tuple[Tree, ...]
    outputs: tuple[Tree, ...] | None


class GraphedCallables(Sequence[Graphed]):
    """A sequence of graphed callables in the order of the data. `run` plays an order. Made by `make_graphed_callables`.

    `[i]` is callable i, a `Graphed` with the methods `evaluate`, `backward`, `dgrad` and `wgrad`.

    Attributes:
        schedule: The schedule that `run` plays by default; None without an order.
    """

    def __init__(
        self,
        graphed: tuple[Graphed, ...],
        params: Sequence[Params] | None,
        schedule: Schedule | None,
        *,
        parse: Callable[[OrderLike], tuple[Schedule | None, tuple[bool, ...]]],
        reuse_buffers: bool,
        options: Mapping[str, OptionValue],
    ):
        self._graphed = graphed
        self._params = params
        self.schedule = schedule
        self._parse = parse
        self._reuse_buffers = reuse_buffers
        self._options = options
        self._shaped = [one.shaped for one in graphed]
        self._plans: dict[Hashable, ExecutionPlan] = {}
        self._runs = 0

    def __len__(self) -> int:
        return len(self._graphed)

    @overload
    def __getitem__(self, index: int) -> Graphed: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Graphed, ...]: ...

    def __getitem__(self, index: int | slice) -> Graphed | tuple[Graphed, ...]:
        return self._graphed[index]

    def __repr__(self) -> str:
        order = "no order" if self.schedule is None else repr(self.schedule)
        return f"GraphedCallables({len(self)} callable{'s' if len(self) > 1 else ''}, {order})"

    def reports(self) -> Reports:
        """Lists the executables of single calls, then those of the orders that `run` has compiled.

        Returns:
            (name, capture report) of each executable. The report describes its command buffers (CUDA graphs); None on platforms
            without them.
        """
        single = [(part.io.name, part.report) for graphed in self._graphed for part in graphed.parts.values()]
        return single + [report for plan in self._plans.values() for report in plan.reports]

    def place(self, params: Sequence[Params]) -> tuple[Params, ...]:
        """Puts the params of every callable on its device.

        Args:
            params: The params of each callable, trees of JAX or NumPy arrays.

        Returns:
            The params on their devices, one tree per callable. JAX arrays that are already there are not copied. NumPy arrays
            are.

        Raises:
            CallableError: If `params` is not a tuple or list with one value per callable.
        """
        given = zip(arguments.each("params", params, len(self)), self._shaped, strict=True)
        return tuple(jax.tree.map(partial(arguments.put, shaped.device), tree) for tree, shaped in given)

    def zero_grads(self) -> None:
        """Sets main_grad of all callables to zero, in place, and makes all handles on it stale.

        Raises:
            CallableError: If microbatches wait for a backward call, another thread is in a call, or the callables were reset.
        """
        with self._turns():
            for graphed in self._graphed:
                graphed.gradients.zero()

    def drop(self) -> None:
        """Removes the waiting microbatches of all callables and frees their buffers.

        Raises:
            CallableError: If another thread is in a call, or the callables were reset.
        """
        for graphed in self._graphed:
            graphed.drop()

    def reset(self) -> None:
        """Frees the buffers and executables of all callables and orders. Later calls raise CallableError.

        Arrays of the caller stay valid, but handles become stale. The params are no longer referenced.

        Raises:
            CallableError: If another thread is in a call.
        """
        for graphed in self._graphed:
            graphed.reset()
        self._params = None
        self._plans.clear()

    def run(
        self,
        order: OrderLike | None,
        inputs: Sequence[Tree],
        loss_fn: Callable[..., jax.Array],
        *,
        params: Sequence[Params] | None = None,
        extra: Sequence[Sequence[Tree]] | None = None,
        loss_args: Sequence[Sequence[Tree]] | None = None,
        key: jax.Array | None = None,
        step: int = 0,
        outputs: Outputs = "drop",
        join: Join = "segments",
    ) -> RunResult:
        """Plays an order: forward and backward of all microbatches, with transfers between devices.

        The first call with an order, a loss function, shapes of `loss_args`, `outputs` and `join` compiles. The eight latest
        results of compilation are kept. Pass the same function in every call, because a new lambda compiles again. Gradients in
        main_grad start from zero in every run, and handles on them from earlier calls become stale.

        Args:
            order: Signed numbers of one rank (`c` is the forward, `-c` the dgrad or full backward and `-c-0.5` the wgrad of
                chunk c, from 1), an Order, a Schedule, or one order per rank; None for the order given to
                `make_graphed_callables`.
            inputs: x of the first callable for each microbatch; never donated.
            loss_fn: `loss_fn(y, *loss_args) -> scalar`, where y is the output of the last callable. Gradients are gradients of
                the sum of the losses over microbatches. Traced when an order is compiled.
            params: The params of each callable, on its device (see `place`); never donated. None uses the params of
                `make_graphed_callables`, which are stored until `run` gets different ones.
            extra: For each microbatch, a tuple of the arguments after x, passed to every callable that takes any; None if no
                callable does.
            loss_args: For each microbatch, a tuple of the arguments of `loss_fn` after y; None for no arguments.
            key: A random key; None if no callable takes one. `fold_key` derives each keyword argument that is a key from it,
                with `step`, the number of the microbatch and the index of the callable.
            step: Number of the training step, from 0 to 2**31 - 1. Only used to derive keys.
            outputs: `keep` returns y of the last callable, `drop` does not.
            join: `segments` compiles consecutive actions of a rank without a transfer between them into one executable, which
                needs fewer launches. `nothing` compiles each action separately.

        Returns:
            Losses, gradients and outputs. On GPUs, returns before the devices finish.

        Raises:
            OrderError: If the order cannot run, does not fit `delay_wgrad` or the devices of the callables, has a wgrad of a
                callable without a delayed gradient, or is None although none was given to `make_graphed_callables`.
            ConfigError: If `outputs` or `join` is unknown.
            CallableError: If an argument differs from the sample (the message lists every difference), params are on another
                device, `params` is None after a run with other params, the order is for another number of callables, the result
                of `loss_fn` is not one floating scalar, `step` is out of range, a key is missing, the call is inside a JAX
                transformation, microbatches of single calls wait for a backward call, another thread is in a call, or the
                callables were reset.
            OwnershipError: If an argument is an array of main_grad or a handle on one.
        """
        check_choice("outputs", outputs, get_args(Outputs))
        check_choice("join", join, get_args(Join))
        wrong = f"`loss_fn` is {type(loss_fn).__name__}: must be a function loss_fn(y, *loss_args)"
        arguments.check_argument(callable(loss_fn), "loss_fn", wrong)
        if not isinstance(step, int) or not 0 <= step < 2**31:
            raise CallableError(f"`step` is {step!r}: must be an integer from 0 to {2**31 - 1}", field="step")
        with self._turns():
            schedule = self.schedule if order is None else self._parse(order)[0]
            if schedule is None:
                wrong = "`order` is None, and the callables were built without an order: pass one, e.g. [1, -1]"
                raise OrderError(wrong, field="order")
            count = schedule.num_microbatches
            inputs = arguments.each("inputs", inputs, count, of="microbatches")
            of_loss = arguments.tuples("loss_args", loss_args, count)
            more = arguments.tuples("extra", extra, count)
            if params is not None:
                self._params = None
            elif (params := self._params) is None:
                wrong = "`params` is None, but an earlier run got params, so none are stored: pass them to every run"
                raise CallableError(wrong, field="params")
            arguments.check_extra(self._shaped, extra, key)
            plan = self._plan(schedule, loss_fn, of_loss[0], outputs=outputs, join=join)
            try:
                given = {"params": params, "inputs": inputs, "extra": more, "loss_args": of_loss}
                registers = plan.fill(self._give(plan.flow, given, key, step))
            except jax.errors.ConcretizationTypeError:
                arguments.check_concrete("run", (params, inputs, extra, loss_args, key))
                raise
            return self._play(plan, registers)

    def _turns(self) -> ExitStack:
        """Locks all callables for this thread. Raises CallableError if microbatches wait for a backward call."""
        with ExitStack() as stack:
            for graphed in self._graphed:
                stack.enter_context(graphed.waiting)
            for graphed in self._graphed:
                graphed.check_idle()
            return stack.pop_all()

    def _plan(
        self,
        schedule: Schedule,
        loss_fn: Callable[..., jax.Array],
        loss_args: tuple[Tree, ...],
        *,
        outputs: Outputs,
        join: Join,
    ) -> ExecutionPlan:
        """Returns the plan for a schedule, a loss and options. Compiles it on the first call."""
        ticks = tuple(row.tobytes() for row in schedule.ticks)
        name = (schedule.orders, schedule.placement, ticks, loss_fn, arguments.signature(loss_args), outputs, join)
        if name not in self._plans:
            shaped = self._shaped
            if len({*zip(ranks_of(schedule), (one.device for one in shaped), strict=True)}) > schedule.num_ranks:
                raise OrderError("the order needs callables on different devices than they were built for; build them for it")
            arguments.check_wgrads(schedule, shaped)
            if len(self._plans) >= _MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[name] = make_plan(
                shaped,
                schedule,
                PlanLoss.trace(lambda _, y, *args: loss_fn(y, *args), shaped[-1].y, jax.tree.map(shape_of, loss_args)),
                aliased=[graphed.gradients.places for graphed in self._graphed],
                reuse=self._reuse_buffers,
                options=self._options,
                join=join,
                outputs=outputs,
            )
        return self._plans[name]

    def _play(self, plan: ExecutionPlan, registers: list[Any]) -> RunResult:
        """Plays a plan on filled registers, with main_grad in its standing registers."""
        self._runs += 1
        given = {id(array) for array in registers if array is not None}
        for i, graphed in enumerate(self._graphed):
            for place, array in graphed.gradients.renew().items():
                if id(array) in given:
                    wrong = f"run updates main_grad of callable {i} in place and was given that array as an argument"
                    raise OwnershipError(f"{wrong}; pass a copy", owner=f"main_grad of callable {i}")
                registers[plan.sums[i][place]] = array
        try:
            play(plan, registers)
        finally:
            # After a failed run, the next run or zero_grads allocates the sums that were donated.
            sums = [{p: registers[plan.sums[i][p]] for p in one.grads["backward"]} for i, one in enumerate(self._shaped)]
            for graphed, arrays in zip(self._graphed, sums, strict=True):
                if graphed.gradients.places:
                    graphed.gradients.update([(p, arrays.pop(p)) for p in graphed.gradients.places], f"run {self._runs}")
        grads = tuple(graphed.gradients.tree(owned) for graphed, owned in zip(self._graphed, sums, strict=True))
        losses = tuple([registers[r] for r in plan.losses])
        y = self._shaped[-1].y
        kept = [registers[r] for r in plan.outputs]
        outputs = tuple(y.unflatten(kept[start : start + len(y)]) for start in range(0, len(kept), max(len(y), 1)))
        return RunResult(losses, grads, outputs or None)

    def _give(
        self, flow: Flow, given: Mapping[str, Sequence[Tree]], key: jax.Array | None, step: int
    ) -> dict[str, Callable[[Name], jax.Array]]:
        """Returns the functions for `ExecutionPlan.fill`. Raises CallableError with every difference from the sample."""
        callables = self._shaped
        first, last = callables[0], callables[-1]
        sent: dict[tuple[int, JaxDevice], jax.Array] = {}

        def on(device: JaxDevice, leaf: Leaf) -> jax.Array:
            """Returns the array on a device. Sends an array only once, even if several registers share it."""
            if isinstance(leaf, jax.Array) and leaf.devices() == {device}:
                return leaf
            if (id(leaf), device) not in sent:
                sent[id(leaf), device] = arguments.put(device, leaf)
            return sent[id(leaf), device]

        def root(name: Name) -> jax.Array:
            assert key is not None, "checked by `check_extra`"
            return on(callables[name.callable].device, key)

        def leaves(side: Side, name: str) -> list[list[Leaf]]:
            return [arguments.matching_leaves(side, tree, f"{name}[{m}]") for m, tree in enumerate(given[name])]

        params = arguments.each("params", given["params"], len(self))
        weights = [_params(i, *pair) for i, pair in enumerate(zip(callables, params, strict=True))]
        x = leaves(first.x, "inputs")
        of_loss = leaves(flow.loss.args, "loss_args")
        takers = {name.callable for name in flow.named if name.kind == "extra"}
        more = {i: leaves(callables[i].positional, "extra") for i in takers}
        return {
            "params": lambda name: weights[name.callable][name.leaf],
            "x": lambda name: on(first.device, x[name.microbatch][name.leaf]),
            "loss_args": lambda name: on(last.device, of_loss[name.microbatch][name.leaf]),
            "extra": lambda name: on(callables[name.callable].device, more[name.callable][name.microbatch][name.leaf]),
            "keys": root,
            "step": lambda name: jnp.asarray(step, jnp.int32, device=flow.devices[name.rank]),
            "microbatch": lambda name: jnp.asarray(name.microbatch, jnp.int32, device=flow.devices[name.rank]),
        }


def _params(i: int, shaped: Shaped, tree: Params) -> list[jax.Array]:
    """Returns the leaves of the params of callable `i`. Raises CallableError if one is not on its device."""
    leaves = arguments.matching_leaves(shaped.params, tree, f"params[{i}]", shaped.device)
    arrays = []
    for leaf, path in zip(leaves, shaped.params.paths, strict=True):
        if not isinstance(leaf, jax.Array) or leaf.devices() != {shaped.device}:
            text = f"params[{i}]/{path} is on {arguments.devices_of(leaf)}, used on {shaped.device}"
            raise CallableError(f"{text}; pass graphed.place(params) to run", mismatches=(text,), field="params")
        arrays.append(leaf)
    return arrays
