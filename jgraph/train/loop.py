"""The loop: steps handed to the device without waiting for them, and everything that happens between two of them."""

import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jgraph.checkpoint.store import Checkpoints
from jgraph.data import Ahead
from jgraph.device import peak_flops
from jgraph.errors import NonFiniteError, ProfileError, os_errors
from jgraph.moe import statistics
from jgraph.processes import all_gather_scalar, is_process_zero
from jgraph.profile import report
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train import capacity
from jgraph.train.capacity import Halt
from jgraph.train.console import Reporter
from jgraph.train.metrics import MetricsLog, StepClock, finite, peak_memory_bytes
from jgraph.train.optimizer import learning_rate
from jgraph.train.profiling import Recorder
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from jgraph.train.signals import StopRequest
from jgraph.train.watchdog import Watchdog

# Steps handed over before the oldest of them is waited for: enough to hide the host, few enough to stop soon.
_RUN_AHEAD = 4


@dataclass
class Loop:
    """One run of the loop; holds what the host has not looked at yet.

    Attributes:
        setup, batches, evaluate, run_dir, checkpoints, log, reporter, clock: of the run.
        step: compiled; None where it is to be compiled again.
        recorder: of a profile; None where there is to be none any more.
        started: called once, after the first step.
        watchdog: watches over every wait for the devices.
        pending: steps that were handed over, and their numbers.
        skipped: updates of the run that were not applied.
        told_zero: arrays whose gradient was told to be zero.
        told_starved: layers with experts that were told to get nothing.
    """

    setup: TrainSetup
    step: CompiledStep | None
    batches: Ahead
    evaluate: Callable[[TrainState], float]
    run_dir: RunDir
    checkpoints: Checkpoints
    log: MetricsLog
    reporter: Reporter
    clock: StepClock
    recorder: Recorder | None
    started: Callable[[], None] | None
    watchdog: Watchdog
    pending: list[tuple[int, StepMetrics]] = field(default_factory=list)
    skipped: int = 0
    told_zero: set[str] = field(default_factory=set)
    told_starved: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.config, self.place = self.setup.config, self.setup.step.place
        self.group_names, self.trained_groups = self.setup.group_names(), self.setup.trained_groups()
        self.device = jax.local_devices()[0]
        self.learning_rate = jax.jit(learning_rate(self.config.optimizer, self.config.steps))

    def run(self, done: int, state: TrainState, stop: StopRequest) -> tuple[int, TrainState]:
        """Runs from `done` steps to the end or to a signal, and saves the state there."""
        config = self.config
        self.skipped = int(self.watchdog.wait(lambda: "the state to begin with", state.skipped))
        while done < config.steps and not self._stops(done, stop):
            step = self.step or self._compile(done)
            if self.recorder is not None and done == self.recorder.first:
                done, state = self._profile(self.recorder, done, state)
                continue
            self.clock.start()
            batch = self.batches[done]
            with self.watchdog.over(partial(self._unfinished, done + 1), step):
                state, metrics = step(state, self.place(batch))
            done += 1
            self.pending.append((done, metrics))
            if self.started:
                self._wait(self.pending)
                self.started()
                self.started = None
            halts = False
            if len(self.pending) > _RUN_AHEAD:
                oldest = self.pending[-1 - _RUN_AHEAD]
                self._wait([oldest])
                halts = capacity.is_halted(oldest[1])
            evaluates = done == config.steps or done % config.eval_every == 0
            logs = evaluates or done == 1 or done % config.log_every == 0
            saves = done % config.checkpoint_every == 0
            profiles = self.recorder is not None and done == self.recorder.first
            if not (logs or saves or profiles or halts):
                continue
            last = self._settle()
            if isinstance(last, Halt):
                done, state = self._goes_on(last, state)
                continue
            if logs:
                self._log(done, last, state, evaluates=evaluates)
            if saves:
                self._save(done, state)
        if self.pending and isinstance(last := self._settle(), Halt):
            done, state = self._goes_on(last, state)
        self._save(done, state)
        return done, state

    def _goes_on(self, halt: Halt, state: TrainState) -> tuple[int, TrainState]:
        """Returns the steps done before the one that halted and the state after them, for a larger program."""
        self.config, told = capacity.grown(self.config, halt)
        if is_process_zero():
            capacity.keep(self.config, self.run_dir)
        self.reporter.line(told)
        self.step = None
        return halt.number - 1, self.setup.step.resumed(state)

    def _compile(self, done: int) -> CompiledStep:
        """Compiles the step again, after so many, and what a profile needs that is still to come."""
        self.setup = TrainSetup.of(self.config)
        self.step = step = self.setup.compile_step()
        if (old := self.recorder) is not None:
            first, needed = max(old.first, done), 2 * old.count + 2
            self.recorder = None
            if first + needed <= self.config.steps:
                self.recorder = Recorder.of(self.setup, step, first, old.directory)
            else:
                self.reporter.warn(f"no profile: from step {first} on, fewer than {needed} steps are left")
        return step

    def _stops(self, done: int, stop: StopRequest) -> bool:
        """Returns whether a signal ends the run after `done` steps: one that any process has had, told to all."""
        # Only where a step was just logged and no device is at work: to ask takes a word with every process.
        if jax.process_count() > 1 and done % self.config.log_every:
            return False
        with self.watchdog.over(lambda: f"the processes' word after step {done}"):
            number = max(all_gather_scalar(signal.Signals[stop.name] if stop.name else 0))
        if number:
            stop.name = signal.Signals(number).name
        # Not what `stop` says by now, which is this process's alone.
        return bool(number)

    def _log(self, number: int, last: StepMetrics, state: TrainState, *, evaluates: bool) -> None:
        """Writes and shows the entry of step `number`, the last one handed over, and the state after it."""
        step_seconds = self.clock.lap()
        peak = peak_flops(self.device.device_kind)
        # Skipped updates, of which this may be one, do not count.
        updates = number - 1 - self.skipped + bool(_non_finite(last, self.group_names))
        entry: dict[str, Any] = {
            "step": number,
            "loss": float(last.loss),
            "grad_norm": float(last.grad_norm),
            "learning_rate": float(self.learning_rate(updates)),
            "tokens_per_second": self.config.tokens_per_step / step_seconds,
            "step_time_ms": 1e3 * step_seconds,
            "mfu": self.setup.flops_per_step / step_seconds / (peak * self.setup.num_devices) if peak else None,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "skipped": self.skipped,
            "seconds": self.clock.seconds,
            "zero_gradients": len(_zeros(last, self.group_names) & self.trained_groups),
            **statistics.summary(state.carried),
        }
        self._tell_starved(number, state)
        if evaluates:
            entry["eval_loss"] = self.evaluate(state)
        self.log.add(entry)
        # The file says null where the loss is not a number; so does the line.
        self.reporter.progress(finite(entry))

    def _profile(self, recorder: Recorder, done: int, state: TrainState) -> tuple[int, TrainState]:
        """Traces steps, of which the clock and the log know nothing, and writes the report."""
        batches = (self.place(self.batches[index]) for index in itertools.count(done))
        state, metrics = recorder.record(state, batches, self.watchdog)
        steps, halt = capacity.happened(list(enumerate(jax.device_get(metrics), done + 1)))
        self._look(steps)
        after = done + len(steps)
        if halt:
            after, state = self._goes_on(halt, state)
        else:
            self.recorder = None
            self._report(recorder, f"steps {done + 1} to {after}")
        if after // self.config.checkpoint_every > done // self.config.checkpoint_every:
            self._save(after, state)
        return after, state

    def _report(self, recorder: Recorder, which: str) -> None:
        """Writes the page of a profile, and says where."""
        if not is_process_zero():
            return
        try:
            profile = report.of_run(recorder.directory)
            with os_errors("run_dir", recorder.directory):
                written = report.write(profile, recorder.directory)
            self.reporter.line(f"profile of {which}: {', '.join(map(str, written))}")
        except ProfileError as e:
            self.reporter.warn(f"no profile: {e}")

    def _save(self, done: int, state: TrainState) -> None:
        canonical = self.watchdog.wait(lambda: f"the state after {done} steps, to save it", self.setup.step.canonical.of(state))
        self.checkpoints.save(done, canonical)
        # Orbax keeps hold of it until all is written; the next step needs the room.
        for leaf in jax.tree.leaves(canonical):
            leaf.delete()

    def _wait(self, steps: list[tuple[int, StepMetrics]]) -> None:
        """Waits for some of the pending steps."""
        losses = [metrics.loss for _, metrics in steps]
        self.watchdog.wait(partial(self._unfinished, self.pending[-1][0]), losses, self.step)

    def _unfinished(self, last: int) -> str:
        """Says which steps up to `last` were handed over and are not done."""
        losses: list[tuple[int, Any]] = [(number, metrics.loss) for number, metrics in self.pending]
        first = min([number for number, loss in losses if not loss.is_ready()], default=last)
        return f"step {last}" if first == last else f"steps {first} to {last}"

    def _settle(self) -> StepMetrics | Halt:
        """Waits for the steps that were handed over, stops the clock, and looks at each step's numbers.

        Returns:
            The last step's; the step that halted, where one did: those from there on were not done, and took no time.
        """
        self._wait(self.pending)
        fetched: list[tuple[int, StepMetrics]] = jax.device_get(self.pending)
        self.pending.clear()
        steps, halt = capacity.happened(fetched)
        self.clock.stop(len(steps), of=len(fetched))
        self._look(steps)
        return halt or fetched[-1][1]

    def _look(self, fetched: list[tuple[int, StepMetrics]]) -> None:
        """Warns of numbers that are not finite and of gradients that are zero."""
        for number, metrics in fetched:
            if problem := _non_finite(metrics, self.group_names):
                self._tell_non_finite(number, problem)
            if number == 1 and self.config.is_delayed:
                continue  # no amax is known yet, so all scales are 1: small gradients are rounded to zero
            for name in sorted(_zeros(metrics, self.group_names) & self.trained_groups - self.told_zero):
                self.told_zero.add(name)
                self.reporter.warn(
                    f"step {number}: the gradient of {name} is zero; if it is not to be trained, say so by `freeze`"
                )

    def _tell_starved(self, number: int, state: TrainState) -> None:
        """Warns once of each layer with experts that get no tokens any more."""
        for layer, experts in statistics.dead_experts(state.carried).items():
            if layer not in self.told_starved:
                self.told_starved.add(layer)
                some = f"{', '.join(map(str, experts[:8]))}{', ...' * (len(experts) > 8)}"
                advice = "a larger `model.moe.balance_loss` helps"
                self.reporter.warn(f"step {number}: experts {some} of {layer} got no token for 100 steps; {advice}")

    def _tell_non_finite(self, number: int, problem: str) -> None:
        if self.config.on_nonfinite == "skip":
            self.skipped += 1
            self.reporter.warn(f"step {number}: {problem}; its update was skipped ({self.skipped} so far)")
            return
        # The update was not applied, so the state is still good; but a run that goes wrong is one to look at, from where it
        # was last saved.
        self.checkpoints.wait()
        saved = self.checkpoints.latest_step
        kept = "there is no checkpoint yet" if saved is None else f"the checkpoint of step {saved} is kept"
        # Where there is a checkpoint, it is of the old rate, and the directory refuses another.
        over = "" if saved is None else " with `resume` off or another `run_dir`"
        raise NonFiniteError(
            f"step {number}: {problem}; the run stops there and {kept}; "
            f"try a lower `optimizer.learning_rate`{over}, or go on past it with `on_nonfinite` skip",
            step=number,
        )


def _zeros(metrics: StepMetrics, group_names: list[str]) -> set[str]:
    """Returns the groups whose gradient was zero in every element."""
    return {name for name, square_sum in zip(group_names, metrics.grad_square_sums, strict=True) if square_sum == 0}


def _non_finite(metrics: StepMetrics, group_names: list[str]) -> str:
    """Says which of a step's numbers are infinite or NaN; empty if none is."""
    problems = [] if np.isfinite(metrics.loss) else [f"the loss is {float(metrics.loss)}"]
    sums = zip(group_names, metrics.grad_square_sums, strict=True)
    groups = [name for name, square_sum in sums if not np.isfinite(square_sum)]
    if groups:
        problems.append(f"the gradient of {', '.join(groups)} is not finite")
    elif not np.isfinite(metrics.grad_norm):
        problems.append("the gradient's norm overflows")
    return " and ".join(problems)
