"""Look at things before they run.

python -m jgraph.inspect schedule zb-h1 --pp 4 --microbatches 8
python -m jgraph.inspect schedule aligned --pp 4 --microbatches 16 --chunks 2 --costs 1,1.1,0.8 --svg aligned.svg
python -m jgraph.inspect schedule --order my_schedule.csv
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from jgraph import schedule as schedules
from jgraph.cli import one_line
from jgraph.errors import ConfigError, JgraphError
from jgraph.schedule import draw

_PROG = "jgraph.inspect"


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Draw a pipeline schedule, and say how long it idles and what it holds."""

    name: tyro.conf.Positional[str] = ""
    """gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v or aligned; left out with --order."""
    pp: int | None = None
    """Ranks on the pipeline axis; needed with a name."""
    microbatches: int | None = None
    """Microbatches a step; needed with a name."""
    chunks: int | None = None
    """Stages per rank, 1 if left out; zb-v and dualpipe-v have 2 in any case."""
    costs: str = "1,1,1"
    """Time of forward, dgrad, wgrad of ALL layers of a rank for one microbatch; a chunk takes its share."""
    latency: float = 0.0
    """Time of a transfer to another rank, which the sender does not wait for."""
    execution: Literal["auto", "dataflow", "neighbours", "lockstep"] = "auto"
    """How ranks keep step: each on its own, with the neighbours, or all; auto is lockstep for aligned, else dataflow."""
    order: Path | None = None
    """A schedule of your own: CSV as PyTorch writes it, or JSON with signed numbers."""
    svg: Path | None = None
    """Write the picture here."""
    json: Path | None = None
    """Write the numbers here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for input that cannot work, which is told in one line."""
    try:
        options = one_line(
            lambda: tyro.extras.subcommand_cli_from_dict(
                {"schedule": ScheduleOptions},
                prog=f"python -m {_PROG}",
                description=__doc__,
                args=list(sys.argv[1:] if argv is None else argv),
            )
        )
        if isinstance(options, ScheduleOptions):
            show_schedule(options, Console(width=None if sys.stdout.isatty() else 100))
    except (JgraphError, OSError) as e:
        print(f"{_PROG}: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def show_schedule(options: ScheduleOptions, console: Console) -> None:
    """Prints the timeline and the table, and writes the files that were asked for. Raises JgraphError, OSError."""
    schedule = _schedule(options)
    forward, dgrad, wgrad = _costs(options.costs)
    chunks = max(order.num_chunks for order in schedule)
    execution = options.execution
    if execution == "auto":
        execution = "lockstep" if schedule.name == "aligned" else "dataflow"
    costs = schedules.Costs(forward, dgrad, wgrad).per_chunk(chunks)
    run = schedules.simulate(schedule, costs, latency=options.latency, execution=execution)
    slots = schedules.assign(schedule)
    colour = console.color_system is not None
    console.print(draw.timeline(run, width=console.width, colour=colour), soft_wrap=True)
    console.print(draw.legend(run, colour=colour))
    console.print(_table(run, slots))
    console.print(
        f"time {run.makespan:.6g}, bubble {run.bubble:.1%}, {schedule.num_ticks} ticks, {execution}; in flight at most "
        f"{run.peak({'forward_wgrad': 1 / chunks}).max():.4g} microbatches of a rank's layers"
    )
    if options.svg:
        draw.write_svg(run, options.svg)
        console.print(f"picture: {options.svg}")
    if options.json:
        options.json.write_text(json.dumps(_numbers(options, run, slots, execution), indent=1) + "\n", encoding="utf-8")
        console.print(f"numbers: {options.json}")


def _schedule(options: ScheduleOptions) -> schedules.Schedule:
    flags = {"--pp": options.pp, "--microbatches": options.microbatches, "--chunks": options.chunks}
    if options.order is not None:
        given = [flag for flag, value in flags.items() if value is not None] + [options.name] * bool(options.name)
        if given:
            raise ConfigError(f"--order {options.order} says everything; leave out {', '.join(given)}", field="order")
        return schedules.read(options.order)
    if not options.name:
        raise ConfigError(f"name a schedule, one of {', '.join(schedules.NAMES)}, or give --order FILE", field="name")
    if options.pp is None or options.microbatches is None:
        missing = [flag for flag in ("--pp", "--microbatches") if flags[flag] is None]
        raise ConfigError(f"{options.name} needs {' and '.join(missing)}", field=missing[0].strip("-"))
    chunks = 1 if options.chunks is None else options.chunks
    return schedules.generate(options.name, pp=options.pp, microbatches=options.microbatches, chunks=chunks)


def _costs(text: str) -> tuple[float, float, float]:
    try:
        forward, dgrad, wgrad = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--costs is {text!r}: must be three numbers, forward,dgrad,wgrad, e.g. 1,1.1,0.8", field="costs"
        ) from None
    return forward, dgrad, wgrad


def _table(run: schedules.Simulation, slots: schedules.Slots) -> Table:
    table = Table(title="slots of each pool", title_justify="right")
    for column in ("rank", "idle", "idle %", *schedules.POOLS):
        table.add_column(column, justify="right")
    for r in draw.rows_shown(run.schedule.num_ranks):
        if r is None:
            table.add_row(*["..."] * (3 + len(schedules.POOLS)))
            continue
        counts = [str(int(slots.counts[pool][r])) for pool in schedules.POOLS]
        table.add_row(str(r), f"{run.idle[r]:.4g}", f"{run.idle[r] / run.makespan:.1%}", *counts)
    return table


def _numbers(options: ScheduleOptions, run: schedules.Simulation, slots: schedules.Slots, execution: str) -> dict[str, Any]:
    schedule = run.schedule
    return {
        "name": schedule.name,
        "pp": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": [order.num_chunks for order in schedule],
        "costs": _costs(options.costs),
        "latency": options.latency,
        "execution": execution,
        "time": run.makespan,
        "bubble": run.bubble,
        "idle": run.idle.tolist(),
        "ticks": schedule.num_ticks,
        "slots": {pool: counts.tolist() for pool, counts in slots.counts.items()},
        "placement": schedule.placement,
        "orders": [order.to_list() for order in schedule],
    }


if __name__ == "__main__":
    sys.exit(main())
