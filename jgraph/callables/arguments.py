"""What a user gives, checked: choices, one of something for each callable, orders, devices."""

from collections.abc import Sequence
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.callables.shaped import Shaped
from jgraph.errors import CallableError, OrderError
from jgraph.schedule.action import FORWARD, WGRAD
from jgraph.schedule.order import Order, one_each
from jgraph.schedule.schedule import Schedule


def each(name: str, given: Any, count: int, *, of: str = "callables") -> tuple[Any, ...]:
    """Returns the values for each callable, or microbatch, as a tuple; None for each if none are given."""
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)) or len(given) != count:
        number = len(given) if isinstance(given, (tuple, list)) else f"one {type(given).__name__}"
        raise CallableError(f"`{name}`: {number} given for {count} {of}; give a tuple with one for each", field=name)
    return tuple(given)


def schedule_of(
    order: Any, layers: int | Sequence[int] | None, delay_wgrad: bool | Sequence[bool], count: int
) -> tuple[Schedule | None, tuple[bool, ...]]:
    """Returns the schedule that an order means, and for each of `count` callables whether its wgrad is delayed.

    Raises:
        OrderError: the order cannot run, or says otherwise than `delay_wgrad`.
        CallableError: it is for another number of callables.
    """
    if order is None:
        return None, one_each("delay_wgrad", delay_wgrad, count, bool, of="stage")
    if isinstance(order, Schedule):
        schedule = order
    else:
        rows = (order,) if _is_one(order) else order
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
    """Raises OrderError for wgrads in the order of a chunk where no layer has a gradient to delay."""
    for rank, chunk, places in _chunks(schedule):
        row = schedule.orders[rank]
        if row.delay_wgrad[chunk] and not any(callables[i].late for i in places):
            position = int(np.flatnonzero((row.kinds == WGRAD) & (row.chunks == chunk))[0])
            flags = [bool(late and c != chunk) for c, late in enumerate(row.delay_wgrad)]
            raise OrderError(
                f"entry {position} is {-chunk - 1.5:g}, a wgrad of chunk {chunk + 1}, but callable {places[0]} has nothing to "
                f"delay: no matrix product with a parameter of its own; leave the {-chunk - 1.5:g} out and pass "
                f"delay_wgrad={flags}, by chunk",
                position=position,
                rank=rank if schedule.num_ranks > 1 else None,
            )


def most_waiting(schedule: Schedule | None, count: int) -> list[int]:
    """Returns how many microbatches of each callable wait for their backward at once; without an order, one."""
    most = [1] * count
    if schedule is None:
        return most
    for rank, chunk, places in _chunks(schedule):
        row = schedule.orders[rank]
        steps = np.where(row.kinds == FORWARD, 1, np.where(row.kinds == WGRAD, 0, -1)) * (row.chunks == chunk)
        for i in places:
            most[i] = int(np.cumsum(steps).max())
    return most


def _chunks(schedule: Schedule) -> list[tuple[int, int, range]]:
    """Returns every (rank, chunk, places of its callables)."""
    ends = np.cumsum(schedule.num_layers).tolist()
    return [
        (rank, chunk, range(ends[stage] - schedule.num_layers[stage], ends[stage]))
        for rank, stages in enumerate(schedule.placement)
        for chunk, stage in enumerate(stages)
    ]


def homes(schedule: Schedule | None, devices: Sequence[Any] | None, params: Sequence[Any]) -> list[Any]:
    """Returns the device of each callable.

    Raises:
        CallableError: params lie on several devices, or there is not one device per rank.
    """
    if devices is None:
        held = {d for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and leaf.committed for d in leaf.devices()}
        if len(held) > 1:
            raise CallableError(
                f"`params` lie on {len(held)} devices: name one device per rank in `devices`, and give each callable's params "
                f"where it runs; a sharded parameter does not go with graphed callables",
                field="devices",
            )
        with jax.ensure_compile_time_eval():  # also where somebody traces
            devices = list(held or jnp.zeros(()).devices())
    if not isinstance(devices, (tuple, list)) or not all(hasattr(device, "platform") for device in devices):
        raise CallableError(
            f"`devices` is {devices!r}: must be a list of jax devices, one for each rank, or one for all", field="devices"
        )
    num_ranks, ranks = 1, [0] * len(params)
    if schedule is not None:
        num_ranks, ranks = schedule.num_ranks, np.repeat(schedule.rank_of_stage, schedule.num_layers).tolist()
    if len(devices) not in (1, num_ranks):
        wrong = f"`devices` has {len(devices)} for {num_ranks} ranks: give one for each rank, or one for all"
        raise CallableError(wrong, field="devices")
    return [devices[rank % len(devices)] for rank in ranks]


def _is_one(order: Any) -> bool:
    """Returns whether this is one rank's order."""
    return isinstance(order, Order) or not isinstance(order, Sequence) or not order or isinstance(order[0], Number)
