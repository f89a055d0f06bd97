"""Result rows: the schema that all benchmarks share, and comparisons of two rows.

A results file is `{"works": {NAME: result}}`. A result has `environment`, `options`, `device`, `rows`, and a description of the
work: `ranks`, and `config` or `size`.
"""

import statistics
from typing import Any

from jgraph.train.model import settings_from
from jgraph_models.gpt_config import GPTConfig

Row = dict[str, Any]

# Keys of a row. A candidate timed in rounds stores the median under KEY, one value per round under repeats_KEY, and `rounds`.
FIELDS = {
    "system, schedule, variant, join, graph, runtime, microbatches, chunks": "name of the row; system is jgraph, torch, jax, "
    "jax + jgraph (plain JAX with parts of jgraph), jgraph fsdp (jgraph with sharded state as a reference) or one GPU",
    "precision": "precision of the matmuls in the blocks of a training run",
    "chosen, table, phases": "pipeline: chosen schedule and engine, table of candidates, duration of the search",
    "failed": "reason for a missing time, one line",
    "ranks, device, xla_options, capture": "number of ranks, device kind, XLA options, CUDA graph coverage",
    "compiled": "number of compiled programs, and hits of the compilation cache",
    "ms, power_watts, sm_clock_mhz": "time of a step; power and clock of the GPU during the measurement",
    "ms_of_groups": "smallest and largest mean of a group of steps",
    "host_ms, host_us": "host time to dispatch a step or a replay to an idle device",
    "stream_ms": "time of a step without a wait between steps",
    "slowest_ms, late, slowest": "soak: slowest step, number of steps over twice the median, the five slowest steps",
    "categories": "milliseconds of the step by category",
    "forward_ms, dgrad_ms, wgrad_ms, onto_float32_ms": "time of a grouped matmul by its role in the backward pass",
    "alone": "milliseconds of the forward, dgrad and wgrad of a stage, each timed in isolation",
    "loss, losses, heldout, skipped, same_loss": "loss after the first step, or per step; validation loss; skipped steps; True "
    "for a constant loss",
    "halted": "expert capacity that the step needed, 0 if the capacity was sufficient",
    "build_s, build_and_first_s, first_step_s, imports_s, trace_s, compile_s, state_s, step_s": "seconds of setup",
    "exit_s, start_s, resume_s, resumed, codes, lines": "restarts: seconds from a kill to the end of the other processes, to "
    "the next start, to the restored state; the step of that state; exit codes and messages of the other processes",
    "links": "network: how NCCL has connected the GPUs",
    "launches, updates, replays, actions": "CUDA graph launches, graph updates, replays, or pipeline actions per step",
    "steps, done": "soak: requested and completed steps; loss curve: logged steps",
    "difference": "loop: difference of the results of both programs",
    "differs, first_differs": "largest difference of the losses from another run, and the first step with one: in a soak, from "
    "the run with graph auto; in restarts, from the run with one process per GPU",
    "peak_bytes, init_peak_bytes, step_bytes": "peak memory of the fullest device; after init; of the program",
    "peaks_bytes": "peak memory of each pipeline rank; 0 for rank 0 if the unsharded model took more",
    "argument_bytes, temp_bytes, output_bytes, alias_bytes": "memory analysis of the compiled step",
    "arrays, kernels": "arrays in the state of a step, kernels and library calls of its program",
    "planned_bytes, measured_bytes, planned_state_bytes, state_bytes": "peak and state of a step: of the plan, and measured",
    "planned_ms, measured_ms": "time of a step: of the plan, and measured",
    "kind, source, date": "plan: group of the summary; file, work and variant of the measurement, and its date",
    "margin, fits": "plan: part of the peak that is added before the comparison with the memory of the GPU, and its result",
    "moved_bytes": "bytes that the kernels of a step must read and write",
    "device_bytes, host_bytes, first_device_bytes, first_host_bytes": "soak: memory in use, now and before the first step",
    "params_bytes, grads_bytes, moments_bytes, update_bytes, more_bytes, reads": "memory by dtype rule",
    "starts_ms, ends_ms": "start and end of every action of each rank",
}
KNOWN = {name for names in FIELDS for name in names.split(", ")} | {"rounds"}

# Parameters after the forward pass: gathered copies kept, freed and gathered again, or no sharding at all.
PLACEMENTS = ("kept", "resharded", "replicated")
WITHIN = "within the spread"


def unknown_keys(row: Row) -> set[str]:
    """Returns the keys of `row` that are missing from the schema."""
    return {key for key in row if key.removeprefix("repeats_") not in KNOWN}


def row_name(row: Row) -> str:
    """Returns the name of a row: system, schedule, variant and join."""
    join = f"join {row['join']}" if "join" in row else ""
    return " ".join(filter(None, (row["system"], row.get("schedule"), row.get("variant"), join)))


def fastest(rows: list[Row], system: str) -> Row | None:
    """Returns the row of a system (jgraph, torch, jax or one GPU) with the smallest `ms`. None if no row has a time."""
    return min((row for row in rows if row["system"] == system and "ms" in row), key=lambda row: row["ms"], default=None)


def placement(row: Row) -> str:
    """Returns the entry of `PLACEMENTS` that the variant of a row uses."""
    options = set(row.get("variant", "").replace(":", " ").split())
    if options & {"layout=dp", "graph"}:
        return "replicated"
    return "resharded" if options & {"reshard=yes", "reshard"} else "kept"


def is_comparable(row: Row, kind: str) -> bool:
    """Reports whether a row is compared with the rows of a placement. Replicated PyTorch is also compared with `kept`."""
    return placement(row) == kind or (row["system"] == "torch" and (placement(row), kind) == ("replicated", "kept"))


def spread(row: Row) -> str:
    """Returns the fastest and the slowest repeat in milliseconds."""
    return f"{min(row['repeats_ms']):.3f}, {max(row['repeats_ms']):.3f}"


def ratios(row: Row, to: Row | None, key: str = "ms") -> list[float]:
    """Returns the time of `row` divided by the time of `to`: one ratio per round that both took part in.

    Without a common round, returns the ratio of the medians. Empty if a time is missing.
    """
    if not to or key not in row or key not in to:
        return []
    if not (row.get("rounds") and to.get("rounds")):
        return [row[key] / to[key]]
    own, others = (dict(zip(one["rounds"], one[f"repeats_{key}"], strict=True)) for one in (row, to))
    return [own[number] / others[number] for number in own if number in others] or [row[key] / to[key]]


def ratio(row: Row | None, to: Row | None, key: str = "ms", *, digits: int = 3) -> str:
    """Formats the median ratio of two rows, followed by the smallest and the largest if there are several rounds.

    Empty if a time is missing or both arguments are the same row.
    """
    found = [] if row is to or row is None else ratios(row, to, key)
    if len(found) < 2:
        return f"{found[0]:.{digits}f}" if found else ""
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def verdict(a: list[float], b: list[float]) -> str:
    """Compares the repeats of a baseline with those of another run: faster or slower only if the two ranges do not overlap."""
    if min(len(a), len(b)) < 2:
        return "no spread known"
    return "faster" if max(b) < min(a) else "slower" if min(b) > max(a) else WITHIN


def gpt_config_from(fields: Row) -> GPTConfig:
    """Builds the model config from stored settings. Ignores `module`, which old results store among them."""
    return settings_from(GPTConfig, {name: value for name, value in fields.items() if name != "module"})


def step_flops(config: Row) -> float:
    """Returns the FLOPs of a training step of a stored config."""
    return gpt_config_from(config["model"]).flops(config["batch_size"], config["seq_len"])
