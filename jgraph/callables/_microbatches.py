"""Tracks microbatches from forward to their last backward call, and the thread that owns them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from threading import RLock, get_ident
from typing import Any, Literal

from jax import Array

from jgraph.errors import CallableError

_ADVICE = "build callables for each thread, or call evaluate, which keeps no arrays"


@dataclass(eq=False, slots=True)
class Microbatch:
    """A microbatch that waits for a backward call, and the arrays for that call. They are not copied."""

    number: int  # of its forward, from 0
    params: Sequence[Array]  # leaves of the parameters that its forward was called with
    residuals: Sequence[Array]  # arrays that forward keeps: both pools before dgrad, the pool forward_wgrad after it
    stash: Sequence[Array] = ()  # arrays that dgrad keeps for wgrad
    early: Sequence[Array] = ()  # gradients that dgrad returned as new arrays


class Waiting:
    """The microbatches of a callable that wait for a backward call, by number, oldest first. Also a lock for one thread.

    Entering raises CallableError instead of waiting if another thread holds the lock, or microbatches of another thread wait.
    """

    def __init__(self, name: str, most: int):
        self._name = name
        self._most = most  # maximum number of microbatches that wait for their dgrad at once in the order
        self._count = 0
        self._lock = RLock()
        self._thread = 0
        # Waiting microbatches by their last action, then by number.
        self.after: dict[Literal["dgrad", "forward"], dict[int, Microbatch]] = {"dgrad": {}, "forward": {}}

    def __enter__(self) -> None:
        self._acquire()
        if self._thread != get_ident():
            if waiting := self.numbers:
                self._lock.release()
                wrong = f"{self._name} is called while {len(waiting)} microbatches of another thread wait for their backward"
                raise CallableError(f"{wrong}; finish or drop() them, or {_ADVICE}")
            self._thread = get_ident()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Holds the lock also while microbatches of another thread wait, so that any thread can end them."""
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        # Raise instead of waiting for the other thread, because then the order of microbatches would depend on timing.
        if not self._lock.acquire(False):
            raise CallableError(f"{self._name} is in use by another thread; {_ADVICE}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all waiting microbatches: first the microbatches after dgrad, then the others, each oldest first."""
        return tuple(number for waiting in self.after.values() for number in waiting)

    def add(self, params: Sequence[Array], residuals: Sequence[Array]) -> None:
        """Adds a microbatch after its forward, with the next number. Call it while holding the lock."""
        self.after["forward"][self._count] = Microbatch(self._count, params, residuals)
        self._count += 1

    def next(self, part: str, before: Literal["forward", "dgrad"], number: int | None) -> Microbatch:
        """Selects a microbatch (None: the oldest) with the last action `before` for the call `part`. Does not remove it."""
        waiting = self.after[before]
        if number is not None:
            self._check_waits(part, tuple(waiting), number)
            return waiting[number]
        if not waiting:
            raise CallableError(f"{self._name}: {part} has no preceding {before}; call {before} first")
        if before == "forward" and len(waiting) > self._most:
            raise CallableError(
                f"{self._name}: {len(waiting)} microbatches wait for their {part} {_shown(waiting)}, but at most {self._most} "
                f"wait at once in the order (1 without an order): pass `microbatch`, drop() microbatches without a backward, "
                f"or build with the order of these calls; for a forward without a backward, call evaluate",
                field="microbatch",
            )
        return next(iter(waiting.values()))

    def after_dgrad(self, microbatch: Microbatch) -> None:
        """Records that the dgrad of a microbatch ran: moves it from `after["forward"]` to `after["dgrad"]`."""
        self.after["dgrad"][microbatch.number] = self.after["forward"].pop(microbatch.number)

    def end(self, microbatch: Microbatch) -> None:
        """Removes a waiting microbatch, and so drops the references to its arrays."""
        del self.after["dgrad" if microbatch.number in self.after["dgrad"] else "forward"][microbatch.number]

    def drop(self, number: int | None) -> None:
        """Removes a waiting microbatch, or all for None, and so drops their arrays. Call it under `taken_over`."""
        if number is not None:
            self._check_waits("drop", self.numbers, number)
        for microbatch in [m for waiting in self.after.values() for m in waiting.values() if number in (None, m.number)]:
            self.end(microbatch)

    def check_none(self) -> None:
        """Raises CallableError if microbatches wait for a backward call."""
        if waiting := self.numbers:
            wrong = f"{self._name} has {len(waiting)} microbatches that wait for a backward part {_shown(waiting)}"
            advice = "finish or drop() them before the next step; for a forward without a backward, call evaluate"
            raise CallableError(f"{wrong}; {advice}")

    def _check_waits(self, part: str, waiting: Sequence[int], number: int) -> None:
        if number not in waiting:
            wrong = f"microbatch {number!r} does not wait for {part}; waiting: {', '.join(map(str, waiting)) or 'none'}"
            raise CallableError(f"{self._name}: {wrong}", field="microbatch")


def _shown(numbers: Collection[int]) -> str:
    return f"({', '.join(map(str, islice(numbers, 8)))}{', ...' if len(numbers) > 8 else ''})"
