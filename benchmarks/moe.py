"""Mixtures of experts on one GPU: jgraph against PyTorch, the same model, dtype policy, routing and losses.

    python -m benchmarks run moe --work gpt-moe --together 3
    python -m benchmarks run moe --work qwen3-30b-a3b-layers
    python -m benchmarks run moe --work gpt-moe --variant graph=full --soak 1000

`gpt-moe` is a whole training step. Of `qwen3-30b-a3b` four layers are timed alone: forward and backward on random activations,
without embedding, head and optimizer, weights and their gradients in bfloat16. FLOPs count the experts that a token passes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import tyro

from benchmarks import single_gpu
from benchmarks.rows import Row, named, ratio, spread, step_flops
from benchmarks.runner import Benchmark, SoakOptions, TraceOptions, Work
from benchmarks.tables import COLUMNS, Section, mfu, number
from benchmarks.turns import Candidate
from benchmarks.works import training
from jgraph.train.config import TrainConfig

WorkName = Literal["gpt-moe", "qwen3-30b-a3b-layers"]
LAYERS = "-layers"
TINY = {"num_experts": 4, "experts_per_token": 2, "d_ff": 32}


@dataclass(frozen=True, kw_only=True)
class Options(SoakOptions, TraceOptions):
    """Chooses what is run."""

    work: tuple[WorkName, ...] = ("gpt-moe", "qwen3-30b-a3b-layers")
    """What is timed."""
    peers: tuple[str, ...] = ("compile", "compile + CUDA graph", "CUDA graph", "eager")
    """Of PyTorch's: eager or compile, `max-autotune`, and `+ CUDA graph` of the whole step."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=TEXT for one row more: graph=off|full, fp8=RECIPE:FORMAT, what the model calls so, or XLA's; may be repeated."""


def works(options: Options) -> Iterator[Work]:
    for work in options.work:
        config = config_of(work, options)
        variants = [f"jgraph {variant}".strip() for variant in dict.fromkeys(("", *options.variant))]
        candidates = [
            single_gpu.candidate(how, config, options) for how in (*variants, *(f"torch {peer}" for peer in options.peers))
        ]
        if work.endswith(LAYERS):
            if options.soak:
                continue
            candidates = [alone(one, options) for one in candidates]
        yield Work(work, {"ranks": 1, "config": config.to_dict()}, [candidates])


def config_of(work: str, options: Options) -> TrainConfig:
    """Returns the run of a work; of layers timed alone, four of them on 4 sequences of 4096 tokens."""
    config = training(work.removesuffix(LAYERS), options)
    if options.sizes == "tiny":
        model: Any = config.model
        # bfloat16, since torch compiles no grouped product of another dtype.
        model = replace(model, compute_dtype="bfloat16", moe=replace(model.moe, **TINY))
        config = config.changed(batch_size=2, model=model)
    elif work.endswith(LAYERS):
        config = config.changed(batch_size=4, seq_len=4096, model=replace(config.model, num_layers=4))
    return config


def alone(candidate: Candidate, options: Options) -> Candidate:
    """Returns who times the layers alone, as an candidate of the whole step is named."""
    ours, gpus = candidate.labels["system"] == "jgraph", int(options.sizes == "full")
    return replace(candidate, module=f"benchmarks.{'programs' if ours else 'peers'}.layers", gpus=0 if ours else gpus)


def flops(config: Row, *, head: bool) -> float:
    """Returns the FLOPs of loss and gradients, as `GPTConfig.flops` counts them, with or without the head."""
    model, tokens = config["model"], config["batch_size"] * config["seq_len"]
    return step_flops(config) - (0 if head else 6.0 * tokens * model["d_model"] * model["vocab_size"])


def section(name: str, result: Row) -> Section:
    config, rows = result["config"], result["rows"]
    tokens, total = config["batch_size"] * config["seq_len"], flops(config, head=not name.endswith(LAYERS))
    ours = rows[0] if rows else {}
    return Section(
        f"{name}, {config['batch_size']}x{config['seq_len']} tokens",
        {
            "variant": named,
            "ms, median": number("ms", ".3f"),
            "fastest, slowest": spread,
            "tokens/s": lambda row: f"{tokens / row['ms'] * 1e3:,.0f}",
            "TFLOP/s": lambda row: f"{total / row['ms'] / 1e9:.0f}",
            "MFU": mfu(total),
            "this / jgraph": lambda row: ratio(row, ours),
            **{name: COLUMNS[name] for name in ("peak GB", "W", "MHz")},
        },
        notes=ours.get("capture") or "",
    )


BENCHMARK = Benchmark("Mixtures of experts on one GPU", __doc__, Options, works, section)
