"""Look at things before they run.

    python -m jgraph.inspect schedule zb-h1 --pp 4 --microbatches 8
    python -m jgraph.inspect schedule aligned --pp 4 --microbatches 16 --chunks 2 --costs 1,1.1,0.8 --svg aligned.svg
    python -m jgraph.inspect schedule --order my_schedule.csv --json numbers.json
    python -m jgraph.inspect capture models.gpt:gpt_124m --target h200
    python -m jgraph.inspect capture my_module:my_example --graph full --json report.json

Schedules need no jax; captures need jax and, with --target, no GPU.
"""

import dataclasses
import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from tyro.constructors import PrimitiveConstructorSpec

from jgraph import schedule as schedules
from jgraph.cli import one_line
from jgraph.config import TrainConfig
from jgraph.errors import ConfigError, JgraphError
from jgraph.presets import PRESETS, preset
from jgraph.schedule import draw

if TYPE_CHECKING:
    from jgraph.graph.explain import Explanation

_PROG = "jgraph.inspect"
# Where the output goes to no terminal, which would have a width.
_PIPE_WIDTH = 100
# Sums of more could be infinite.
_LONGEST = 1e30
# Forwards of all ranks: measured 7 s and 0.6 GB for 1f1b, 16 s and 1.3 GB for zb-v; their SVG takes minutes.
_MOST_FORWARDS = 1_000_000

T = TypeVar("T")


