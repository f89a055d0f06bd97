"""Tracks microbatches from forward to their last backward call, and the thread that owns them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from threading import RLock, get_ident
from typing import Any, Literal

from jgraph.errors import CallableError

_ADVICE = "build callables for each thread, or call evaluate, which keeps nothing"


@dataclass(eq=False, slots=True)
class Microbatch:
    """A microbatch that waits for a backward call, and the arrays that it needs.

    Attributes:
        number: The number of its forward, from 0.
        params, residuals, stash: Leaves. The residuals are those of both pools until dgrad, and those of forward_wgrad after.
        early: New gradients that dgrad returned.
    """

    number: int
    params: Sequence[Any]
    residuals: Sequence[Any]
    stash: Sequence[Any] = ()
    early: Sequence[Any] = ()


class Waiting:
    """The microbatches of a callable that wait for a backward call, by number, oldest first.

    Also a lock for one thread at a time, which keeps out other threads while microbatches of its last owner wait.

    Attributes:
        after: Waiting microbatches by the part that ran last.
    """

    def __init__(self, name: str, most: int):
        """`most` is the number of microbatches that wait for their dgrad at once, by the order."""
        self._name, self._most, self._count = name, most, 0
        self._lock, self._thread = RLock(), 0
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

    def _acquire(self) -> None:
        # Waiting for the other thread would make the order of microbatches depend on timing.
        if not self._lock.acquire(False):
            raise CallableError(f"{self._name} is in use by another thread; {_ADVICE}")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the microbatches, those after a dgrad first."""
        return tuple(number for waiting in self.after.values() for number in waiting)

    def add(self, params: Sequence[Any], residuals: Sequence[Any]) -> None:
        """Numbers a microbatch after its forward."""
        self.after["forward"][self._count] = Microbatch(self._count, params, residuals)
        self._count += 1

    def next(self, part: str, before: Literal["forward", "dgrad"], number: int | None) -> Microbatch:
        """Returns the microbatch of a backward call: the one of this number, or the oldest one after the part `before`."""
        waiting = self.after[before]
        if number is not None:
            self._check_waits(part, tuple(waiting), number)
            return waiting[number]
        if not waiting:
            raise CallableError(f"{self._name}: {part} has no {before} to belong to; call {before} first")
        if before == "forward" and len(waiting) > self._most:
            raise CallableError(
                f"{self._name}: {len(waiting)} microbatches wait for their {part} {_shown(waiting)}, and the order has at most "
                f"{self._most} at once (without one 1): pass `microbatch`, drop() microbatches without a backward, or build "
                f"with the order that is called; for a forward without a backward, call evaluate",
                field="microbatch",
            )
        return next(iter(waiting.values()))

    def after_dgrad(self, microbatch: Microbatch) -> None:
        """Records that the dgrad of a microbatch ran."""
        self.after["dgrad"][microbatch.number] = self.after["forward"].pop(microbatch.number)

    def end(self, microbatch: Microbatch) -> None:
        """Removes a microbatch."""
        del self.after["dgrad" if microbatch.number in self.after["dgrad"] else "forward"][microbatch.number]

    def drop(self, number: int | None) -> None:
        """Removes a microbatch, or all of them if `number` is None. Any thread may call it while no other is in a call."""
        self._acquire()
        try:
            if number is not None:
                self._check_waits("drop", self.numbers, number)
            for microbatch in [m for waiting in self.after.values() for m in waiting.values() if number in (None, m.number)]:
                self.end(microbatch)
        finally:
            self._lock.release()

    def check_none(self) -> None:
        """Raises CallableError while microbatches wait for their backward."""
        if waiting := self.numbers:
            wrong = f"{self._name} has {len(waiting)} microbatches that wait for a backward part {_shown(waiting)}"
            advice = "finish or drop() them before the next step; for a forward without a backward, call evaluate"
            raise CallableError(f"{wrong}; {advice}")

    def _check_waits(self, part: str, waiting: Sequence[int], number: Any) -> None:
        if number not in waiting:
            wrong = f"microbatch {number!r} does not wait for {part}; waiting: {', '.join(map(str, waiting)) or 'none'}"
            raise CallableError(f"{self._name}: {wrong}", field="microbatch")


def _shown(numbers: Collection[int]) -> str:
    return f"({', '.join(map(str, islice(numbers, 8)))}{', ...' if len(numbers) > 8 else ''})"
