"""A run: text, directory, compiled step, checkpoints and the loop, put together; what is wrong is said before anything slow."""

import contextlib
import dataclasses
import json
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jgraph.checkpoint.store import Checkpoints, check_space
from jgraph.data import Ahead, Batch, Batches, Corpus, heldout_batches, load
from jgraph.dispatch import check_devices, in_turn
from jgraph.errors import ConfigError, os_errors
from jgraph.inference.generate import generate
from jgraph.interop.folder import Folder
from jgraph.processes import all_gather_scalar, all_or_raise, connect, is_process_zero
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import TrainState
from jgraph.train import capacity, continued, origin, profiling, trackers
from jgraph.train.config import TrainConfig
from jgraph.train.console import Reporter, Summary
from jgraph.train.engine import settle_engine
from jgraph.train.loop import Loop
from jgraph.train.metrics import MetricsLog, StepClock, read_metrics
from jgraph.train.rundir import RunDir, replace_json, versions
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup
from jgraph.train.signals import StopRequest
from jgraph.train.watchdog import Wait, Watchdog, hang_message
from jgraph.xla import cache, compiler_options

_PROMPT_TOKENS = 64
_TEMPERATURE = 0.8


def train(config: TrainConfig, *, console: Console, end: Callable[[Callable[[], str]], object]) -> Summary:
    """Trains until `config.steps` or a signal, from the last checkpoint of the run directory on. Returns the printed summary.

    Of several processes, which all call this, the first writes and talks; they stop and fail together.

    Args:
        config: the whole run.
        console: where to tell of it.
        end: ends the process where the devices hang, from any thread; it is given what says so.

    Raises:
        JgraphError: anything that a user can put right, in one line. NonFiniteError for a loss or gradient that is not finite,
            unless `config.on_nonfinite` is `skip`.
        KeyboardInterrupt: a second SIGINT.
    """
    # Refused before anything slow, and before a backend starts. "gpu", because options are checked the same way everywhere.
    compiler_options(config.graph, config.xla_options, platform="gpu")
    trackers.check_installed(config.log)
    connect(**dataclasses.asdict(config.distributed))
    check_devices()
    run_dir = RunDir(Path(config.run_dir))
    with all_or_raise(), os_errors("run_dir", run_dir.path, "read"):
        config = run_dir.resumed(config)
    reporter = Reporter(console if is_process_zero() else Console(quiet=True), config)
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        compiles = held.enter_context(cache.watch())
        with all_or_raise():
            where = config.compile_cache
            kept_in = "" if where == "off" else cache.enable(Path(where) if where else None, field="compile_cache")
            source = origin.opened(config, run_dir) or continued.opened(config, run_dir)
            if isinstance(source, SavedRun):
                held.callback(source.close)
            rows = config.batch_size // jax.process_count()
            _check_memory(config, rows * (config.seq_len + 1) * np.dtype(np.int32).itemsize, "its tokens")
            sizes: dict[str, Any] = {"seq_len": config.seq_len, "vocab_size": getattr(config.model, "vocab_size", None)}
            tokenizer = origin.tokenizer_of(config, run_dir)
            sizes |= {"field": config.data_field, "documents": config.data_documents}
            corpus = load(config.data, **sizes, tokenizer=tokenizer)
            with os_errors("run_dir", run_dir.path, "read"):  # `locked` names the files that it writes
                run_dir.check(config, corpus.fingerprint)
                if is_process_zero():
                    held.enter_context(run_dir.locked(reporter.warn))
                    # Another process may have written there before this one held the lock.
                    run_dir.check(config, corpus.fingerprint)
            config, engine = settle_engine(config, corpus.sources, run_dir, reporter)
            setup = TrainSetup.of(config)
            # Traced now, called long after the start.
            setup.check_loss()
            no_sample = setup.sampling_problem() if config.sample_tokens else ""
        _check_alike(config, corpus, source)
        size = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
        reporter.begins(parameters=size, corpus=corpus, devices=_devices(setup))
        if kept_in:
            reporter.line(f"compile cache: {kept_in}")
        if source is not None and (doubt := origin.doubt(config)):
            reporter.warn(doubt)
        if no_sample:
            reporter.warn(f"no sample at the end: {no_sample}; set `sample_tokens` to 0 to disable samples")
        stop = held.enter_context(StopRequest())
        held.enter_context(_memory_errors(config, run_dir))

        def started() -> None:
            reporter.line(f"first step finished {time.perf_counter() - began:.1f} s after the start; {compiles}")

        def hung(wait: Wait) -> None:
            end(partial(_last_words, wait, config, run_dir, reporter))

        watchdog = held.enter_context(Watchdog(config.hang_seconds, hung))
        samples = bool(config.sample_tokens) and not no_sample
        return _train(setup, corpus, source, run_dir, reporter, stop, started, watchdog, engine, samples=samples)