def _optional(kind: Callable[[str], T], metavar: str) -> PrimitiveConstructorSpec[T | None]:
    """A flag that may be left out. tyro shows `int | None` as `{None}|INT`, and its errors are as long."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: kind(words[0]),
        is_instance=lambda value: value is None or not isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


_Count = Annotated[int | None, _optional(int, "INT"), tyro.conf.arg(help_behavior_hint="")]
_Name = Annotated[str | None, _optional(str, "NAME"), tyro.conf.arg(help_behavior_hint="")]
_File = Annotated[Path | None, _optional(Path, "FILE"), tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Draw a pipeline schedule, and say how long it idles and what it holds."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = ""
    """gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v or aligned; left out with --order."""
    pp: _Count = None
    """Ranks on the pipeline axis; needed with a name."""
    microbatches: _Count = None
    """Microbatches a step; needed with a name."""
    chunks: _Count = None
    """Stages per rank, 1 if left out; zb-v and dualpipe-v have 2 in any case."""
    costs: str = "1,1,1"
    """Times of forward,dgrad,wgrad of ALL layers of a rank for one microbatch, in any unit; each chunk takes its share."""
    latency: float = 0.0
    """Time of a transfer to another rank, which the sender does not wait for; in the unit of the costs."""
    execution: Literal["auto", "dataflow", "neighbours", "lockstep"] = "auto"
    """How ranks keep step: each on its own, with its neighbours, or with all; auto is lockstep for aligned, else dataflow."""
    order: _File = None
    """A schedule of your own: .csv as PyTorch writes it, or .json with signed numbers."""
    svg: _File = None
    """Write the picture here."""
    json: _File = None
    """Write the numbers here."""

    def __post_init__(self):
        for flag, value in self.sizes().items():
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}: must be at least 1", field=flag.strip("-"))
        if not 0 <= self.latency <= _LONGEST:
            raise ConfigError(f"--latency is {self.latency:g}: must be a time, 0 to {_LONGEST:g}", field="latency")
        self.times()
        if self.order is not None:
            given = [self.name] * bool(self.name) + [flag for flag, value in self.sizes().items() if value is not None]
            if given:
                raise ConfigError(f"--order {self.order} says everything: leave out {', '.join(given)}", field="order")
        elif not self.name:
            raise ConfigError(f"name a schedule, one of {', '.join(schedules.NAMES)}, or give --order FILE", field="name")

    def sizes(self) -> dict[str, int | None]:
        """What goes with a name."""
        return {"--pp": self.pp, "--microbatches": self.microbatches, "--chunks": self.chunks}

    def times(self) -> tuple[float, float, float]:
        """Of forward, dgrad and wgrad. Raises ConfigError."""
        try:
            forward, dgrad, wgrad = (float(part) for part in self.costs.split(","))
            if all(1 / _LONGEST <= time <= _LONGEST for time in (forward, dgrad, wgrad)):
                return forward, dgrad, wgrad
        except ValueError:
            pass
        raise ConfigError(
            f"--costs is {self.costs!r}: must be forward,dgrad,wgrad, numbers > 0 ({1 / _LONGEST:g} to {_LONGEST:g})",
            field="costs",
        )


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Say what of a program becomes command buffers, what stays outside and why, and what became of donated buffers."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")]
    """A model's training step: MODULE:CLASS with --preset, MODULE:PRESET or a preset alone (gpt_124m or gpt-124m). Or a
    function without arguments that returns (fn, args) or (fn, args, donate_argnums)."""
    target: Annotated[str | None, _optional(str, "GPU"), tyro.conf.arg(help_behavior_hint="")] = None
    """h200, h100 or b200: compile for that GPU without having one; left out, for the device at hand."""
    preset: _Name = None
    """Sizes of the training step of a MODULE:CLASS."""
    batch_size: _Count = None
    """Sequences per step, instead of the preset's."""
    seq_len: _Count = None
    """Tokens per sequence, instead of the preset's."""
    graph: Literal["auto", "off", "full"] = "auto"
    """Command buffers: XLA's default, none, or all that XLA can record on one device."""
    xla_options: tuple[str, ...] = ()
    """Further XLA options as name=value, besides those of the preset."""
    json: _File = None
    """Write the report here."""

    def __post_init__(self):
        for flag, value in (("--batch-size", self.batch_size), ("--seq-len", self.seq_len)):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} is {value}: must be at least 1", field=flag.strip("-").replace("-", "_"))
        if self.preset is not None:
            preset(self.preset)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        Exit code: 0 when done or asked for help, 2 for input that cannot work (one line on stderr), 130 after Ctrl-C.
    """
    try:
        options = one_line(
            lambda: tyro.extras.subcommand_cli_from_dict(
                {"schedule": ScheduleOptions, "capture": CaptureOptions},
                prog=f"python -m {_PROG}",
                description=__doc__,
                args=list(sys.argv[1:] if argv is None else argv),
            )
        )
        if isinstance(options, ScheduleOptions):
            show_schedule(options, _console())
        elif isinstance(options, CaptureOptions):
            show_capture(options, _console())
    except (JgraphError, OSError) as e:
        print(f"{_PROG}: error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


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
        _write("--svg", options.svg, lambda path: draw.write_svg(run, path))
    if options.json:
        text = json.dumps(_numbers(options, run, slots, execution)) + "\n"
        _write("--json", options.json, lambda path: path.write_text(text, encoding="utf-8"))
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


def show_capture(options: CaptureOptions, console: Console) -> None:
    """Compiles the program, runs nothing, writes the report to the file that was asked for, and prints it.

    Raises:
        JgraphError: there is no such program, it cannot be compiled as asked, or a file cannot be written.
    """
    try:
        report = _explain(options)
    except (JgraphError, OSError):
        raise
    except Exception as e:  # of the user's code, or of jax about it
        said = f"{type(e).__name__}: {e}".strip().splitlines()[0]
        raise ConfigError(f"{options.name} cannot be compiled: {said}", field="name") from e
    if options.json:
        text = report.to_json() + "\n"
        _write("--json", options.json, lambda path: path.write_text(text, encoding="utf-8"))
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _explain(options: CaptureOptions) -> "Explanation":
    config = _training_config(options)
    # Only now: jax takes its time.
    from jgraph.graph import compiler_options
    from jgraph.graph.explain import explain

    if options.target is None:
        import jax

        platform = jax.default_backend()
    else:
        platform = "gpu"
    xla_options = (*(config.xla_options if config else ()), *options.xla_options)
    chosen = compiler_options(options.graph, xla_options, platform=platform)
    if config is None:
        fn, args, donated = _example(options.name)
        report = explain(fn, *args, donate_argnums=donated, target=options.target, compiler_options=chosen)
        return dataclasses.replace(report, name=f"{options.name}, {report.name}")
    from jgraph.assembly import Assembly

    assembly = Assembly.of(config)
    shapes = assembly.step_shapes(config.batch_size)
    report = explain(assembly.step(), *shapes, target=options.target, compiler_options=chosen)
    name = f"training step of {config.preset} ({config.model.module}), {config.batch_size} x {config.seq_len} tokens,"
    notes = report.notes
    if options.target is not None and config.model.attention == "xla":
        notes += ("attention is XLA's: cuDNN's, which a run on the GPU would take, cannot be compiled without one",)
    return dataclasses.replace(report, name=name, notes=notes)


def _training_config(options: CaptureOptions) -> TrainConfig | None:
    """The run whose step is meant; None if the name is not that of a model or preset."""
    module, _, name = options.name.rpartition(":")
    called = name.replace("_", "-")
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    sizes = {field: value for field, value in sizes.items() if value is not None}
    if called in PRESETS and (not module or not _has(module, name)):
        base = preset(called)
        if module and base.model.module.partition(":")[0] != module:
            raise ConfigError(f"{options.name} names no class: give {module}:CLASS --preset {called}", field="name")
        if options.preset is not None:
            raise ConfigError(f"{options.name} is a preset: leave out --preset {options.preset}", field="preset")
    elif not module:
        raise ConfigError(f"{name!r} is neither MODULE:NAME nor a preset ({', '.join(PRESETS)})", field="name")
    elif inspect.isclass(_find(options.name)):
        if options.preset is None:
            raise ConfigError(f"{options.name} is a class: give its sizes, --preset {'|'.join(PRESETS)}", field="preset")
        base = preset(options.preset)
        base = dataclasses.replace(base, model=dataclasses.replace(base.model, module=options.name))
    else:
        given = [f"--{field.replace('_', '-')}" for field in ("preset", *sizes) if getattr(options, field) is not None]
        if given:
            raise ConfigError(f"{options.name} is no class, and says everything: leave out {', '.join(given)}", field="name")
        return None
    if options.target is not None and base.model.attention == "auto":
        # cuDNN's attention cannot be compiled without a GPU, also where there is one of another kind.
        base = dataclasses.replace(base, model=dataclasses.replace(base.model, attention="xla"))
    return dataclasses.replace(base, **sizes)


def _example(name: str) -> tuple[Any, Sequence[Any], Any]:
    """(function, arguments, donate_argnums) that the function of that name returns."""
    match _find(name)():
        case (fn, (*args,)) if callable(fn):
            return fn, args, ()
        case (fn, (*args,), donated) if callable(fn):
            return fn, args, donated
    raise ConfigError(f"{name}() must return (fn, args) or (fn, args, donate_argnums), args a tuple", field="name")


def _has(module: str, name: str) -> bool:
    return hasattr(_import(module), name)


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    found = getattr(_import(module), attribute, None)
    if not callable(found):
        what = "nothing" if found is None else f"no function but a {type(found).__name__}"
        raise ConfigError(f"{module} has {what} called {attribute!r}: must be a class or a function", field="name")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as e:  # whatever the module does when it is imported
        said = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"{module} cannot be imported from here: {said}", field="name") from e


def _console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Dots and lines become question marks, not errors, where the encoding has none.
        sys.stdout.reconfigure(errors="replace")
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)


def _schedule(options: ScheduleOptions) -> schedules.Schedule:
    if options.order is not None:
        return schedules.read(options.order)
    if options.name not in schedules.NAMES:
        raise ConfigError(f"no schedule is called {options.name!r}: take one of {', '.join(schedules.NAMES)}", field="name")
    if options.pp is None or options.microbatches is None:
        missing = [flag for flag in ("--pp", "--microbatches") if options.sizes()[flag] is None]
        raise ConfigError(f"{options.name} needs {' and '.join(missing)}", field=missing[0].strip("-"))
    chunks = 1 if options.chunks is None else options.chunks
    if (forwards := options.pp * options.microbatches * chunks) > _MOST_FORWARDS:
        raise ConfigError(
            f"--pp {options.pp} --microbatches {options.microbatches} --chunks {chunks} make {forwards:,} forwards: "
            f"must be at most {_MOST_FORWARDS:,}",
            field="microbatches",
        )
    return schedules.generate(options.name, pp=options.pp, microbatches=options.microbatches, chunks=chunks)


def _write(flag: str, path: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(path)
    except OSError as e:
        raise ConfigError(f"{flag} {path} cannot be written: {e.strerror or e}", field=flag.strip("-")) from None


def _table(run: schedules.Simulation, slots: schedules.Slots, width: int) -> Table:
    """Idle time and slots of each rank, or of the first and last of many."""
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


if __name__ == "__main__":
    sys.exit(main())
