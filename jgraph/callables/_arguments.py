"""Checks the arguments of `make_graphed_callables`, of calls and of `run`."""

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jgraph.callables._borrowed import check_no_handles
from jgraph.callables._dataflow import layers_of, ranks_of
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError, OrderError
from jgraph.schedule.action import FORWARD, WGRAD
from jgraph.schedule.order import Order, one_each
from jgraph.schedule.schedule import Schedule
from jgraph.tree import PyTree


def check_argument(condition: bool, field: str, message: str) -> None:
    """Raises CallableError for an argument unless a condition holds."""
    if not condition:
        raise CallableError(message, field=field)


def each(name: str, given: Any, count: int, *, of: str = "callables") -> tuple[Any, ...]:
    """Returns a tuple of one value per callable or microbatch. None stands for a tuple of None."""
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)) or len(given) != count:
        number = len(given) if isinstance(given, (tuple, list)) else f"one {type(given).__name__}"
        raise CallableError(f"`{name}`: {number} given for {count} {of}; give a tuple with one for each", field=name)
    return tuple(given)


def tuples(name: str, given: Sequence[Any] | None, count: int) -> list[tuple[Any, ...]]:
    """Returns the arguments of each microbatch; None stands for no arguments."""
    for m, arguments in enumerate(given := each(name, [()] * count if given is None else given, count, of="microbatches")):
        if not isinstance(arguments, (tuple, list)):
            raise CallableError(f"`{name}[{m}]` is {type(arguments).__name__}: must be a tuple of arguments", field=name)
    return [tuple(arguments) for arguments in given]


