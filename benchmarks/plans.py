"""Compares plans of `jgraph.plan` with the memory and the times of stored results. Needs no GPU and compiles nothing.

python -m benchmarks run plans
python -m benchmarks run plans --groups chosen --only fsdp2 --out /tmp/plans       # a few rows

Each configuration of a training step that `benchmarks/results/` has with its memory is planned once, beside its newest
measurement. Rows with XLA options of their own, unrolled loops or parts of a step are left out. The benchmark `step_memory`
measures the memory of the same configurations again.
"""

import json
import re
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import jax.numpy as jnp

from benchmarks import runner
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, markdown, number
from benchmarks.works import vary
from jgraph.errors import JgraphError
from jgraph.loss import _auto_chunk as auto_chunk
from jgraph.plan._plan import AXES, margin, predict
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.model import settings_from
from jgraph.train.presets import preset

Group: TypeAlias = Literal["chosen", "later", "earlier loss"]
TITLES = {
    "chosen": "Steps that the rules were chosen with",
    "later": "Steps that were compared after the rules were chosen",
    "earlier loss": "Steps that were measured with an earlier loss",
}
# Before this time, several chunks of the loss ran at once, and held more logits than one chunk: in a loop over microbatches, on
# several GPUs, with the head in FP8, and if there are more than two.
_ONE_CHUNK_AT_ONCE = "2026-11-28T12:30"
# Fields of a stored config that a plan depends on. Results of earlier versions lack some of them.
_FIELDS = (*AXES, "batch_size", "seq_len", "num_microbatches", "remat")
# File, work and variant of the steps that the rules were chosen with.
_CHOSEN_WITH = {
    ("single_gpu", "gpt-124m", ""),
    ("single_gpu_microbatches", "gpt-124m", "num_microbatches=2"),
    ("single_gpu_microbatches", "gpt-124m", "num_microbatches=8"),
    ("single_gpu_layouts", "launch-bound, second run, layouts compose", ""),
    ("fp8", "gpt-124m", "fp8=delayed"),
    ("fp8_current", "gpt-124m", "fp8=current"),
    ("single_gpu_1b3", "gpt-1b3", ""),
    ("fp8_h100", "gpt-1b3", "fp8=delayed"),
    ("moe_fp8_h100", "gpt-moe", ""),
    ("moe_fp8", "gpt-moe", "fp8=delayed:e4m3"),
    ("fsdp_graph", "gpt-1b3", ""),
    ("fsdp2", "gpt-1b3", ""),
    ("fsdp2", "gpt-1b3", "reshard=yes"),
    ("fsdp", "gpt-7b", ""),
    ("fsdp", "gpt-7b", "reshard=yes"),
    ("fsdp_fp8", "gpt-1b3", "fp8=delayed"),
    ("fsdp_fp8", "gpt-7b", "fp8=delayed"),
    ("fsdp_fp8_llama", "llama3-8b", ""),
    ("fsdp_fp8_llama", "llama3-8b", "fp8=delayed graph=full grads=float32"),
    ("fsdp_experts_copies", "gpt-moe", ""),
    ("fsdp_experts", "gpt-moe", "layout=ep capacity=2"),
    ("tensor_context", "gpt-1b3-tp", ""),
    ("tensor_context", "gpt-1b3-cp", ""),
    ("finetune", "qwen3-0.6b, 8x2048 tokens", ""),
    ("finetune2", "llama3-8b, 2x8192 tokens", ""),
    ("soaks", "fsdp launch-bound, graph=full, graph full, other work beside it", "graph=full"),
    ("soaks", "fsdp launch-bound, layout=tp graph=full, graph full", "layout=tp graph=full"),
    ("soaks", "fsdp launch-bound, fp8=delayed graph=full, graph full", "fp8=delayed graph=full"),
    ("soaks", "fsdp launch-bound, layout=pp graph=full, graph full", "layout=pp graph=full"),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """Flags of the benchmark."""

    groups: tuple[Group, ...] = get_args(Group)
    """Groups of steps to plan."""
    only: tuple[str, ...] = ()
    """Names of results files, without .json, to take steps from. Default: all."""


@dataclass(frozen=True)
class Measured:
    """A training step of a results file.

    Attributes:
        source: File, work and variant.
        config: Its configuration, with default CUDA graphs.
        gpu: `h100` or `h200`.
        date: Of the measurement.
        state: Bytes of its arguments.
        peak: Bytes of the compiled step: arguments, temporary arrays, and results outside donated buffers.
        ms: Time of a step; None if the file has no comparable time.
    """

    source: tuple[str, str, str]
    config: TrainConfig
    gpu: str
    date: str
    state: int
    peak: int
    ms: float | None


def works(options: PlanOptions) -> Iterator[Work]:
    """Yields the steps by group."""
    found = newest(measured(options.only))
    chosen = {repr(step.config) for step in measured() if step.source in _CHOSEN_WITH}
    for group in options.groups:
        own = [step for step in found if group_of(step, chosen) == group]
        yield Work(group, {"ranks": 1}, rows=map(planned, own))


def group_of(step: Measured, chosen: Collection[str]) -> Group:
    """Returns the group of a step. `chosen` are the configurations that the rules were chosen with."""
    if step.date < _ONE_CHUNK_AT_ONCE and _ran_chunks_at_once(step.config):
        return "earlier loss"
    return "chosen" if repr(step.config) in chosen else "later"


def _ran_chunks_at_once(config: TrainConfig) -> bool:
    parallel = config.parallel
    tokens = config.sequences_per_device * config.input.seq_len // parallel.cp
    vocab_size = config.hooks.vocab_size // parallel.tp
    chunks = tokens // auto_chunk(tokens, vocab_size, jnp.dtype(config.hooks.compute_dtype))
    has_fp8_head = config.is_fp8 and getattr(config.model, "head_precision", "") == "fp8"
    is_alone = config.input.num_microbatches == 1 and parallel.num_devices == 1 and not has_fp8_head
    return chunks > (2 if is_alone else 1)


def measured(only: Iterable[str] = ()) -> Iterator[Measured]:
    """Yields all training steps of jgraph in the stored results that have the memory of the compiled step."""
    only = tuple(only)
    for file in sorted(runner.RESULTS.glob("*.json")):
        if only and file.stem not in only:
            continue
        for work, result in json.loads(file.read_text())["works"].items():
            for row in result["rows"]:
                config = _config_of(file.stem, work, result, row)
                if config is None:
                    continue
                peak = row.get("step_bytes") or sum(row[f"{name}_bytes"] for name in ("argument", "output", "temp"))
                peak -= row.get("alias_bytes", 0)
                state = row.get("argument_bytes", peak - row["temp_bytes"])
                device = row.get("device") or result["device"]
                gpu = "h100" if "H100" in device else "h200"
                # A soak waits after each step.
                ms = None if file.stem == "soaks" else row.get("ms")
                source = file.stem, work, row.get("variant", "")
                yield Measured(source, config, gpu, result["environment"]["date"], state, peak, ms)


def _config_of(file: str, work: str, result: Row, row: Row) -> TrainConfig | None:
    """Returns the configuration of a row; None if it is not a training step of jgraph that a plan describes."""
    variant = row.get("variant", "")
    if row["system"] != "jgraph" or "temp_bytes" not in row or "xla_" in variant:
        return None
    if file == "step_memory":
        return TrainConfig.from_dict(result["config"])
    if file.startswith("microbatches"):
        name, sequences = work.removesuffix(" sequences").split(", ")
        found = re.fullmatch(r"(\d+)( gathered per pass)?", variant)
        if found is None:  # an unrolled program, or an earlier choice
            return None
        fields = {"gather_per": "pass"} if found[2] else {}
        fields |= {"fsdp": result["options"].get("fsdp", 1), "batch_size": int(sequences), "num_microbatches": int(found[1])}
        return preset(name).changed(**fields)
    if "config" not in result or work.endswith("-layers") or "unrolled" in variant:
        return None
    stored = result["config"]
    base = preset(stored["preset"])
    changes: dict[str, Any] = {name: stored[name] for name in _FIELDS if name in stored}
    model = {name: value for name, value in stored["model"].items() if name != "module"}
    changes["model"] = settings_from(type(base.model), model)
    if rank := stored.get("lora", {}).get("rank"):
        changes["lora"] = LoRAConfig(rank=rank, alpha=stored["lora"]["alpha"], base_dtype=stored["lora"]["base_dtype"])
    try:
        return vary(base.changed(**changes), variant).changed(graph="auto")
    except SystemExit:  # a setting of an earlier version
        return None


def newest(steps: Iterable[Measured]) -> list[Measured]:
    """Returns the newest memory of each configuration on each GPU, with its newest time, in the order of the files."""
    found: dict[str, Measured] = {}
    for step in sorted(steps, key=lambda step: step.date):
        key = f"{step.gpu} {step.config}"
        found[key] = replace(step, ms=found[key].ms) if step.ms is None and key in found else step
    return sorted(found.values(), key=lambda step: (step.source, step.gpu))


def planned(step: Measured) -> Row:
    """Returns the row of a step: its plan beside its measurement."""
    config, source = step.config, step.source
    row: Row = {"system": "plan", "variant": describe(config), "source": ", ".join(filter(None, source)), "kind": kind(config)}
    row["date"] = step.date[:10]
    devices = config.parallel.num_devices
    row |= {"device": f"{devices} x {step.gpu.upper()}", "measured_bytes": step.peak, "state_bytes": step.state}
    row |= {"measured_ms": step.ms} if step.ms else {}
    try:
        option = predict(config, step.gpu)
    except JgraphError as e:
        return row | {"failed": str(e)}
    return row | {
        "planned_bytes": round(option.memory.peak),
        "planned_state_bytes": round(option.memory.state),
        "planned_ms": 1e3 * option.speed.step,
        "margin": margin(config),
        "fits": option.fits,
    }


def kind(config: TrainConfig) -> str:
    """Returns the group of a configuration in the summary."""
    if config.preset == "launch-bound":
        return "launch-bound"
    if config.lora.rank:
        return "LoRA"
    if config.hooks.moe and config.hooks.moe.num_experts:
        return "experts"
    return "dense, one GPU" if config.parallel.num_devices == 1 else "dense, several GPUs"


def describe(config: TrainConfig) -> str:
    """Returns the preset, the tokens of a step, and the settings that differ from those of a run on one GPU."""
    sizes = {axis: getattr(config.parallel, axis) for axis in AXES}
    parts = [config.preset, f"{config.input.batch_size} x {config.input.seq_len}"]
    parts += [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    parts += [f"{count} microbatches"] if (count := config.input.num_microbatches) > 1 else []
    parts += [f"remat {config.compile.remat}"] if config.compile.remat != "nothing" else []
    parts += ["gathered per pass"] if config.parallel.gather_per == "pass" else []
    parts += [f"LoRA {config.lora.rank}"] if config.lora.rank else []
    parts += [f"FP8 {config.fp8.recipe}"] if config.is_fp8 else []
    parts += ["with options"] if config.is_fp8 and config.fp8.accumulation != "full" else []
    parts += [config.optimizer.name] if config.optimizer.name != "adamw" else []
    parts += [f"matmuls of the update in {dtype}"] if (dtype := config.optimizer.matrix_dtype) != "auto" else []
    parts += ["head in FP8"] if getattr(config.model, "head_precision", "") == "fp8" else []
    moe = config.hooks.moe
    parts += [f"capacity {moe.capacity:g}"] if config.parallel.ep > 1 and moe else []
    is_plain = config.parallel.tp > 1 and getattr(config.model, "tensor_overlap", "") == "none"
    parts += ["exchange not in turns"] if is_plain else []
    return ", ".join(parts)


def memory_error(row: Row) -> float:
    """Returns the planned peak over the measured one, minus one."""
    return row["planned_bytes"] / row["measured_bytes"] - 1


def time_ratio(row: Row) -> float:
    """Returns the planned time of a step over the measured one."""
    return row["planned_ms"] / row["measured_ms"]


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a group of steps."""
    return Section(
        TITLES[name],
        {
            "step": lambda row: row["variant"],
            "devices": lambda row: row["device"],
            "planned peak, GiB": number("planned_bytes", scale=2**-30),
            "measured": number("measured_bytes", scale=2**-30),
            "error": lambda row: f"{memory_error(row):+.1%}",
            "within its margin": lambda row: "yes" if is_covered(row) else "no",
            "fits": lambda row: "yes" if row["fits"] else "no",
            "planned step, ms": number("planned_ms"),
            "measured step, ms": number("measured_ms"),
            "planned / measured": lambda row: f"{time_ratio(row):.2f}" if "measured_ms" in row else "",
            "source": lambda row: f"{row['source']}, {row['date']}",
        },
        needs="planned_bytes",
        notes="\n".join(markdown(SUMMARY_HEADS, summary(result["rows"]))),
    )


def is_covered(row: Row) -> bool:
    """True if the planned peak with its margin is at least the measured one, so that no memory makes the plan wrong."""
    return row["planned_bytes"] * (1 + row["margin"]) >= row["measured_bytes"]


SUMMARY_HEADS = ["steps", "number", "memory: median error", "worst", "above the margin", "time: planned / measured", "range"]


def summary(rows: list[Row]) -> Iterator[list[str]]:
    """Yields the cells under `SUMMARY_HEADS`, by kind of step and for all."""
    rows = [row for row in rows if "planned_bytes" in row]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for title in (*sorted(kinds), "all"):
        own = [row for row in rows if title in ("all", row["kind"])]
        if not own:
            continue
        errors = [memory_error(row) for row in own]
        times = sorted(time_ratio(row) for row in own if "measured_ms" in row)
        middle = statistics.median(map(abs, errors))
        cells = [
            title,
            str(len(own)),
            f"{middle:.1%}",
            f"{max(errors, key=abs):+.1%}",
            str(sum(not is_covered(r) for r in own)),
        ]
        yield [*cells, f"{statistics.median(times):.2f}", f"{times[0]:.2f} to {times[-1]:.2f}"] if times else cells


def table(works: dict[str, Row]) -> list[str]:
    """Returns the lines of the table of all groups, for pages of notes/."""
    lines = [[f"{TITLES[group]}: {kind}", *cells] for group, one in works.items() for kind, *cells in summary(one["rows"])]
    return markdown(SUMMARY_HEADS, lines)


BENCHMARK = Benchmark("Plans beside measured steps", __doc__, PlanOptions, works, section)