def _devices(setup: TrainSetup) -> str:
    """Returns how many of which devices a run has, and of how many processes."""
    count, kind, processes = setup.num_devices, jax.devices()[0].device_kind, jax.process_count()
    return f"{count} {kind} device{'s' * (count > 1)}{f' of {processes} processes' if processes > 1 else ''}"


def _last_words(wait: Wait, config: TrainConfig, run_dir: RunDir, reporter: Reporter) -> str:
    """Leaves the terminal and the run directory as a run that ends does; returns what to say of a hang."""
    with contextlib.suppress(Exception):
        reporter.__exit__()
    if is_process_zero():
        run_dir.lock_file.unlink(missing_ok=True)
    return hang_message(wait, config, run_dir)


@contextlib.contextmanager
def _memory_errors(config: TrainConfig, run_dir: RunDir) -> Iterator[None]:
    """Raises ConfigError where the memory of a device does not suffice: that is a matter of flags."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        over = ", with `resume` off or another `run_dir`" if config.resume and run_dir.has_checkpoint() else ""
        raise ConfigError(
            f"`batch_size` is {config.batch_size} in `num_microbatches` {config.num_microbatches}: must fit the memory of a "
            f"{jax.local_devices()[0].device_kind}; take a smaller batch or more microbatches{over} ({str(e).splitlines()[0]})",
            field="batch_size",
        ) from e


def _check_memory(config: TrainConfig, needed: int, what: str) -> None:
    """Raises ConfigError if something that grows with the batch needs more bytes than the memory of this machine."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        sizes = f"{what} of {needed / 2**30:,.1f} GiB must fit the {there / 2**30:,.1f} GiB of this machine"
        raise ConfigError(
            f"`batch_size` is {config.batch_size} in `num_microbatches` {config.num_microbatches}: {sizes}; "
            "take a smaller batch or more microbatches",
            field="batch_size",
        )


