"""Checks the arguments of `make_graphed_callables`, of calls and of `run`."""

from collections.abc import Hashable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jgraph.callables._borrowed import check_no_handles
from jgraph.callables._dataflow import layers_of, ranks_of
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError, OrderError, of_type
from jgraph.schedule.action import FORWARD, WGRAD
from jgraph.schedule.order import Order, one_each
from jgraph.schedule.schedule import Schedule
from jgraph.types import JaxDevice, Leaf, Params, Tree

OrderLike: TypeAlias = Order | Schedule | Sequence[float] | Sequence[Order | Sequence[float]]
"""Signed numbers of one rank, an order, a schedule, or one order per rank."""


def check_argument(condition: bool, field: str, message: str) -> None:
    """Raises CallableError with `message` for the argument `field` if `condition` is false."""
    if not condition:
        raise CallableError(message, field=field)


def each(name: str, given: Sequence[Any] | None, count: int, *, of: str = "callables") -> tuple[Any, ...]:
    """Converts a tuple or list with one value per item to a tuple, without copies. None stands for a tuple of None."""
    if given is None:
        return (None,) * count
    if not isinstance(given, (tuple, list)) or len(given) != count:
        found = f"has length {len(given)}" if isinstance(given, (tuple, list)) else f"is {of_type(given)}"
        raise CallableError(f"`{name}` {found}: must be a tuple of length {count}, one value per {of[:-1]}", field=name)
    return tuple(given)


def tuples(name: str, given: Sequence[Sequence[Tree]] | None, count: int) -> list[tuple[Tree, ...]]:
    """Converts an argument to the positional arguments of each microbatch. Raises CallableError for another structure."""
    for m, arguments in enumerate(given := each(name, [()] * count if given is None else given, count, of="microbatches")):
        if not isinstance(arguments, (tuple, list)):
            raise CallableError(f"`{name}[{m}]` is {type(arguments).__name__}: must be a tuple of arguments", field=name)
    return [tuple(arguments) for arguments in given]


def sample_of(i: int, args: Sequence[Tree], kwargs: Mapping[str, Tree] | None) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Checks the sample arguments of callable `i`: (x, *extra), and keyword arguments or None. Raises CallableError."""
    kwargs = {} if kwargs is None else kwargs
    wrong = f"`sample_args` of callable {i} is {type(args).__name__}: must be a tuple (x, *extra)"
    check_argument(isinstance(args, (tuple, list)) and len(args) > 0, "sample_args", wrong)
    if not isinstance(kwargs, Mapping):
        raise CallableError(f"`sample_kwargs` of callable {i} is {kwargs!r}: must be a dict", field="sample_kwargs")
    return tuple(args), dict(kwargs)


def schedule_of(
    order: OrderLike | None, layers: int | Sequence[int] | None, delay_wgrad: bool | Sequence[bool], count: int
) -> tuple[Schedule | None, tuple[bool, ...]]:
    """Parses an order. Returns its schedule, None without an order, and for each callable if its wgrad is delayed."""
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
            f"the order needs {len(flags)} callables (`num_layers_per_chunk` for each of {schedule.num_stages} chunks), but "
            f"there are {count}: must be equal"
        )
    return schedule, flags


def check_wgrads(schedule: Schedule, callables: Sequence[Shaped]) -> None:
    """Raises OrderError if an order has wgrads of a chunk without delayed gradients."""
    for rank, chunk, places in _chunks(schedule):
        row = schedule.orders[rank]
        if row.delay_wgrad[chunk] and not any(callables[i].late for i in places):
            position = int(np.flatnonzero((row.kinds == WGRAD) & (row.chunks == chunk))[0])
            flags = [bool(late and c != chunk) for c, late in enumerate(row.delay_wgrad)]
            raise OrderError(
                f"entry {position} is {-chunk - 1.5:g}, a wgrad of chunk {chunk + 1}, but callable {places[0]} has nothing to "
                f"delay, because it has no matmul with a parameter; remove the entries {-chunk - 1.5:g} and pass "
                f"delay_wgrad={flags}, one per chunk",
                position=position,
                rank=rank if schedule.num_ranks > 1 else None,
            )


def most_waiting(schedule: Schedule | None, count: int) -> list[int]:
    """Returns the maximum number of microbatches of each callable that wait for their dgrad at once; 1 without an order."""
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
    """Returns every (rank, chunk, indices of its callables)."""
    layers = layers_of(schedule)
    return [
        (rank, chunk, layers[stage]) for rank, stages in enumerate(schedule.placement) for chunk, stage in enumerate(stages)
    ]


def homes(schedule: Schedule | None, devices: Sequence[JaxDevice] | None, params: Sequence[Params]) -> list[JaxDevice]:
    """Returns the device of each callable: one device per rank, or one for all. Raises CallableError for other lists."""
    if devices is None:
        # The device of the committed arrays in `params`, or JAX's default device if there are none.
        held = {d for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) and leaf.committed for d in leaf.devices()}
        wrong = f"`params` are on {len(held)} devices: pass one device per rank as `devices`, and params on their device"
        check_argument(len(held) < 2, "devices", f"{wrong}; sharded parameters are not supported")
        with jax.ensure_compile_time_eval():  # Concrete also inside a JAX transformation.
            devices = list(held or jnp.zeros(()).devices())
    is_list = isinstance(devices, (tuple, list)) and all(hasattr(device, "platform") for device in devices)
    wrong = f"`devices` is {devices!r}: must be a list of JAX devices, one per rank, or one for all ranks"
    check_argument(is_list, "devices", wrong)
    num_ranks = 1 if schedule is None else schedule.num_ranks
    ranks = [0] * len(params) if schedule is None else ranks_of(schedule)
    wrong = f"`devices` has {len(devices)} devices for {num_ranks} ranks: must have one per rank, or one for all ranks"
    check_argument(len(devices) in (1, num_ranks), "devices", wrong)
    return [devices[rank % len(devices)] for rank in ranks]


def check_extra(callables: Sequence[Shaped], extra: Sequence[Sequence[Tree]] | None, key: jax.Array | None) -> None:
    """Raises CallableError unless `extra` and `key` of `run` supply the arguments of the callables besides params and x."""
    for i, shaped in enumerate(callables):
        for place in range(len(shaped.positional), len(shaped.extra)):
            name = shaped.extra.paths[place].removeprefix("1/")
            aval = shaped.extra.avals[place]
            takes = f"callable {i} takes the keyword argument {name}"
            if place not in shaped.keys:
                raise CallableError(f"{takes}, which is not a random key: make it a positional argument after x for run")
            check_argument(key is not None, "key", f"{takes}: pass `key` to run")
            if not isinstance(key, jax.Array) or shape_of(key) != aval:  # repr(key) waits for the device.
                wrong = f"`key` is {key!r}: must be a random key of the sample's dtype {aval.dtype}"
                raise CallableError(wrong, field="key")
    takes_any = extra is None or any(shaped.extra.shapes()[0] for shaped in callables)
    check_argument(takes_any, "extra", "`extra` must be None, because no callable takes arguments after x")


def call_differences(shaped: Shaped, params: Params, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> list[str]:
    """Describes every difference in paths, shapes, dtypes, devices or structure between a call and the sample."""
    device = shaped.device
    num_extra = len(shaped.extra.shapes()[0])
    texts = differences(shaped.params, params, "params", device) + differences(shaped.x, args[0], "x", device)
    if len(args) - 1 != num_extra:
        return [*texts, f"{len(args) - 1} arguments after x, built for {num_extra}"]
    return texts + differences(shaped.extra, (tuple(args[1:]), dict(kwargs)), "extra", device)


def mismatch(shaped: Shaped, texts: Sequence[str]) -> CallableError:
    """Returns, but does not raise, the error for a call with arguments that differ from the sample."""
    return CallableError(
        f"the arguments of callable {shaped.index} differ from its sample: {'; '.join(texts)}; "
        f"pass the shapes of the sample, or build another callable",
        mismatches=tuple(texts),
    )


def check_concrete(name: str, tree: Any) -> None:
    """Raises CallableError if a leaf is a tracer, which means that the call is inside a JAX transformation."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise CallableError(
            f"{name} is compiled and cannot be called inside jax.jit, jax.grad, jax.vmap or another transformation: call it "
            f"outside and get gradients from backward, or call the original function inside"
        )


