"""Measured steps of `benchmarks/results/`, with the configuration that a plan predicts them from."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jgraph.precision.config import FP8Config
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.presets import preset

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
_E4M3 = {"precision": "fp8", "fp8": FP8Config(recipe="delayed", format="e4m3")}
_DELAYED = {"precision": "fp8", "fp8": FP8Config(recipe="delayed")}
_LORA = {"lora": LoRAConfig(rank=16, alpha=32.0, base_dtype="bfloat16")}
# File, work, variant, GPU, and what differs from the preset of the work. The last row of a variant counts.
_STEPS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("single_gpu", "gpt-124m", "", "h200", {}),
    ("single_gpu_microbatches", "gpt-124m", "num_microbatches=2", "h200", {"num_microbatches": 2}),
    ("single_gpu_microbatches", "gpt-124m", "num_microbatches=8", "h200", {"num_microbatches": 8}),
    ("single_gpu_layouts", "launch-bound, second run, layouts compose", "", "h200", {}),
    ("fp8", "gpt-124m", "fp8=delayed", "h200", _DELAYED),
    ("fp8_current", "gpt-124m", "fp8=current", "h200", {"precision": "fp8"}),
    ("single_gpu_1b3", "gpt-1b3", "", "h200", {}),
    ("fp8_h100", "gpt-1b3", "fp8=delayed", "h100", _DELAYED),
    ("moe_fp8_h100", "gpt-moe", "", "h100", {}),
    ("moe_fp8", "gpt-moe", "fp8=delayed:e4m3", "h200", _E4M3),
    ("fsdp_graph", "gpt-1b3", "", "h200", {"fsdp": 4, "batch_size": 32}),
    ("fsdp2", "gpt-1b3", "", "h200", {"fsdp": 2, "batch_size": 16}),
    ("fsdp2", "gpt-1b3", "reshard=yes", "h200", {"fsdp": 2, "batch_size": 16, "gather_per": "pass"}),
    ("fsdp", "gpt-7b", "", "h200", {"fsdp": 4, "batch_size": 16}),
    ("fsdp", "gpt-7b", "reshard=yes", "h200", {"fsdp": 4, "batch_size": 16, "gather_per": "pass"}),
    ("fsdp_fp8", "gpt-1b3", "", "h200", {"fsdp": 2, "batch_size": 16}),
    ("fsdp_fp8", "gpt-1b3", "fp8=delayed", "h200", {"fsdp": 2, "batch_size": 16, **_DELAYED}),
    ("fsdp_fp8", "gpt-7b", "fp8=delayed", "h200", {"fsdp": 2, "batch_size": 4, **_DELAYED}),
    ("fsdp_fp8_llama", "llama3-8b", "", "h200", {"fsdp": 2, "batch_size": 2}),
    ("fsdp_fp8_llama", "llama3-8b", "fp8=delayed graph=full grads=float32", "h200", {"fsdp": 2, "batch_size": 2, **_DELAYED}),
    ("fsdp_experts_copies", "gpt-moe", "", "h200", {"fsdp": 2, "batch_size": 32}),
    ("fsdp_experts", "gpt-moe", "layout=ep capacity=2", "h200", {"fsdp": 2, "ep": 2, "batch_size": 32, "capacity": 2.0}),
    ("tensor_context", "gpt-1b3-tp", "", "h200", {"tp": 2, "batch_size": 16}),
    ("tensor_context", "gpt-1b3-cp", "", "h200", {"cp": 2, "batch_size": 1, "seq_len": 32768}),
    ("finetune", "qwen3-0.6b, 8x2048 tokens", "", "h200", {"batch_size": 8, "seq_len": 2048, **_LORA}),
    ("finetune2", "llama3-8b, 2x8192 tokens", "", "h200", {"fsdp": 2, **_LORA}),
    ("finetune2_remat", "llama3-8b, 2x8192 tokens", "remat=layer", "h200", {"fsdp": 2, "remat": "layer", **_LORA}),
)


@dataclass(frozen=True)
class Measured:
    """A measured step: its memory in bytes, and its configuration."""

    name: str
    gpu: str
    config: TrainConfig
    state: int  # arguments of the step
    peak: int


def measured() -> Iterator[Measured]:
    for file, work, variant, gpu, changes in _STEPS:
        rows = json.loads((RESULTS / f"{file}.json").read_text())["works"][work]
        found = [row for row in rows["rows"] if row.get("system", "jgraph") == "jgraph" and row.get("variant", "") == variant]
        row = found[-1] if file != "fsdp_experts_copies" else found[0]
        config = preset(rows["config"]["preset"])
        changes = dict(changes)
        capacity = changes.pop("capacity", None)
        if capacity:
            moe = replace(config.model.moe, capacity=capacity)
            config = config.changed(model=replace(config.model, moe=moe))
        peak = row["argument_bytes"] + row["output_bytes"] - row["alias_bytes"] + row["temp_bytes"]
        lora = " LoRA" if "lora" in changes else ""
        name = f"{work.partition(',')[0]}{lora} {' '.join(f'{k}={v}' for k, v in changes.items() if k in _SHOWN)}"
        yield Measured(name, gpu, config.changed(**changes), row["argument_bytes"], peak)


def measured_later() -> Iterator[Measured]:
    """Steps that were measured after the rules of the plan were chosen."""
    for work, found in json.loads((RESULTS / "microbatches.json").read_text())["works"].items():
        name, sequences = work.removesuffix(" sequences").split(", ")
        for row in found["rows"]:
            if row["variant"].isdigit():  # not an unrolled program
                config = preset(name).changed(batch_size=int(sequences), num_microbatches=int(row["variant"]))
                gpu = "h100" if "H100" in found["device"] else "h200"
                state = row["step_bytes"] - row["temp_bytes"]
                yield Measured(f"{work}, {row['variant']} microbatches", gpu, config, state, row["step_bytes"])


_SHOWN = ("fsdp", "ep", "tp", "cp", "num_microbatches", "remat", "gather_per", "precision", "seq_len")
