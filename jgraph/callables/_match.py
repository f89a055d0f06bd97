"""Compares the arguments of a call with the shapes that a callable was built for."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jgraph.callables._borrowed import check_no_handles
from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError
from jgraph.tree import PyTree


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
        if path not in found:
            texts.append(f"{where} is missing")
        elif path not in wanted:
            texts.append(f"{where} is not known")
        else:
            leaf = leaves[path]
            if found[path] != wanted[path]:
                texts.append(f"{where} is {_show(found[path])}, built for {_show(wanted[path])}")
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                texts.append(f"{where} was donated or deleted by the caller")
            elif isinstance(leaf, jax.Array) and leaf.devices() != {device} and leaf.committed:
                texts.append(f"{where} is on {', '.join(map(str, sorted(leaf.devices(), key=str)))}, built for {device}")
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


def _show(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"
