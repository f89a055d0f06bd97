"""Rows: what a benchmark leaves of each thing that it timed, the same for all, and how two rows are compared.

A results file is {"works": {NAME: result}}. A result has `environment`, `options`, `device`, `rows`, and what its work was:
`ranks`, `config` or `size`.
"""

import statistics
from typing import Any

from jgraph.train.model import settings_from
from jgraph_models.gpt_config import GPTConfig

Row = dict[str, Any]

# What a row may have. A row that takes turns has the median of them, `repeats_ms` and so on with each turn, and their `rounds`.
FIELDS = {
    "system, schedule, variant, join, graph, runtime, microbatches, chunks": "its name: jgraph, torch, jax or one GPU, and how",
    "precision": "in which the blocks of a run multiply matrices",
    "chosen, table, phases": "of a pipeline: schedule and engine, what they were chosen from, and what that took",
    "failed": "why it has no time, in one line",
    "ranks, device, xla_options, capture": "what it ran on, with which options, and how much of it is a CUDA graph",
    "compiled": "how many programs, and how many of them jax's compilation cache had",
    "ms, power_watts, sm_clock_mhz": "of a step, and what the card did meanwhile",
    "host_ms, host_us": "until the step, or a replay, is handed over to an idle device",
    "stream_ms": "of a step, back to back",
    "slowest_ms, late, slowest": "of a soak: its slowest step, how many took twice the median, the five slowest",
    "categories": "milliseconds of the step by what they were for",
    "forward_ms, dgrad_ms, wgrad_ms, onto_float32_ms": "of a product, by what it is for",
    "alone": "milliseconds of a stage's forward, dgrad and wgrad by themselves",
    "loss, losses, heldout, skipped, same_loss": "after the first step or each; steps not finite; always the same or not",
    "halted": "places that experts needed where they had fewer, else 0",
    "build_s, build_and_first_s, first_step_s, trace_s, compile_s": "until it could be timed",
    "launches, updates, replays, actions": "how many CUDA graphs, replays or actions there are in a step",
    "steps, done": "that were asked of a soak and that it did; those that were logged",
    "differs, first_differs": "largest difference of a soak's losses from those with graph auto; the first step that has one",
    "peak_bytes, init_peak_bytes, step_bytes": "of the device that had most; when the state was made; of the program alone",
    "peaks_bytes": "of each rank of a pipeline; 0 for the first where the whole model took more before it was spread",
    "argument_bytes, temp_bytes, output_bytes, alias_bytes": "of the compiled step",
    "moved_bytes": "that the kernels of a step must read and write",
    "device_bytes, host_bytes, first_device_bytes, first_host_bytes": "in use, and before the first step of a soak",
    "params_bytes, grads_bytes, moments_bytes, update_bytes, more_bytes, reads": "by the dtype rules",
    "starts_ms, ends_ms": "of every action of each rank",
}
KNOWN = {name for names in FIELDS for name in names.split(", ")} | {"rounds"}

PARAMETERS = ("kept", "gathered again", "whole")
WITHIN = "within the spread"


def unknown(row: Row) -> set[str]:
    """Returns keys that the schema has not."""
    return {key for key in row if key.removeprefix("repeats_") not in KNOWN}


def named(row: Row) -> str:
    """Returns system, schedule, variant and join."""
    join = f"join {row['join']}" if "join" in row else ""
    return " ".join(filter(None, (row["system"], row.get("schedule"), row.get("variant"), join)))


def fastest(rows: list[Row], system: str) -> Row | None:
    return min((row for row in rows if row["system"] == system and "ms" in row), key=lambda row: row["ms"], default=None)


def parameters(row: Row) -> str:
    """Tells whether gathered parameters are kept for the backward, or every GPU has them whole: like is compared with like."""
    words = set(row.get("variant", "").replace(":", " ").split())
    if words & {"layout=dp", "graph"}:
        return "whole"
    return "gathered again" if words & {"reshard=yes", "reshard"} else "kept"


def is_peer(row: Row, kind: str) -> bool:
    """Tells whether a row is compared with those of such parameters; PyTorch's whole ones, with the kept ones too."""
    return parameters(row) == kind or (row["system"] == "torch" and (parameters(row), kind) == ("whole", "kept"))


def spread(row: Row) -> str:
    return f"{min(row['repeats_ms']):.3f}, {max(row['repeats_ms']):.3f}"


def ratios(row: Row, to: Row | None, key: str = "ms") -> list[float]:
    """Returns how much longer a row took than another in each round of both; where there was none, by their medians."""
    if not to or key not in row or key not in to:
        return []
    if not (row.get("rounds") and to.get("rounds")):
        return [row[key] / to[key]]
    own, others = (dict(zip(one["rounds"], one[f"repeats_{key}"], strict=True)) for one in (row, to))
    return [own[number] / others[number] for number in own if number in others] or [row[key] / to[key]]


def ratio(row: Row | None, to: Row | None, key: str = "ms", *, digits: int = 3) -> str:
    """Returns the median of the rounds' ratios, and from the least to the most of them."""
    found = [] if row is to or row is None else ratios(row, to, key)
    if len(found) < 2:
        return f"{found[0]:.{digits}f}" if found else ""
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def verdict(a: list[float], b: list[float]) -> str:
    """Tells whether b is faster; the spread is from the fastest to the slowest repeat, and a single one has none."""
    if min(len(a), len(b)) < 2:
        return "no spread known"
    return "faster" if max(b) < min(a) else "slower" if min(b) > max(a) else WITHIN


def gpt_of(fields: Row) -> GPTConfig:
    """Returns the model of a stored configuration; earlier ones had its module among its settings."""
    return settings_from(GPTConfig, {name: value for name, value in fields.items() if name != "module"})


def step_flops(config: Row) -> float:
    """Returns the FLOPs of a training step of a stored configuration."""
    return gpt_of(config["model"]).flops(config["batch_size"], config["seq_len"])