def sample_of(i: int, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the sample arguments of callable `i`. Raises CallableError if they are not a tuple and a dict."""
    kwargs = {} if kwargs is None else kwargs
    wrong = f"`sample_args` of callable {i} is {type(args).__name__}: must be a tuple (x, *extra)"
    check_argument(isinstance(args, (tuple, list)) and len(args) > 0, "sample_args", wrong)
    if not isinstance(kwargs, Mapping):
        raise CallableError(f"`sample_kwargs` of callable {i} is {kwargs!r}: must be a dict", field="sample_kwargs")
    return tuple(args), dict(kwargs)


def schedule_of(
    order: Any, layers: int | Sequence[int] | None, delay_wgrad: bool | Sequence[bool], count: int
) -> tuple[Schedule | None, tuple[bool, ...]]:
    """Parses an order.

    Args:
        order: As in `make_graphed_callables`.
        layers: Callables per chunk.
        delay_wgrad: One flag, or one per stage.
        count: Number of callables.

    Returns:
        The schedule, and for each callable whether its wgrad is delayed.

    Raises:
        OrderError: The order cannot run, or contradicts `delay_wgrad`.
        CallableError: The order is for another number of callables.
    """
    if order is None:
        return None, one_each("delay_wgrad", delay_wgrad, count, bool, of="stage")
    if isinstance(order, Schedule):
        schedule = order
    else:
        is_one = isinstance(order, Order) or not isinstance(order, Sequence) or not order or isinstance(order[0], Number)
        rows: Any = (order,) if is_one else order
        schedule = Schedule(tuple(row if isinstance(row, Order) else Order.parse(row, layers) for row in rows))
    wanted = one_each("delay_wgrad", delay_wgrad, schedule.num_stages, bool, of="stage")
    for rank, (row, stages) in enumerate(zip(schedule.orders, schedule.placement, strict=True)):
        try:
            row.check_delayed([wanted[stage] for stage in stages])
        except OrderError as error:
            error.rank = rank if schedule.num_ranks > 1 else None
            raise
    flags = tuple(np.repeat(wanted, schedule.num_layers).tolist())
    if len(flags) != count:
        raise CallableError(
            f"the order has {len(flags)} callables (num_layers_per_chunk of each of {schedule.num_stages} chunks), but "
            f"{count} are given; give one for each layer of each chunk"
        )
    return schedule, flags


def check_wgrads(schedule: Schedule, callables: Sequence[Shaped]) -> None:
    """Raises OrderError for wgrads of a chunk without a layer that has a gradient to delay."""
    for rank, chunk, places in _chunks(schedule):
        row = schedule.orders[rank]
        if row.delay_wgrad[chunk] and not any(callables[i].late for i in places):
            position = int(np.flatnonzero((row.kinds == WGRAD) & (row.chunks == chunk))[0])
            flags = [bool(late and c != chunk) for c, late in enumerate(row.delay_wgrad)]
            raise OrderError(
                f"entry {position} is {-chunk - 1.5:g}, a wgrad of chunk {chunk + 1}, but callable {places[0]} has nothing to "
                f"delay: no matmul with a parameter of its own; leave the {-chunk - 1.5:g} out and pass "
                f"delay_wgrad={flags}, by chunk",
                position=position,
                rank=rank if schedule.num_ranks > 1 else None,
            )


def most_waiting(schedule: Schedule | None, count: int) -> list[int]:
    """Returns for each callable how many microbatches wait for their backward at once; 1 without an order."""
    most = [1] * count
    for rank, chunk, places in _chunks(schedule) if schedule is not None else ():
        assert schedule is not None
        row = schedule.orders[rank]
        steps = np.where(row.kinds == FORWARD, 1, np.where(row.kinds == WGRAD, 0, -1)) * (row.chunks == chunk)
        for i in places:
            most[i] = int(np.cumsum(steps).max())
    return most


def _chunks(schedule: Schedule) -> list[tuple[int, int, range]]:
    """Returns every (rank, chunk, indices of its callables)."""
    layers = layers_of(schedule)
    return [
        (rank, chunk, layers[stage]) for rank, stages in enumerate(schedule.placement) for chunk, stage in enumerate(stages)
    ]


def homes(schedule: Schedule | None, devices: Sequence[Any] | None, params: Sequence[Any]) -> list[Any]:
    """Returns the device of each callable.

    Args:
        schedule: The order of each rank; None for one rank.
        devices: One per rank, or one for all. None takes the device of the params.
        params: The parameters of each callable.

    Raises:
        CallableError: The params are on several devices, or `devices` does not have one device per rank.
    """
    if devices is None:
        held = {d for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and leaf.committed for d in leaf.devices()}
        wrong = f"`params` are on {len(held)} devices: pass one device per rank as `devices`, and params on their device"
        check_argument(len(held) < 2, "devices", f"{wrong}; graphed callables take no sharded parameter")
        with jax.ensure_compile_time_eval():  # also inside a jax transformation
            devices = list(held or jnp.zeros(()).devices())
    is_list = isinstance(devices, (tuple, list)) and all(hasattr(device, "platform") for device in devices)
    wrong = f"`devices` is {devices!r}: must be a list of jax devices, one for each rank, or one for all"
    check_argument(is_list, "devices", wrong)
    num_ranks = 1 if schedule is None else schedule.num_ranks
    ranks = [0] * len(params) if schedule is None else ranks_of(schedule)
    wrong = f"`devices` has {len(devices)} for {num_ranks} ranks: give one for each rank, or one for all"
    check_argument(len(devices) in (1, num_ranks), "devices", wrong)
    return [devices[rank % len(devices)] for rank in ranks]


def check_extra(callables: Sequence[Shaped], extra: Sequence[Any] | None, key: jax.Array | None) -> None:
    """Raises CallableError if `run` cannot give a callable its arguments besides params and x."""
    for i, shaped in enumerate(callables):
        for place in range(len(shaped.positional), len(shaped.extra)):
            name, aval = shaped.extra.paths[place].removeprefix("1/"), shaped.extra.avals[place]
            takes = f"callable {i} takes the keyword argument {name}"
            if place not in shaped.keys:
                raise CallableError(f"{takes}, which is no random key: run gives keys only; take it as an argument after x")
            check_argument(key is not None, "key", f"{takes}: give run a `key`")
            if not isinstance(key, jax.Array) or shape_of(key) != aval:  # repr(key) waits for the device
                wrong = f"`key` is {key!r}: must be one random key like the sample's, {aval.dtype}"
                raise CallableError(wrong, field="key")
    takes_any = extra is None or any(shaped.extra.shapes()[0] for shaped in callables)
    check_argument(takes_any, "extra", "`extra` is given, but no callable takes arguments after x: leave it out")


def call_differences(shaped: Shaped, params: PyTree, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[str]:
    """Returns every difference between the arguments of a call and the sample."""
    device, num_extra = shaped.device, len(shaped.extra.shapes()[0])
    texts = differences(shaped.params, params, "params", device) + differences(shaped.x, args[0], "x", device)
    if len(args) - 1 != num_extra:
        return [*texts, f"{len(args) - 1} arguments after x, built for {num_extra}"]
    return texts + differences(shaped.extra, (tuple(args[1:]), dict(kwargs)), "extra", device)


def mismatch(shaped: Shaped, texts: Sequence[str]) -> CallableError:
    """Returns the error for a call with other shapes."""
    return CallableError(
        f"callable {shaped.index} is called with something else than it was built for: {'; '.join(texts)}; "
        f"pass the shapes of the sample, or build another callable",
        mismatches=tuple(texts),
    )


def check_concrete(name: str, tree: Any) -> None:
    """Raises CallableError for tracers: the call is inside a jax transformation."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise CallableError(
            f"{name} is called inside of jax.jit, jax.grad, jax.vmap or another transformation, and is compiled already: call "
            f"it outside, its gradients come from backward; inside, call the function that it was made of"
        )


