"""`pp_engine` auto of a run: what plays its schedule, and which schedule, by measurement; kept with the run."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import jax

from jgraph.data import Batches, Source
from jgraph.dispatch import in_turn
from jgraph.errors import JgraphError
from jgraph.pipeline.autotune import filled, seconds_of
from jgraph.schedule import Candidate
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.console import Reporter
from jgraph.train.rundir import RunDir, versions
from jgraph.train.setup import TrainSetup
from jgraph.train.strategy import predictor

_T = TypeVar("_T")
_LONGEST = 50.0  # seconds after which what is not compiled is not waited for: with the timing it is a minute at most
_NEAR = 1.3  # predicted to take so many times as long, a schedule is not measured: predictions are better than that
_MOST_ROWS = 8

# Fields of the configuration that do not affect the compiled step.
_BESIDE = (
    "run_dir resume compile_cache on_nonfinite log_every eval_every eval_batches checkpoint_every checkpoint_keep hang_seconds "
    "profile sample_tokens distributed data data_field data_shuffle data_documents seed log"
)


def settle_engine(
    config: TrainConfig, sources: Sequence[Source], run_dir: RunDir, reporter: Reporter
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the run with an engine, a schedule and its chunks, and tells of them.

    All schedules are simulated with measured times of a layer, under the memory limit. The best two are compiled, both at once,
    with one layer for each stage, and then timed; the time counts in proportion to what was predicted of them. If one takes too
    long to compile, what is predicted decides.

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
    here = _place(config, config.pp * config.dp)
    if config.resume and (before := _kept(run_dir.engine, here)):
        reporter.line(
            f"`pp_engine` auto: takes {before['engine']}, {before['schedule']}, as measured before ({run_dir.engine})"
        )
        return _with(config, before["engine"], before["schedule"], before["chunks"]), {}
    clock = [time.perf_counter()]
    rows, predicted = _candidates(config)
    pair = _pair(rows)
    clock.append(time.perf_counter())
    timers = {row: _begun(partial(_prepared, _as(config, row), sources, layers=_layers(config, row))) for row in pair}
    late = wait(timers.values(), timeout=max(0.0, clock[0] + _LONGEST - time.perf_counter())).not_done
    clock.append(time.perf_counter())
    failed = {row: error for row, timer in timers.items() if timer not in late and (error := timer.exception())}
    seconds: dict[Candidate, float] = {}
    # Not where one still compiles: the other one's time would be wrong, and would say nothing alone.
    why: dict[Candidate, str] = {}
    for row in pair if not late and len(pair) - len(failed) > 1 else ():
        try:
            found = timers[row].result()()
            seconds[row] = found * row.makespan / predicted(row) if row.makespan else found
            few = f", from {1e3 * found:.2f} with {_layers(config, row)} layers" if row.makespan else ""
            why[row] = f"measured {1e3 * seconds[row]:.2f}{few}"
        except (JgraphError, jax.errors.JaxRuntimeError) as e:
            failed[row] = e
    clock.append(time.perf_counter())
    for error in failed.values():
        if len(failed) == len(pair) or not isinstance(error, JgraphError | jax.errors.JaxRuntimeError):
            raise error
    left = [row for row in pair if row not in failed]
    taken = min(left, key=lambda row: (seconds.get(row, math.inf), row.makespan is None and timers[row] in late))
    why |= {row: (str(error).splitlines() or [type(error).__name__])[0] for row, error in failed.items()}
    why |= {row: f"not compiled after {_LONGEST:g} s" for row in pair if timers[row] in late}
    for row in {row.engine: row for row in reversed(rows)}.values():
        if row.makespan and rows[0].makespan and row.makespan > _NEAR * rows[0].makespan:
            why[row] = f"{row.makespan / rows[0].makespan:.1f} x the least: not measured"
    table = [_row(row, why.get(row, ""), row is taken) for row in rows]
    reporter.line("`pp_engine` auto, ms a step:")
    for one in table[:_MOST_ROWS]:
        reporter.line("  " + "  ".join(one.values()))
    phases = dict(zip(("parts", "compiling", "timing"), (b - a for a, b in pairwise(clock)), strict=True))
    told = {"engine": taken.engine, "schedule": taken.name, "chunks": taken.chunks, "table": table, "seconds": phases}
    return _as(config, taken), told | {"measured_for": here}


def _candidates(config: TrainConfig) -> tuple[list[Candidate], Callable[[Candidate], float]]:
    """Returns what could be taken, the most promising first, and what is predicted of one with as many layers as are timed."""
    if config.schedule != "auto":
        return [Candidate(config.schedule, config.chunks, "", engine=engine) for engine in config.pp_engines], lambda row: 1.0
    predict = predictor(config)
    found = [row for row in predict(None).candidates if row.makespan is not None and "more than the limit" not in row.verdict]

    def predicted(row: Candidate) -> float:
        same = (row.engine, row.name, row.chunks)
        rows = predict(_layers(config, row)).candidates
        return next(one.makespan for one in rows if (one.engine, one.name, one.chunks) == same and one.makespan)

    return sorted(found, key=lambda row: row.makespan or 0.0), predicted


def _pair(rows: list[Candidate]) -> list[Candidate]:
    """Returns the best two that are near each other: the best of both engines, else the best two of one; perhaps one alone."""
    first, *rest = rows
    others = [*[row for row in rest if row.engine != first.engine][:1], *rest[:1]]
    return [first, *[row for row in others if (row.makespan or 0.0) <= _NEAR * (first.makespan or 0.0)][:1]]


def _layers(config: TrainConfig, row: Candidate) -> int | None:
    """Returns how many layers are timed: one for each stage, which compiles soon; all of them where nothing is predicted."""
    return config.pp * row.chunks if row.makespan else None


def _begun(fn: Callable[[], _T]) -> Future[_T]:
    """Calls a function in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    found = thread.submit(fn)
    thread.shutdown(wait=False)
    return found


