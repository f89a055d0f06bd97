"""The loop: steps handed to the device without waiting for them, and everything that happens between two of them."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import math
import os
import platform
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jgraph.assembly import Assembly
from jgraph.checkpoint import Checkpoints, check_space
from jgraph.config import TrainConfig
from jgraph.data import Batches, Corpus, heldout_batches, load
from jgraph.distributed import agree, connect, is_first, together
from jgraph.errors import ConfigError, NonFiniteError, ProfileError
from jgraph.graph import compiler_options
from jgraph.metrics import MetricsLog, StepClock, flops_per_step, peak_flops, peak_memory_bytes, read_metrics
from jgraph.profile import record, report
from jgraph.report import Reporter, Summary
from jgraph.rundir import RunDir
from jgraph.sample import generate
from jgraph.signals import StopRequest
from jgraph.step import StepMetrics, TrainState

# Steps handed over before the oldest of them is waited for: enough to hide the host, few enough to stop soon.
_RUN_AHEAD = 4
_PROMPT_TOKENS = 64


def train(config: TrainConfig, *, console: Console) -> Summary:
    """Trains until `config.steps` or a signal, going on from the last checkpoint of the run directory.

    Of several processes, which all call this, the first writes and talks; they stop and fail together.

    Args:
        config: the whole run.
        console: where to tell of it.

    Returns:
        The summary that was printed.

    Raises:
        JgraphError: anything that a user can put right, in one line. NonFiniteError for a loss or gradient that is not finite,
            unless `config.on_nonfinite` is `skip`.
        KeyboardInterrupt: a second SIGINT.
    """
    # Refused before anything slow, and before a backend starts. "gpu", because options are checked the same way everywhere.
    compiler_options(config.graph, config.xla_options, platform="gpu")
    connect(config.distributed)
    with together():
        corpus = load(config.data, seq_len=config.seq_len, vocab_size=config.model.vocab_size)
        run_dir = RunDir(Path(config.run_dir))
        run_dir.check(config, _corpus_entry(corpus))
        _check_attention(config)
        assembly = Assembly.of(config)
    _check_alike(config, corpus)
    reporter = Reporter(console if is_first() else Console(quiet=True), config)
    reporter.config()
    if jax.process_count() > 1:
        reporter.line(f"devices: {assembly.num_devices}, of {jax.process_count()} processes")
    with StopRequest() as stop, _memory_errors(config):
        return _train(assembly, corpus, run_dir, reporter, stop)


@contextlib.contextmanager
def _memory_errors(config: TrainConfig) -> Iterator[None]:
    """A device that is too small is a matter of flags."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise ConfigError(
            f"--batch-size is {config.batch_size} in --num-microbatches {config.num_microbatches}: must fit the memory of a "
            f"{jax.local_devices()[0].device_kind}; take a smaller batch or more microbatches ({str(e).splitlines()[0]})",
            field="batch_size",
        ) from e


def _train(assembly: Assembly, corpus: Corpus, run_dir: RunDir, reporter: Reporter, stop: StopRequest) -> Summary:
    config, shapes = assembly.config, assembly.portable.shapes()
    if config.profile:
        assembly = dataclasses.replace(assembly, config=record.profiled(config, jax.default_backend()))
    batches = _batches(assembly, corpus)
    step = None
    # The first process's word, because it may already be writing where another looks.
    if not agree(config.resume and run_dir.checkpoints.exists())[0]:
        with together():
            check_space(run_dir.path.absolute(), shapes, config.checkpoint_keep + 1)
        # Before the directory changes: what does not compile must not replace a run that did.
        step = _compile(assembly, reporter)
    with together():
        if is_first():
            if not config.resume:
                run_dir.reset()
            run_dir.write(config, _corpus_entry(corpus), _versions())
    checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint_keep, warn=reporter.warn)
    try:
        with together():
            checkpoints.check_space(shapes)
        done, state = _start(assembly, checkpoints, shapes)
        if done >= config.steps:
            reporter.line(f"this run is finished: {done} of --steps {config.steps} are done")
            outcome = "already finished"
        else:
            if done:
                reporter.line(f"resumed from step {done}")
            step = step or _compile(assembly, reporter)
            recorder = None
            if config.profile and done > config.profile_steps[0]:
                reporter.warn(f"no profile: --profile is {config.profile}, and {done} steps are done already")
            elif config.profile:
                recorder = _recorder(assembly, step, run_dir)
            metrics = run_dir.metrics if is_first() else Path(os.devnull)
            with contextlib.closing(MetricsLog(metrics, first_step=done)) as log, reporter:
                clock = StepClock(next((entry["seconds"] for entry in reversed(read_metrics(run_dir.metrics))), 0.0))
                loop = _Loop(assembly, step, batches, _evaluator(assembly, corpus), checkpoints, log, reporter, clock, recorder)
                done, state = loop.run(done, state, stop)
            outcome = f"stopped by {stop.name}" if done < config.steps else "finished"
    finally:
        checkpoints.close()
    if done < config.steps:
        reporter.line(f"{outcome} at step {done}; saved in {run_dir.path}; run the same command to go on")
    sample = _sample(assembly, state, corpus) if done >= config.steps and config.sample_tokens else ("", "")
    summary = _summary(config, corpus, run_dir, outcome, state, sample)
    if done >= config.steps:
        reporter.summary(summary)
    return summary


