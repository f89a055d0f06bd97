"""The fastest schedule that fits, and why the others lost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from jgraph.errors import OrderError
from jgraph.schedule.action import FORWARD
from jgraph.schedule.generate import NAMES, generate
from jgraph.schedule.schedule import Schedule
from jgraph.schedule.simulate import Costs, Execution, simulate
from jgraph.schedule.slots import check_sizes


@dataclass(frozen=True)
class Engine:
    """Says what playing a schedule takes besides its actions.

    Attributes:
        name: for the reader.
        execution: as in `simulate`.
        head: what it adds to the last stage's forward.
        of_step: (schedule, makespan) -> time of a step; None where that is the makespan.
    """

    name: str = "program"
    execution: Execution = "dataflow"
    head: float = 0.0
    of_step: Callable[[Schedule, float], float] | None = None


@dataclass(frozen=True)
class Candidate:
    """One schedule that was looked at.

    Attributes:
        name, chunks: what `generate` was given.
        verdict: why it won or lost, in a few words.
        makespan: of a step, in the unit of the costs; None where there is no such schedule.
        bubble: idle share, 0 to 1.
        peak_bytes: of the rank that needs most.
        engine: that plays it.
    """

    name: str
    chunks: int
    verdict: str
    makespan: float | None = None
    bubble: float | None = None
    peak_bytes: float | None = None
    engine: str = "program"


@dataclass(frozen=True)
class Choice:
    """The schedule to take, and all candidates: the winner first, then by makespan, then those that are impossible."""

    schedule: Schedule
    candidates: tuple[Candidate, ...]


def best(
    *,
    pp: int,
    microbatches: int,
    costs: Costs,
    sizes: Mapping[str, float] | None = None,
    memory_limit: float | None = None,
    names: Sequence[str] = NAMES,
    chunks: Sequence[int] = (1, 2),
    latency: float = 0.0,
    engines: Sequence[Engine] = (Engine(),),
) -> Choice:
    """Simulates every schedule and takes the fastest that fits; of equally fast ones, the one that needs least memory.

    Args:
        pp, microbatches: as in `generate`.
        costs: of all layers of a rank, to be divided by the number of chunks.
        sizes: bytes per pool (`slots.POOLS`) of all layers of a rank, to be divided likewise, but not those between layers
            (activation, gradient).
        memory_limit: bytes for the pools of a rank; None for no limit.
        names, chunks: schedules and numbers of chunks to try.
        latency: as in `simulate`.
        engines: that could play it.

    Raises:
        OrderError: nothing fits; the message names what comes nearest, and by how much it is over.
    """
    sizes = dict(sizes or {})
    limit = float("inf") if memory_limit is None else memory_limit
    if not isinstance(limit, (int, float)) or not limit >= 0:
        raise OrderError(f"`memory_limit` is {memory_limit!r}: must be bytes >= 0, or None for no limit", field="memory_limit")
    for field, value in (("names", names), ("chunks", chunks)):
        if isinstance(value, (int, str)):
            raise OrderError(f"`{field}` is {value!r}: must be a sequence of those to try", field=field)
    check_sizes(sizes)
    found: list[tuple[float, float, Schedule, Candidate]] = []
    generated: list[tuple[Candidate, Schedule]] = []
    refused: dict[tuple[str, str], Candidate] = {}
    for name, count in product(dict.fromkeys(names), dict.fromkeys(chunks)):
        try:
            schedule = generate(name, pp=pp, microbatches=microbatches, chunks=count)
        except OrderError as error:
            refused.setdefault((name, str(error)), Candidate(name, count, str(error)))
            continue
        if len(schedule.placement[0]) == count:
            generated.append((Candidate(name, count, ""), schedule))
    for engine, (candidate, schedule) in product(engines, generated):
        count = candidate.chunks
        own = _with_head(costs.per_chunk(count), schedule.num_stages, engine.head)
        run = simulate(schedule, own, latency=latency, execution=engine.execution)
        share = {pool: size if pool in ("activation", "gradient") else size / count for pool, size in sizes.items()}
        peak = float(run.peak(share).max())
        makespan = run.makespan if engine.of_step is None else engine.of_step(schedule, run.makespan)
        # Rounded, so that sums in another order do not decide between equals.
        time = float(f"{makespan:.9g}")
        told = replace(candidate, makespan=makespan, bubble=run.bubble, peak_bytes=peak, engine=engine.name)
        found.append((time, peak, schedule, told))
    found.sort(key=lambda row: row[:2])
    if not found:
        why = next((c.verdict for c in refused.values()), "`names` and `chunks` leave no schedule")
        raise OrderError(f"no schedule is possible: {why}", field="names")
    fits = [row for row in found if row[1] <= limit]
    if not fits:
        _, least, _, nearest = min(found, key=lambda row: row[1])
        raise OrderError(
            f"no schedule fits into {limit:,.0f} bytes a rank; the nearest is {nearest.name} with {nearest.chunks} chunks, "
            f"which needs {least:,.0f}, {least - limit:,.0f} more; raise the memory limit",
            field="memory_limit",
        )
    fastest, least, schedule, winner = fits[0]
    others = []
    for time, peak, _, candidate in found:
        verdict = "as fast" + f", needs {peak - least:,.0f} bytes more" * (peak > least)
        if peak > limit:
            verdict = f"needs {peak - limit:,.0f} bytes more than the limit"
        elif time > fastest:
            verdict = f"{time / fastest - 1:.1%} slower"
        others += [replace(candidate, verdict=verdict)] if candidate is not winner else []
    return Choice(schedule, (replace(winner, verdict="fastest that fits"), *others, *refused.values()))


def _with_head(costs: Costs, num_stages: int, head: float) -> Costs:
    """Returns a chunk's costs, where the last stage's forward takes so much more."""
    if not head:
        return costs
    forward = costs.table(num_stages)[FORWARD]
    return replace(costs, forward=[*forward[:-1].tolist(), float(forward[-1]) + head])
