"""Selects the engine and the schedule of a pipeline with `pp_engine` auto."""

import jax

from jgraph.pipeline import find_schedule
from jgraph.schedule import NAMES, Candidate
from jgraph.train.config import TrainConfig
from jgraph.train.console import Reporter
from jgraph.train.setup import measured_choice


def settle_engine(config: TrainConfig, reporter: Reporter) -> TrainConfig:
    """Selects the engine, and with `schedule` auto the schedule, with the smallest predicted time.

    Measures the parts of a layer and simulates all schedules with these times, under the memory limit. Compiles no step.

    Args:
        config: The configuration of the run.
        reporter: Prints the choice.

    Returns:
        The configuration with an engine. Unchanged unless `pp_engine` is auto.

    Raises:
        ConfigError: As `TrainSetup.of`.
        OrderError: If no schedule fits in memory.
    """
    if config.pipeline.pp_engine != "auto":
        return config
    if len(config.pp_engines) == 1 or jax.process_count() > 1:
        reporter.line("`pp_engine` auto: takes program, the only engine that supports the other settings")
        return config.changed(pp_engine="program")
    rows = _candidates(config)
    if not rows:
        reporter.line(
            f"`pp_engine` auto: takes program, because no time is predicted for `schedule` {config.pipeline.schedule}"
        )
        return config.changed(pp_engine="program")
    taken, best = rows[0], dict[str, Candidate]()
    for row in rows:
        best.setdefault(row.engine, row)
    times = ", ".join(f"{1e3 * (row.makespan or 0.0):.2f} with {row.engine} ({_shown(row)})" for row in best.values())
    reporter.line(f"`pp_engine` auto: takes {taken.engine}, {_shown(taken)}; predicted ms per step: {times}")
    return config.changed(pp_engine=taken.engine, schedule=taken.name, chunks=taken.chunks, memory_limit=0.0)


def _candidates(config: TrainConfig) -> list[Candidate]:
    """Returns the candidates with a predicted time that fit in memory, fastest first. Empty for a schedule from a file."""
    own = config.pipeline
    chunks: int | None = None
    if own.schedule != "auto":
        sizes = {"pp": config.parallel.pp, "microbatches": config.input.num_microbatches}
        schedule = find_schedule(own.schedule, chunks=own.chunks, **sizes)
        if own.schedule not in NAMES:
            return []
        chunks = schedule.num_chunks
    rows = [row for row in measured_choice(config).candidates if row.makespan is not None]
    rows = [row for row in rows if "more than the limit" not in row.verdict]
    return rows if chunks is None else [row for row in rows if (row.name, row.chunks) == (own.schedule, chunks)]


def _shown(row: Candidate) -> str:
    return f"{row.name} with {row.chunks} chunk{'s' * (row.chunks > 1)}"
