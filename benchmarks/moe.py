"""Mixtures of experts on one GPU: jgraph, PyTorch and Transformer Engine with the same model, dtypes, routing and losses.

    python -m benchmarks run moe --work gpt-moe --together 3
    python -m benchmarks run moe --work qwen3-30b-a3b-layers
    python -m benchmarks run moe --work gpt-moe --variant graph=full --soak 1000

`gpt-moe` times a whole training step. `qwen3-30b-a3b-layers` times the forward and backward of four layers on random
activations, without embedding, head and optimizer, with bfloat16 weights and gradients. FLOPs count only the experts that a
token is routed to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks import single_gpu
from benchmarks.rows import Row, step_flops
from benchmarks.runner import Benchmark, SoakOptions, VariantOptions, Work
from benchmarks.tables import Section, against_first, mfu, step_section, teraflops, tokens_per_second
from benchmarks.turns import Candidate
from benchmarks.works import preset_config
from jgraph.train.config import TrainConfig

WorkName = Literal["gpt-moe", "qwen3-30b-a3b-layers"]
LAYERS = "-layers"
ENGINE = ("te bf16 bf16-params", "te bf16 bf16-params graphed-attention", "te bf16 bf16-params cutlass graphed-attention")
TINY = {"num_experts": 4, "experts_per_token": 2, "d_ff": 32}


@dataclass(frozen=True, kw_only=True)
class Options(SoakOptions, VariantOptions):
    """Flags of the benchmark."""

    work: tuple[WorkName, ...] = ("gpt-moe", "qwen3-30b-a3b-layers")
    """Works to time."""
    peers: tuple[str, ...] = ("compile", "compile + CUDA graph", "CUDA graph", "eager", *ENGINE)
    """PyTorch variants: `eager` or `compile`, `max-autotune`, and `+ CUDA graph` to capture the whole step. Variants of
    Transformer Engine: `te RECIPE` (`benchmarks/peers/te_variant.py`)."""


def works(options: Options) -> Iterator[Work]:
    """Yields the selected works."""
    for work in options.work:
        config = config_of(work, options)
        variants = [f"jgraph {variant}".strip() for variant in options.variants]
        candidates = [
            single_gpu.candidate(variant, config, options)
            for variant in (*variants, *(f"torch {peer}" for peer in options.peers))
        ]
        if work.endswith(LAYERS):
            if options.soak:
                continue
            candidates = [layers_only(one, options) for one in candidates]
        yield Work(work, {"ranks": 1, "config": config.to_dict()}, [candidates])


def config_of(work: str, options: Options) -> TrainConfig:
    """Returns the config of a work. Works with the suffix `LAYERS` have four layers and 4 sequences of 4096 tokens."""
    config = preset_config(work.removesuffix(LAYERS), options)
    if options.sizes == "tiny":
        model: Any = config.model
        # torch.compile supports grouped matmuls in bfloat16 only.
        model = replace(model, compute_dtype="bfloat16", moe=replace(model.moe, **TINY))
        config = config.changed(batch_size=2, model=model)
    elif work.endswith(LAYERS):
        config = config.changed(batch_size=4, seq_len=4096, model=replace(config.model, num_layers=4))
    return config


def layers_only(candidate: Candidate, options: Options) -> Candidate:
    """Replaces a candidate of the whole step by one of the layers."""
    ours, gpus = candidate.labels["system"] == "jgraph", int(options.sizes == "full")
    return replace(candidate, module=f"benchmarks.{'programs' if ours else 'peers'}.layers", gpus=0 if ours else gpus)


def flops(config: Row, *, head: bool) -> float:
    """Counts the FLOPs of a step of a stored config, with or without the output projection."""
    model, tokens = config["model"], config["batch_size"] * config["seq_len"]
    return step_flops(config) - (0 if head else 6.0 * tokens * model["d_model"] * model["vocab_size"])


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config = result["config"]
    tokens, total = config["batch_size"] * config["seq_len"], flops(config, head=not name.endswith(LAYERS))
    cells = {"tokens/s": tokens_per_second(tokens), "TFLOP/s": teraflops(total), "MFU": mfu(total)}
    cells |= {"time / jgraph": against_first(result)}
    return step_section(f"{name}, {config['batch_size']}x{config['seq_len']} tokens", result, cells)


BENCHMARK = Benchmark("Mixtures of experts on one GPU", __doc__, Options, works, section)
