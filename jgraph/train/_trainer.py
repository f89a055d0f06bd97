"""Trains a configured model: opens the data and the run directory, compiles the step, and runs the loop."""

import contextlib
import json
import math
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jgraph.checkpoint.store import Checkpoints, Names, check_path, check_space
from jgraph.data import Ahead, Batches, Corpus, load
from jgraph.dispatch import check_devices
from jgraph.errors import ConfigError, os_errors
from jgraph.peers import Loss, Peers
from jgraph.processes import Connection, all_gather_scalar, all_or_raise, connect, is_process_zero, refused_gpus, unused_gpus
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import TrainState
from jgraph.train import _callbacks, _capacity, _elastic, _trackers, _validation, profiling
from jgraph.train._console import Reporter, Summary
from jgraph.train._functional import batch_shapes
from jgraph.train._lock import locked, release
from jgraph.train._loop import Callback, Loop, agreed_stop
from jgraph.train._memory import check_host, check_step, memory_errors
from jgraph.train._signals import StopRequest
from jgraph.train._watchdog import Wait, Watchdog, hang_message, loss_message
from jgraph.train.config import TrainConfig
from jgraph.train.initial import InitialWeights, initial_weights, tokenizer_of, tokenizer_warning, write_origin
from jgraph.train.metrics import MetricsLog, StepClock, read_metrics
from jgraph.train.rundir import RunDir, versions
from jgraph.train.saved import read_frozen
from jgraph.train.setup import TrainSetup
from jgraph.xla import cache, compiler_options
from jgraph.xla.options import known
from jgraph.xla.startup import Startup, watch

_NAMES = Names("run_dir", "checkpoint_keep", restart="use another `run_dir` or `resume` off")


def train(config: TrainConfig, *, console: Console, end: Callable[[Callable[[], str]], object], began: float) -> Summary:
    """Trains a model until `config.steps`, SIGTERM or SIGINT, and saves the state at the end.

    Starts from the newest checkpoint that is not damaged, else from the initial weights. With `resume` off, replaces the run
    in the directory. In a distributed run, all processes call it with the same configuration, except for
    `distributed.process_id`; only process 0 prints and writes metrics, and all stop at the same step.

    `end` is called from another thread if the devices hang, or if another process is gone. Its argument removes the lock and
    returns the error message. It must end the process, because the thread that waits for a hung device cannot be interrupted.
    While the step compiles, a signal ends the process, unless the run has several. Later, a second SIGINT raises
    KeyboardInterrupt at once. After a NonFiniteError, the state is not saved. `began` is the start of the command, by
    `time.monotonic`.
    """
    # Checked before a backend starts, which is slow. Platform "gpu", so that a CPU rejects the same options.
    compiler_options(config.compile.graph, config.compile.xla_options, platform="gpu")
    _trackers.check_installed(config.monitor.log)
    connection = connect(**asdict(config.distributed))
    process = _process(connection)
    run_dir = RunDir(Path(config.output.run_dir))
    reporter = Reporter(Console(quiet=True) if process else console, config.steps)
    progress = _callbacks.Progress()
    # releases the run directory while this process holds it
    at_end: list[Callable[[], object]] = []

    def lost(loss: Loss) -> None:
        message = lambda: loss_message(loss, process, progress.done, config, run_dir)  # noqa: E731
        end(partial(_last_words, message, at_end, reporter))

    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(Peers(process, connection.sockets if connection else {}, lost))
        check_devices()
        with all_or_raise(), os_errors("run_dir", run_dir.path, "read"):
            check_path(run_dir.checkpoints.absolute(), names=_NAMES)
            config = run_dir.resumed(config)
            resumes = run_dir.resumes(config.output)
            placed, devices_line = _elastic.placed(config, jax.device_count(), run_dir.first_share(config))
        startup = Startup(began, stack.enter_context(watch()))
        with all_or_raise():
            rows = config.input.batch_size // jax.process_count()
            check_host(config.input, rows * (config.input.seq_len + 1) * np.dtype(np.int32).itemsize, "its tokens")
            cache_line = _enable_cache(config.compile.compile_cache)
            weights = None if resumes else initial_weights(config)
            if weights:
                stack.callback(weights.close)
            tokenizer = tokenizer_of(config, run_dir.origin if resumes else None)
            warnings = [tokenizer_warning(config) if weights else ""]
            with reporter.phase("reading the data"):
                corpus = load(config.input.data, tokenizer=tokenizer, **config.data_options)
            with os_errors("run_dir", run_dir.path, "read"):  # `locked` names the files that it writes
                run_dir.check(config, corpus.fingerprint)
                if is_process_zero():
                    stack.enter_context(_held(run_dir, at_end, reporter))
                    # Another process may have written to the directory before this one took the lock.
                    run_dir.check(config, corpus.fingerprint)
            with reporter.phase("tracing the model"):
                setup = TrainSetup.from_config(placed)
                # Traced now, because they run long after the start.
                _validation.check_loss(setup)
                no_sample = _validation.sampling_problem(setup) if config.monitor.sample_tokens else ""
                if no_sample:
                    warnings.append(f"no sample at the end: {no_sample}; set `sample_tokens` to 0 to turn off this warning")
        _check_processes_agree(placed, corpus.fingerprint, weights.step if weights else None)
        _describe(setup, corpus, connection, [devices_line, cache_line], reporter)
        for warning in filter(None, warnings):
            reporter.warn(warning)
        stop = stack.enter_context(StopRequest())
        stack.enter_context(memory_errors(config.input, run_dir))

        def hung(wait: Wait) -> None:
            peers.failed(None)
            end(partial(_last_words, lambda: hang_message(wait, config, run_dir), at_end, reporter))

        watchdog = stack.enter_context(Watchdog(config.monitor.hang_seconds, hung))
        run = _Run(config, setup, corpus, weights, run_dir, reporter, watchdog, stop, startup, progress, peers)
        return run.run(samples=bool(config.monitor.sample_tokens) and not no_sample)