def _as(config: TrainConfig, row: Candidate) -> TrainConfig:
    return _with(config, row.engine, row.name, row.chunks)


def _with(config: TrainConfig, engine: Any, schedule: str, chunks: int) -> TrainConfig:
    return dataclasses.replace(config, pp_engine=engine, schedule=schedule, chunks=chunks, memory_limit=0.0)


def _row(row: Candidate, measured: str, is_taken: bool) -> dict[str, str]:
    """Returns a line of the table, as text of equal width."""
    predicted = "" if row.makespan is None else f"predicted {1e3 * row.makespan:.2f}"
    return {
        "engine": f"{row.engine:8}",
        "schedule": f"{row.name:17}",
        "chunks": f"{row.chunks} chunk{'s' * (row.chunks > 1):1}",
        "predicted": f"{predicted:18}",
        "measured": f"{measured:17}",
        "verdict": "taken" * is_taken,
    }


def _prepared(config: TrainConfig, sources: Sequence[Source], *, layers: int | None) -> Callable[[], float]:
    """Compiles a run's step, of so many layers. Returns a function that gives the median time of a training step."""
    setup = TrainSetup.of(config, layers=layers)
    step = setup.compile_step()

    def timed() -> float:
        sizes: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "seed": config.seed}
        batch = setup.step.place(Batches(sources, **sizes, documents=config.data_documents)[0])
        # Not the run's own first state: random numbers take long to compile. Moments of the optimizer are zero as there.
        state = [in_turn(filled(setup.step.state, zero=lambda path: path[0].name != "params"))]

        def run() -> tuple[TrainState, StepMetrics]:
            state[0], metrics = step(state[0], batch)
            return state[0], metrics

        return seconds_of(run)

    return timed


def _place(config: TrainConfig, num_devices: int) -> dict[str, Any]:
    """Returns the settings, versions and devices that a measurement is valid for."""
    device = jax.devices()[0]
    found = {
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name not in _BESIDE.split()},
        "versions": versions() | {"runtime": device.client.platform_version},
        "devices": f"{num_devices} x {device.device_kind}",
        "processes": jax.process_count(),
    }
    return json.loads(json.dumps(found))  # as it is read


def _kept(file: Path, place: dict[str, Any]) -> dict[str, Any]:
    """Returns the measurement stored in `file` for `place`, or an empty dict."""
    try:
        fields = json.loads(file.read_text())
        return fields if fields["measured_for"] == place else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
