"""Chooses the fastest schedule that fits into memory, and reports every candidate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jgraph.errors import OrderError
from jgraph.schedule._generate import NAMES, generate
from jgraph.schedule._slots import check_sizes
from jgraph.schedule.action import FORWARD
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.simulate import Costs, Execution, simulate


@dataclass(frozen=True)
class Candidate:
    """One candidate schedule of `best` and its simulated results, which are None if the schedule cannot be generated."""

    name: str
    chunks: int
    # Why the candidate won or lost, such as `fastest that fits` or `3.1% slower`, or why it cannot be generated.
    verdict: str
    makespan: float | None = None  # in the unit of the costs
    bubble: float | None = None  # idle fraction of all ranks' time, from 0 to 1
    peak_bytes: float | None = None  # of the pools of the rank that needs the most


@dataclass(frozen=True)
class Choice:
    """The result of `best`: the chosen schedule, and all candidates for a report."""

    schedule: Schedule
    # The winner, then the others from the fastest to the slowest, then those that cannot be generated. A schedule that fails
    # with the same message for several numbers of chunks occurs once.
    candidates: tuple[Candidate, ...]


def best(
    *,
    pp: int,
    microbatches: int,
    # Times of all layers of a rank for one microbatch. They are divided by the number of chunks of a candidate.
    costs: Costs,
    # Bytes of one array of each pool, for all layers of a rank. Divided by the number of chunks, except for received arrays.
    sizes: Mapping[str, float] | None = None,
    memory_limit: float | None = None,  # bytes of all pools of a rank
    names: Sequence[str] = NAMES,
    chunks: Sequence[int] = (1, 2),
    latency: float = 0.0,
    execution: Execution = "dataflow",
    head: float = 0.0,  # time of the loss, added to each forward of the last stage; it is not divided
) -> Choice:
    """Simulates all pairs of a name and a number of chunks, and returns the fastest schedule that fits into memory."""
    sizes = dict(sizes or {})
    check_sizes(sizes)
    limit = float("inf") if memory_limit is None else memory_limit
    if not isinstance(limit, (int, float)) or not limit >= 0:
        raise OrderError(f"`memory_limit` is {memory_limit!r}: must be bytes >= 0, or None for no limit", field="memory_limit")
    for field, value in (("names", names), ("chunks", chunks)):
        if isinstance(value, (int, str)):
            raise OrderError(f"`{field}` is {value!r}: must be a sequence of values to try", field=field)
    found: list[tuple[float, float, Candidate, Schedule]] = []
    refused: dict[tuple[str, str], Candidate] = {}
    for name, count in product(dict.fromkeys(names), dict.fromkeys(chunks)):
        try:
            schedule = generate(name, pp=pp, microbatches=microbatches, chunks=count)
        except OrderError as error:
            refused.setdefault((name, str(error)), Candidate(name, count, str(error)))
            continue
        if schedule.num_chunks != count:
            continue
        chunk_costs = costs.per_chunk(count)
        if head:
            forward = chunk_costs.table(schedule.num_stages)[FORWARD].tolist()
            chunk_costs = replace(chunk_costs, forward=[*forward[:-1], forward[-1] + head])
        run = simulate(schedule, chunk_costs, latency=latency, execution=execution)
        share = {pool: size if pool in ("activation", "gradient") else size / count for pool, size in sizes.items()}
        peak = float(run.peak(share).max())
        # Rounded to 9 digits, so that floating-point error does not decide between equally fast schedules.
        time = float(f"{run.makespan:.9g}")
        found.append((time, peak, Candidate(name, count, "", run.makespan, run.bubble, peak), schedule))
    if not found:
        reason = next((c.verdict for c in refused.values()), "`names` and `chunks` select no schedule")
        raise OrderError(f"no schedule can be generated: {reason}", field="names")
    # Among equally fast schedules, the one with the smallest peak memory wins.
    found.sort(key=lambda row: row[:2])
    fits = [row for row in found if row[1] <= limit]
    if not fits:
        _, least, smallest, _ = min(found, key=lambda row: row[1])
        needs = f"{smallest.name} with {smallest.chunks} chunks and needs {least:,.0f}, {least - limit:,.0f} more"
        problem = f"no schedule fits into {limit:,.0f} bytes per rank; the smallest is {needs}; raise the memory limit"
        raise OrderError(problem, field="memory_limit")
    fastest, least, winner, schedule = fits[0]
    candidates = [replace(winner, verdict="fastest that fits")]
    for time, peak, candidate, _ in found:
        if candidate is winner:
            continue
        if peak > limit:
            verdict = f"needs {peak - limit:,.0f} bytes more than the limit"
        elif time > fastest:
            verdict = f"{time / fastest - 1:.1%} slower"
        elif peak > least:
            verdict = f"as fast, needs {peak - least:,.0f} bytes more"
        else:
            verdict = "as fast"
        candidates.append(replace(candidate, verdict=verdict))
    return Choice(schedule, (*candidates, *refused.values()))
