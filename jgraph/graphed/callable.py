"""A graphed callable: its forward, dgrad and wgrad as executables made beforehand, called one by one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.errors import CallableError, OwnershipError
from jgraph.graphed.borrowed import arrays_of, handles_in
from jgraph.graphed.entry import Entry, check_concrete, differences, signature
from jgraph.graphed.main_grad import MainGrad
from jgraph.graphed.pool import Pool, Slot, slots_of
from jgraph.graphed.turn import Turn

Tree = Any
_LOG = getLogger(__name__)

# Entries that on_mismatch="recompile" may add: more of them means shapes that do not repeat.
_MOST_ENTRIES = 8


@dataclass(eq=False)
class _Pending:
    """A microbatch between its forward and its last backward part."""

    number: int
    entry: Entry
    params: list[Any]
    residuals: list[Any]
    stash: list[Any]
    early: dict[int, Any]
    held: dict[str, list[Slot]]


class Graphed:
    """One callable; see `make_graphed_callables`.

    A forward keeps what its backward reads; `evaluate` keeps nothing. Microbatches are numbered by their forwards, from 0. A
    backward part belongs to the oldest that waits for it, or to the one that `microbatch` names. It must name one where more
    wait than the order ever has at once, which without an order is one: then a forward never got its backward.

    One thread at a time calls it, from a forward to the last backward part; with `reuse_buffers`, all callables of a build.
    """

    def __init__(
        self,
        build: Callable[[Tree, Sequence[Tree], dict[str, Tree]], Entry],
        entry: Entry,
        key: Any,
        *,
        pools: dict[str, Pool] | None,
        turn: Turn,
        most_waiting: int,
        delayed: bool,
        on_mismatch: Literal["error", "recompile"],
        mode: Callable[[], str],
    ):
        self._build, self._entry, self._entries = build, entry, {key: entry}
        self._pools, self._delayed, self._on_mismatch, self._mode = pools, delayed, on_mismatch, mode
        # By number, the oldest first.
        self._forwards: dict[int, _Pending] = {}
        self._dgrads: dict[int, _Pending] = {}
        self._count, self._most_waiting = 0, most_waiting
        self.turn = turn
        self.gradients = MainGrad(entry)
        self._is_reset = False

    def __repr__(self) -> str:
        if self._is_reset:
            return f"Graphed({self.index}: reset)"
        shaped = self._entry.shaped
        x, y = (", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in side.avals) for side in (shaped.x, shaped.y))
        waiting = f"; microbatches that wait: {', '.join(map(str, self.pending))}" if self.pending else ""
        return f"Graphed({self.index}: {', '.join(self._entry.parts)}; {x} -> {y}{waiting})"

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
        if len(self._entry.parts) == 1:
            return self.evaluate(params, x, *extra, **kwargs)
        with self.turn:
            taken: list[Slot] = []
            if self._pools is not None:
                taken = slots_of((x, extra, kwargs))
                x, extra, kwargs = arrays_of((x, extra, kwargs))
            entry, weights, inputs, outs = self._forward(params, (x, *extra), kwargs)
            part = entry.shaped
            y = outs[: len(part.y)]
            residuals = _handed(part.residuals_from, outs[len(y) :], inputs)
            pending = _Pending(self._count, entry, weights, residuals, [], {}, {})
            self._forwards[self._count] = pending
            self._count += 1
            self.turn.waiting += 1
            if self._pools is not None:
                self._consume(pending, part.last_use_of_x, taken)
                owned = [r if source is None else None for r, source in zip(residuals, part.residuals_from, strict=True)]
                self._hold(pending, "dgrad", "forward_dgrad", owned[: part.num_dgrad])
                self._hold(pending, "wgrad", "forward_wgrad", owned[part.num_dgrad :])
                self._release(pending, "forward")
                y = self._lend("activation", y)
            return part.y.unflatten(y)

    def evaluate(self, params: Tree, x: Tree, *extra: Tree, **kwargs: Tree) -> Tree:
        """Runs forward and keeps nothing, so that no backward belongs to it; for any thread at any time.

        The executable is that of the call, with its dropout if it has any. Buffers of a pool are read and not consumed, and y
        is the caller's. Arguments and errors are those of the call.
        """
        self._check_alive()
        if self._pools is not None:
            x, extra, kwargs = arrays_of((x, extra, kwargs))
        entry, _, _, outs = self._forward(params, (x, *extra), kwargs)
        return entry.shaped.y.unflatten(outs[: len(entry.shaped.y)])

    def _forward(
        self, params: Tree, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[Entry, list[Any], list[Any], list[Any]]:
        """The entry for these arguments, leaves of params and of (x, extra), and what the executable gives."""
        if problem := self._mode():
            raise CallableError(f"callable {self.index}: {problem}")
        weights, params_tree = jax.tree.flatten(params)
        inputs, inputs_tree = jax.tree.flatten((args[0], (args[1:], kwargs)))
        # A numpy array could be written to before the backward reads it again.
        weights = [jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in weights]
        arrays = [leaf if isinstance(leaf, jax.Array) else jnp.array(leaf) for leaf in inputs]
        entry = self._entry
        part = entry.shaped
        if params_tree == part.params.tree and inputs_tree == part.inputs_tree:
            try:
                return entry, weights, arrays, self._run(entry, "forward", [*weights, *arrays])
            except (TypeError, ValueError, RuntimeError):
                self._check_concrete(weights, arrays)
                if not self._differences(params, args, kwargs):
                    raise
        if handles_in((params, args, kwargs)):
            return self._forward(*arrays_of((params, args, kwargs)))
        self._check_concrete(weights, arrays)
        entry = self._other_entry(params, args, kwargs)
        return entry, weights, arrays, self._run(entry, "forward", [*weights, *arrays])

    def backward(self, dy: Tree, *, microbatch: int | None = None) -> tuple[Tree, Tree]:
        """The whole backward of a microbatch.

        Args:
            dy: as y.
            microbatch: number of the microbatch; None for the oldest that has no backward.

        Returns:
            Gradients as params, each leaf owned or a `Borrowed` on main_grad; None for integers. And dx, as x.

        Raises:
            CallableError: no forward waits for its backward, or more do than there should and `microbatch` does not say which
                is meant; dy is not as y; built for inference; another thread's microbatches wait.
        """
        with self.turn:
            if self._delayed:
                self._check_alive()
                if self._dgrads and microbatch is None:
                    raise CallableError(
                        f"callable {self.index}: {len(self._dgrads)} microbatches wait for their wgrad, and they go first in, "
                        f"first out; call wgrad for them, or dgrad for this one"
                    )
                pending = self._next(self._forwards, "backward", "forward", microbatch)
                dx = self._dgrad(pending, dy)
                return self._wgrad(pending), dx
            pending = self._next(self._forwards, "backward", "forward", microbatch)
            part = pending.entry.shaped
            leaves, taken = self._dy(pending, dy)
            outs = self._run_backward(pending, "backward", leaves, dy)
            self._end(self._forwards, pending)
            dx, gradients = outs[: part.num_dx], self._gradients(pending, "backward", outs)
            if self._pools is not None:
                self._consume(pending, "dgrad", taken)
                self._release(pending, "dgrad", "backward")
                self._release(pending, "wgrad", "backward")
                dx = self._lend("gradient", dx)
            return gradients, part.x.unflatten(dx) if part.takes_gradient else None

    def dgrad(self, dy: Tree, *, microbatch: int | None = None) -> Tree:
        """dx of a microbatch, whose wgrad then waits. Only where wgrads are delayed; arguments and errors as `backward`."""
        with self.turn:
            self._check_alive()
            if "backward" in self._entry.parts:
                raise CallableError(
                    f"callable {self.index} was built with delay_wgrad=False; call backward, or build it with delay_wgrad=True"
                )
            return self._dgrad(self._next(self._forwards, "dgrad", "forward", microbatch), dy)

    def wgrad(self, *, microbatch: int | None = None) -> Tree:
        """Gradients of a microbatch, as `backward` gives them; of the oldest whose wgrad waits, if none is named."""
        with self.turn:
            self._check_alive()
            return self._wgrad(self._next(self._dgrads, "wgrad", "dgrad", microbatch))

    def _dgrad(self, pending: _Pending, dy: Tree) -> Tree:
        part = pending.entry.shaped
        leaves, taken = self._dy(pending, dy)
        outs = self._run_backward(pending, "dgrad", leaves, dy)
        dx, rest = outs[: part.num_dx], outs[part.num_dx :]
        pending.stash = _handed(part.stash_from, rest, [*pending.residuals, *leaves])
        new = pending.entry.parts["dgrad"].new
        pending.early = dict(zip(new, outs[len(outs) - len(new) :], strict=True))
        pending.residuals = pending.residuals[part.num_dgrad :]
        self._dgrads[pending.number] = self._forwards.pop(pending.number)
        if self._pools is not None:
            self._consume(pending, part.last_use_of_dy, taken)
            owned = [s if source is None else None for s, source in zip(pending.stash, part.stash_from, strict=True)]
            self._hold(pending, "wgrad", "stash", owned)
            self._release(pending, "dgrad")
            dx = self._lend("gradient", dx)
        return part.x.unflatten(dx) if part.takes_gradient else None

    def _wgrad(self, pending: _Pending) -> Tree:
        # Where nothing is delayed there is nothing to run: dgrad gave every gradient.
        outs = self._run_backward(pending, "wgrad", pending.stash, None) if "wgrad" in pending.entry.parts else []
        self._end(self._dgrads, pending)
        gradients = self._gradients(pending, "wgrad", outs)
        if self._pools is not None:
            self._release(pending, "wgrad")
        return gradients

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the microbatches that wait: those without wgrad, then those without any backward, by age.

        After a forward, the last is its number.
        """
        return (*self._dgrads, *self._forwards)

    def drop(self, microbatch: int | None = None) -> None:
        """Forgets a microbatch that waits and frees its buffers; all of them, if none is named. For any thread.

        Raises:
            CallableError: that microbatch does not wait; or another thread is in a call.
        """
        with self.turn.taken_over():
            self._check_alive()
            if microbatch is not None and microbatch not in self.pending:
                raise self._not_waiting("drop", self.pending, microbatch)
            for waiting in (self._dgrads, self._forwards):
                for pending in [p for p in waiting.values() if microbatch in (None, p.number)]:
                    self._end(waiting, pending)
                    for part in list(pending.held):
                        self._release(pending, part, "drop")

    @property
    def main_grad(self) -> Tree:
        """As params: `Borrowed` float32 sums since `zero_grads` where gradients are aliased, None elsewhere."""
        self._check_alive()
        params, aliased = self._entry.shaped.params, self._entry.aliased
        return params.unflatten([self.gradients.handle(i) if i in aliased else None for i in range(len(params))])

    def zero_grads(self) -> None:
        """Sets main_grad to zero, in place. Raises CallableError while microbatches wait for their backward."""
        with self.turn:
            self.check_idle()
            self.gradients.zero()

    def reset(self) -> None:
        """Frees its buffers and executables. Any later use raises CallableError; what the caller owns stays."""
        with self.turn.taken_over():
            if not self._is_reset:
                self.drop()
            self.gradients.end("freed by reset")
            for array in self.gradients.arrays.values():
                array.delete()
            self.gradients.arrays = {}
            self._entries.clear()
            self._entry = Entry(self._entry.shaped, {})
            self._is_reset = True

    def check_idle(self) -> None:
        """Raises CallableError while microbatches wait for their backward."""
        self._check_alive()
        if waiting := self.pending:
            raise CallableError(
                f"callable {self.index} has {len(waiting)} microbatches that wait for a backward part {_shown(waiting)}; "
                f"finish or drop() them before the next step; a forward without backward is evaluate"
            )

    def _check_alive(self) -> None:
        if self._is_reset:
            raise CallableError("this graphed callable was reset and holds nothing any more; build it again")

    def _run(self, entry: Entry, kind: str, arrays: Sequence[Any], number: int = -1) -> list[Any]:
        part = entry.parts[kind]
        places = part.updates
        sums = self.gradients.open() if places else {}
        new, outs = part.program.compiled([sums[i] for i in places], [], [arrays[i] for i in part.reads])
        if places:
            self.gradients.update(dict(zip(places, new, strict=True)), f"the {kind} of microbatch {number}")
        return outs

    def _run_backward(self, pending: _Pending, kind: str, rest: list[Any], dy: Tree) -> list[Any]:
        """Runs a backward part; what went wrong is looked for only when something did."""
        try:
            return self._run(pending.entry, kind, [*pending.params, *pending.residuals, *rest], pending.number)
        except OwnershipError:
            raise
        except (TypeError, ValueError, RuntimeError) as e:
            part = pending.entry.shaped
            read = (*pending.params, *pending.residuals, *rest)
            self._check_concrete(read)
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

    def _check_concrete(self, *leaves: Sequence[Any]) -> None:
        check_concrete(f"callable {self.index}", leaves)

    def _next(self, waiting: dict[int, _Pending], what: str, before: str, microbatch: int | None) -> _Pending:
        """The microbatch that a backward part belongs to."""
        self._check_alive()
        if len(self._entry.parts) == 1:
            raise CallableError(f"callable {self.index} was built with training=False and has no backward")
        if microbatch is not None:
            if microbatch not in waiting:
                raise self._not_waiting(what, tuple(waiting), microbatch)
            return waiting[microbatch]
        if not waiting:
            raise CallableError(f"callable {self.index}: {what} has no {before} to belong to; call {before} first")
        if before == "forward" and len(waiting) > self._most_waiting:
            raise CallableError(
                f"callable {self.index}: {len(waiting)} microbatches wait for their {what} {_shown(waiting)}, and the order "
                f"has at most {self._most_waiting} at once (without one 1): say with microbatch= which one this is, drop() "
                f"those that get none, or build with the order that is called; a forward without backward is evaluate"
            )
        return next(iter(waiting.values()))

    def _not_waiting(self, what: str, waiting: Sequence[int], microbatch: Any) -> CallableError:
        return CallableError(
            f"callable {self.index}: microbatch {microbatch!r} does not wait for {what}; waiting: "
            f"{', '.join(map(str, waiting)) or 'none'}"
        )

    def _end(self, waiting: dict[int, _Pending], pending: _Pending) -> None:
        del waiting[pending.number]
        self.turn.waiting -= 1

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
        return [leaf if isinstance(leaf, jax.Array) else jnp.array(leaf) for leaf in leaves], taken

    def _gradients(self, pending: _Pending, kind: str, outs: Sequence[Any]) -> Tree:
        """As params: new arrays, handles on main_grad, and None for integers."""
        entry = pending.entry
        new = entry.parts[kind].new if kind in entry.parts else ()
        params, aliased = entry.shaped.params, entry.aliased
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


def _shown(numbers: Iterable[int]) -> str:
    """Numbers of microbatches, for messages."""
    numbers = list(numbers)
    return f"({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"


def _mismatch_error(index: int, texts: Sequence[str]) -> CallableError:
    return CallableError(
        f"callable {index} is called with something else than it was built for: {'; '.join(texts)}; "
        f"pass what was built, or build with on_mismatch='recompile'",
        mismatches=tuple(texts),
    )
