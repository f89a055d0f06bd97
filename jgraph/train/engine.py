"""`pp_engine` auto: times the best schedules of both pipeline engines and stores the choice in the run directory."""

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

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
from jgraph.train.setup import TrainSetup, in_thread, predictor

_LONGEST = 50.0  # seconds to compile, after which the prediction decides
_NEAR = 1.3  # a schedule predicted to be slower than this times the fastest is not timed
_MOST_ROWS = 8

# Fields that do not affect the compiled step.
_BESIDE = (
    "run_dir resume compile_cache on_nonfinite log_every eval_every eval_batches checkpoint_every checkpoint_keep hang_seconds "
    "profile sample_tokens distributed data data_field data_shuffle data_documents seed log"
)


def settle_engine(
    config: TrainConfig, sources: Sequence[Source], run_dir: RunDir, reporter: Reporter
) -> tuple[TrainConfig, dict[str, Any]]:
    """Selects the engine and the schedule of a pipeline with `pp_engine` auto.

    Simulates all schedules with the measured times of a layer, under the memory limit. Compiles the best two at once, with one
    layer per stage, and times them. The measured time is scaled by the predicted ratio to all layers. If one of them does not
    compile in time, the prediction decides.

    Args:
        config: The configuration of the run.
        sources: The data.
        run_dir: The run directory, which may hold an earlier measurement.
        reporter: Prints the candidates and the choice.

    Returns:
        The configuration with an engine, and the fields to write to `run_dir.engine`, empty if nothing was measured.

    Raises:
        JgraphError: If no engine can run the model.
    """
    if config.pipeline.pp_engine != "auto":
        return config, {}
    if len(config.pp_engines) == 1 or jax.process_count() > 1:
        reporter.line("`pp_engine` auto: takes program, the only engine that supports the other settings")
        return config.changed(pp_engine="program"), {}
    here = _measured_for(config)
    if config.output.resume and (before := _stored(run_dir, here)):
        chosen = f"takes {before['engine']}, {before['schedule']}, as measured before ({run_dir.engine})"
        reporter.line(f"`pp_engine` auto: {chosen}")
        return _with(config, Candidate(before["schedule"], before["chunks"], "", engine=before["engine"])), {}
    start = time.perf_counter()
    rows, predicted = _candidates(config)
    taken, notes = _fastest(config, _pair(rows), predicted, sources, deadline=start + _LONGEST)
    for row in {row.engine: row for row in reversed(rows)}.values():
        if row.makespan and rows[0].makespan and row.makespan > _NEAR * rows[0].makespan:
            notes[row] = f"{row.makespan / rows[0].makespan:.1f} x the fastest: not measured"
    table = [_line(row, notes.get(row, ""), "taken" * (row is taken)) for row in rows]
    for line in ("`pp_engine` auto, ms a step:", *(f"  {line}" for line in table[:_MOST_ROWS])):
        reporter.line(line)
    stored = {"engine": taken.engine, "schedule": taken.name, "chunks": taken.chunks, "table": table, "measured_for": here}
    return _with(config, taken), stored


def _fastest(
    config: TrainConfig,
    pair: list[Candidate],
    predicted: Callable[[Candidate], float],
    sources: Sequence[Source],
    *,
    deadline: float,
) -> tuple[Candidate, dict[Candidate, str]]:
    """Times the candidates. Returns the fastest one, and a note on each."""
    timers = {row: in_thread(partial(_prepared, _with(config, row), sources, layers=_layers(config, row))) for row in pair}
    late = wait(timers.values(), timeout=max(0.0, deadline - time.perf_counter())).not_done
    failed = {row: error for row, timer in timers.items() if timer not in late and (error := timer.exception())}
    seconds: dict[Candidate, float] = {}
    notes = {row: f"not compiled after {_LONGEST:g} s" for row in pair if timers[row] in late}
    # Not timed while another one compiles, because the time would be wrong; one time alone decides nothing.
    for row in pair if not late and len(pair) - len(failed) > 1 else ():
        try:
            found = timers[row].result()()
        except (JgraphError, jax.errors.JaxRuntimeError) as e:
            failed[row] = e
            continue
        seconds[row] = found * row.makespan / predicted(row) if row.makespan else found
        few = f", from {1e3 * found:.2f} with {_layers(config, row)} layers" if row.makespan else ""
        notes[row] = f"measured {1e3 * seconds[row]:.2f}{few}"
    for row, error in failed.items():
        if len(failed) == len(pair) or not isinstance(error, JgraphError | jax.errors.JaxRuntimeError):
            raise error
        notes[row] = (str(error).splitlines() or [type(error).__name__])[0]
    left = [row for row in pair if row not in failed]
    return min(left, key=lambda row: (seconds.get(row, math.inf), row.makespan is None and timers[row] in late)), notes