def _train(
    setup: TrainSetup,
    corpus: Corpus,
    source: Folder | SavedRun | None,
    run_dir: RunDir,
    reporter: Reporter,
    stop: StopRequest,
    started: Callable[[], None],
    watchdog: Watchdog,
    engine: dict[str, Any],
    *,
    samples: bool,
) -> Summary:
    config, shapes = setup.config, setup.step.canonical.shapes()
    if (larger := capacity.remembered(config, run_dir)) != config:
        setup = TrainSetup.of(larger)
    if config.profile:
        setup = dataclasses.replace(setup, config=profiling.profiled(setup.config, jax.default_backend()))
    how: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
    how |= {"shuffle": config.data_shuffle, "documents": config.data_documents}
    batches = Batches(corpus.sources, **how, rows=setup.step.batch_rows(config.batch_size))
    step, init = None, setup.init
    # The first process's word, because it may already be writing where another looks.
    if begins := not all_gather_scalar(config.resume and run_dir.has_checkpoint())[0]:
        with all_or_raise():
            check_space(run_dir.path.absolute(), shapes, config.checkpoint_keep + 1)
        # Both programs at once, and before the directory changes: what does not compile must not replace a run that did.
        init = _beginning(setup, source)
    if begins:
        step = _compile(setup, reporter)
    with all_or_raise():
        if is_process_zero():
            if not config.resume:
                run_dir.reset()
            about = {"name": corpus.name, "fingerprint": corpus.fingerprint}
            about |= {"train_tokens": len(corpus.train), "heldout_tokens": len(corpus.heldout)}
            machine = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
            run_dir.write(config, about, versions() | machine)
            if begins:
                origin.keep(config, run_dir)
            if engine:
                replace_json(run_dir.engine, engine)
    wait = partial(watchdog.wait, lambda: "checksums of the state, to save it")
    checkpoints = Checkpoints(run_dir.checkpoints, config.checkpoint_keep, warn=reporter.warn, wait=wait)
    try:
        with all_or_raise():
            checkpoints.check_space(shapes)
        done, state = _start(setup, init, checkpoints, shapes)
        if done >= config.steps:
            reporter.line(f"this run is finished: {done} of `steps` {config.steps}; to add steps, see `optimizer.extend`")
            outcome = "already finished"
        else:
            if done:
                reporter.line(f"resumed from step {done}")
            elif source:
                after = f" after {source.step} steps" if isinstance(source, SavedRun) else ""
                beside = " and the optimizer state" * (config.continue_with == "optimizer")
                reporter.line(f"started with the weights{beside} of {source.path}{after}")
            epochs = batches.epochs(config.steps)
            reporter.line(f"epochs in this run: {', '.join(f'{times:.3g} of {name}' for name, times in epochs)}")
            step = step or _compile(setup, reporter)
            recorder = None
            if config.profile and done > config.profile_steps[0]:
                reporter.warn(f"no profile: `profile` is {config.profile}, but {done} steps are already done")
            elif config.profile:
                recorder = _recorder(setup, step, run_dir)
            metrics = run_dir.metrics if is_process_zero() else Path(os.devnull)
            with all_or_raise():
                others = trackers.start(config.log, run_dir, done) if is_process_zero() else []
            with contextlib.closing(MetricsLog(metrics, done=done, trackers=others)) as log, reporter:
                entries = reversed(read_metrics(run_dir.metrics))
                clock = StepClock(next((entry["seconds"] for entry in entries if "seconds" in entry), 0.0))
                evaluate = evaluator(setup, heldout(config, corpus), watchdog)
                given = (setup, step, Ahead(batches), evaluate, run_dir, checkpoints, log, reporter, clock)
                loop = Loop(*given, recorder, started, watchdog)
                done, state = loop.run(done, state, stop)
            outcome = f"stopped by {stop.name}" if done < config.steps else "finished"
    finally:
        checkpoints.close()
    is_done = done >= config.steps
    if not is_done:
        reporter.line(f"{outcome} at step {done}; saved in {run_dir.path}; run the same command to resume")
    entries = read_metrics(run_dir.metrics)
    last = entries[-1] if entries else {}
    summary = Summary(
        outcome=outcome,
        steps=int(state.step),
        skipped=int(state.skipped),
        tokens=int(state.step) * config.tokens_per_step,
        seconds=last.get("seconds", 0.0),
        train_loss=last.get("loss"),
        heldout_loss=next((entry["eval_loss"] for entry in reversed(entries) if "eval_loss" in entry), None),
        zlib_nats_per_token=corpus.zlib_nats_per_token,
        run_dir=run_dir.path,
        sample=_sample(setup, state, corpus) if is_done and samples else ("", ""),
        stopped_by="" if is_done else stop.name,
    )
    if is_done:
        reporter.summary(summary)
        if is_process_zero() and any(summary.sample):
            run_dir.add_sample(summary.steps, *summary.sample)
    return summary


def _beginning(setup: TrainSetup, source: Folder | SavedRun | None) -> Callable[[], TrainState]:
    """Returns what makes the state before the first step; begins to compile it where it is the run's own."""
    if source is None:
        return setup.compile_init()
    return partial(setup.load, source) if isinstance(source, Folder) else partial(continued.load, setup, source)