def differences(side: Side, given: Any, name: str, device: Any) -> list[str]:
    """Returns every difference between an argument and the sample: paths, shapes, dtypes, devices."""
    here = Side.of(given)
    leaves = dict(zip(here.paths, jax.tree.leaves(given), strict=True))
    wanted, found = dict(zip(side.paths, side.avals, strict=True)), dict(zip(here.paths, here.avals, strict=True))
    texts = []
    for path in dict.fromkeys((*wanted, *found)):
        where = f"{name}{path and '/' + path}"
        if path not in found or path not in wanted:
            texts.append(f"{where} is {'missing' if path in wanted else 'not known'}")
            continue
        leaf = leaves[path]
        if found[path] != wanted[path]:
            texts.append(f"{where} is {_show(found[path])}, built for {_show(wanted[path])}")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            texts.append(f"{where} was donated or deleted by the caller")
        elif isinstance(leaf, jax.Array) and leaf.devices() != {device} and leaf.committed:
            texts.append(f"{where} is on {devices_of(leaf)}, built for {device}")
    if not texts and here.tree != side.tree:
        texts.append(f"{name} has the structure {here.tree}, built for {side.tree}")
    return texts


def matching_leaves(side: Side, tree: PyTree, name: str, device: Any = None) -> list[Any]:
    """Returns the leaves of an argument of `run`. Raises CallableError with every difference from the sample."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != side.tree:
        check_no_handles(tree)  # a handle is a pytree node, so the structure differs
    if structure != side.tree or not all(_fits(leaf, aval) for leaf, aval in zip(leaves, side.avals, strict=True)):
        texts = differences(side, tree, name, device)
        raise CallableError(f"run is given something else than was built: {'; '.join(texts)}", mismatches=tuple(texts))
    return leaves


def put(device: Any, leaf: Any) -> jax.Array:
    """Puts an array on a device. Copies a NumPy array: a CPU would share its memory, and the caller may write to it."""
    return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, device)


def signature(sample: Any) -> Any:
    """Returns the structure, shapes and dtypes of a tree."""
    leaves, tree = jax.tree.flatten(sample)
    return tree, *((aval.shape, aval.dtype) for aval in map(shape_of, leaves))


def _fits(leaf: Any, aval: jax.ShapeDtypeStruct) -> bool:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return False
    given = leaf if isinstance(leaf, jax.Array) else shape_of(leaf)
    return given.shape == aval.shape and given.dtype == aval.dtype


def devices_of(leaf: Any) -> str:
    """Returns the names of the devices that a leaf is on."""
    return ", ".join(sorted(map(str, leaf.devices()))) if isinstance(leaf, jax.Array) else "the host"


def _show(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