def _start(assembly: Assembly, checkpoints: Checkpoints, shapes: TrainState) -> tuple[int, TrainState]:
    """Steps done, and the state after them: the last that was saved, or the first. A function, so that it is held once."""
    saved = checkpoints.restore_latest(shapes)
    return (0, assembly.init()) if saved is None else (saved[0], assembly.portable.back(saved[1]))


class _Loop:
    """One run of the loop; holds what the host has not looked at yet."""

    def __init__(
        self,
        assembly: Assembly,
        step: Callable[[TrainState, jax.Array | np.ndarray], tuple[TrainState, StepMetrics]],
        batches: Batches,
        evaluate: Callable[[TrainState], float],
        checkpoints: Checkpoints,
        log: MetricsLog,
        reporter: Reporter,
        clock: StepClock,
        recorder: record.Recorder | None,
    ):
        self.config = assembly.config
        self.place = assembly.place
        self.portable = assembly.portable
        self.num_devices = assembly.num_devices
        self.group_names = assembly.group_names()
        self.trained_groups = assembly.trained_groups()
        self.told_zero: set[str] = set()
        self.step = step
        self.batches = batches
        self.evaluate = evaluate
        self.checkpoints = checkpoints
        self.log = log
        self.reporter = reporter
        self.clock = clock
        self.recorder = recorder
        self.device = jax.local_devices()[0]
        self.pending: list[tuple[int, StepMetrics]] = []
        self.skipped = 0

    def run(self, done: int, state: TrainState, stop: StopRequest) -> tuple[int, TrainState]:
        """From `done` steps to the end or to a signal; what is reached is saved."""
        config = self.config
        self.skipped = int(state.skipped)
        while done < config.steps and not self._stops(done, stop):
            if self.recorder is not None and done == self.recorder.first:
                done, state = self._profile(self.recorder, done, state)
                continue
            self.clock.start()
            state, metrics = self.step(state, self.place(self.batches[done]))
            self.pending.append((done, metrics))
            if len(self.pending) > _RUN_AHEAD:
                jax.block_until_ready(self.pending[-1 - _RUN_AHEAD][1].loss)
            evaluates = done + 1 == config.steps or (done > 0 and done % config.eval_every == 0)
            if evaluates or done % config.log_every == 0:
                self._log(done, state if evaluates else None)
            done += 1
            if done % config.checkpoint_every == 0:
                self._save(done, state)
        self._save(done, state)
        return done, state

    def _stops(self, done: int, stop: StopRequest) -> bool:
        """Whether a signal is to end the run before step `done`: one that any process has had, told to all."""
        # Only where a step was just logged and no device is at work: to ask takes a word with every process.
        if jax.process_count() > 1 and (done - 1) % self.config.log_every:
            return False
        number = max(agree(signal.Signals[stop.name] if stop.name else 0))
        if number:
            stop.name = signal.Signals(number).name
        # Not what `stop` says by now, which is this process's alone.
        return bool(number)

    def _log(self, index: int, evaluated: TrainState | None) -> None:
        """Writes and shows the entry of step `index`, the last one handed over; evaluates if given the state."""
        last = self._settle()
        step_seconds = self.clock.lap()
        peak = peak_flops(self.device.device_kind)
        entry: dict[str, Any] = {
            "step": index,
            "loss": float(last.loss),
            "grad_norm": float(last.grad_norm),
            "tokens_per_second": self.config.tokens_per_step / step_seconds,
            "step_time_ms": 1e3 * step_seconds,
            "mfu": flops_per_step(self.config) / step_seconds / (peak * self.num_devices) if peak else None,
            "peak_memory_bytes": peak_memory_bytes(self.device),
            "skipped": self.skipped,
            "seconds": self.clock.seconds,
            "zero_gradients": len(_zeros(last, self.group_names) & self.trained_groups),
        }
        if evaluated is not None:
            entry["eval_loss"] = self.evaluate(evaluated)
        self.log.add(entry)
        # The file says null where the loss is not a number; so does the line.
        self.reporter.progress({key: value if value is None or math.isfinite(value) else None for key, value in entry.items()})

    def _profile(self, recorder: record.Recorder, done: int, state: TrainState) -> tuple[int, TrainState]:
        """Steps that are traced, of which the clock and the log know nothing; and the report."""
        if self.pending:
            self._settle()
        batches = (self.place(self.batches[index]) for index in itertools.count(done))
        state, metrics = recorder.record(state, batches)
        self._look(list(enumerate(jax.device_get(metrics), done)))
        if is_first():
            try:
                written = report.write(report.of_run(recorder.directory), recorder.directory)
                self.reporter.line(f"profile of steps {done} to {done + len(metrics) - 1}: {', '.join(map(str, written))}")
            except ProfileError as e:
                self.reporter.warn(f"no profile: {e}")
        if (done + len(metrics)) // self.config.checkpoint_every > done // self.config.checkpoint_every:
            self._save(done + len(metrics), state)
        return done + len(metrics), state

    def _save(self, done: int, state: TrainState) -> None:
        if self.pending:
            self._settle()
        portable = self.portable.of(state)
        self.checkpoints.save(done, portable)
        # Orbax keeps hold of it until all is written; the next step needs the room.
        for leaf in jax.tree.leaves(portable):
            leaf.delete()

    def _settle(self) -> StepMetrics:
        """Waits for the steps that were handed over, stops the clock, and looks at each step's numbers; returns the last's."""
        fetched: list[tuple[int, StepMetrics]] = jax.device_get(self.pending)
        self.pending.clear()
        self.clock.stop(len(fetched))
        self._look(fetched)
        return fetched[-1][1]

    def _look(self, fetched: list[tuple[int, StepMetrics]]) -> None:
        """Tells of what is not as it should be."""
        for index, metrics in fetched:
            if problem := _non_finite(metrics, self.group_names):
                self._tell_non_finite(index, problem)
            for name in sorted(_zeros(metrics, self.group_names) & self.trained_groups - self.told_zero):
                self.told_zero.add(name)
                self.reporter.warn(
                    f"step {index}: the gradient of {name} is zero; if it is not to be trained, say so by --freeze"
                )

    def _tell_non_finite(self, index: int, problem: str) -> None:
        if self.config.on_nonfinite == "skip":
            self.skipped += 1
            self.reporter.warn(f"step {index}: {problem}; its update was skipped ({self.skipped} so far)")
            return
        # The update was not applied, so the state is still good; but a run that goes wrong is one to look at, from where it
        # was last saved.
        self.checkpoints.wait()
        saved = self.checkpoints.latest_step
        kept = "there is no checkpoint yet" if saved is None else f"the checkpoint of step {saved} is kept"
        raise NonFiniteError(
            f"step {index}: {problem}; the run stops there and {kept}; "
            "try a lower --optimizer.learning-rate, or go on past it with --on-nonfinite skip",
            step=index,
        )


