"""The training loop: dispatches steps without waiting for them, and calls callbacks between steps."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jgraph.data import Ahead
from jgraph.processes import all_gather_scalar
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train._capacity import Halt, Numbered, happened, is_halted
from jgraph.train._signals import StopRequest
from jgraph.train._watchdog import Watchdog
from jgraph.train.metrics import StepClock
from jgraph.train.setup import TrainSetup

# Steps dispatched before the oldest one is waited for: enough to hide the host, few enough to stop soon.
_RUN_AHEAD = 4


class Callback:
    """Acts between the steps of a `Loop`, counted from 1. Every process calls the same methods at the same steps."""

    def instead(self, done: int, state: TrainState) -> tuple[TrainState, list[StepMetrics]] | None:
        """Runs steps in place of the loop, or returns None. Returns the state after them and their metrics in order.

        Only allowed while no step is in flight: before the first step, and if `due(done)` was True. The state is donated.
        """
        return None

    def finished(self, steps: Sequence[Numbered]) -> None:
        """Receives every finished step once and in order, also steps of `instead`, without halted steps. May raise."""

    def due(self, done: int) -> bool:
        """Returns True if the loop must wait for step `done` and then call `after`. A halt prevents that call."""
        return False

    def after(self, done: int, state: TrainState, metrics: StepMetrics | None) -> None:
        """Acts when step `done` has finished and no other is running. The next step donates `state`.

        `metrics` is None if a callback ran the step.
        """

    def recompiled(self, setup: TrainSetup, step: CompiledStep, done: int) -> None:
        """Receives a step that the loop compiled after `done` steps, before its first use. `setup` has its expert capacity."""

    def ended(self, done: int, state: TrainState) -> None:
        """Acts once after the last step or a stop signal, but not after an exception. Must not donate `state`."""


@dataclass
class Loop:
    """Runs steps until `config.steps` of the setup or a stop signal, at most four steps ahead of the devices."""

    setup: TrainSetup
    # None after a halt, until it is compiled
    step: CompiledStep | None
    compile: Callable[[TrainSetup], CompiledStep]
    grow: Callable[[Halt], TrainSetup]
    # rows of this process [B, ...] of every step, indexed from 0
    batches: Ahead
    callbacks: Sequence[Callback]
    stops: Callable[[int], bool]
    clock: StepClock
    watchdog: Watchdog
    # dispatched steps that the callbacks have not received yet
    pending: list[Numbered] = field(default_factory=list)

    def run(self, done: int, state: TrainState) -> tuple[int, TrainState]:
        """Runs the steps after `done`, calls the callbacks, and waits for the last step. Repeats halted steps.

        Returns the number of finished steps and the state after them.
        """
        place = self.setup.step.place
        steps = self.setup.config.steps
        while done < steps and not self.stops(done):
            step = self.step or self._compile(done)
            if (ran := self._instead(done, state)) is not None:
                done, state = ran
                continue
            self.clock.start()
            batch = self.batches[done]
            with self.watchdog.over(partial(self._unfinished, done + 1), step):
                state, metrics = step(state, place(batch))
            done += 1
            self.pending.append((done, metrics))
            due = [callback for callback in self.callbacks if callback.due(done)]
            if self._has_halted() or due:
                done, state = self._settle(done, state, due)
        if self.pending:
            done, state = self._settle(done, state, ())
        for callback in self.callbacks:
            callback.ended(done, state)
        return done, state

    def _has_halted(self) -> bool:
        """Waits for the step before the last `_RUN_AHEAD` ones, so that no more are in flight. True if it halted."""
        if len(self.pending) <= _RUN_AHEAD:
            return False
        oldest = self.pending[-1 - _RUN_AHEAD]
        self._wait([oldest])
        return is_halted(oldest[1])

    def _settle(self, done: int, state: TrainState, due: Sequence[Callback]) -> tuple[int, TrainState]:
        """Waits for all dispatched steps, stops the clock and calls the callbacks. Handles a halt instead of `due`."""
        self._wait(self.pending)
        fetched: list[Numbered] = jax.device_get(self.pending)
        self.pending.clear()
        steps, halt = happened(fetched)
        self.clock.stop(len(steps), of=len(fetched))
        self._finish(steps)
        if halt:
            return self._halted(halt, state)
        for callback in due:
            callback.after(done, state, fetched[-1][1])
        return done, state

    def _instead(self, done: int, state: TrainState) -> tuple[int, TrainState] | None:
        """Lets a callback run the next steps. Returns the steps done and the state after them, or None if no callback did."""
        for callback in self.callbacks:
            if (ran := callback.instead(done, state)) is not None:
                state, metrics = ran
                steps, halt = happened(list(enumerate(jax.device_get(metrics), done + 1)))
                self._finish(steps)
                done += len(steps)
                if halt:
                    done, state = self._halted(halt, state)
                for other in self.callbacks:
                    if other.due(done):
                        other.after(done, state, None)
                return done, state
        return None

    def _finish(self, steps: Sequence[Numbered]) -> None:
        for callback in self.callbacks:
            callback.finished(steps)

    def _halted(self, halt: Halt, state: TrainState) -> tuple[int, TrainState]:
        """Increases the expert capacity. Returns the steps done before the halt, and the state to continue from."""
        self.setup = self.grow(halt)
        self.step = None
        return halt.number - 1, self.setup.step.resumed(state)

    def _compile(self, done: int) -> CompiledStep:
        self.step = self.compile(self.setup)
        for callback in self.callbacks:
            callback.recompiled(self.setup, self.step, done)
        return self.step

    def _wait(self, steps: list[Numbered]) -> None:
        losses = [metrics.loss for _, metrics in steps]
        self.watchdog.wait(partial(self._unfinished, self.pending[-1][0]), losses, self.step)

    def _unfinished(self, last: int) -> str:
        """Names the dispatched steps up to `last` that have not finished."""
        losses: list[tuple[int, Any]] = [(number, metrics.loss) for number, metrics in self.pending]
        first = min([number for number, loss in losses if not loss.is_ready()], default=last)
        return f"step {last}" if first == last else f"steps {first} to {last}"


def agreed_stop(stop: StopRequest, watchdog: Watchdog, every: int) -> Callable[[int], bool]:
    """Returns a function of the steps done that is True on all processes if one of them got a stop signal.

    Several processes exchange their signals only at multiples of `every`, where the loop waits for the devices anyway.
    """

    def stops(done: int) -> bool:
        if jax.process_count() > 1 and done % every:
            return False
        with watchdog.over(lambda: f"the exchange of stop signals after step {done}"):
            number = max(all_gather_scalar(signal.Signals[stop.name] if stop.name else 0))
        if number:
            stop.name = signal.Signals(number).name
        # `stop.name` may have been set by this process since the all-gather.
        return bool(number)

    return stops
