"""Prints the timeline, idle time and slots of a schedule, and writes them as SVG and JSON. Does not import jax."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jgraph import schedule as schedules
from jgraph.cli import Count, File
from jgraph.errors import ConfigError, os_errors, require
from jgraph.schedule import draw

# Sums of larger times could overflow to infinity.
_MAX_TIME = 1e30
# Forwards of all ranks. At this limit 1f1b takes 7 s and 0.6 GB, zb-v 16 s and 1.3 GB (measured); their SVG takes minutes.
_MAX_FORWARDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Draw a pipeline schedule and report its idle time and its slots."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v or aligned; omit with --order."""
    pp: Count = None
    """Ranks on the pipeline axis; required with a name."""
    microbatches: Count = None
    """Microbatches per step; required with a name."""
    chunks: Count = None
    """Stages per rank, 1 by default; zb-v and dualpipe-v always have 2, interleaved-1f1b needs at least 2."""
    costs: str = "1,1,1"
    """Times of forward,dgrad,wgrad of ALL layers of a rank for one microbatch, in any unit; divided among the chunks."""
    latency: float = 0.0
    """Time of a transfer to another rank, in the unit of the costs; the sender does not wait for it."""
    execution: Literal["auto", "dataflow", "neighbours", "lockstep"] = "auto"
    """Synchronization of ranks: by data only (dataflow), per tick with neighbours, or per tick with all ranks (lockstep);
    auto is lockstep for aligned and dataflow otherwise."""
    order: File = None
    """File with a schedule: .csv in PyTorch's format, or .json with signed numbers."""
    svg: File = None
    """File for the figure (.svg)."""
    json: File = None
    """File for the numbers as JSON."""

    def __post_init__(self):
        """Validates the options that do not depend on the schedule."""
        given = [name for name in ("pp", "microbatches", "chunks") if getattr(self, name) is not None]
        for name in given:
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(0 <= self.latency <= _MAX_TIME, "latency", f"{self.latency:g}", f"a time from 0 to {_MAX_TIME:g}")
        require(self.svg is None or self.svg.suffix == ".svg", "svg", self.svg, "a file name ending in .svg")
        self.times()
        if self.order is not None and (words := [self.name] * bool(self.name) + [f"`{name}`" for name in given]):
            raise ConfigError(f"`order` {self.order} determines the schedule: omit {', '.join(words)}", field="order")
        if self.order is None and not self.name:
            raise ConfigError(f"no schedule: pass one of {', '.join(schedules.NAMES)}, or `order` FILE", field="name")

    def times(self) -> tuple[float, float, float]:
        """Parses `costs` and returns the times of forward, dgrad and wgrad.

        Raises:
            ConfigError: If `costs` is not three positive numbers in range.
        """
        try:
            forward, dgrad, wgrad = (float(part) for part in self.costs.split(","))
            if all(1 / _MAX_TIME <= time <= _MAX_TIME for time in (forward, dgrad, wgrad)):
                return forward, dgrad, wgrad
        except ValueError:
            pass
        allowed = f"forward,dgrad,wgrad: three numbers > 0 ({1 / _MAX_TIME:g} to {_MAX_TIME:g})"
        raise ConfigError(f"`costs` is {self.costs!r}: must be {allowed}", field="costs")


