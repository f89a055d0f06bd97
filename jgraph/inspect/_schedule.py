"""Prints the timeline, idle time and slots of a schedule. Does not import jax."""

import math
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich import box
from rich.table import Table

from jgraph import schedule as schedules
from jgraph.cli import Count, FlagConsole
from jgraph.errors import ConfigError, require
from jgraph.inspect import draw

# Sums of larger times could overflow to infinity.
_MAX_TIME = 1e30
# Forwards of all ranks. At this limit 1f1b takes 7 s and 0.6 GB, zb-v 16 s and 1.3 GB (measured).
_MAX_FORWARDS = 1_000_000


def schedule(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME_OR_FILE", help_behavior_hint="")] = "",
    /,
    *,
    pp: Count = None,
    microbatches: Count = None,
    chunks: Count = None,
    costs: str = "1,1,1",
    latency: float = 0.0,
    execution: Literal["auto", "dataflow", "neighbours", "lockstep"] = "auto",
) -> None:
    """Draw a pipeline schedule and report its idle time and its slots.

    Prints the simulated timeline, a table with a row per rank, and the makespan, idle share and peak memory. A slot is a
    position for one array in a pool of buffers.

    Args:
        name: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v or aligned. Or a file with a schedule. A .csv file
            has PyTorch's format: a row per rank, with cells such as 5F3 (stage 5, forward, microbatch 3). A .json file has a
            list of numbers per rank, in order of execution: c is a forward of the rank's chunk c, from 1; -c is a dgrad, or a
            full backward if the chunk has no wgrads; -c-0.5 is a wgrad. Each number stands for the next microbatch of its kind
            and chunk.
        pp: Ranks on the pipeline axis; required with a name.
        microbatches: Microbatches per step; required with a name.
        chunks: Stages per rank, 1 by default; zb-v and dualpipe-v always have 2, interleaved-1f1b needs at least 2.
        costs: Times of forward,dgrad,wgrad of ALL layers of a rank for one microbatch, in any unit; divided among the chunks.
            dgrad computes the gradients of the inputs, wgrad those of the parameters.
        latency: Time of a transfer to another rank, in the unit of the costs; the sender does not wait for it.
        execution: Synchronization of ranks: by data only (dataflow), per tick with neighbours, or per tick with all ranks
            (lockstep); auto is lockstep for aligned and dataflow otherwise.

    Raises:
        JgraphError: If the schedule is unknown or invalid, its file cannot be read, `pp` or `microbatches` is missing, a size
            is passed with a file, or costs or latency are out of range.
    """
    require(0 <= latency <= _MAX_TIME, "latency", f"{latency:g}", f"a time from 0 to {_MAX_TIME:g}")
    times = _times(costs)
    found = _schedule(name, {"pp": pp, "microbatches": microbatches, "chunks": chunks})
    if execution == "auto":
        execution = "lockstep" if found.name == "aligned" else "dataflow"
    costs_per_chunk = schedules.Costs(*times).per_chunk(found.num_chunks)
    run = schedules.simulate(found, costs_per_chunk, latency=latency, execution=execution)
    slots = schedules.assign(found)
    # 100 columns if the output is not a terminal.
    console = FlagConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 100)
    # Terminals with 16 colors lack tints, and users redefine their palette.
    cells: draw.Cells = "colors" if console.color_system in ("256", "truecolor") and not console.no_color else "letters"
    console.print(draw.timeline(run, width=console.width, cells=cells), soft_wrap=True)
    console.print(draw.legend(run, cells=cells))
    console.print(_table(run, slots, console.width))
    console.print("idle time, its share of the step, and slots of each pool", style="dim italic")
    peak_residuals = run.peak({"forward_wgrad": 1 / found.num_chunks}).max()
    console.print(
        f"makespan {run.makespan:.6g}, bubble {run.bubble:.1%}, {found.num_ticks} ticks, {execution}\n"
        f"peak memory of the fullest rank: residuals of {peak_residuals:.4g} microbatches",
        highlight=False,
    )


def _times(costs: str) -> list[float]:
    try:
        times = [float(part) for part in costs.split(",")]
    except ValueError:
        times = []
    allowed = f"forward,dgrad,wgrad: three numbers > 0 ({1 / _MAX_TIME:g} to {_MAX_TIME:g})"
    fits = len(times) == 3 and all(1 / _MAX_TIME <= time <= _MAX_TIME for time in times)
    require(fits, "costs", repr(costs), allowed)
    return times


def _schedule(name: str, sizes: dict[str, int | None]) -> schedules.Schedule:
    """Reads a schedule from a file, or generates one from the sizes that are not None."""
    given = {field: size for field, size in sizes.items() if size is not None}
    if Path(name).suffix:
        if given:
            raise ConfigError(f"{name} has the whole schedule: leave out `{'` and `'.join(given)}`", field="name")
        return schedules.read(name)
    if not name:
        raise ConfigError(f"no schedule: pass one of {', '.join(schedules.NAMES)}, or a .csv or .json file", field="name")
    if name in schedules.NAMES and (missing := sorted({"pp", "microbatches"} - set(given), reverse=True)):
        raise ConfigError(f"{name} needs `{'` and `'.join(missing)}`", field=missing[0])
    if (forwards := math.prod(given.values())) > _MAX_FORWARDS:
        shown = " ".join(f"`{field}` {size}" for field, size in given.items())
        raise ConfigError(f"{shown} give {forwards:,} forwards: must be at most {_MAX_FORWARDS:,}", field="microbatches")
    return schedules.generate(name, **{"pp": 1, "microbatches": 1} | given)


def _table(run: schedules.Simulation, slots: schedules.Slots, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, int(width >= 72), 0, 0))
    for column in ("rank", "idle", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for pool in schedules.POOLS:
        table.add_column(pool.replace("_", "_\n"), justify="right", overflow="fold", vertical="bottom")
    for r in range(run.schedule.num_ranks):
        counts = [str(slots.counts[pool][r]) for pool in schedules.POOLS]
        table.add_row(str(r), f"{run.idle[r]:.4g}", f"{run.idle[r] / run.makespan:.1%}", *counts)
    return table
