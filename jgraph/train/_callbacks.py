"""Callbacks of the training loop: checks, metrics, evaluations, checkpoints."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jgraph.adapters import A
from jgraph.checkpoint.store import Checkpoints
from jgraph.device import peak_flops
from jgraph.errors import NonFiniteError
from jgraph.moe import statistics
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train._capacity import Numbered
from jgraph.train._console import Reporter
from jgraph.train._loop import Callback
from jgraph.train._validation import flops_per_step
from jgraph.train._watchdog import Watchdog
from jgraph.train.config import MonitorConfig
from jgraph.train.metrics import MetricsLog, StepClock, finite, peak_memory_bytes
from jgraph.train.optimizer import learning_rate
from jgraph.train.setup import TrainSetup


class FirstStep(Callback):
    """Calls a function once, when the first step that the loop itself runs has finished."""

    def __init__(self, act: Callable[[], None]):
        self._act: Callable[[], None] | None = act

    def due(self, done: int) -> bool:
        return self._act is not None

    def after(self, done: int, state: TrainState, metrics: StepMetrics | None) -> None:
        """Calls the function, unless another callback ran the step (`metrics` is None)."""
        if self._act and metrics is not None:
            self._act()
            self._act = None


class Progress(Callback):
    """Knows the last step that this process has finished since its start; 0 before the first one."""

    done = 0

    def finished(self, steps: Sequence[Numbered]) -> None:
        self.done = max([self.done, *(number for number, _ in steps)])


class GradientChecks(Callback):
    """Raises or warns if the loss or a gradient of a step is not finite, and warns of gradients of zero.

    `skipped` counts the updates that the run has skipped so far, because the loss or a gradient was not finite.
    """

    def __init__(self, setup: TrainSetup, checkpoints: Checkpoints, reporter: Reporter, skipped: int):
        self.skipped = skipped
        self._monitor = setup.config.monitor
        self._is_delayed = setup.config.is_delayed
        self._checkpoints = checkpoints
        self._reporter = reporter
        self._names = sorted(setup.step.bound.layout.trained.params)
        self._warned = set[str]()

    def finished(self, steps: Sequence[Numbered]) -> None:
        """Checks the metrics of finished steps. Waits for the checkpoint that is being written before it raises."""
        for number, metrics in steps:
            if problem := self.problem(metrics):
                self._non_finite(number, problem)
            if number == 1 and self._is_delayed:
                continue  # all scales are 1 before the first amax, so small gradients are rounded to zero
            for name in sorted(self.zeros(metrics) - self._warned):
                if number == 1 and name.endswith(A):
                    continue  # the gradient of A is zero until the first update of B
                self._warned.add(name)
                self._reporter.warn(
                    f"step {number}: the gradient of {name} is zero; if it must not be trained, add the name to `freeze`"
                )

    def zeros(self, metrics: StepMetrics) -> set[str]:
        """Returns the arrays with a gradient of zero everywhere, by their names in `TrainState.params`."""
        return {name for name, square_sum in self._square_sums(metrics) if square_sum == 0}

    def problem(self, metrics: StepMetrics) -> str:
        """Describes a loss, gradients or a norm of the gradient that are not finite; empty if all are finite."""
        problems = [] if np.isfinite(metrics.loss) else [f"the loss is {float(metrics.loss)}"]
        names = [name for name, square_sum in self._square_sums(metrics) if not np.isfinite(square_sum)]
        if names:
            problems.append(f"the gradient of {', '.join(names)} is not finite")
        elif not np.isfinite(metrics.grad_norm):
            problems.append("the norm of the gradient overflows float32")
        return " and ".join(problems)

    def _square_sums(self, metrics: StepMetrics) -> list[tuple[str, Any]]:
        return list(zip(self._names, metrics.grad_square_sums, strict=True))

    def _non_finite(self, number: int, problem: str) -> None:
        if self._monitor.on_nonfinite == "skip":
            self.skipped += 1
            self._reporter.warn(f"step {number}: {problem}; its update was skipped ({self.skipped} so far)")
            return
        # The update was not applied, so the state is good, but it is not saved: the run should continue from an earlier step.
        self._checkpoints.wait()
        saved = self._checkpoints.latest_step
        checkpoint_text = "there is no checkpoint yet" if saved is None else f"the checkpoint of step {saved} is kept"
        # A run with a checkpoint cannot be resumed with another learning rate.
        over = "" if saved is None else " with `resume` off or another `run_dir`"
        raise NonFiniteError(
            f"step {number}: {problem}; the run stops, and {checkpoint_text}; "
            f"try a lower `optimizer.learning_rate`{over}, or leave out such updates with `on_nonfinite` skip",
            step=number,
        )


class Metrics(Callback):
    """Writes and prints the metrics every `log_every` steps, and evaluates the model every `eval_every` steps.

    Every entry ends a lap of `clock`. `checks` comes before this callback in the loop.
    """

    def __init__(
        self,
        setup: TrainSetup,
        log: MetricsLog,
        reporter: Reporter,
        clock: StepClock,
        checks: GradientChecks,
        evaluate: Callable[[TrainState], float],
        trained_tokens: Callable[[range], int] | None = None,
    ):
        self._monitor: MonitorConfig = setup.config.monitor
        self._log = log
        self._reporter = reporter
        self._clock = clock
        self._checks = checks
        self._evaluate = evaluate
        self._trained_tokens = trained_tokens
        self._steps = setup.config.steps
        self._tokens = setup.config.input.tokens_per_step
        self._learning_rate = jax.jit(learning_rate(setup.config.optimizer, self._steps))
        self._device = jax.local_devices()[0]
        self._warned = set[str]()
        self._flops = flops_per_step(setup)
        self._peak_flops = (peak_flops(self._device.device_kind) or 0) * setup.step.num_devices

    def due(self, done: int) -> bool:
        return done == 1 or done % self._monitor.log_every == 0 or self._evaluates(done)

    def _steps_of(self, done: int) -> range:
        """Returns the steps, from 0, since the last entry before `done`, also if the run has been resumed since."""
        multiples = ((done - 1) // every * every for every in (self._monitor.log_every, self._monitor.eval_every))
        return range(max(min(1, done - 1), *multiples), done)

    def _evaluates(self, done: int) -> bool:
        return done == self._steps or done % self._monitor.eval_every == 0

    def after(self, done: int, state: TrainState, metrics: StepMetrics | None) -> None:
        """Evaluates the state if it is time, and writes an entry to metrics.jsonl and the trackers. Warns of dead experts.

        A profiled step (`metrics` is None) has no entry, because the profiler slows it down. Chat data adds "trained_tokens",
        and `jgraph.MoE` layers the keys of `jgraph.moe.statistics.summary`.
        """
        if metrics is None:
            return
        seconds = self._clock.lap()
        checks = self._checks
        # Skipped updates do not advance the learning rate schedule. The update of this step may have been skipped.
        updates = done - 1 - checks.skipped + bool(checks.problem(metrics))
        entry: dict[str, Any] = {
            "step": done,
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "learning_rate": float(self._learning_rate(updates)),
            "tokens_per_second": self._tokens / seconds,
            "step_time_ms": 1e3 * seconds,
            "mfu": self._flops / seconds / self._peak_flops if self._peak_flops else None,
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "skipped": checks.skipped,
            "seconds": self._clock.seconds,
            "zero_gradients": len(checks.zeros(metrics)),
            **statistics.summary(state.carried),
        }
        if self._trained_tokens is not None:
            entry["trained_tokens"] = self._trained_tokens(self._steps_of(done))
        self._warn_of_dead_experts(done, state)
        if self._evaluates(done):
            entry["eval_loss"] = self._evaluate(state)
        self._log.add(entry)
        self._reporter.progress(finite(entry))  # the same values as in metrics.jsonl

    def _warn_of_dead_experts(self, done: int, state: TrainState) -> None:
        """Warns once per layer of experts that have received no token for 100 steps."""
        for layer, experts in statistics.dead_experts(state.carried).items():
            if layer not in self._warned:
                self._warned.add(layer)
                listed = f"{', '.join(map(str, experts[:8]))}{', ...' if len(experts) > 8 else ''}"
                advice = "try a larger `model.moe.balance_loss`"
                self._reporter.warn(f"step {done}: experts {listed} of {layer} got no token for 100 steps; {advice}")


class SaveCheckpoints(Callback):
    """Saves the state at each multiple of `checkpoint_every` steps and at the end of the loop."""

    def __init__(self, setup: TrainSetup, checkpoints: Checkpoints, watchdog: Watchdog, done: int):
        self._layout = setup.step.canonical
        self._every = setup.config.output.checkpoint_every
        self._checkpoints = checkpoints
        self._watchdog = watchdog
        self._saved = done

    def due(self, done: int) -> bool:
        """Returns True if a multiple of `checkpoint_every` lies after the last saved step, at most at `done`.

        `done` may be larger than the multiple, because a profile runs several steps between two calls.
        """
        return done // self._every > self._saved // self._every

    def after(self, done: int, state: TrainState, metrics: StepMetrics | None) -> None:
        self.ended(done, state)

    def ended(self, done: int, state: TrainState) -> None:
        """Saves the state. Needs memory for a second state until the copy is on the host. Files are written later."""
        if self._checkpoints.latest_step == done:
            return  # saved by `after`; another conversion of the state would take memory for a second state
        canonical = self._watchdog.wait(lambda: f"the state of step {done} for its checkpoint", self._layout.of(state))
        self._checkpoints.save(done, canonical)
        self._saved = done
        # Orbax holds the arrays until all files are written, and the next step needs the memory.
        for leaf in jax.tree.leaves(canonical):
            leaf.delete()