def _zeros(metrics: StepMetrics, group_names: list[str]) -> set[str]:
    """Groups whose gradient was zero in every element."""
    return {name for name, square_sum in zip(group_names, metrics.grad_square_sums, strict=True) if square_sum == 0}


def _non_finite(metrics: StepMetrics, group_names: list[str]) -> str:
    """What of a step's numbers is infinite or NaN; empty if nothing is."""
    problems = [] if np.isfinite(metrics.loss) else [f"the loss is {float(metrics.loss)}"]
    sums = np.asarray(metrics.grad_square_sums)
    groups = [name for name, square_sum in zip(group_names, sums, strict=True) if not np.isfinite(square_sum)]
    if groups:
        problems.append(f"the gradient of {', '.join(groups)} is not finite")
    elif not np.isfinite(metrics.grad_norm):
        problems.append("the gradient's norm overflows")
    return " and ".join(problems)


def _check_attention(config: TrainConfig) -> None:
    if config.model.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ConfigError(
            f"--model.attention is cudnn: must be auto or xla on this device, a {jax.devices()[0].device_kind}",
            field="model.attention",
        )


def _check_alike(config: TrainConfig, corpus: Corpus) -> None:
    """Refuses processes that would not compute the same step, or not write to the same place."""
    fields = dataclasses.asdict(config) | {"distributed": None, "corpus": corpus.fingerprint}
    sums = agree(zlib.crc32(json.dumps(fields).encode()) >> 1)  # into an int32
    differing = [process for process, total in enumerate(sums) if total != sums[0]]
    if differing:
        raise ConfigError(
            f"process {differing[0]} was started with other flags or another text of --data than process 0: "
            "only --distributed.process-id may differ",
            field="distributed.process_id",
        )


