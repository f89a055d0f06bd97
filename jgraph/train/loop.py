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
from jgraph.train.capacity import Halt, Numbered, happened, is_halted
from jgraph.train.metrics import StepClock
from jgraph.train.setup import TrainSetup
from jgraph.train.signals import StopRequest
from jgraph.train.watchdog import Watchdog

# Steps dispatched before the oldest one is waited for: enough to hide the host, few enough to stop soon.
_RUN_AHEAD = 4


class Callback:
    """Acts between the steps of a `Loop`. The methods of this base class do nothing, so a subclass overrides some of them.

    Steps are counted from 1, and "done" is the number of finished or dispatched steps. In a distributed run, every process
    calls the same methods at the same steps.
    """

    def instead(self, done: int, state: TrainState) -> tuple[TrainState, list[StepMetrics]] | None:
        """Runs one or more steps in place of the loop. Called before every step that the loop would run.

        The loop's clock does not measure these steps. This method may run steps only while no dispatched step is unfinished.
        That is certain before the first step of the loop, and if `due(done)` of this callback returned True, because the loop
        has then waited for step `done`.

        Args:
            done: Number of steps dispatched so far.
            state: The state after these steps. Donated if this method runs steps.

        Returns:
            None to let the loop run the next step. Otherwise the state after the steps that this method ran, and the metrics of
            each of these steps in order.
        """
        return None

    def finished(self, steps: Sequence[Numbered]) -> None:
        """Receives the metrics of finished steps. Called whenever the loop has waited for its dispatched steps, before `after`.

        Over all calls, receives every step once and in order, also steps that a callback ran (`instead`). Halted steps, which
        changed nothing because an expert buffer was too small, are left out. May raise an exception to end the run.

        Args:
            steps: Pairs of the number of a step, from 1, and its metrics as numpy values. May be empty.
        """

    def due(self, done: int) -> bool:
        """Returns True if the loop must wait for step `done` and then call `after`. Called once a step is dispatched.

        Also called after steps that a callback ran (`instead`). If one of the steps halted, `after` is not called.

        Args:
            done: Number of steps dispatched so far.
        """
        return False

    def after(self, done: int, state: TrainState, metrics: StepMetrics | None) -> None:
        """Acts after step `done`. Called if `due(done)` was True, when step `done` has finished and no other step is running.

        Args:
            done: Number of finished steps.
            state: The state after these steps. This method must not donate `state`. The next step donates `state`, so a
                reference that is kept after the call is invalid.
            metrics: The metrics of step `done` as numpy values; None if a callback ran that step (`instead`).
        """

    def recompiled(self, setup: TrainSetup, step: CompiledStep, done: int) -> None:
        """Receives a step that the loop compiled, before its first use.

        Called after a step halted because an expert buffer was too small: the new step has larger buffers. Also called before
        the first step if the loop was given no compiled step.

        Args:
            setup: The setup of the compiled step. After a halt, its expert capacity is larger.
            step: The compiled step.
            done: Number of finished steps.
        """

    def ended(self, done: int, state: TrainState) -> None:
        """Acts at the end of the loop. Called once, when all steps have finished, after the last step or a stop signal.

        Not called if the loop ends with an exception.

        Args:
            done: Number of finished steps.
            state: The state after these steps. This method must not donate `state`.
        """


@dataclass
class Loop:
    """Runs steps until `config.steps` of the setup or a stop signal, at most four steps ahead of the devices.

    Attributes:
        setup: The setup of `step`. Replaced after a halt: a step that changed nothing, because an expert buffer was too small.
        step: The compiled step; None if it must be compiled before the next step. Set to None after a halt.
        compile: Takes a setup. Compiles and returns its step.
        grow: Takes a `Halt`, the first halted step and the number of rows it needs. Returns a setup with more expert capacity.
        batches: The batch of every step as numpy arrays [B, ...], indexed from 0. B is the number of rows of this process.
        callbacks: Called in this order.
        stops: Takes the number of dispatched steps. Returns True if the loop must stop before the next step.
        clock: Measures the time of the steps.
        watchdog: Watches every wait for the devices.
        pending: Number (from 1) and metrics of each dispatched step that the callbacks have not received yet.
    """

    setup: TrainSetup
    step: CompiledStep | None
    compile: Callable[[TrainSetup], CompiledStep]
    grow: Callable[[Halt], TrainSetup]
    batches: Ahead
    callbacks: Sequence[Callback]
    stops: Callable[[int], bool]
    clock: StepClock
    watchdog: Watchdog
    pending: list[Numbered] = field(default_factory=list)

    def run(self, done: int, state: TrainState) -> tuple[int, TrainState]:
        """Runs the steps after `done`, calls the callbacks, and waits for the last step.

        If a step halts because an expert buffer was too small, compiles a step with larger buffers and repeats the halted
        steps.

        Args:
            done: Number of steps already finished.
            state: The state after these steps. Donated if a step runs.

        Returns:
            The number of finished steps, including the first `done`, and the state after these steps. The number is less than
            `config.steps` if a stop signal ended the loop.
        """
        place, steps = self.setup.step.place, self.setup.config.steps
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
        self.setup, self.step = self.grow(halt), None
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
    """Returns a function that reports a stop signal of any process to all processes, at the same step.

    A single process checks its own signal at every step. Several processes exchange their signals only if the number of
    dispatched steps is a multiple of `every`.

    Args:
        stop: The signal of this process. If another process has received a signal, its name is written to `stop.name`.
        watchdog: Watches the wait for the other processes.
        every: Number of steps between exchanges of stop signals in a run of several processes, for example `log_every`: the
            loop then waits for the devices at these steps anyway.

    Returns:
        A function from the number of dispatched steps to a bool: True if any process has received SIGTERM or SIGINT. With
        several processes, False at steps without an exchange. Collective: every process must call it with the same numbers.
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
