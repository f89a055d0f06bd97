"""`pp_engine` auto of a run: what plays its schedule, and which schedule, by measurement; kept with the run."""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import jax

from jgraph.data import Batches, Corpus
from jgraph.errors import JgraphError
from jgraph.parallel.pipeline.autotune import seconds_of
from jgraph.parallel.step import StepMetrics, TrainState
from jgraph.schedule import Candidate
from jgraph.training.config import TrainConfig
from jgraph.training.console import Reporter
from jgraph.training.graph import kept, place
from jgraph.training.rundir import RunDir
from jgraph.training.setup import TrainSetup, candidates

_LONGEST = 60.0  # seconds after which what is not compiled is not waited for
_MOST_ROWS = 8


def settle_engine(
    config: TrainConfig, corpus: Corpus, run_dir: RunDir, reporter: Reporter
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the run with an engine, a schedule and its chunks, and tells of them.

    All schedules are simulated with measured times of a layer, under the memory limit. The best one of each engine is compiled,
    both at once, and timed on a state of its own, which is freed; if one takes more than a minute to compile, the other alone.

    Returns:
        The configuration; what to write to `run_dir.engine`, nothing where it was not measured now.

    Raises:
        JgraphError: no engine can play it.
    """
    if config.pp_engine != "auto" or not config.is_pipeline:
        return config, {}
    if len(config.pp_engines) == 1 or jax.process_count() > 1:
        reporter.line("`pp_engine` auto: takes program, which alone can do what is asked for")
        return dataclasses.replace(config, pp_engine="program"), {}
    here = place(config, config.pp * config.dp)
    if config.resume and (before := kept(run_dir.engine, here)):
        reporter.line(
            f"`pp_engine` auto: takes {before['engine']}, {before['schedule']}, as measured before ({run_dir.engine})"
        )
        return _with(config, before["engine"], before["schedule"], before["chunks"]), {}
    began, rows = time.perf_counter(), _candidates(config)
    firsts = [next(row for row in rows if row.engine == name) for name in dict.fromkeys(row.engine for row in rows)]
    seconds: dict[str, float] = {}
    verdicts: dict[str, str] = {}
    threads = ThreadPoolExecutor(len(firsts))
    timers = [threads.submit(_prepared, _with(config, row.engine, row.name, row.chunks), corpus) for row in firsts]
    threads.shutdown(wait=False)
    # Not timed while another one compiles, unless that takes too long.
    if not wait(timers, timeout=max(0.0, began + _LONGEST - time.perf_counter())).done:
        wait(timers, return_when=FIRST_COMPLETED)
    for row, timer in sorted(zip(firsts, timers, strict=True), key=lambda pair: not pair[1].done()):
        if seconds and not timer.done():
            verdicts[row.engine] = f"not compiled after {_LONGEST:g} s"
            continue
        try:
            seconds[row.engine] = timer.result()()
        except (JgraphError, jax.errors.JaxRuntimeError) as e:
            verdicts[row.engine] = (str(e).splitlines() or [type(e).__name__])[0]
            if len(firsts) == len(verdicts):
                raise
    winner = min(seconds, key=seconds.__getitem__)
    taken = next(row for row in firsts if row.engine == winner)
    table = [_row(row, seconds if row in firsts else {}, verdicts if row in firsts else {}, row is taken) for row in rows]
    reporter.line("`pp_engine` auto, ms a step:")
    for one in table[:_MOST_ROWS]:
        reporter.line("  " + "  ".join(one.values()))
    told = {"engine": winner, "schedule": taken.name, "chunks": taken.chunks, "table": table, "measured_for": here}
    return _with(config, winner, taken.name, taken.chunks), told


def _candidates(config: TrainConfig) -> list[Candidate]:
    """Returns what could be taken, the most promising first."""
    if config.schedule != "auto":
        return [Candidate(config.schedule, config.chunks, "", engine=engine) for engine in config.pp_engines]
    found = [row for row in candidates(config) if row.makespan is not None and "more than the limit" not in row.verdict]
    return sorted(found, key=lambda row: row.makespan or 0.0)


def _with(config: TrainConfig, engine: Any, schedule: str, chunks: int) -> TrainConfig:
    return dataclasses.replace(config, pp_engine=engine, schedule=schedule, chunks=chunks, memory_limit=0.0)


def _row(row: Candidate, seconds: dict[str, float], verdicts: dict[str, str], is_taken: bool) -> dict[str, str]:
    """Returns a line of the table, as text of equal width."""
    predicted = "" if row.makespan is None else f"predicted {1e3 * row.makespan:.2f}"
    measured = f"measured {1e3 * seconds[row.engine]:.2f}" if row.engine in seconds else verdicts.get(row.engine, "")
    return {
        "engine": f"{row.engine:8}",
        "schedule": f"{row.name:17}",
        "chunks": f"{row.chunks} chunk{'s' * (row.chunks > 1):1}",
        "predicted": f"{predicted:18}",
        "measured": f"{measured:17}",
        "verdict": "taken" * is_taken,
    }


def _prepared(config: TrainConfig, corpus: Corpus) -> Callable[[], float]:
    """Compiles a run's step and what makes its state. Returns a function that gives the median time of a training step."""
    setup = TrainSetup.of(config)
    init, step = setup.compile_init(), setup.compile_step()

    def timed() -> float:
        sizes: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
        batch, state = setup.step.place(Batches(corpus.sources, **sizes, documents=config.data_documents)[0]), [init()]

        def run() -> tuple[TrainState, StepMetrics]:
            state[0], metrics = step(state[0], batch)
            return state[0], metrics

        return seconds_of(run)

    return timed
