"""How long it takes to generate, check, colour and tabulate a schedule, and that it grows with the number of actions.

python -m benchmarks.schedules
"""

import itertools
import statistics
import time

from benchmarks.harness import environment, write_results
from jgraph.schedule import NAMES, assign, generate, tick_table

PP, CHUNKS = 64, 4
MICROBATCHES = (128, 256, 512, 1024, 2048)
REPEATS = 5
ONE_CHUNK, TWO_CHUNKS = ("1f1b", "zb-h1", "zb-h2"), ("zb-v", "dualpipe-v")


def measure(name: str, microbatches: int) -> dict[str, float]:
    """Median seconds of `REPEATS`; generating checks, as an Order and a Schedule exist only if they can run."""
    chunks = 1 if name in ONE_CHUNK else 2 if name in TWO_CHUNKS else CHUNKS
    rows, actions = [], 0
    for _ in range(REPEATS):
        times = [time.perf_counter()]
        schedule = generate(name, pp=PP, microbatches=microbatches, chunks=chunks)
        times.append(time.perf_counter())
        assign(schedule)
        times.append(time.perf_counter())
        tick_table(schedule)
        times.append(time.perf_counter())
        actions = sum(map(len, schedule))
        rows.append([after - before for before, after in itertools.pairwise(times)])
    generated, coloured, tabulated = (statistics.median(column) for column in zip(*rows, strict=True))
    both = generated + coloured
    return {
        "chunks": chunks,
        "microbatches": microbatches,
        "actions": actions,
        "generate_and_check_s": generated,
        "colour_s": coloured,
        "table_s": tabulated,
        "microseconds_per_action": both / actions * 1e6,
    }


def main() -> None:
    results = {name: [measure(name, m) for m in MICROBATCHES] for name in NAMES}
    lines = [
        f"Seconds on one core, {PP} ranks, median of {REPEATS}; the last column is generate, check and colour by action.",
        "",
        "| schedule | chunks | microbatches | actions | generate, check | colour | table | us an action |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        for row in rows:
            lines.append(
                f"| {name} | {row['chunks']} | {row['microbatches']} | {row['actions']:,} | "
                f"{row['generate_and_check_s']:.3f} | {row['colour_s']:.3f} | {row['table_s']:.3f} | "
                f"{row['microseconds_per_action']:.2f} |"
            )
    table = "\n".join(lines) + "\n"
    print(table)
    write_results("schedules", {"environment": environment(), "pp": PP, "results": results}, table)


if __name__ == "__main__":
    main()