def differences(side: Side, given: Tree, name: str, device: JaxDevice | None) -> list[str]:
    """Describes every difference between an argument and the sample, and every array that is deleted or on another device."""
    actual = Side.from_tree(given)
    leaves = dict(zip(actual.paths, jax.tree.leaves(given), strict=True))
    expected = dict(zip(side.paths, side.avals, strict=True))
    found = dict(zip(actual.paths, actual.avals, strict=True))
    texts = []
    for path in dict.fromkeys((*expected, *found)):
        label = f"{name}{path and '/' + path}"
        if path not in found or path not in expected:
            texts.append(f"{label} is {'missing' if path in expected else 'unexpected'}")
            continue
        leaf = leaves[path]
        if found[path] != expected[path]:
            texts.append(f"{label} is {_show(found[path])}, built for {_show(expected[path])}")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            texts.append(f"{label} was donated or deleted by the caller")
        elif isinstance(leaf, jax.Array) and leaf.devices() != {device} and leaf.committed:
            texts.append(f"{label} is on {devices_of(leaf)}, built for {device}")
    if not texts and actual.tree != side.tree:
        texts.append(f"{name} has the structure {actual.tree}, built for {side.tree}")
    return texts


def matching_leaves(side: Side, tree: Tree, name: str, device: JaxDevice | None = None) -> list[Leaf]:
    """Returns the leaves of an argument of `run`, not copied. Raises CallableError with every difference from the sample."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != side.tree:
        check_no_handles(tree)  # A handle is a pytree node, so the structure differs.
    if structure != side.tree or not all(_fits(leaf, aval) for leaf, aval in zip(leaves, side.avals, strict=True)):
        texts = differences(side, tree, name, device)
        raise CallableError(f"the arguments of run differ from the sample: {'; '.join(texts)}", mismatches=tuple(texts))
    return leaves


def put(device: JaxDevice, leaf: Leaf) -> jax.Array:
    """Puts an array on a device. Copies a NumPy array first, because a CPU device would share its memory with the caller."""
    return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, device)


def signature(sample: Tree) -> Hashable:
    """Returns a hashable description of a tree. Trees of equal structure, shapes and dtypes have equal signatures."""
    leaves, tree = jax.tree.flatten(sample)
    return tree, *((aval.shape, aval.dtype) for aval in map(shape_of, leaves))


def _fits(leaf: Leaf, aval: jax.ShapeDtypeStruct) -> bool:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return False
    given = leaf if isinstance(leaf, jax.Array) else shape_of(leaf)
    return given.shape == aval.shape and given.dtype == aval.dtype


def devices_of(leaf: Leaf) -> str:
    """Returns the names of a leaf's devices, sorted and separated by commas; "the host" if the leaf is not a JAX array."""
    return ", ".join(sorted(map(str, leaf.devices()))) if isinstance(leaf, jax.Array) else "the host"


def _show(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
