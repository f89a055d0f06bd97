"""Shows a schedule: a timeline, idle time, slots; a picture and the numbers in files. No jax."""

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

# Sums of more could be infinite.
_LONGEST = 1e30
# Forwards of all ranks: measured 7 s and 0.6 GB for 1f1b, 16 s and 1.3 GB for zb-v; their SVG takes minutes.
_MOST_FORWARDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Draw a pipeline schedule, and say how long it idles and what it holds."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v or aligned; left out with --order."""
    pp: Count = None
    """Ranks on the pipeline axis; needed with a name."""
    microbatches: Count = None
    """Microbatches a step; needed with a name."""
    chunks: Count = None
    """Stages per rank, 1 if left out; zb-v and dualpipe-v have 2 in any case, interleaved-1f1b has at least 2."""
    costs: str = "1,1,1"
    """Times of forward,dgrad,wgrad of ALL layers of a rank for one microbatch, in any unit; each chunk takes its share."""
    latency: float = 0.0
    """Time of a transfer to another rank, which the sender does not wait for; in the unit of the costs."""
    execution: Literal["auto", "dataflow", "neighbours", "lockstep"] = "auto"
    """How ranks keep step: each on its own, with its neighbours, or with all; auto is lockstep for aligned, else dataflow."""
    order: File = None
    """A schedule of your own: .csv as PyTorch writes it, or .json with signed numbers."""
    svg: File = None
    """Write the picture here."""
    json: File = None
    """Write the numbers here."""

    def __post_init__(self):
        given = [name for name in ("pp", "microbatches", "chunks") if getattr(self, name) is not None]
        for name in given:
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(0 <= self.latency <= _LONGEST, "latency", f"{self.latency:g}", f"a time, 0 to {_LONGEST:g}")
        require(self.svg is None or self.svg.suffix == ".svg", "svg", self.svg, "a file that ends in .svg")
        self.times()
        if self.order is not None and (words := [self.name] * bool(self.name) + [f"`{name}`" for name in given]):
            raise ConfigError(f"`order` {self.order} says everything: leave out {', '.join(words)}", field="order")
        if self.order is None and not self.name:
            raise ConfigError(f"name a schedule, one of {', '.join(schedules.NAMES)}, or give `order` FILE", field="name")

    def times(self) -> tuple[float, float, float]:
        """Returns the times of forward, dgrad and wgrad. Raises ConfigError."""
        try:
            forward, dgrad, wgrad = (float(part) for part in self.costs.split(","))
            if all(1 / _LONGEST <= time <= _LONGEST for time in (forward, dgrad, wgrad)):
                return forward, dgrad, wgrad
        except ValueError:
            pass
        allowed = f"forward,dgrad,wgrad, numbers > 0 ({1 / _LONGEST:g} to {_LONGEST:g})"
        raise ConfigError(f"`costs` is {self.costs!r}: must be {allowed}", field="costs")


def show_schedule(options: ScheduleOptions, console: Console) -> None:
    """Writes the files that were asked for, then prints the timeline, the table and a summary.

    Raises:
        JgraphError: the options make no schedule, or a file cannot be written.
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
        text = json.dumps(_numbers(options, run, slots, execution)) + "\n"
        with os_errors("json", options.json):
            options.json.write_text(text, encoding="utf-8")
    # The 16 colours of the oldest terminals are the user's own, and too few for tints.
    colour = console.color_system in ("256", "truecolor") and not console.no_color
    console.print(draw.timeline(run, width=console.width, colour=colour), soft_wrap=True)
    console.print(draw.legend(run, colour=colour))
    console.print(_table(run, slots, console.width))
    held = run.peak({"forward_wgrad": 1 / chunks}).max()
    console.print(
        f"makespan {run.makespan:.6g}, bubble {run.bubble:.1%}, {schedule.num_ticks} ticks, {execution}\n"
        f"held by the fullest rank: residuals of {held:.4g} microbatches",
        highlight=False,
    )


def _schedule(options: ScheduleOptions) -> schedules.Schedule:
    if options.order is not None:
        return schedules.read(options.order, field="order")
    if options.name not in schedules.NAMES:
        file = f"; a file is given as `order` {options.name}" if options.name.endswith((".csv", ".json")) else ""
        known = ", ".join(schedules.NAMES)
        raise ConfigError(f"no schedule is called {options.name!r}: take one of {known}{file}", field="name")
    if options.pp is None or options.microbatches is None:
        missing = [name for name in ("pp", "microbatches") if getattr(options, name) is None]
        raise ConfigError(f"{options.name} needs `{'` and `'.join(missing)}`", field=missing[0])
    chunks = 1 if options.chunks is None else options.chunks
    if options.name == "interleaved-1f1b" and chunks == 1:
        raise ConfigError("`chunks` is 1: must be at least 2 for interleaved-1f1b; with 1, take 1f1b", field="chunks")
    if (forwards := options.pp * options.microbatches * chunks) > _MOST_FORWARDS:
        raise ConfigError(
            f"`pp` {options.pp} `microbatches` {options.microbatches} `chunks` {chunks} make {forwards:,} forwards: "
            f"must be at most {_MOST_FORWARDS:,}",
            field="microbatches",
        )
    return schedules.generate(options.name, pp=options.pp, microbatches=options.microbatches, chunks=chunks)


def _table(run: schedules.Simulation, slots: schedules.Slots, width: int) -> Table:
    """Returns idle time and slots by rank, or by the first and last of many ranks."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, int(width >= 72), 0, 0),
        caption="idle time, its share, and slots of each pool",
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


def _numbers(options: ScheduleOptions, run: schedules.Simulation, slots: schedules.Slots, execution: str) -> dict[str, Any]:
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