@dataclass
class _Run:
    """A run with a checked configuration."""

    # as config.json stores it
    config: TrainConfig
    # its configuration may have a larger expert capacity or other XLA options, and has numbers for `auto`
    setup: TrainSetup
    corpus: Corpus
    # None if they are random
    weights: InitialWeights | None
    run_dir: RunDir
    reporter: Reporter
    watchdog: Watchdog
    stop: StopRequest
    startup: Startup
    progress: Callback
    peers: Peers

    def run(self, *, samples: bool) -> Summary:
        """Trains, prints and returns the summary. Generates text after the last step if `samples` is True."""
        config = self.config
        run_dir = self.run_dir
        reporter = self.reporter
        shapes = self.setup.step.canonical.shapes()
        frozen = self.setup.step.canonical.frozen
        if config.monitor.profile:
            profiled = profiling.profiled(self.setup.config, jax.default_backend())
            self.setup = TrainSetup(profiled, self.setup.model, self.setup.step)
        setup = self.setup
        batches = self._batches()
        step = None
        init = setup.init
        source = str(self.weights.path) if self.weights and config.output.checkpoint_base == "reference" else ""
        # Process 0 decides, because it may write checkpoints while another process looks for them.
        if is_new := not all_gather_scalar(run_dir.resumes(config.output))[0]:
            with all_or_raise():
                path, count = run_dir.path.absolute(), config.output.checkpoint_keep + 1
                check_space(path, shapes, count, names=_NAMES, frozen=frozen, frozen_count=0 if source else 1)
            # Both programs compile at once, and before the directory changes: an error must not replace an earlier run.
            with self._before_first_step("compiling the training step"):
                init = partial(self.weights.load, setup) if self.weights else setup.compile_init()
                step = self.compile(setup)
        with all_or_raise():
            if is_process_zero():
                self._write(is_new=is_new)
        wait = partial(self.watchdog.wait, lambda: "the checksums of the state for a checkpoint")
        keep = config.output.checkpoint_keep
        checkpoints = Checkpoints(
            run_dir.checkpoints,
            keep,
            warn=reporter.warn,
            wait=wait,
            names=_NAMES,
            frozen=frozen,
            read_frozen=partial(read_frozen, config, setup.model.shapes),
        )
        try:
            if not is_new:  # else checked above
                with all_or_raise():
                    checkpoints.check_space(shapes)
            self.startup.enter("initial state")
            with self._before_first_step("making the initial state" if is_new else "restoring the newest checkpoint"):
                if source:
                    init = partial(init, partial(checkpoints.refer, source))
                done, state = _start(setup, init, checkpoints, shapes)
            outcome = "already finished"
            if done >= config.steps:
                reporter.line(f"this run is finished: {done} of {config.steps} steps; to train longer, see `optimizer.extend`")
            else:
                self._print_start(done, batches)
                if step is None:
                    with self._before_first_step("compiling the training step"):
                        step = self.compile(setup)
                done, state = self._loop(done, state, step, batches, checkpoints)
                outcome = f"stopped by {self.stop.name}" if done < config.steps else "finished"
        except BaseException as e:
            self.peers.failed(e)  # before `close`, which waits for the others
            raise
        finally:
            checkpoints.close()
        return self._summary(outcome, done, state, samples=samples)

    def _batches(self) -> Batches:
        config = self.config
        return Batches(
            self.corpus.sources,
            batch_size=config.input.batch_size,
            seq_len=config.input.seq_len,
            seed=config.seed,
            shuffle=config.input.data_shuffle,
            documents=config.input.data_documents,
            rows=self.setup.step.batch_rows(config.input.batch_size),
        )

    def _before_first_step(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Shows a phase in which nothing can be saved. A stop signal ends a run of one process at once, several agree later."""

        def at_stop() -> str:
            release(self.run_dir)
            return "; nothing was trained"

        return self.reporter.phase(name, None if jax.process_count() > 1 else at_stop)

    def compile(self, setup: TrainSetup) -> CompiledStep:
        """Compiles the step and prints its XLA options, capture and pipeline."""
        step = setup.compile_step()
        check_step(setup.config.input, step, setup.step.num_devices // jax.process_count())
        platform = jax.default_backend()
        texts, used = known(setup.step.bound.xla_options, platform), setup.options(platform)
        own = compiler_options("auto", texts, platform=platform)
        if chosen := [text for text, name in zip(texts, own, strict=True) if used[name] == own[name]]:
            self.reporter.line(f"XLA options chosen for this step: {' '.join(chosen)}")
        if step.capture is not None:
            self.reporter.line(str(step.capture))
        shapes = batch_shapes(setup.config.input, setup.config.input.batch_size)
        for line in setup.step.bound.reports.describe(shapes, step.gradients, step.executables, step.memory):
            self.reporter.line(line)
        return step

    def _write(self, *, is_new: bool) -> None:
        """Writes config.json, and for a new run the files of its initial weights."""
        corpus = self.corpus
        if not self.config.output.resume:
            self.run_dir.reset()
        texts = {
            "name": corpus.name,
            "fingerprint": corpus.fingerprint,
            "train_tokens": len(corpus.train),
            "heldout_tokens": len(corpus.heldout),
        }
        machine = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
        self.run_dir.write(self.config, texts, versions() | machine, self.setup.config)
        if is_new:
            write_origin(self.config, self.run_dir)

    def _print_start(self, done: int, batches: Batches) -> None:
        config = self.config
        if done:
            self.reporter.line(f"resumed from step {done}")
        elif self.weights:
            optimizer = " and the optimizer state" if config.initial.continue_with == "optimizer" else ""
            self.reporter.line(f"started with the weights{optimizer} of {self.weights.about}")
        epochs = ", ".join(f"{times:.3g} of {name}" for name, times in batches.epochs(config.steps))
        self.reporter.line(f"epochs: {epochs} in {config.steps} steps")

    def _loop(
        self, done: int, state: TrainState, step: CompiledStep, batches: Batches, checkpoints: Checkpoints
    ) -> tuple[int, TrainState]:
        setup = self.setup
        reporter = self.reporter
        watchdog = self.watchdog
        run_dir = self.run_dir
        monitor = setup.config.monitor
        ahead = Ahead(batches)
        trained_tokens = batches.trained_tokens if setup.config.input.data_format == "chat" else None
        profiles: list[Callback] = []
        if monitor.profile and done > monitor.profile_steps[0]:
            reporter.warn(f"no profile: `profile` is {monitor.profile}, but {done} steps are already done")
        elif monitor.profile:
            batch_of = lambda index: setup.step.place(ahead[index])  # noqa: E731
            profiles = [profiling.Profile(setup, step, batch_of, run_dir, watchdog, reporter)]
        with all_or_raise():
            started = _trackers.start(monitor.log, run_dir, done) if is_process_zero() else []
        seconds = [entry["seconds"] for entry in read_metrics(run_dir.metrics) if "seconds" in entry]
        clock = StepClock(seconds[-1] if seconds else 0.0)
        skipped = int(watchdog.wait(lambda: "the initial state", state.skipped))
        self.startup.enter("first step")
        path = run_dir.metrics if is_process_zero() else Path(os.devnull)
        with contextlib.closing(MetricsLog(path, done=done, trackers=started)) as log, reporter:
            evaluate = _validation.evaluator(setup, _validation.heldout(setup.config, self.corpus), watchdog)
            checks = _callbacks.GradientChecks(setup, checkpoints, reporter, skipped)
            loop = Loop(
                setup=setup,
                step=step,
                compile=self.compile,
                grow=self._grow,
                batches=ahead,
                callbacks=[
                    *profiles,
                    _callbacks.FirstStep(lambda: reporter.line(str(self.startup))),
                    self.progress,
                    checks,
                    _callbacks.Metrics(setup, log, reporter, clock, checks, evaluate, trained_tokens),
                    _callbacks.SaveCheckpoints(setup, checkpoints, watchdog, done),
                ],
                stops=agreed_stop(self.stop, watchdog, monitor.log_every),
                clock=clock,
                watchdog=watchdog,
            )
            return loop.run(done, state)

    def _grow(self, halt: _capacity.Halt) -> TrainSetup:
        """Returns the setup with the expert capacity that a halted step needs."""
        config, line = _capacity.grown(self.setup.config, halt)
        self.reporter.line(line)
        self.setup = TrainSetup.from_config(config)
        return self.setup

    def _summary(self, outcome: str, done: int, state: TrainState, *, samples: bool) -> Summary:
        """Prints and returns the summary. Generates text if the run is finished."""
        run_dir = self.run_dir
        is_done = done >= self.config.steps
        entries = read_metrics(run_dir.metrics)
        last = entries[-1] if entries else {}
        sample = ("", "")
        if is_done and samples:
            with self.reporter.phase("generating a sample text"):
                sample = _validation.sample(self.setup, state, self.corpus)
        summary = Summary(
            outcome=outcome,
            steps=int(state.step),
            skipped=int(state.skipped),
            tokens=int(state.step) * self.config.input.tokens_per_step,
            seconds=last.get("seconds", 0.0),
            train_loss=last.get("loss"),
            heldout_loss=next((entry["eval_loss"] for entry in reversed(entries) if "eval_loss" in entry), None),
            zlib_nats_per_token=self.corpus.zlib_nats_per_token,
            run_dir=run_dir.path,
            sample=sample,
            stopped_by="" if is_done else self.stop.name,
        )
        if is_done:
            self.reporter.summary(summary, self.config)
            if is_process_zero() and any(summary.sample):
                run_dir.add_sample(summary.steps, *summary.sample)
        else:
            saved = f"saved in {run_dir.path}; run the same command to resume"
            self.reporter.line(f"{outcome} at step {done}; {saved}")
        return summary


def _process(connection: Connection | None) -> int:
    """Returns the number of this process. Starts no backend, unless the caller of the trainer has connected the processes."""
    if connection:
        return connection.launch.process_id
    return jax.process_index() if jax.distributed.is_initialized() else 0


@contextlib.contextmanager
def _held(run_dir: RunDir, at_end: list[Callable[[], object]], reporter: Reporter) -> Iterator[None]:
    """Locks a run directory. `at_end` releases it if the process ends at once."""
    with locked(run_dir, reporter.warn):
        at_end.append(partial(release, run_dir))
        try:
            yield
        finally:
            at_end.clear()


def _describe(setup: TrainSetup, corpus: Corpus, connection: Connection | None, lines: list[str], reporter: Reporter) -> None:
    """Prints the header of a run, how its processes are connected, and lines that are not empty."""
    own = setup.step.bound.layout.own.params.values()
    size = sum(math.prod(param.shape) for param in own)
    trained = sum(math.prod(param.shape) for param in own if param.is_trained)
    reporter.begins(setup.config, parameters=size, trained=trained, corpus=corpus, devices=_devices(setup))
    if refused := refused_gpus():
        reason = "JAX_PLATFORMS=cuda shows why JAX does not use them, JAX_PLATFORMS=cpu hides this warning"
        reporter.warn(f"the run uses the CPU, and this machine has {refused} NVIDIA GPU{'s' * (refused > 1)}: {reason}")
    if connection:
        reporter.line(f"processes  {connection}")
        if unused := unused_gpus():
            reporter.warn(f"no process uses {unused} of the GPUs of this machine: see `distributed.local_devices`")
    for line in filter(None, lines):
        reporter.line(line)


def _enable_cache(setting: str) -> str:
    """Enables the compilation cache. Returns a line about it, or an empty string if it is off."""
    if setting == "off":
        return ""
    directory = cache.enable(Path(setting) if setting else None, field="compile_cache")
    return f"compile cache: {directory} (later runs load their programs from it)" if directory else ""


def _devices(setup: TrainSetup) -> str:
    count = setup.step.num_devices
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{count} {jax.devices()[0].device_kind} device{'s' if count > 1 else ''}{processes}"


def _last_words(message: Callable[[], str], at_end: list[Callable[[], object]], reporter: Reporter) -> str:
    """Restores the terminal, releases the run directory, and returns the message of a process that ends at once."""
    with contextlib.suppress(Exception):
        reporter.__exit__()
    for act in at_end:
        act()
    return message()


def _start(
    setup: TrainSetup, init: Callable[[], TrainState], checkpoints: Checkpoints, shapes: TrainState
) -> tuple[int, TrainState]:
    """Restores the newest checkpoint, or makes the initial state. Returns the number of steps done too.

    A separate function, so that the restored arrays are freed.
    """
    saved = checkpoints.restore_latest(shapes)
    return (0, init()) if saved is None else (saved[0], setup.step.canonical.back(saved[1]))


def _check_processes_agree(config: TrainConfig, fingerprint: str, source_step: int | None) -> None:
    """Checks that all processes have the configuration and data of process 0, and the same source of weights."""
    fields = config.to_dict() | {"distributed": None, "corpus": fingerprint, "from": source_step}
    sums = all_gather_scalar(zlib.crc32(json.dumps(fields).encode()) >> 1)  # 31 bits, for an int32
    differing = [process for process, total in enumerate(sums) if total != sums[0]]
    if differing:
        raise ConfigError(
            f"process {differing[0]} was started with other flags or another text of `data` than process 0: "
            "all flags except `distributed.process_id` and `distributed.local_devices` must be the same",
            field="distributed.process_id",
        )
