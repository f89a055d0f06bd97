r"""Training with tensor or context parallelism on the GPUs of one machine: `jgraph.train --tp` and `--cp`, and PyTorch.

    python -m benchmarks run tensor_context --together 2 --categories
    python -m benchmarks run tensor_context --work gpt-1b3-tp --variant graph=full --variant fp8=delayed --together 2

With tensor parallelism, jgraph with sharded state is timed on the same batch. All times are whole steps that are dispatched
back to back: forward, backward, gradient clipping, AdamW.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.rows import Row, fastest, ratio, row_name, spread, step_flops
from benchmarks.runner import Benchmark, MultiGPUOptions, VariantOptions, Work
from benchmarks.tables import COLUMNS, Section, mfu, number, tokens_per_second
from benchmarks.turns import Candidate
from benchmarks.works import jgraph_step, preset_config, torch_ranks, vary, with_options
from jgraph.train.config import TrainConfig
from jgraph.xla.hlo import COLLECTIVES

WorkName = Literal["gpt-1b3-tp", "gpt-1b3-cp", "gpt-124m-cp"]

# Sequence length of the works with context parallelism, which train on one or two sequences.
LONG = 32768
SEQUENCES: dict[WorkName, int] = {"gpt-1b3-cp": 1, "gpt-124m-cp": 2}
# Sequences per GPU of the work with tensor parallelism, as in the benchmark fsdp.
SEQUENCES_PER_GPU = 8

NOTES = (
    "torch / row compares with the fastest PyTorch variant. With `--cp`, jgraph replicates parameters and moments. PyTorch "
    "shards both over the same GPUs, except with replicate. FLOPs of a step are 6 x tokens x (matmul weights + layers x "
    "width x sequence length), without the embedding and without recompute. Exposed collectives is the time of collectives "
    "when no other kernel runs, without CUDA graphs, as a mean of the GPUs. Peak memory is of the fullest GPU. The "
    "compilation time of torch is its first step."
)


@dataclass(frozen=True, kw_only=True)
class Options(MultiGPUOptions, VariantOptions):
    """Flags of the benchmark. Only the first jgraph variant is measured by category."""

    work: tuple[WorkName, ...] = ("gpt-1b3-tp", "gpt-1b3-cp")
    """Presets to train, with tensor parallelism (`-tp`) or context parallelism (`-cp`)."""
    sharded: Literal["yes", "no"] = "yes"
    """Also time jgraph with sharded state on the works with tensor parallelism."""
    tensor_peers: tuple[str, ...] = ("compile", "compile:sequence", "compile:async", "eager")
    """PyTorch variants of tensor parallelism: `eager` or `compile` (each block and the loss), with suffixes. The residual
    stream is split along the batch, or along the sequence with `:sequence`. `:async` pipelines collectives with matmuls in
    symmetric memory. `:cudnn` prefers cuDNN attention. Pass the flag without values to skip PyTorch."""
    context_peers: tuple[str, ...] = ("compile:cudnn", "compile", "compile:replicate:cudnn", "eager")
    """PyTorch variants of context parallelism, with suffixes. `:replicate` replicates the parameters instead of sharding them.
    `:alltoall` sends keys and values around a ring instead of gathering them. `:cudnn` prefers cuDNN attention."""


def works(options: Options) -> Iterator[Work]:
    """Yields the works."""
    ranks = options.num_ranks
    for work in options.work:
        config = config_of(work, ranks, options)
        others = replace(options, categories=False)
        candidates = [
            jgraph_step(
                {"system": "jgraph", "variant": variant, "ranks": ranks},
                vary(config, variant),
                options if variant == options.first else others,
            )
            for variant in options.variants
        ]
        is_tensor = config.parallel.tp > 1
        peers = options.tensor_peers if is_tensor else options.context_peers
        candidates += [torch_candidate(peer, config, ranks, options) for peer in peers if "async" not in peer]
        if is_tensor and options.sharded == "yes":
            labels = {"system": "jgraph fsdp", "variant": options.first, "ranks": ranks}
            candidates += [jgraph_step(labels, vary(config.changed(tp=1, fsdp=ranks), options.first), others)]
        # Last, because a machine without symmetric memory may stop them only after the timeout.
        candidates += [torch_candidate(peer, config, ranks, options) for peer in peers if "async" in peer]
        yield Work(work, {"ranks": ranks, "config": config.to_dict()}, [candidates])


def torch_candidate(peer: str, config: TrainConfig, ranks: int, options: Options) -> Candidate:
    """Returns a candidate of PyTorch. Exits if the variant has an unknown word."""
    mode, *suffixes = peer.split(":")
    is_tensor = config.parallel.tp > 1
    allowed = {"cudnn", *(("sequence", "async") if is_tensor else ("replicate", "alltoall"))}
    if mode not in ("eager", "compile") or not allowed.issuperset(suffixes):
        flag = "--tensor-peers" if is_tensor else "--context-peers"
        raise SystemExit(f"{flag} has the unknown variant {peer}; use eager or compile, with :{', :'.join(sorted(allowed))}")
    request = {"config": config.to_dict(), "compile": mode == "compile", "cudnn": "cudnn" in suffixes}
    if is_tensor:
        request |= {"split": "sequence" if "sequence" in suffixes else "batch", "pipelined": "async" in suffixes}
    else:
        request |= {"params": "replicated" if "replicate" in suffixes else "sharded"}
        request |= {"rotate": "alltoall" if "alltoall" in suffixes else "allgather"}
    labels = {"system": "torch", "variant": peer, "ranks": ranks}
    return torch_ranks(labels, "benchmarks.peers.partitioned", request, ranks, options)


def config_of(work: WorkName, ranks: int, options: Options) -> TrainConfig:
    """Returns the config of a work."""
    name, _, axis = work.rpartition("-")
    config = preset_config(name, options)
    if axis == "tp":
        config = config.changed(tp=ranks, batch_size=ranks * SEQUENCES_PER_GPU)
    else:
        length = LONG if options.sizes == "full" else config.input.seq_len
        config = config.changed(cp=ranks, batch_size=SEQUENCES[work], seq_len=length)
    return with_options(config, options)


def section(work: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config, rows, ranks = (result[key] for key in ("config", "rows", "ranks"))
    peer, sharded = fastest(rows, "torch"), fastest(rows, "jgraph fsdp")
    tokens, flops = config["batch_size"] * config["seq_len"], step_flops(config) / ranks
    return Section(
        f"{work}, {ranks} ranks, {config['batch_size']} x {config['seq_len']} tokens",
        {
            "variant": row_name,
            "step, ms": number("ms"),
            "fastest, slowest, ms": spread,
            "tokens/s": tokens_per_second(tokens),
            "torch / row": lambda row: ratio(peer, row),
            **({"row / jgraph fsdp": lambda row: ratio(row, sharded)} if sharded else {}),
            "MFU": mfu(flops),
            "exposed collectives, ms": exposed,
            **COLUMNS,
            "first loss": number("loss", ".5g"),
        },
        facts=f", graph {config['graph']}, XLA options: {' '.join(config['xla_options']) or 'none'}",
        notes=NOTES,
    )


def exposed(row: Row) -> str:
    """Returns the time of collectives that no other kernel hides, in milliseconds. Empty if it was not measured."""
    categories = row.get("categories")
    return f"{sum(categories.get(kind, 0.0) for kind in {*COLLECTIVES.values()}):.2f}" if categories else ""


BENCHMARK = Benchmark("Tensor and context parallelism", __doc__, Options, works, section)
