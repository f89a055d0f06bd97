"""Whether a call is for the shapes that a callable was built for."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jgraph.callables.shaped import Shaped, Side, shape_of
from jgraph.errors import CallableError

Tree = Any


def call_differences(shaped: Shaped, params: Tree, args: Sequence[Tree], kwargs: dict[str, Tree]) -> list[str]:
    """Returns everything in which the arguments of a call differ from the sample."""
    device, num_extra = shaped.device, len(shaped.extra.shapes()[0])
    texts = differences(shaped.params, params, "params", device) + differences(shaped.x, args[0], "x", device)
    if len(args) - 1 != num_extra:
        return [*texts, f"{len(args) - 1} arguments after x, built for {num_extra}"]
    return texts + differences(shaped.extra, (tuple(args[1:]), kwargs), "extra", device)


def mismatch(shaped: Shaped, texts: Sequence[str]) -> CallableError:
    """Returns the error for a call with other shapes."""
    return CallableError(
        f"callable {shaped.index} is called with something else than it was built for: {'; '.join(texts)}; "
        f"pass what was built, or build another one",
        mismatches=tuple(texts),
    )


def check_concrete(name: str, tree: Any) -> None:
    """Raises CallableError where a transformation of jax stands around the call, so that arguments are no arrays."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise CallableError(
            f"{name} is called inside of jax.jit, jax.grad, jax.vmap or another transformation, and is compiled already: call "
            f"it outside, its gradients come from backward; inside, call the function that it was made of"
        )


def differences(side: Side, given: Any, name: str, device: Any) -> list[str]:
    """Returns everything in which an argument differs from the sample: paths, shapes, dtypes, devices."""
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


def _show(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def signature(sample: Any) -> Any:
    """Returns the structure, shapes and dtypes of a tree."""
    leaves, tree = jax.tree.flatten(sample)
    return tree, *((aval.shape, aval.dtype) for aval in map(shape_of, leaves))
