"""Whose turn it is: callables are one thread's from a forward to its last backward part, and another's after that."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

from jgraph.errors import CallableError


class Turn:
    """Lets one thread at a time in, and no other while microbatches of the last one wait. Enter it with `with`.

    Attributes:
        waiting: microbatches between their forward and their last backward part.
    """

    def __init__(self, name: str):
        self._name, self._lock, self._thread = name, RLock(), 0
        self.waiting = 0

    def __enter__(self) -> None:
        self._acquire()
        me = get_ident()
        if me != self._thread:
            if self.waiting:
                self._lock.release()
                raise CallableError(
                    f"{self._name} is called from another thread than the one whose {self.waiting} microbatches wait for their "
                    f"backward; finish or drop() those, or {_ADVICE}"
                )
            self._thread = me

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Lets in a thread that only ends what waits, whichever thread's it is."""
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        # Waiting for the other thread would only make the order of microbatches a matter of luck.
        if not self._lock.acquire(False):
            raise CallableError(f"{self._name} is in use by another thread; {_ADVICE}")


_ADVICE = "build callables for each thread, or call evaluate, which keeps nothing"
