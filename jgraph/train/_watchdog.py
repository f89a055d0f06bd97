"""Ends a run if its devices hang, with an error message of one line about the likely cause.

A thread that waits for a hung device in the runtime cannot be interrupted. Another thread therefore counts the time of every
wait. Compiling, reading data and writing files do not count.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeVar

import jax

from jgraph.peers import Loss
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from jgraph.xla.hlo import HloModule

T = TypeVar("T")

_TICKS = 20  # at least this many ticks per time limit


class Wait(NamedTuple):
    """A wait for the devices."""

    # Names the program for the error message, such as "step 12". Called only if the wait takes too long.
    about: Callable[[], str]
    # The compiled program, with a method `as_text()`; None if it is unknown.
    program: Any


class Watchdog:
    """Calls `hung` once from another thread if one wait for the devices takes longer than `seconds` (0: never).

    That wait may never end, so `hung` should end the process. Only waits marked by `over` and `wait` are watched.
    """

    def __init__(self, seconds: float, hung: Callable[[Wait], object]):
        self._seconds = seconds
        self._hung = hung
        self._wait: Wait | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def over(self, about: Callable[[], str], program: Any = None) -> Iterator[None]:
        """Watches a `with` block that dispatches a program or waits for one. Blocks must not be nested."""
        self._wait = Wait(about, program)
        try:
            yield
        finally:
            self._wait = None

    def wait(self, about: Callable[[], str], arrays: T, program: Any = None) -> T:
        """Waits for arrays one by one, each with the whole time limit, and returns them."""
        for leaf in jax.tree.leaves(arrays):
            with self.over(about, program):
                jax.block_until_ready(leaf)
        return arrays

    def _watch(self) -> None:
        tick = min(1.0, self._seconds / _TICKS)
        seen = None
        ticks = 0
        # Counts ticks instead of reading a clock, because a process that was suspended has not waited meanwhile.
        while not self._ended.wait(tick):
            wait = self._wait
            seen, ticks = wait, ticks + 1 if wait is not None and wait is seen else 0
            if seen is not None and ticks * tick >= self._seconds:
                self._hung(seen)
                return


def hang_message(wait: Wait, config: TrainConfig, run_dir: RunDir) -> str:
    """Returns one line about devices that hang: the unfinished program, its collectives, and how to resume."""
    suspects = ""
    captured = False
    with contextlib.suppress(Exception):  # the text of the program may be unavailable
        suspects, captured = _suspects(wait.program)
    process = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
    parts = [f"{process}{wait.about()} did not finish within {config.monitor.hang_seconds:g} s: the devices hang{suspects}"]
    parts.append(_how_to_resume(config, run_dir))
    if captured:
        parts.append("`graph` auto keeps collectives outside command buffers")
    return "; ".join([*parts, "if a program may take this long, raise `hang_seconds`"])


def loss_message(loss: Loss, process: int, done: int, config: TrainConfig, run_dir: RunDir) -> str:
    """Returns one line of `process` about another one that is gone: the steps done by this one, and how to resume."""
    how = {"failed": "ended with an error, which it prints", "lost": "is gone: it was killed, or its machine is lost"}[loss.how]
    when = f"the last step that finished here is {done} of {config.steps}" if done else "no step has finished since the start"
    return f"process {process}: process {loss.process} {how}; {when}; {_how_to_resume(config, run_dir)}"


def _how_to_resume(config: TrainConfig, run_dir: RunDir) -> str:
    again = f"run the same command again{'' if config.output.resume else ', without `resume` off,'}"
    if (saved := run_dir.last_checkpoint()) is None:
        return f"there is no complete checkpoint: {again} to start from the beginning"
    return f"{again} to resume from the last complete checkpoint, {run_dir.checkpoints / str(saved)}"


def _suspects(program: Any) -> tuple[str, bool]:
    """Describes the collectives of a compiled program. Also returns True if they are captured."""
    found = HloModule(program.as_text()).collectives if program else {}
    if not found:
        return "", False
    kinds = ", ".join(f"{count} {kind}{f' over {groups}' if groups else ''}" for (kind, groups), count in found.items())
    capture = getattr(program, "capture", None)
    location = "" if capture is None else f" {'in' if capture.holds_collectives else 'out'}side command buffers"
    return f", perhaps in one of its collectives{location}: {kinds}", capture is not None and capture.holds_collectives