def _start(
    setup: TrainSetup, init: Callable[[], TrainState], checkpoints: Checkpoints, shapes: TrainState
) -> tuple[int, TrainState]:
    """Returns the steps done and the state after them, saved or the first. A function, so that the state is held once."""
    saved = checkpoints.restore_latest(shapes)
    return (0, init()) if saved is None else (saved[0], setup.step.canonical.back(saved[1]))


def _check_alike(config: TrainConfig, corpus: Corpus, source: Folder | SavedRun | None) -> None:
    """Raises ConfigError where processes would not compute the same step, or not write to the same place."""
    fields = dataclasses.asdict(config) | {"distributed": None, "corpus": corpus.fingerprint}
    fields["from"] = source.step if isinstance(source, SavedRun) else None  # of a run that goes on, it may be another by now
    sums = all_gather_scalar(zlib.crc32(json.dumps(fields).encode()) >> 1)  # into an int32
    differing = [process for process, total in enumerate(sums) if total != sums[0]]
    if differing:
        raise ConfigError(
            f"process {differing[0]} was started with other flags or another text of `data` than process 0: "
            "only `distributed.process_id` may differ",
            field="distributed.process_id",
        )


def _compile(setup: TrainSetup, reporter: Reporter) -> CompiledStep:
    """Compiles the step and reports its XLA options, capture and pipeline."""
    step = setup.compile_step()
    if jax.default_backend() == "cpu" and step.memory is not None:
        # A CPU device takes memory that is not there, and Linux kills the process later.
        devices = setup.num_devices // jax.process_count()
        _check_memory(setup.config, devices * step.memory.total, "a step")
    if chosen := setup.step.chosen_options(jax.default_backend()):
        reporter.line(f"XLA options chosen for this step: {' '.join(chosen)}")
    if step.capture is not None:
        reporter.line(str(step.capture))
    for line in setup.describe(step):
        reporter.line(line)
    return step


def _recorder(setup: TrainSetup, step: CompiledStep, run_dir: RunDir) -> profiling.Recorder:
    """Compiles for the profile, before the loop, so that no pause cools the devices that are to be traced."""
    # Every process runs the steps; the first one's trace is reported.
    directory = run_dir.path / "profile" if is_process_zero() else Path(tempfile.mkdtemp(prefix="jgraph-profile-"))
    return profiling.Recorder.of(setup, step, setup.config.profile_steps[0], directory)


def heldout(config: TrainConfig, corpus: Corpus) -> list[Batch]:
    """Returns `eval_batches` whole batches to evaluate on, as microbatches, whose activations fit."""
    return heldout_batches(
        corpus.heldout_sources,
        batch_size=config.batch_size // config.num_microbatches,
        seq_len=config.seq_len,
        limit=config.eval_batches * config.num_microbatches,
        documents=config.data_documents,
    )


def evaluator(setup: TrainSetup, batches: list[Batch], watchdog: Watchdog) -> Callable[[TrainState], float]:
    """Returns the function for the mean loss of a state over batches of as many tokens each."""
    loss, compiled = jax.jit(setup.loss), None

    def evaluate(state: TrainState) -> float:
        nonlocal compiled
        losses = []
        for batch in map(setup.place_whole, batches):
            # By itself: no device is waited for meanwhile.
            compiled = compiled or loss.lower(state, batch).compile()
            with watchdog.over(lambda: "an evaluation", compiled):
                losses.append(in_turn(compiled(state, batch)))
        watchdog.wait(lambda: "an evaluation", losses, compiled)
        # All batches have the same number of tokens, or weights that make up for it: so this is the mean over tokens.
        return float(np.mean(jax.device_get(losses)))

    return evaluate


def _sample(setup: TrainSetup, state: TrainState, corpus: Corpus) -> tuple[str, str]:
    """Returns a held-out prompt and its continuation."""
    config = setup.config
    prompt = np.asarray(corpus.heldout[: min(_PROMPT_TOKENS, config.seq_len)]).astype(np.int32)
    how = {"max_tokens": config.sample_tokens, "temperature": _TEMPERATURE, "key": config.seed, "window": config.seq_len}
    (tokens,) = generate(setup.decoder, state, [prompt], **how)
    return corpus.decode(prompt), corpus.decode(tokens)
