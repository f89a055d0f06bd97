"""How long it takes to generate, check, colour and tabulate a schedule, and that it grows with the number of actions.

python -m benchmarks run schedules
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section
from jgraph.schedule import NAMES, assign, generate, tick_table

SIZES = {"full": (64, (128, 256, 512, 1024, 2048)), "tiny": (4, (8,))}  # ranks, microbatches
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2}  # 4 of the others


@dataclass(frozen=True, kw_only=True)
class Flags(Options):
    """What to run."""

    name: str = "schedules"


def works(options: Flags) -> Iterator[Work]:
    ranks, microbatches = SIZES[options.sizes]
    rows = (row for name in NAMES for row in measure(name, ranks, microbatches, options.repeats))
    yield Work(f"{ranks} ranks", {"ranks": ranks}, rows=lambda: rows)


def measure(name: str, ranks: int, microbatches: tuple[int, ...], repeats: int) -> Iterator[Row]:
    """Median milliseconds on one core; generating checks, as an Order and a Schedule exist only if they can run."""
    chunks = CHUNKS.get(name, 4)
    for count in microbatches:
        rows, actions = [], 0
        for _ in range(repeats):
            times = [time.perf_counter()]
            schedule = generate(name, pp=ranks, microbatches=count, chunks=chunks)
            times.append(time.perf_counter())
            slots = assign(schedule)
            times.append(time.perf_counter())
            tick_table(schedule, slots)
            times.append(time.perf_counter())
            actions = sum(map(len, schedule))
            rows.append([(after - before) * 1e3 for before, after in itertools.pairwise(times)])
        kinds = ("generate and check", "colour", "table")
        split = {kind: statistics.median(column) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)}
        row = {"system": "jgraph", "schedule": name, "chunks": chunks, "microbatches": count, "actions": actions}
        yield row | {"ms": sum(split.values()), "categories": split}


def section(name: str, result: Row) -> Section:
    columns = {
        "schedule, chunks a rank, microbatches": lambda row: f"{row['schedule']}, {row['chunks']}, {row['microbatches']}",
        "actions": lambda row: f"{row['actions']:,}",
        "us an action": lambda row: f"{row['ms'] / row['actions'] * 1e3:.2f}",
    }
    return Section(name, columns)


BENCHMARK = Benchmark("Schedules, on one core", __doc__, Flags, works, section)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
