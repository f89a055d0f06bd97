"""A graphed callable: its forward, dgrad and wgrad as executables made beforehand, called one by one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.callables.borrowed import check_no_handles
from jgraph.callables.entry import Entry
from jgraph.callables.main_grad import MainGrad
from jgraph.callables.match import call_differences, check_concrete, differences, mismatch
from jgraph.callables.microbatches import Microbatch, Turn, Waiting
from jgraph.errors import CallableError, OwnershipError

Tree = Any


class Graphed:
    """Runs forward, dgrad and wgrad of one callable, as CUDA graphs. Made by `make_graphed_callables`.

    A forward keeps what its backward reads; `evaluate` keeps nothing. Microbatches are numbered by their forwards, from 0. A
    backward part belongs to the oldest that waits for it, or to the one that `microbatch` names. It must name one where more
    wait than the order ever has at once (without an order: one), since then a forward never got its backward.

    One thread at a time calls it, from a forward to its last backward part.

    Attributes:
        entry: the executables that were built.
    """

    def __init__(self, entry: Entry, most_waiting: int, delayed: bool, check_mode: Callable[[], None]):
        self._delayed, self._check_mode = delayed, check_mode
        self.entry, self.index = entry, entry.shaped.index
        self.turn = Turn(f"callable {self.index}")
        self._waiting, self._is_reset = Waiting(self.index, most_waiting, self.turn), False
        self.gradients = MainGrad(self.entry)

    def __repr__(self) -> str:
        if self._is_reset:
            return f"Graphed({self.index}: reset)"
        shaped = self.entry.shaped
        x, y = (", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in side.avals) for side in (shaped.x, shaped.y))
        waiting = f"; microbatches that wait: {', '.join(map(str, self.pending))}" if self.pending else ""
        return f"Graphed({self.index}: {', '.join(self.entry.parts)}; {x} -> {y}{waiting})"

    def __call__(self, params: Tree, x: Tree, *extra: Tree, **kwargs: Tree) -> Tree:
        """Runs forward and keeps the arrays that the backward needs.

        Args:
            params, x, extra, kwargs: shapes and dtypes as those of the samples; never donated.

        Returns:
            y, a new array.

        Raises:
            CallableError: an argument is not as it was built (one message lists every difference); or the module is in
                another mode; or the callable was reset.
            OwnershipError: an argument is a `Borrowed` on main_grad.
        """
        self._check_alive()
        if len(self.entry.parts) == 1:
            return self.evaluate(params, x, *extra, **kwargs)
        with self.turn:
            shaped = self.entry.shaped
            weights, inputs, outs = self._forward(params, x, extra, kwargs)
            y = outs[: len(shaped.y)]
            new = iter(outs[len(y) :])
            residuals = [next(new) if source is None else inputs[source] for source in shaped.residuals_from]
            self._waiting.add(weights, residuals)
            return shaped.y.unflatten(y)

    def evaluate(self, params: Tree, x: Tree, *extra: Tree, **kwargs: Tree) -> Tree:
        """Runs forward and keeps nothing: no backward belongs to it. Any thread may call it at any time.

        Runs the executable of the call, dropout included. Arguments and errors are those of the call.
        """
        self._check_alive()
        y = self.entry.shaped.y
        return y.unflatten(self._forward(params, x, extra, kwargs)[-1][: len(y)])

    def backward(self, dy: Tree, *, microbatch: int | None = None) -> tuple[Tree, Tree]:
        """Runs the whole backward of a microbatch.

        Args:
            dy: gradient of y, a tree as y.
            microbatch: number of the microbatch; None for the oldest that has no backward.

        Returns:
            (grads, dx): grads is a tree as params, each leaf your array or a `Borrowed` on main_grad, None for integers; dx is
            a tree as x.

        Raises:
            CallableError: no forward waits for its backward; more wait than there should, and `microbatch` names none; dy is
                not as y; it was built with `training=False`; another thread's microbatches wait.
        """
        with self.turn:
            self._check_trains()
            after_dgrad = self._waiting.after["dgrad"]
            if self._delayed and after_dgrad and microbatch is None:
                raise CallableError(
                    f"callable {self.index}: {len(after_dgrad)} microbatches wait for their wgrad, and they go first in, "
                    f"first out; call wgrad for them, or dgrad for this one"
                )
            pending = self._waiting.next("backward", "forward", microbatch)
            if self._delayed:
                dx = self._dgrad(pending, dy)
                return self._wgrad(pending), dx
            outs = self._run_backward(pending, "backward", self._dy(dy), dy)
            return self._finish(pending, "backward", outs), self._dx(outs)

    def dgrad(self, dy: Tree, *, microbatch: int | None = None) -> Tree:
        """Returns dx of a microbatch, whose wgrad then waits. Needs `delay_wgrad`. Arguments and errors as of `backward`."""
        with self.turn:
            self._check_trains()
            if not self._delayed:
                raise CallableError(
                    f"callable {self.index} was built with delay_wgrad=False; call backward, or build it with delay_wgrad=True"
                )
            return self._dgrad(self._waiting.next("dgrad", "forward", microbatch), dy)

    def wgrad(self, *, microbatch: int | None = None) -> Tree:
        """Returns the gradients of a microbatch, as `backward` does; `microbatch` None is the oldest whose wgrad waits."""
        with self.turn:
            self._check_trains()
            return self._wgrad(self._waiting.next("wgrad", "dgrad", microbatch))

    @property
    def pending(self) -> tuple[int, ...]:
        """Numbers of the microbatches that wait: first those that lack a wgrad, then those that lack a dgrad too, by age.

        After a forward, the last number is that of its microbatch.
        """
        return self._waiting.numbers

    def drop(self, microbatch: int | None = None) -> None:
        """Forgets a microbatch that waits and frees its buffers; None forgets all. Any thread may call it.

        Raises:
            CallableError: that microbatch does not wait; or another thread is in a call.
        """
        with self.turn.taken_over():
            self._check_alive()
            self._waiting.drop(microbatch)

    @property
    def main_grad(self) -> Tree:
        """The float32 sums of gradients since `zero_grads`, a tree as params: `Borrowed` if aliased, None elsewhere."""
        self._check_alive()
        return self.gradients.tree({})

    def zero_grads(self) -> None:
        """Sets main_grad to zero, in place. Raises CallableError while microbatches wait for their backward."""
        with self.turn:
            self.check_idle()
            self.gradients.zero()

    def reset(self) -> None:
        """Frees buffers and executables. Any later use raises CallableError; your arrays stay."""
        with self.turn.taken_over():
            if not self._is_reset:
                self._waiting.drop(None)
            self.gradients.free()
            self.entry, self._is_reset = Entry(self.entry.shaped, {}), True

    def check_idle(self) -> None:
        """Raises CallableError while microbatches wait for their backward."""
        self._check_alive()
        self._waiting.check_none()

    def _check_alive(self) -> None:
        if self._is_reset:
            raise CallableError("this graphed callable was reset and holds nothing any more; build it again")

    def _check_trains(self) -> None:
        self._check_alive()
        if len(self.entry.parts) == 1:
            raise CallableError(f"callable {self.index} was built with training=False and has no backward")

    def _forward(
        self, params: Tree, x: Tree, extra: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the leaves of params and of (x, extra), and the outputs of the executable."""
        self._check_mode()
        weights, params_tree = jax.tree.flatten(params)
        inputs, inputs_tree = jax.tree.flatten((x, (extra, kwargs)))
        # A numpy array could be written to before the backward reads it again.
        weights = [jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in weights]
        arrays = [leaf if isinstance(leaf, jax.Array) else jnp.array(leaf) for leaf in inputs]
        shaped, cause = self.entry.shaped, None
        if params_tree == shaped.params.tree and inputs_tree == shaped.inputs_tree:
            try:
                return weights, arrays, self._run("forward", [*weights, *arrays])
            except (TypeError, ValueError, RuntimeError) as e:
                cause = e
        else:
            check_no_handles((params, x, extra, kwargs))  # a handle is a pytree node, so the structure differs
        check_concrete(f"callable {self.index}", (weights, arrays))
        texts = call_differences(shaped, params, (x, *extra), kwargs)
        if cause and not texts:
            raise cause
        raise mismatch(shaped, texts) from cause

    def _dgrad(self, pending: Microbatch, dy: Tree) -> Tree:
        shaped = self.entry.shaped
        leaves = self._dy(dy)
        outs = self._run_backward(pending, "dgrad", leaves, dy)
        given, new = [*pending.residuals, *leaves], iter(outs[shaped.num_dx :])
        pending.stash = [next(new) if source is None else given[source] for source in shaped.stash_from]
        pending.early = dict(zip(self.entry.places("dgrad", "new"), new, strict=True))
        pending.residuals = pending.residuals[shaped.num_dgrad :]
        self._waiting.after_dgrad(pending)
        return self._dx(outs)

    def _wgrad(self, pending: Microbatch) -> Tree:
        # Where nothing is delayed there is nothing to run: dgrad gave every gradient.
        outs = self._run_backward(pending, "wgrad", pending.stash, None) if "wgrad" in self.entry.parts else []
        return self._finish(pending, "wgrad", outs)

    def _finish(self, pending: Microbatch, kind: str, outs: Sequence[Any]) -> Tree:
        """Forgets a microbatch; returns gradients as params: new arrays, handles on main_grad, and None for integers."""
        self._waiting.end(pending)
        new = self.entry.places(kind, "new")
        return self.gradients.tree(pending.early | dict(zip(new, outs[len(outs) - len(new) :], strict=True)))

    def _dx(self, outs: Sequence[Any]) -> Tree:
        shaped = self.entry.shaped
        return shaped.x.unflatten(outs[: shaped.num_dx]) if shaped.takes_gradient else None

    def _run(self, kind: str, arrays: Sequence[Any], number: int = -1) -> list[Any]:
        executable, places = self.entry.parts[kind], self.entry.places(kind, "add")
        sums = self.gradients.open() if places else {}
        new, outs = executable.compiled([sums[i] for i in places], [], [arrays[i] for i in executable.io.read])
        if places:
            self.gradients.update(dict(zip(places, new, strict=True)), f"the {kind} of microbatch {number}")
        return outs

    def _run_backward(self, pending: Microbatch, kind: str, rest: list[Any], dy: Tree) -> list[Any]:
        """Runs a backward part; looks for the cause only if something went wrong."""
        read = [*pending.params, *pending.residuals, *rest]
        try:
            return self._run(kind, read, pending.number)
        except OwnershipError:
            raise
        except (TypeError, ValueError, RuntimeError) as e:
            shaped = self.entry.shaped
            check_concrete(f"callable {self.index}", read)
            if shared := [i for i, total in self.gradients.arrays.items() if any(array is total for array in read)]:
                raise OwnershipError(
                    f"callable {self.index}: {kind} updates main_grad, {shaped.params.paths[shared[0]]!r}, in place, and reads "
                    f"the same array, which was given as params, x, dy or an extra argument; pass a copy of it",
                    owner=f"main_grad of callable {self.index}",
                ) from e
            if gone := sum(array.is_deleted() for array in (*pending.residuals, *pending.stash)):
                raise OwnershipError(
                    f"callable {self.index}: {kind} needs {gone} arrays of this microbatch that were donated or deleted since, "
                    f"the caller's x, dy or extra arguments; keep them until then",
                    owner="the caller",
                ) from e
            texts = [] if dy is None else differences(shaped.y, dy, "dy", shaped.device)
            texts += differences(shaped.params, shaped.params.unflatten(pending.params), "params", shaped.device)
            if not texts:
                raise
            raise mismatch(shaped, texts) from e

    def _dy(self, dy: Tree) -> list[Any]:
        """Returns the leaves of dy. Raises CallableError if its structure is not that of y."""
        shaped = self.entry.shaped
        leaves, tree = jax.tree.flatten(dy)
        if tree != shaped.y.tree:
            check_no_handles(dy)  # a handle is a pytree node, so the structure differs
            raise mismatch(shaped, differences(shaped.y, dy, "dy", shaped.device))
        return [leaf if isinstance(leaf, jax.Array) else jnp.array(leaf) for leaf in leaves]
