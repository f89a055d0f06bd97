"""Pipeline schedules: `jgraph.pipeline` against torch.distributed.pipelining, and against the sum of its actions.

    python -m benchmarks run pipeline --work mlp-large mlp-launch-bound gpt-1b3

    python -m benchmarks run pipeline --work gpt-1b3 --schedules "zb-v:2 engine=dispatch fp8=delayed" aligned --together 2

A step computes loss and gradients. The host waits after every step; a last measurement runs steps back to back. Forward, dgrad
and wgrad of a stage, the embedding and head, and a transfer are also timed in isolation. `jgraph.schedule.simulate` combines
them into the lower bound of a step: in lockstep for the aligned runtime, by data flow for the general runtime and for the
dispatch engine.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.rows import Row, fastest, ratio, spread
from benchmarks.runner import Benchmark, MultiGPUOptions, Work
from benchmarks.tables import Section, columns, number, teraflops
from benchmarks.turns import Candidate
from benchmarks.works import Size, pipeline_sizes, size_from_dict, torch_pipeline

WorkName = Literal["mlp-large", "mlp-launch-bound", "gpt-1b3", "gpt-7b"]
TORCH_SCHEDULES = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

SETTINGS = {
    "engine": ("program", "dispatch"),
    "fp8": ("current", "delayed"),
    "graph": ("auto", "off", "full"),
    "remat": ("nothing", "wide", "layer"),
    "norm": ("xla", "fused"),
}


@dataclass(frozen=True, kw_only=True)
class Options(MultiGPUOptions):
    """Flags of the benchmark."""

    work: tuple[WorkName, ...] = ("mlp-large", "mlp-launch-bound", "gpt-1b3")
    """Works to time. An MLP has 4 layers per rank."""
    schedules: tuple[str, ...] = ("aligned", "aligned:2", "zb-h1", "1f1b", "zb-v:2 engine=dispatch", "1f1b engine=dispatch")
    """Schedules of `jgraph.schedule`, optionally with chunks per rank after a colon, followed by settings:
    engine=program|dispatch, fp8=current|delayed, graph=auto|off|full, remat=nothing|wide|layer, norm=xla|fused (GPT only), and
    XLA options NAME=VALUE. Pass the flag without values to skip jgraph."""
    peers: tuple[str, ...] = (*TORCH_SCHEDULES, *(f"{name}:compile" for name in TORCH_SCHEDULES))
    """Schedules of torch.distributed.pipelining; `:compile` adds torch.compile. Without values, the flag skips PyTorch."""
    remat: Literal["nothing", "wide", "layer"] = "nothing"
    """Activations that the backward recomputes, unless the schedule has a remat setting."""
    actions: Literal["yes", "no"] = "yes"
    """Also time the actions in isolation."""


def works(options: Options) -> Iterator[Work]:
    """Yields the selected works."""
    ranks = options.num_ranks
    for work in options.work:
        size = pipeline_sizes(options.sizes, ranks)[work]
        ours = [jgraph_candidate(schedule, size, ranks, options) for schedule in options.schedules]
        candidates = [*ours, *(torch_pipeline(peer, size, ranks, options) for peer in options.peers)]
        yield Work(work, {"ranks": ranks, "size": asdict(size)}, [candidates])


def jgraph_candidate(text: str, size: Size, ranks: int, options: Options) -> Candidate:
    """Returns a candidate of jgraph for a schedule and settings, as in `--schedules`. Exits if a setting is unknown."""
    schedule, _, variant = text.partition(" ")
    settings = {"engine": "program", "fp8": "", "graph": options.graph, "remat": options.remat, "norm": ""}
    xla = list(options.xla_option)
    for setting in variant.split():
        match setting.split("=", 1):
            case ["engine" | "fp8" | "graph" | "remat" | "norm" as name, value] if value in SETTINGS[name]:
                settings[name] = value
            case [name, _] if name not in settings:
                xla.append(setting)
            case _:
                allowed = ", ".join(f"{name}={'|'.join(values)}" for name, values in SETTINGS.items())
                raise SystemExit(f"--schedules has the unknown setting {setting}; use {allowed}, or an XLA option")
    request = {
        "schedule": schedule,
        **settings,
        "ranks": ranks,
        "size": asdict(size),
        "xla_options": xla,
        "clock": asdict(options.timer),
        "actions": options.actions == "yes",
    }
    labels = {"system": "jgraph", "schedule": schedule, "variant": variant, "xla_options": xla}
    return Candidate(labels, "benchmarks.programs.pipeline", request)


def label(row: Row) -> str:
    """Returns system, schedule and variant."""
    return " ".join(filter(None, (row["system"], row["schedule"], row["variant"])))


def overhead(row: Row) -> str:
    """Returns the time of a step divided by its lower bound."""
    known = row.get("categories", {})
    bound = sum(ms for name, ms in known.items() if name not in ("waiting for neighbours", "not told"))
    return f"{row['ms'] / bound:.3f}" if known else ""


def section(work: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    options, ranks, size, peer = (
        result["options"],
        result["ranks"],
        size_from_dict(result["size"]),
        fastest(result["rows"], "torch"),
    )
    # Old results store the actions per number of chunks, not per row.
    alone = {f"{chunks} chunk{'s' * (chunks != '1')} per rank": times for chunks, times in result.get("actions", {}).items()}
    alone |= {label(row): row["alone"] for row in result["rows"] if "alone" in row}
    notes = []
    for name, times in alone.items():
        text = ", ".join(f"{key[:-3]} {value:.3f}" for key, value in times.items() if key.endswith("_ms"))
        notes += [f"Actions of {name}, each timed in isolation, ms: {text}{times.get('failed', '')}."]
    if any("categories" in row for row in result["rows"]):
        notes += [
            "A category is the number of its operations in a step times their time in isolation. For the dispatch engine it is "
            "the time that a simulation of the data flow adds. Unexplained time is negative if operations overlap. The lower "
            "bound is the sum of the categories without waiting and unexplained time."
        ]
    return Section(
        f"{work}, {size.layers} layers, {size.microbatches} microbatches, {ranks} ranks",
        {
            "schedule": label,
            "step, ms": number("ms"),
            "fastest, slowest, ms": spread,
            "fastest torch / row": lambda row: ratio(peer, row),
            "back to back, ms": number("stream_ms"),
            "host, ms": number("host_ms"),
            "step / lower bound": overhead,
            "TFLOP/s per GPU": teraflops(size.flops / ranks),
            **columns("peak memory, GB", "temporary buffers, GB", "compilation, s", "graph launches, updates"),
            "loss": number("loss", ".6g"),
        },
        facts=f", graph {options['graph']}, remat {options['remat']}, XLA options: {' '.join(options['xla_option']) or 'none'}",
        notes=" ".join(notes),
    )


BENCHMARK = Benchmark("Pipelines", __doc__, Options, works, section)
