"""What `run` is given, checked and put into the registers of an execution plan, each array on its device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CallableError
from jgraph.graphed.arguments import each
from jgraph.graphed.borrowed import arrays_of, handles_in
from jgraph.graphed.match import check_concrete, differences
from jgraph.graphed.plan import ExecutionPlan
from jgraph.graphed.shaped import Shaped, Side, shape_of

Tree = Any


def filled(
    plan: ExecutionPlan,
    callables: Sequence[Shaped],
    *,
    params: Sequence[Tree],
    inputs: Sequence[Tree],
    extra: Sequence[tuple[Tree, ...]],
    loss_args: Sequence[tuple[Tree, ...]],
    key: jax.Array | None,
    step: int,
) -> list[Any]:
    """Returns the arrays by register, None for those that the plan makes. Raises CallableError with every difference."""
    registers: list[Any] = [None] * plan.size
    try:
        _fill_params(plan, callables, registers, params)
        _fill_inputs(plan, callables, registers, inputs, extra, loss_args)
        if key is not None:
            _fill_keys(plan, callables, registers, key, step)
    except jax.errors.ConcretizationTypeError:
        check_concrete("run", (params, inputs, extra, loss_args, key))
        raise
    return registers


def _fill_params(plan: ExecutionPlan, callables: Sequence[Shaped], registers: list[Any], params: Sequence[Tree]) -> None:
    for i, (tree, shaped) in enumerate(zip(each("params", params, len(callables)), callables, strict=True)):
        leaves = _leaves(shaped.params, tree, f"params[{i}]", shaped.device)
        for register, leaf, path in zip(plan.params[i], leaves, shaped.params.paths, strict=True):
            if not isinstance(leaf, jax.Array) or leaf.devices() != {shaped.device}:
                where = ", ".join(sorted(map(str, leaf.devices()))) if isinstance(leaf, jax.Array) else "the host"
                text = f"params[{i}]/{path} is on {where}, used on {shaped.device}"
                raise CallableError(f"{text}; give run graphed.place(params)", mismatches=(text,), field="params")
            registers[register] = leaf


def _fill_inputs(
    plan: ExecutionPlan,
    callables: Sequence[Shaped],
    registers: list[Any],
    inputs: Sequence[Tree],
    extra: Sequence[Any],
    loss_args: Sequence[Any],
) -> None:
    first, last = callables[0], callables[-1]
    for m, (x, rest) in enumerate(zip(inputs, loss_args, strict=True)):
        for register, leaf in zip(plan.inputs[m], _leaves(first.x, x, f"inputs[{m}]"), strict=True):
            registers[register] = _on(first.device, leaf)
        for register, leaf in zip(plan.loss_args[m], _leaves(plan.loss_side, tuple(rest), f"loss_args[{m}]"), strict=True):
            registers[register] = _on(last.device, leaf)
    sent: dict[Any, Any] = {}
    for (i, m, place), register in plan.extra.items():
        shaped = callables[i]
        leaf = _leaves(shaped.positional, tuple(extra[m]), f"extra[{m}]")[place]
        where = (id(leaf), shaped.device)
        if where not in sent:
            sent[where] = _on(shaped.device, leaf)
        registers[register] = sent[where]


def _fill_keys(plan: ExecutionPlan, callables: Sequence[Shaped], registers: list[Any], key: jax.Array, step: int) -> None:
    for (i, _), register in plan.keys.items():
        registers[register] = _on(callables[i].device, key)
    for rank, register in enumerate(plan.steps):
        if register >= 0:
            registers[register] = jnp.asarray(step, jnp.int32, device=plan.devices[rank])
    for (rank, m), register in plan.microbatches.items():
        registers[register] = jnp.asarray(m, jnp.int32, device=plan.devices[rank])


def check_extra(callables: Sequence[Shaped], extra: Sequence[Any] | None, key: jax.Array | None) -> None:
    """Raises CallableError if what callables take besides params and x cannot be given."""
    for i, shaped in enumerate(callables):
        for place in range(len(shaped.positional), len(shaped.extra)):
            name, aval = shaped.extra.paths[place].removeprefix("1/"), shaped.extra.avals[place]
            if place not in shaped.keys:
                raise CallableError(
                    f"callable {i} takes the keyword argument {name}, which is no random key: run gives keys only; take it as "
                    f"an argument after x"
                )
            if key is None:
                raise CallableError(f"callable {i} takes the keyword argument {name}: give run a `key`", field="key")
            if not isinstance(key, jax.Array) or shape_of(key) != aval:
                wrong = f"`key` is {key!r}: must be one random key like the sample's, {aval.dtype}"
                raise CallableError(wrong, field="key")
    if extra is not None and not any(shaped.extra.shapes()[0] for shaped in callables):
        raise CallableError("`extra` is given, but no callable takes arguments after x: leave it out", field="extra")


def per_microbatch(name: str, given: Sequence[Any], count: int) -> list[Any]:
    """Returns the values for each microbatch as a list. Raises CallableError for another number of them."""
    if not isinstance(given, (tuple, list)):
        wrong = f"`{name}` is {type(given).__name__}: must be a list of {count}, one for each microbatch"
        raise CallableError(wrong, field=name)
    if len(given) != count:
        wrong = f"`{name}` has {len(given)} entries, but the order has {count} microbatches: give one for each"
        raise CallableError(wrong, field=name)
    return list(given)


def tuples(name: str, given: Sequence[Any] | None, count: int) -> list[tuple[Any, ...]]:
    """Returns the arguments for each microbatch; none for None."""
    if given is None:
        return [()] * count
    for m, arguments in enumerate(per_microbatch(name, given, count)):
        if not isinstance(arguments, (tuple, list)):
            raise CallableError(f"`{name}[{m}]` is {type(arguments).__name__}: must be a tuple of arguments", field=name)
    return [tuple(arguments) for arguments in given]


def _leaves(side: Side, tree: Tree, name: str, device: Any = None) -> list[Any]:
    """Returns the leaves of an argument that is as it was built. Raises CallableError with every difference."""
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
    """Returns the array itself where it is already there."""
    return leaf if isinstance(leaf, jax.Array) and leaf.devices() == {device} else put(device, leaf)


def put(device: Any, leaf: Any) -> jax.Array:
    """Returns the array on a device. One of numpy is copied: on a CPU its memory would be shared, and the caller may write."""
    return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, device)
