"""What `run` is given, checked and put into the registers of an execution plan, each array on its device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.callables.arguments import each
from jgraph.callables.borrowed import check_no_handles
from jgraph.callables.dataflow import Flow
from jgraph.callables.match import check_concrete, differences
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError

Tree = Any


def filled(
    flow: Flow,
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
    registers: list[Any] = [None] * len(flow.avals)
    first, last = callables[0], callables[-1]
    sent: dict[Any, Any] = {}

    def on(device: Any, leaf: Any) -> jax.Array:
        """Returns the array on a device: itself where it is there, and one that was sent before where it was."""
        if isinstance(leaf, jax.Array) and leaf.devices() == {device}:
            return leaf
        if (id(leaf), device) not in sent:
            sent[id(leaf), device] = put(device, leaf)
        return sent[id(leaf), device]

    try:
        weights = _params(callables, params)
        x = [_leaves(first.x, tree, f"inputs[{m}]") for m, tree in enumerate(inputs)]
        rest = [_leaves(flow.loss_side, tree, f"loss_args[{m}]") for m, tree in enumerate(loss_args)]
        takes = {name[1] for name in flow.named if name[0] == "extra"}
        more = {(i, m): _leaves(callables[i].positional, tree, f"extra[{m}]") for i in takes for m, tree in enumerate(extra)}
        give = {
            "params": lambda i, place: weights[i][place],
            "x": lambda m, place: on(first.device, x[m][place]),
            "loss": lambda m, place: on(last.device, rest[m][place]),
            "extra": lambda i, m, place: on(callables[i].device, more[i, m][place]),
            "keys": lambda i, _: on(callables[i].device, key),
            "step": lambda rank: jnp.asarray(step, jnp.int32, device=flow.devices[rank]),
            "microbatch": lambda rank, m: jnp.asarray(m, jnp.int32, device=flow.devices[rank]),
        }
        for (kind, *where), register in flow.named.items():
            registers[register] = give[kind](*where)
    except jax.errors.ConcretizationTypeError:
        check_concrete("run", (params, inputs, extra, loss_args, key))
        raise
    return registers


def _params(callables: Sequence[Shaped], params: Sequence[Tree]) -> list[list[Any]]:
    """Returns the leaves of each callable's params. Raises CallableError where one is not on the callable's device."""
    every = []
    for i, (tree, shaped) in enumerate(zip(each("params", params, len(callables)), callables, strict=True)):
        every.append(_leaves(shaped.params, tree, f"params[{i}]", shaped.device))
        for leaf, path in zip(every[i], shaped.params.paths, strict=True):
            if not isinstance(leaf, jax.Array) or leaf.devices() != {shaped.device}:
                where = ", ".join(sorted(map(str, leaf.devices()))) if isinstance(leaf, jax.Array) else "the host"
                text = f"params[{i}]/{path} is on {where}, used on {shaped.device}"
                raise CallableError(f"{text}; give run graphed.place(params)", mismatches=(text,), field="params")
    return every


def check_extra(callables: Sequence[Shaped], extra: Sequence[Any] | None, key: jax.Array | None) -> None:
    """Raises CallableError if the arguments of callables besides params and x cannot be given."""
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


def tuples(name: str, given: Sequence[Any] | None, count: int) -> list[tuple[Any, ...]]:
    """Returns the arguments for each microbatch; none for None."""
    for m, arguments in enumerate(given := each(name, [()] * count if given is None else given, count, of="microbatches")):
        if not isinstance(arguments, (tuple, list)):
            raise CallableError(f"`{name}[{m}]` is {type(arguments).__name__}: must be a tuple of arguments", field=name)
    return [tuple(arguments) for arguments in given]


def _leaves(side: Side, tree: Tree, name: str, device: Any = None) -> list[Any]:
    """Returns the leaves of an argument that is as it was built. Raises CallableError with every difference."""
    leaves, structure = jax.tree.flatten(tree)
    if structure != side.tree:
        check_no_handles(tree)  # a handle is a pytree node, so the structure differs
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


def put(device: Any, leaf: Any) -> jax.Array:
    """Returns the array on a device. One of numpy is copied: on a CPU its memory would be shared, and the caller may write."""
    return jax.device_put(np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, device)