def _candidates(config: TrainConfig) -> tuple[list[Candidate], Callable[[Candidate], float]]:
    """Returns the candidates, fastest prediction first, and the prediction for the layers that are timed."""
    if config.pipeline.schedule != "auto":
        name, chunks = config.pipeline.schedule, config.pipeline.chunks
        return [Candidate(name, chunks, "", engine=engine) for engine in config.pp_engines], lambda row: 1.0
    predict = predictor(config)
    found = [row for row in predict(None).candidates if row.makespan is not None and "more than the limit" not in row.verdict]

    def predicted(row: Candidate) -> float:
        same = (row.engine, row.name, row.chunks)
        rows = predict(_layers(config, row)).candidates
        return next(one.makespan for one in rows if (one.engine, one.name, one.chunks) == same and one.makespan)

    return sorted(found, key=lambda row: row.makespan or 0.0), predicted


def _pair(rows: list[Candidate]) -> list[Candidate]:
    """Returns the fastest candidate and the fastest one of the other engine, else of the same, if the predictions are close."""
    first, *rest = rows
    others = [*[row for row in rest if row.engine != first.engine][:1], *rest[:1]]
    return [first, *[row for row in others if (row.makespan or 0.0) <= _NEAR * (first.makespan or 0.0)][:1]]


def _layers(config: TrainConfig, row: Candidate) -> int | None:
    """Returns the number of layers that are timed: one per stage; None for all if there is no prediction to scale by."""
    return config.parallel.pp * row.chunks if row.makespan else None


def _with(config: TrainConfig, row: Candidate) -> TrainConfig:
    return config.changed(pp_engine=row.engine, schedule=row.name, chunks=row.chunks, memory_limit=0.0)


def _line(row: Candidate, note: str, verdict: str) -> str:
    predicted = "" if row.makespan is None else f"predicted {1e3 * row.makespan:.2f}"
    chunks = f"{row.chunks} chunk{'s' * (row.chunks > 1)}"
    return f"{row.engine:10}{row.name:19}{chunks:10}{predicted:20}{note:17}  {verdict}".rstrip()


def _prepared(config: TrainConfig, sources: Sequence[Source], *, layers: int | None) -> Callable[[], float]:
    """Compiles the step of a candidate, perhaps with fewer layers. Returns a function that returns its median time."""
    setup = TrainSetup.of(config, layers=layers)
    step, batch = setup.compile_step(), config.input

    def timed() -> float:
        sizes: dict[str, Any] = {"batch_size": batch.batch_size, "seq_len": batch.seq_len, "seed": config.seed}
        placed = setup.step.place(Batches(sources, **sizes, documents=batch.data_documents)[0])
        # Random numbers of the first state would take long to compile. The moments of the optimizer are zero in it.
        state = [in_turn(filled(setup.step.state, zero=lambda path: path[0].name != "params"))]

        def run() -> tuple[TrainState, StepMetrics]:
            state[0], metrics = step(state[0], placed)
            return state[0], metrics

        return seconds_of(run)

    return timed


def _measured_for(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings, versions and devices that a measurement is valid for."""
    device = jax.devices()[0]
    found = {
        "config": {name: value for name, value in config.to_dict().items() if name not in _BESIDE.split()},
        "versions": versions() | {"runtime": device.client.platform_version},
        "devices": f"{config.parallel.pp * config.parallel.dp} x {device.device_kind}",
    }
    return json.loads(json.dumps(found))  # tuples become lists, as in the file


def _stored(run_dir: RunDir, measured_for: dict[str, Any]) -> dict[str, Any]:
    """Returns the stored measurement if it is valid for these settings, or an empty dict."""
    try:
        fields = json.loads(run_dir.engine.read_text())
        return fields if fields["measured_for"] == measured_for else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
