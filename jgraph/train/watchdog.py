"""A watch over the devices: who waits for them too long is told of, in one line with what may be stuck.

A hung device answers nothing, and a thread that waits for it in the runtime cannot be woken. So a thread of ours counts while
the run waits, and only then: compiling, reading data and writing files are no waits for a device.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeVar

import jax

from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from jgraph.xla.hlo import HloModule

T = TypeVar("T")

_TICKS = 20  # of which a limit is made, at least


class Wait(NamedTuple):
    """What is waited for: `told` says it when asked, e.g. `step 12`; `program` is the compiled program, if it is known."""

    told: Callable[[], str]
    program: Any


class Watchdog:
    """Calls `hung` from a thread of its own where one wait for the devices lasts `seconds`. A context manager.

    A new wait counts from nothing: as long as programs finish, one after the other, the devices do not hang.

    Args:
        seconds: the limit; 0 for none.
        hung: is given the wait, once; nothing that is waited for may be expected to come back.
    """

    def __init__(self, seconds: float, hung: Callable[[Wait], object]):
        self._seconds, self._hung = seconds, hung
        self._wait: Wait | None = None
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()

    @contextlib.contextmanager
    def over(self, told: Callable[[], str], program: Any = None) -> Iterator[None]:
        """Watches over its block, which hands a program to the devices or waits for one."""
        self._wait = Wait(told, program)
        try:
            yield
        finally:
            self._wait = None

    def wait(self, told: Callable[[], str], arrays: T, program: Any = None) -> T:
        """Waits for arrays one by one, so that each that is there is progress, and returns them."""
        for leaf in jax.tree.leaves(arrays):
            with self.over(told, program):
                jax.block_until_ready(leaf)
        return arrays

    def _watch(self) -> None:
        tick, seen, ticks = min(1.0, self._seconds / _TICKS), None, 0
        # Ticks are counted and no clock is read: a process that was stopped, suspended or starved has not waited meanwhile.
        while not self._ended.wait(tick):
            wait = self._wait
            seen, ticks = wait, ticks + 1 if wait is not None and wait is seen else 0
            if seen is not None and ticks * tick >= self._seconds:
                self._hung(seen)
                return


def hang_message(wait: Wait, config: TrainConfig, run_dir: RunDir) -> str:
    """Says in a line what was not done in time, where it may be stuck, what is saved and what to do next."""
    suspects, captured = "", False
    with contextlib.suppress(Exception):  # a text that cannot be had
        suspects, captured = _suspects(wait.program)
    who = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
    parts = [f"{who}{wait.told()}: handed over and not done after {config.hang_seconds:g} s, so the devices hang{suspects}"]
    again = f"the same command{'' if config.resume else ', without `resume` off,'}"
    if (saved := run_dir.last_checkpoint()) is None:
        parts.append(f"there is no whole checkpoint: {again} starts from the beginning")
    else:
        parts.append(f"the last whole checkpoint is {run_dir.checkpoints / str(saved)}: {again} goes on from there")
    if captured:
        parts.append("`graph` auto leaves collectives outside command buffers")
    return "; ".join([*parts, "if it may take that long, give more `hang_seconds`"])


def _suspects(program: Any) -> tuple[str, bool]:
    """Returns words on a compiled program's collectives, empty where it has none, and whether command buffers hold them."""
    found = HloModule(program.as_text()).collectives if program else {}
    if not found:
        return "", False
    kinds = ", ".join(f"{count} {kind}{f' over {groups}' if groups else ''}" for (kind, groups), count in found.items())
    capture = getattr(program, "capture", None)
    where = "" if capture is None else f" {'in' if capture.holds_collectives else 'out'}side command buffers"
    return f", perhaps in one of its collectives{where}: {kinds}", capture is not None and capture.holds_collectives
