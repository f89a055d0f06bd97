"""A schedule as one program (`jgraph.pipeline`) against torch.distributed.pipelining, and against its actions alone.

    python -m benchmarks run pipeline --work mlp-large mlp-launch-bound gpt-1b3

    python -m benchmarks run pipeline --work gpt-1b3 --schedules "zb-v:2 engine=dispatch fp8=delayed" aligned --together 2

Both sides time loss and gradients of a step, each step waited for; back to back once, at the end. Forward, dgrad and wgrad are
timed alone on one GPU, embedding and head where they are computed, a transfer between two. Played by `jgraph.schedule.simulate`
they give the time of a step that has nothing but its actions, ends, transfers and bubble: in lockstep for the aligned runtime,
by data flow for the general one and for dispatched executables.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import jax

from benchmarks.harness import count_gpus
from benchmarks.rows import Row, fastest, ratio, spread
from benchmarks.runner import Benchmark, MultiGPUOptions, Work
from benchmarks.tables import COLUMNS, Section, number
from benchmarks.turns import Candidate
from benchmarks.works import Size, size_from_dict, pipeline_sizes, torch_pipeline

WorkName = Literal["mlp-large", "mlp-launch-bound", "gpt-1b3", "gpt-7b"]
KINDS = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")

WORDS = {
    "engine": ("program", "dispatch"),
    "fp8": ("current", "delayed"),
    "graph": ("auto", "off", "full"),
    "remat": ("nothing", "wide", "layer"),
    "norm": ("xla", "fused"),
}


@dataclass(frozen=True, kw_only=True)
class Options(MultiGPUOptions):
    """Chooses what is run."""

    work: tuple[WorkName, ...] = ("mlp-large", "mlp-launch-bound", "gpt-1b3")
    """What is trained; 4 MLP layers a rank."""
    schedules: tuple[str, ...] = ("aligned", "aligned:2", "zb-h1", "1f1b", "zb-v:2 engine=dispatch", "1f1b engine=dispatch")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon, then words for how it is played: engine=dispatch (the
    host dispatches executables), fp8=current|delayed, graph=auto|off|full, remat=nothing|wide|layer, norm=xla|fused (of a
    GPT), XLA's NAME=VALUE; none where the flag stands alone."""
    peers: tuple[str, ...] = (*KINDS, *(f"{kind}:compile" for kind in KINDS))
    """Schedules of torch.distributed.pipelining, `:compile` for torch.compile; none where the flag stands alone."""
    remat: Literal["nothing", "wide", "layer"] = "nothing"
    """What of a layer is made again in its backward, where the schedule's words do not say it."""
    actions: Literal["yes", "no"] = "yes"
    """Whether actions are timed alone too."""


def works(options: Options) -> Iterator[Work]:
    ranks = options.ranks or count_gpus() or len(jax.devices())
    for work in options.work:
        size = pipeline_sizes(options.sizes, ranks)[work]
        ours = [jgraph_candidate(schedule, size, ranks, options) for schedule in options.schedules]
        candidates = [*ours, *(torch_pipeline(peer, size, ranks, options) for peer in options.peers)]
        yield Work(work, {"ranks": ranks, "size": asdict(size)}, [candidates])


def jgraph_candidate(text: str, size: Size, ranks: int, options: Options) -> Candidate:
    schedule, _, variant = text.partition(" ")
    how = {"engine": "program", "fp8": "", "graph": options.graph, "remat": options.remat, "norm": ""}
    xla = list(options.xla_option)
    for word in variant.split():
        match word.split("=", 1):
            case ["engine" | "fp8" | "graph" | "remat" | "norm" as name, value] if value in WORDS[name]:
                how[name] = value
            case [name, _] if name not in how:
                xla.append(word)
            case _:
                allowed = ", ".join(f"{name}={'|'.join(values)}" for name, values in WORDS.items())
                raise SystemExit(f"--schedules has {word}: must be {allowed} or XLA's")
    request = {
        "schedule": schedule,
        **how,
        "ranks": ranks,
        "size": asdict(size),
        "xla_options": xla,
        "clock": asdict(options.timer),
        "actions": options.actions == "yes",
    }
    labels = {"system": "jgraph", "schedule": schedule, "variant": variant, "xla_options": xla}
    return Candidate(labels, "benchmarks.programs.pipeline", request)


def label(row: Row) -> str:
    return " ".join(filter(None, (row["system"], row["schedule"], row["variant"])))


def overhead(row: Row) -> str:
    known = row.get("categories", {})
    floor = sum(ms for name, ms in known.items() if name not in ("waiting for neighbours", "not told"))
    return f"{row['ms'] / floor:.3f}" if known else ""


def section(work: str, result: Row) -> Section:
    options, ranks, size, peer = result["options"], result["ranks"], size_from_dict(result["size"]), fastest(result["rows"], "torch")
    # Earlier results have them for all schedules with as many chunks.
    alone = {f"{chunks} chunk{'s' * (chunks != '1')} a rank": told for chunks, told in result.get("actions", {}).items()}
    alone |= {label(row): row["alone"] for row in result["rows"] if "alone" in row}
    notes = []
    for whose, told in alone.items():
        times = ", ".join(f"{key[:-3]} {value:.3f}" for key, value in told.items() if key.endswith("_ms"))
        notes += [f"Alone, {whose}, ms: {times}{told.get('failed', '')}."]
    if any("categories" in row for row in result["rows"]):
        notes += [
            "Each is as often as a step has it times its time alone, so what overlaps with actions makes `not told` negative; "
            "where the host dispatches, what it adds by data flow. The floor is their sum, but for waiting and not told."
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
            "ms / floor": overhead,
            "TFLOP/s a GPU": lambda row: f"{size.flops / ranks / row['ms'] / 1e9:.0f}",
            **{name: COLUMNS[name] for name in ("peak GB", "temporaries GB", "compile s", "launches, updates")},
            "loss": number("loss", ".6g"),
        },
        facts=f", graph {options['graph']}, remat {options['remat']}, XLA options: {' '.join(options['xla_option']) or 'none'}",
        notes=" ".join(notes),
    )


BENCHMARK = Benchmark("Pipelines", __doc__, Options, works, section)
