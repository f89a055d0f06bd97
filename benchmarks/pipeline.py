"""A schedule as one program (`jgraph.parallel.pipeline`) against torch.distributed.pipelining, and against its actions alone.

    python -m benchmarks run pipeline --work mlp-large mlp-launch-bound gpt-1b3

Both sides time loss and gradients of a step, each step waited for; back to back once, at the end. Forward, dgrad and wgrad are
timed alone on one GPU. Played by `jgraph.schedule.simulate` they give the time of a step that has nothing but its actions and
its bubble: in lockstep for the aligned runtime, by data flow for the general one.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import jax
import tyro

from benchmarks.harness import count_gpus
from benchmarks.rows import Row, fastest, ratio, spread
from benchmarks.runner import Benchmark, Several, Work
from benchmarks.tables import COLUMNS, Section, number
from benchmarks.turns import Entrant, ask
from benchmarks.works import Size, schedule_of, size_from, sizes_of, torchs
from jgraph.schedule import Costs, simulate

WorkName = Literal["mlp-large", "mlp-launch-bound", "gpt-1b3", "gpt-7b"]
KINDS = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@dataclass(frozen=True, kw_only=True)
class Options(Several):
    """What to run."""

    work: tuple[WorkName, ...] = ("mlp-large", "mlp-launch-bound", "gpt-1b3")
    """What is trained; 4 MLP layers a rank."""
    schedules: tuple[str, ...] = ("aligned", "aligned:2", "zb-h1", "1f1b")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon; none where the flag stands alone."""
    peers: tuple[str, ...] = (*KINDS, *(f"{kind}:compile" for kind in KINDS))
    """Schedules of torch.distributed.pipelining, `:compile` for torch.compile; none where the flag stands alone."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE[ NAME=VALUE ...] for one row more of the first schedule; may be repeated."""
    remat: Literal["nothing", "layer"] = "nothing"
    """What of a layer is made again in its backward."""
    actions: Literal["yes", "no"] = "yes"
    """Whether actions are timed alone too."""


def works(options: Options) -> Iterator[Work]:
    ranks = options.ranks or count_gpus() or len(jax.devices())
    for work in options.work:
        size = sizes_of(options.sizes, ranks)[work]
        named = [(text, "") for text in options.schedules]
        named += [(text, variant) for text in options.schedules[:1] for variant in options.variant]
        ours = [jgraphs(schedule, variant, size, ranks, options) for schedule, variant in named]
        alone: dict[str, Row] = {}  # times by chunks of a rank
        for entrant in ours if options.actions == "yes" and not options.soak else ():
            if (chunks := chunks_of(entrant.named["schedule"], ranks, size)) not in alone:
                alone[chunks] = ask(Entrant({}, entrant.module, entrant.request | {"task": "actions"}), timeout=options.timeout)
        entrants = [*ours, *(torchs(peer, size, ranks, options) for peer in options.peers)]

        def more(row: Row, size: Size = size, alone: dict[str, Row] = alone) -> Row:
            if row["system"] != "jgraph":
                return {}
            return made_of(row, alone.get(chunks_of(row["schedule"], ranks, size), {}), ranks, size)

        yield Work(work, {"ranks": ranks, "size": asdict(size), "actions": alone}, [entrants], more=more)


def jgraphs(schedule: str, variant: str, size: Size, ranks: int, options: Options) -> Entrant:
    asked = {
        "task": "time",
        "schedule": schedule,
        "ranks": ranks,
        "size": asdict(size),
        "graph": options.graph,
        "xla_options": [*options.xla_option, *variant.split()],
        "remat": options.remat,
        "clock": asdict(options.clock),
    }
    named = {"system": "jgraph", "schedule": schedule, "variant": variant, "xla_options": asked["xla_options"]}
    return Entrant(named, "benchmarks.programs.pipeline", asked)


def chunks_of(schedule: str, ranks: int, size: Size) -> str:
    return str(len(schedule_of(schedule, ranks, size.microbatches).placement[0]))


def made_of(row: Row, alone: Row, ranks: int, size: Size) -> Row:
    """A step's time by category: its actions as often as it has them, the bubble they leave, and what is not told."""
    if "ms" not in row or "wgrad_ms" not in alone:
        return {}
    schedule = schedule_of(row["schedule"], ranks, size.microbatches)
    costs = Costs(alone["forward_ms"], alone["dgrad_ms"], alone["wgrad_ms"])
    played = simulate(schedule, costs, execution="lockstep" if row["runtime"] == "aligned" else "dataflow")
    found = {"actions": float(played.busy.mean()), "bubble": played.makespan - float(played.busy.mean())}
    if row["runtime"] == "general":
        ticks = simulate(schedule, costs, execution="neighbours").makespan
        found["waiting for neighbours"] = max(ticks - played.makespan, 0.0)
    return {"categories": found | {"not told": row["ms"] - sum(found.values())}}


def label(row: Row) -> str:
    return " ".join(filter(None, (row["system"], row["schedule"], row["variant"])))


def overhead(row: Row) -> str:
    known = row.get("categories", {})
    return f"{row['ms'] / (known['actions'] + known['bubble']):.3f}" if known else ""


def section(work: str, result: Row) -> Section:
    options, ranks, size, peer = result["options"], result["ranks"], size_from(result["size"]), fastest(result["rows"], "torch")
    notes = []
    for chunks, alone in result["actions"].items():
        times = ", ".join(f"{key[:-3]} {value:.3f}" for key, value in alone.items() if key.endswith("_ms"))
        notes += [f"Alone, {chunks} chunk{'s' * (chunks != '1')} a rank, ms: {times}{alone.get('failed', '')}."]
    if any("categories" in row for row in result["rows"]):
        notes += [
            "Each is as often as a step has it times its time alone, so what overlaps with actions makes `not told` negative."
        ]
    return Section(
        f"{work}, {size.layers} layers, {size.microbatches} microbatches, {ranks} ranks",
        {
            "schedule": label,
            "ms a step": number("ms"),
            "fastest, slowest": spread,
            "torch / jgraph": lambda row: ratio(peer, row),
            "back to back": number("stream_ms"),
            "host ms": number("host_ms"),
            "ms / actions": overhead,
            "TFLOP/s a GPU": lambda row: f"{size.flops / ranks / row['ms'] / 1e9:.0f}",
            **{name: COLUMNS[name] for name in ("peak GB", "temporaries GB", "compile s", "launches, updates")},
            "loss": number("loss", ".6g"),
        },
        facts=f", graph {options['graph']}, remat {options['remat']}, XLA options: {' '.join(options['xla_option']) or 'none'}",
        notes=" ".join(notes),
    )


BENCHMARK = Benchmark("Pipelines", __doc__, Options, works, section)
