"""A graphed callable: its forward, dgrad and wgrad as executables made beforehand, called one by one."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jgraph.callables.borrowed import arrays_of, handles_in
from jgraph.callables.entry import Entry, differences, signature
from jgraph.callables.main_grad import MainGrad
from jgraph.callables.pool import Pool, Slot, slots_of
from jgraph.errors import CallableError, OwnershipError

Tree = Any
_LOG = getLogger(__name__)

# Entries that on_mismatch="recompile" may add: more of them means shapes that do not repeat.
_MOST_ENTRIES = 8


@dataclass
class _Pending:
    """A microbatch between its forward and its last backward part."""

    entry: Entry
    params: list[Any]
    residuals: list[Any]
    stash: list[Any]
    early: dict[int, Any]
    held: dict[str, list[Slot]]


class Graphed:
    """One callable; see `make_graphed_callables`. Microbatches are first in, first out."""

    def __init__(
        self,
        build: Callable[[Tree, Sequence[Tree], dict[str, Tree]], Entry],
        entry: Entry,
        key: Any,
        *,
        pools: dict[str, Pool] | None,
        delayed: bool,
        on_mismatch: Literal["error", "recompile"],
        mode: Callable[[], str],
    ):
        self._build, self._entry, self._entries = build, entry, {key: entry}
        self._pools, self._delayed, self._on_mismatch, self._mode = pools, delayed, on_mismatch, mode
        self._forwards: deque[_Pending] = deque()
        self._dgrads: deque[_Pending] = deque()
        self._counts = {"forward": 0, "dgrad": 0, "wgrad": 0, "backward": 0}
        self.gradients = MainGrad(entry)
        self._is_reset = False

    @property
    def index(self) -> int:
        return self._entry.shaped.index

    @property
    def entry(self) -> Entry:
        """The executables that were built."""
        return self._entry

    def __call__(self, params: Tree, x: Tree, *extra: Tree, **kwargs: Tree) -> Tree:
        """Runs forward and keeps what the backward needs.

        Args:
            params, x, extra, kwargs: as the samples; never donated.

        Returns:
            y: the caller's array; with `reuse_buffers` a `Borrowed` on a pool buffer.

        Raises:
            CallableError: something is not as it was built, every difference in one message; or the module is in another
                mode; or the callable was reset.
            OwnershipError: x is a pool buffer that was released.
        """
        self._check_alive()
        if problem := self._mode():
            raise CallableError(f"callable {self.index}: {problem}")
        taken: list[Slot] = []
        if self._pools is not None:
            taken = slots_of((x, extra, kwargs))
            x, extra, kwargs = arrays_of((x, extra, kwargs))
        args = (x, *extra)
        weights, params_tree = jax.tree.flatten(params)
        inputs, inputs_tree = jax.tree.flatten((x, (extra, kwargs)))
        # A numpy array could be written to before the backward reads it again.
        arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in inputs]
        entry, outs = self._entry, None
        part = entry.shaped
        if params_tree == part.params.tree and inputs_tree == part.inputs_tree:
            try:
                outs = self._run(entry, "forward", [*weights, *arrays])
            except (TypeError, ValueError, RuntimeError):
                if not self._differences(params, args, kwargs):
                    raise
        if outs is None:
            if handles_in((params, args, kwargs)):
                params, args, kwargs = arrays_of((params, args, kwargs))
                return self(params, *args, **kwargs)
            entry = self._other_entry(params, args, kwargs)
            part = entry.shaped
            outs = self._run(entry, "forward", [*weights, *arrays])
        y = outs[: len(part.y)]
        if len(entry.parts) == 1:
            return part.y.unflatten(y)
        residuals = _handed(part.residuals_from, outs[len(y) :], arrays)
        pending = _Pending(entry, weights, residuals, [], {}, {})
        self._forwards.append(pending)
        if self._pools is not None:
            self._consume(pending, part.last_use_of_x, taken)
            owned = [r if source is None else None for r, source in zip(residuals, part.residuals_from, strict=True)]
            self._hold(pending, "dgrad", "forward_dgrad", owned[: part.num_dgrad])
            self._hold(pending, "wgrad", "forward_wgrad", owned[part.num_dgrad :])
            self._release(pending, "forward")
            y = self._lend("activation", y)
        return part.y.unflatten(y)

    def backward(self, dy: Tree) -> tuple[Tree, Tree]:
        """The whole backward of the oldest microbatch that has none.

        Args:
            dy: as y.

        Returns:
            Gradients as params, each leaf owned or a `Borrowed` on main_grad; None for integers. And dx, as x.

        Raises:
            CallableError: no forward waits for its backward; dy is not as y; built for inference.
        """
        if self._delayed:
            self._check_alive()
            if self._dgrads:
                raise CallableError(
                    f"callable {self.index}: {len(self._dgrads)} microbatches wait for their wgrad, and they go first in, "
                    f"first out; call wgrad for them, or dgrad for this one"
                )
            dx = self.dgrad(dy)
            return self.wgrad(), dx
        pending = self._oldest(self._forwards, "backward", "forward")
        part = pending.entry.shaped
        leaves, taken = self._dy(pending, dy)
        outs = self._run_backward(pending, "backward", leaves, dy)
        self._forwards.popleft()
        dx, gradients = outs[: part.num_dx], self._gradients(pending, "backward", outs)
        if self._pools is not None:
            self._consume(pending, "dgrad", taken)
            self._release(pending, "dgrad", "backward")
            self._release(pending, "wgrad", "backward")
            dx = self._lend("gradient", dx)
        return gradients, part.x.unflatten(dx) if part.takes_gradient else None

    def dgrad(self, dy: Tree) -> Tree:
        """dx of the oldest microbatch that has none; its wgrad waits. Only where wgrads are delayed; raises as `backward`."""
        self._check_alive()
        if "backward" in self._entry.parts:
            raise CallableError(
                f"callable {self.index} was built with delay_wgrad=False; call backward, or build it with delay_wgrad=True"
            )
        pending = self._oldest(self._forwards, "dgrad", "forward")
        part = pending.entry.shaped
        leaves, taken = self._dy(pending, dy)
        outs = self._run_backward(pending, "dgrad", leaves, dy)
        dx, rest = outs[: part.num_dx], outs[part.num_dx :]
        pending.stash = _handed(part.stash_from, rest, [*pending.residuals, *leaves])
        new = pending.entry.parts["dgrad"].new
        pending.early = dict(zip(new, outs[len(outs) - len(new) :], strict=True))
        pending.residuals = pending.residuals[part.num_dgrad :]
        self._dgrads.append(self._forwards.popleft())
        if self._pools is not None:
            self._consume(pending, part.last_use_of_dy, taken)
            owned = [s if source is None else None for s, source in zip(pending.stash, part.stash_from, strict=True)]
            self._hold(pending, "wgrad", "stash", owned)
            self._release(pending, "dgrad")
            dx = self._lend("gradient", dx)
        return part.x.unflatten(dx) if part.takes_gradient else None

    def wgrad(self) -> Tree:
        """Gradients of the oldest microbatch whose wgrad waits, as `backward` gives them."""
        self._check_alive()
        pending = self._oldest(self._dgrads, "wgrad", "dgrad")
        outs = self._run_backward(pending, "wgrad", pending.stash, None)
        self._dgrads.popleft()
        gradients = self._gradients(pending, "wgrad", outs)
        if self._pools is not None:
            self._release(pending, "wgrad")
        return gradients

    @property
    def main_grad(self) -> Tree:
        """As params: `Borrowed` float32 sums since `zero_grads` where gradients are aliased, None elsewhere."""
        self._check_alive()
        params, aliased = self._entry.shaped.params, self._entry.aliased
        return params.unflatten([self.gradients.handle(i) if i in aliased else None for i in range(len(params))])

    def zero_grads(self) -> None:
        """Sets main_grad to zero, in place."""
        self._check_alive()
        self.gradients.zero()

    def reset(self) -> None:
        """Frees its buffers and executables. Any later use raises CallableError; what the caller owns stays."""
        self.gradients.end("freed by reset")
        for pending in (*self._forwards, *self._dgrads):
            for part in list(pending.held):
                self._release(pending, part, "reset")
        for array in self.gradients.arrays.values():
            array.delete()
        self.gradients.arrays = {}
        self._forwards.clear()
        self._dgrads.clear()
        self._entries.clear()
        self._entry = Entry(self._entry.shaped, {})
        self._is_reset = True

    def check_idle(self) -> None:
        """Raises CallableError while microbatches wait for their backward."""
        self._check_alive()
        if waiting := len(self._forwards) + len(self._dgrads):
            raise CallableError(
                f"callable {self.index} has {waiting} microbatches that wait for a backward part; finish them or reset() first"
            )

    def _check_alive(self) -> None:
        if self._is_reset:
            raise CallableError("this graphed callable was reset and holds nothing any more; build it again")

    def _run(self, entry: Entry, kind: str, arrays: Sequence[Any]) -> list[Any]:
        part = entry.parts[kind]
        places = part.updates
        sums = self.gradients.open() if places else {}
        new, outs = part.program.compiled([sums[i] for i in places], [], [arrays[i] for i in part.reads])
        self._counts[kind] += 1
        if places:
            self.gradients.update(dict(zip(places, new, strict=True)), f"the {kind} of microbatch {self._counts[kind] - 1}")
        return outs

    def _run_backward(self, pending: _Pending, kind: str, rest: list[Any], dy: Tree) -> list[Any]:
        """Runs a backward part; what went wrong is looked for only when something did."""
        try:
            return self._run(pending.entry, kind, [*pending.params, *pending.residuals, *rest])
        except (TypeError, ValueError, RuntimeError) as e:
            part = pending.entry.shaped
            read = (*pending.params, *pending.residuals, *rest)
            if shared := [i for i, total in self.gradients.arrays.items() if any(array is total for array in read)]:
                raise OwnershipError(
                    f"callable {self.index}: {kind} updates main_grad, {part.params.paths[shared[0]]!r}, in place, and reads "
                    f"the same array, which was given as params, x, dy or an extra argument; pass a copy of it",
                    owner=f"main_grad of callable {self.index}",
                ) from e
            gone = sum(array.is_deleted() for array in (*pending.residuals, *pending.stash))
            if gone:
                raise OwnershipError(
                    f"callable {self.index}: {kind} needs {gone} arrays of this microbatch that were donated or deleted since, "
                    f"the caller's x, dy or extra arguments; keep them until then",
                    owner="the caller",
                ) from e
            texts = [] if dy is None else differences(part.y, dy, "dy", part.device)
            texts += differences(part.params, part.params.unflatten(pending.params), "params", part.device)
            if not texts:
                raise
            raise _mismatch_error(self.index, texts) from e

    def _differences(self, params: Tree, args: Sequence[Tree], kwargs: dict[str, Tree]) -> list[str]:
        part = self._entry.shaped
        texts = differences(part.params, params, "params", part.device) + differences(part.x, args[0], "x", part.device)
        num_extra = len(part.extra.shapes()[0])
        if len(args) - 1 != num_extra:
            texts.append(f"{len(args) - 1} arguments after x, built for {num_extra}")
            return texts
        return texts + differences(part.extra, (tuple(args[1:]), kwargs), "extra", part.device)

    def _other_entry(self, params: Tree, args: Sequence[Tree], kwargs: dict[str, Tree]) -> Entry:
        """Executables for other shapes, if those may be made."""
        texts = self._differences(params, args, kwargs)
        part = self._entry.shaped
        positional, named = part.extra.shapes()
        # Other shapes are another program; other arguments are another function, and a program does not move.
        same_arguments = len(args) - 1 == len(positional) and set(kwargs) == set(named)
        here = all(
            leaf.devices() == {part.device} or not leaf.committed
            for leaf in jax.tree.leaves((params, args, kwargs))
            if isinstance(leaf, jax.Array)
        )
        # main_grad has the shapes of the parameters that it was made for.
        other_sums = self._entry.aliased and differences(part.params, params, "params", part.device)
        if self._on_mismatch == "error" or not same_arguments or not here or other_sums:
            raise _mismatch_error(self.index, texts)
        key = signature(params, args, kwargs)
        if key not in self._entries:
            if len(self._entries) >= _MOST_ENTRIES:
                raise CallableError(
                    f"callable {self.index} was compiled for {len(self._entries)} sets of shapes, the most that "
                    f"on_mismatch='recompile' allows; pad the inputs to few shapes; the last differs in: {'; '.join(texts)}",
                    mismatches=tuple(texts),
                )
            _LOG.warning("callable %d is compiled again (entry %d): %s", self.index, len(self._entries) + 1, "; ".join(texts))
            entry = self._build(params, args, kwargs)
            if entry.aliased != self._entry.aliased:
                paths = [part.params.paths[i] for i in sorted(entry.aliased ^ self._entry.aliased)]
                raise CallableError(
                    f"callable {self.index}: with these shapes other gradients live in main_grad than it was built for "
                    f"({', '.join(paths)}); build another callable for them: {'; '.join(texts)}",
                    mismatches=tuple(texts),
                )
            self._entries[key] = entry
        return self._entries[key]

    def _oldest(self, waiting: deque[_Pending], what: str, before: str) -> _Pending:
        self._check_alive()
        if len(self._entry.parts) == 1:
            raise CallableError(f"callable {self.index} was built with training=False and has no backward")
        if not waiting:
            raise CallableError(f"callable {self.index}: {what} has no {before} to belong to; call {before} first")
        return waiting[0]

    def _dy(self, pending: _Pending, dy: Tree) -> tuple[list[Any], list[Slot]]:
        side = pending.entry.shaped.y
        taken: list[Slot] = []
        if self._pools is not None:
            taken = slots_of(dy)
        if handles_in(dy):
            dy = arrays_of(dy)
        leaves, tree = jax.tree.flatten(dy)
        if tree != side.tree:
            raise _mismatch_error(self.index, differences(side, dy, "dy", pending.entry.shaped.device))
        return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves], taken

    def _gradients(self, pending: _Pending, kind: str, outs: Sequence[Any]) -> Tree:
        """As params: new arrays, handles on main_grad, and None for integers."""
        entry = pending.entry
        new, params, aliased = entry.parts[kind].new, entry.shaped.params, entry.aliased
        owned = pending.early | dict(zip(new, outs[len(outs) - len(new) :], strict=True))
        return params.unflatten(
            [owned[i] if i in owned else self.gradients.handle(i) if i in aliased else None for i in range(len(params))]
        )

    def _hold(self, pending: _Pending, until: str, pool: str, arrays: Sequence[Any]) -> None:
        """Takes a place for arrays that only jgraph sees; None for those that are someone else's."""
        own = [array for array in arrays if array is not None]
        if own and self._pools is not None:
            slot = self._pools[pool].take()
            slot.arrays.extend(own)
            self._consume(pending, until, [slot])

    def _consume(self, pending: _Pending, until: str, slots: Sequence[Slot]) -> None:
        """Notes who reads these places, and until which part."""
        for slot in slots:
            slot.consumers += 1
            pending.held.setdefault(until, []).append(slot)

    def _lend(self, pool: str, leaves: Sequence[Any]) -> list[Any]:
        assert self._pools is not None
        slot = self._pools[pool].take()
        return [slot.lend(leaf) for leaf in leaves]

    def _release(self, pending: _Pending, part: str, name: str = "") -> None:
        for slot in pending.held.pop(part, ()):
            slot.release(f"the {name or part} of callable {self.index}")


def _handed(sources: Sequence[int | None], outs: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """All results from those that were computed and those that were only handed on."""
    new = iter(outs)
    return [next(new) if source is None else inputs[source] for source in sources]


def _mismatch_error(index: int, texts: Sequence[str]) -> CallableError:
    return CallableError(
        f"callable {index} is called with something else than it was built for: {'; '.join(texts)}; "
        f"pass what was built, or build with on_mismatch='recompile'",
        mismatches=tuple(texts),
    )