def _compile(assembly: Assembly, reporter: Reporter):
    step, capture = assembly.compile_step(assembly.config.batch_size)
    if chosen := assembly.chosen_options(jax.default_backend()):
        reporter.line(f"XLA options, as --xla-options would give them: {' '.join(chosen)}")
    if capture is not None:
        reporter.line(str(capture))
    if about := assembly.about_pipeline(step):
        reporter.line(about)
    return step


def _recorder(assembly: Assembly, step: jax.stages.Compiled, run_dir: RunDir) -> record.Recorder:
    """Compiled before the loop, so that no pause cools the devices that are to be traced."""
    first, stop = assembly.config.profile_steps
    plain = dataclasses.replace(assembly, config=record.uncaptured(assembly.config))
    is_captured = jax.default_backend() == "gpu" and assembly.config.graph != "off"
    return record.Recorder(
        assembly,
        step if is_captured else None,
        plain.compile_step(plain.config.batch_size)[0] if is_captured else step,
        first,
        stop - first,
        # Every process runs the steps; the first one's trace is reported.
        run_dir.path / "profile" if is_first() else Path(tempfile.mkdtemp(prefix="jgraph-profile-")),
    )


def _batches(assembly: Assembly, corpus: Corpus) -> Batches:
    config = assembly.config
    process_index, process_count = assembly.batch_part()
    return Batches(
        corpus.train,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        seed=config.seed,
        process_index=process_index,
        process_count=process_count,
    )


def _evaluator(assembly: Assembly, corpus: Corpus) -> Callable[[TrainState], float]:
    """Mean held-out loss. In microbatches, whose activations are known to fit, over `eval_batches` whole batches' windows."""
    config = assembly.config
    batches = heldout_batches(
        corpus.heldout,
        batch_size=config.batch_size // config.num_microbatches,
        seq_len=config.seq_len,
        limit=config.eval_batches * config.num_microbatches,
    )
    loss = jax.jit(assembly.loss)
    # All batches have the same number of tokens, so the mean of their means is the mean over tokens.
    place = assembly.place_whole
    return lambda state: float(np.mean(jax.device_get([loss(state.params, place(tokens_BS)) for tokens_BS in batches])))


def _sample(assembly: Assembly, state: TrainState, corpus: Corpus) -> tuple[str, str]:
    config = assembly.config
    prompt = np.asarray(corpus.heldout[: min(_PROMPT_TOKENS, config.seq_len)]).astype(np.int32)
    tokens = generate(
        assembly.logits,
        state.params,
        prompt,
        jax.random.key(config.seed),
        num_tokens=config.sample_tokens,
        window=config.seq_len,
    )
    return corpus.decode(prompt), corpus.decode(np.asarray(tokens))


def _summary(config: TrainConfig, corpus: Corpus, run_dir: RunDir, outcome: str, state: TrainState, sample) -> Summary:
    entries = read_metrics(run_dir.metrics)
    last = entries[-1] if entries else {}
    return Summary(
        outcome=outcome,
        steps=int(state.step),
        skipped=int(state.skipped),
        tokens=int(state.step) * config.tokens_per_step,
        seconds=last.get("seconds", 0.0),
        train_loss=last.get("loss"),
        heldout_loss=next((entry["eval_loss"] for entry in reversed(entries) if "eval_loss" in entry), None),
        zlib_nats_per_token=corpus.zlib_nats_per_token,
        run_dir=run_dir.path,
        sample=sample,
    )


def _corpus_entry(corpus: Corpus) -> dict[str, Any]:
    return {
        "name": corpus.name,
        "fingerprint": corpus.fingerprint,
        "train_tokens": len(corpus.train),
        "heldout_tokens": len(corpus.heldout),
    }


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return packages | {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