def show_schedule(options: ScheduleOptions, console: Console) -> None:
    """Writes the files named in `options`, then prints the timeline, a table and a summary.

    Args:
        options: The schedule, its costs and the files to write.
        console: Console for the output.

    Raises:
        JgraphError: If the schedule is unknown or invalid, or a file cannot be written.
    """
    schedule = _schedule(options)
    execution = options.execution
    if execution == "auto":
        execution = "lockstep" if schedule.name == "aligned" else "dataflow"
    chunks = max(order.num_chunks for order in schedule)
    costs = schedules.Costs(*options.times()).per_chunk(chunks)
    run = schedules.simulate(schedule, costs, latency=options.latency, execution=execution)
    slots = schedules.assign(schedule)
    if options.svg:
        with os_errors("svg", options.svg):
            draw.write_svg(run, options.svg)
    if options.json:
        text = json.dumps(_report(options, run, slots, execution)) + "\n"
        with os_errors("json", options.json):
            options.json.write_text(text, encoding="utf-8")
    # Terminals with 16 colors lack tints, and users redefine their palette.
    colour = console.color_system in ("256", "truecolor") and not console.no_color
    console.print(draw.timeline(run, width=console.width, colour=colour), soft_wrap=True)
    console.print(draw.legend(run, colour=colour))
    console.print(_table(run, slots, console.width))
    held = run.peak({"forward_wgrad": 1 / chunks}).max()
    console.print(
        f"makespan {run.makespan:.6g}, bubble {run.bubble:.1%}, {schedule.num_ticks} ticks, {execution}\n"
        f"peak memory of the fullest rank: residuals of {held:.4g} microbatches",
        highlight=False,
    )


def _schedule(options: ScheduleOptions) -> schedules.Schedule:
    """Reads or generates the schedule; raises OrderError or ConfigError if the options do not describe one."""
    if options.order is not None:
        return schedules.read(options.order, field="order")
    if options.name not in schedules.NAMES:
        hint = f"; pass a file as `order` {options.name}" if options.name.endswith((".csv", ".json")) else ""
        known = ", ".join(schedules.NAMES)
        raise ConfigError(f"no schedule is called {options.name!r}: choose one of {known}{hint}", field="name")
    if options.pp is None or options.microbatches is None:
        missing = [name for name in ("pp", "microbatches") if getattr(options, name) is None]
        raise ConfigError(f"{options.name} needs `{'` and `'.join(missing)}`", field=missing[0])
    chunks = 1 if options.chunks is None else options.chunks
    if options.name == "interleaved-1f1b" and chunks == 1:
        raise ConfigError("`chunks` is 1: must be at least 2 for interleaved-1f1b; use 1f1b for 1", field="chunks")
    if (forwards := options.pp * options.microbatches * chunks) > _MAX_FORWARDS:
        raise ConfigError(
            f"`pp` {options.pp} `microbatches` {options.microbatches} `chunks` {chunks} give {forwards:,} forwards: "
            f"must be at most {_MAX_FORWARDS:,}",
            field="microbatches",
        )
    return schedules.generate(options.name, pp=options.pp, microbatches=options.microbatches, chunks=chunks)


def _table(run: schedules.Simulation, slots: schedules.Slots, width: int) -> Table:
    """Returns a table of idle time and slots per rank; of many ranks only the first and the last ones."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, int(width >= 72), 0, 0),
        caption="idle time, its share of the step, and slots of each pool",
        caption_justify="left",
    )
    for column in ("rank", "idle", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for pool in schedules.POOLS:
        table.add_column(pool.replace("_", "_\n"), justify="right", overflow="fold", vertical="bottom")
    for r in draw.rows_shown(run.schedule.num_ranks):
        if r is None:
            table.add_row(*["..."] * len(table.columns))
            continue
        counts = [str(slots.counts[pool][r]) for pool in schedules.POOLS]
        table.add_row(str(r), f"{run.idle[r]:.4g}", f"{run.idle[r] / run.makespan:.1%}", *counts)
    return table


def _report(options: ScheduleOptions, run: schedules.Simulation, slots: schedules.Slots, execution: str) -> dict[str, Any]:
    """Returns the content of the JSON file."""
    schedule = run.schedule
    return {
        "name": schedule.name,
        "pp": schedule.num_ranks,
        "microbatches": schedule.num_microbatches,
        "chunks": max(order.num_chunks for order in schedule),
        "costs": options.times(),
        "latency": options.latency,
        "execution": execution,
        "makespan": run.makespan,
        "bubble": run.bubble,
        "idle": run.idle.tolist(),
        "ticks": schedule.num_ticks,
        "slots": {pool: counts.tolist() for pool, counts in slots.counts.items()},
        "placement": schedule.placement,
        "orders": [order.to_list() for order in schedule],
    }
