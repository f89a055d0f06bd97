"""Whether a call is for the shapes that a callable was built for, and the executables for others."""

from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any, Literal

import jax
from jax.core import Tracer

from jgraph.errors import CallableError
from jgraph.graphed.entry import Entry
from jgraph.graphed.shaped import Shaped, Side, shape_of

Tree = Any
OnMismatch = Literal["error", "recompile"]
_LOG = getLogger(__name__)

# Entries that on_mismatch="recompile" may add: more of them means shapes that do not repeat.
_MOST_ENTRIES = 8


class Entries:
    """A callable's executables, by the shapes of a call.

    Attributes:
        built: those for the sample.
    """

    def __init__(self, build: Callable[..., Entry], built: Entry, sample: Any, on_mismatch: OnMismatch):
        self.built, self._build, self._on_mismatch = built, build, on_mismatch
        self._entries = {signature(*sample): built}

    def clear(self) -> None:
        """Frees the executables; shapes are still known."""
        self.built = Entry(self.built.shaped, {})
        self._entries.clear()

    def differences(self, params: Tree, args: Sequence[Tree], kwargs: dict[str, Tree]) -> list[str]:
        """Returns everything in which arguments differ from the sample."""
        shaped = self.built.shaped
        device, num_extra = shaped.device, len(shaped.extra.shapes()[0])
        texts = differences(shaped.params, params, "params", device) + differences(shaped.x, args[0], "x", device)
        if len(args) - 1 != num_extra:
            return [*texts, f"{len(args) - 1} arguments after x, built for {num_extra}"]
        return texts + differences(shaped.extra, (tuple(args[1:]), kwargs), "extra", device)

    def other(self, params: Tree, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Entry:
        """Returns executables for other shapes, compiled if those may be. Raises CallableError if not."""
        texts, shaped = self.differences(params, args, kwargs), self.built.shaped
        positional, named = shaped.extra.shapes()
        # Other shapes are another program; other arguments are another function, and a program does not move.
        same_arguments = len(args) - 1 == len(positional) and set(kwargs) == set(named)
        here = all(
            leaf.devices() == {shaped.device} or not leaf.committed
            for leaf in jax.tree.leaves((params, args, kwargs))
            if isinstance(leaf, jax.Array)
        )
        # main_grad has the shapes of the parameters that it was made for.
        other_sums = self.built.aliased and differences(shaped.params, params, "params", shaped.device)
        if self._on_mismatch == "error" or not same_arguments or not here or other_sums:
            raise mismatch(shaped, texts)
        key, name = signature(params, args, kwargs), f"callable {shaped.index}"
        if key not in self._entries:
            if len(self._entries) >= _MOST_ENTRIES:
                raise CallableError(
                    f"{name} was compiled for {len(self._entries)} sets of shapes, the most that on_mismatch='recompile' "
                    f"allows; pad the inputs to few shapes; the last differs in: {'; '.join(texts)}",
                    mismatches=tuple(texts),
                )
            _LOG.warning("%s is compiled again (entry %d): %s", name, len(self._entries) + 1, "; ".join(texts))
            entry = self._build(params, args, kwargs)
            if entry.aliased != self.built.aliased:
                paths = ", ".join(shaped.params.paths[i] for i in sorted(entry.aliased ^ self.built.aliased))
                raise CallableError(
                    f"{name}: with these shapes other gradients live in main_grad than it was built for ({paths}); build "
                    f"another callable for them: {'; '.join(texts)}",
                    mismatches=tuple(texts),
                )
            self._entries[key] = entry
        return self._entries[key]


def mismatch(shaped: Shaped, texts: Sequence[str]) -> CallableError:
    """Returns the error for a call with other shapes."""
    return CallableError(
        f"callable {shaped.index} is called with something else than it was built for: {'; '.join(texts)}; "
        f"pass what was built, or build with on_mismatch='recompile'",
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
            texts += _leaf_differences(where, wanted[path], found[path], leaves[path], device)
    if not texts and here.tree != side.tree:
        texts.append(f"{name} has the structure {here.tree}, built for {side.tree}")
    return texts


def _leaf_differences(where: str, wanted: Any, found: Any, leaf: Any, device: Any) -> list[str]:
    texts = []
    if found != wanted:
        texts.append(f"{where} is {_show(found)}, built for {_show(wanted)}")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            texts.append(f"{where} was donated or deleted by the caller")
        elif leaf.devices() != {device} and leaf.committed:
            texts.append(f"{where} is on {', '.join(map(str, sorted(leaf.devices(), key=str)))}, built for {device}")
    return texts


def _show(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def signature(params: Any, args: Any, kwargs: Any) -> Any:
    """Returns the structures, shapes and dtypes that an entry is for."""
    leaves, tree = jax.tree.flatten((params, args, kwargs))
    return tree, *((aval.shape, aval.dtype) for aval in map(shape_of, leaves))
