"""Training with sharded state as one program (`jgraph.train --fsdp`) against PyTorch's `fully_shard`, on the GPUs of a machine.

    python -m benchmarks run fsdp --work gpt-1b3 gpt-7b
    python -m benchmarks run fsdp --name fsdp_fp8 --first fp8=delayed --variant fp8=current \
        --peers compile compile:float8 --one-gpu no --together 2      # 1 for gpt-7b on two H200s: one at a time
    python -m benchmarks run fsdp --work llama3-8b --name fsdp_fp8_llama --first "fp8=delayed graph=full grads=float32" \
        --peers compile:float8 --one-gpu no --together 1

jgraph on one GPU with as many tokens takes part too. Both sides time whole steps handed over one after the other: forward,
backward, clipping, AdamW.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import jax
import tyro

from benchmarks.harness import count_gpus
from benchmarks.rows import PLACEMENTS, Row, fastest, is_comparable, named, parameters, ratio, spread, step_flops
from benchmarks.runner import Benchmark, MultiGPUOptions, SoakOptions, TraceOptions, Work
from benchmarks.tables import COLUMNS, Section, mfu, number
from benchmarks.turns import Candidate
from benchmarks.works import in_fp8, training, jgraph_step
from jgraph.train.config import TrainConfig

WorkName = Literal["launch-bound", "gpt-1b3", "gpt-7b", "llama3-8b", "gpt-moe", "qwen3-30b-a3b"]

# Of a GPU in a step.
SEQUENCES: dict[WorkName, int] = {
    "launch-bound": 2,
    "gpt-1b3": 8,
    "gpt-7b": 2,
    "llama3-8b": 1,
    "gpt-moe": 16,
    "qwen3-30b-a3b": 4,
}
LAYERS: dict[WorkName, int] = {"qwen3-30b-a3b": 4}  # of all that it has
ON_ONE_GPU = ("launch-bound", "gpt-1b3", "gpt-moe")  # the state of the others leaves little of a GPU

NOTES = (
    "torch's is the fastest that keeps parameters, gathers them again, or has them whole, as the row does; whole ones count as "
    "kept too. FLOPs of a step: 6 x tokens x (weights of matrix products + layers x width x sequence): no embedding, nothing "
    "computed again. Peak GB: of the GPU that had most; (init) if the state took more to make than a step. Compile s of torch "
    "is its first step. Launches, updates: of all GPUs in a step."
)


@dataclass(frozen=True, kw_only=True)
class Options(MultiGPUOptions, SoakOptions, TraceOptions):
    """Chooses what is run."""

    work: tuple[WorkName, ...] = ("gpt-1b3", "gpt-7b")
    """Presets that are trained."""
    peers: tuple[str, ...] = ("compile", "compile:reshard", "eager")
    """eager or compile (torch.compile of every block and of the loss), `:reshard` to gather again in the backward, `:float8`
    for torchao's of the blocks, gathered as bytes; `:cudnn` for cuDNN's attention, where PyTorch would take another; `:graph`
    for replicas whose whole step with its all-reduce is one CUDA graph, `:whole:graph` with the model compiled in one;
    `:experts` for a mixture's experts spread over the ranks, to which rows are sent; none where the flag stands alone."""
    first: str = ""
    """The variant of ours that is in every comparison; as it comes if it is left out."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE[ NAME=VALUE ...] for one row more; graph=auto|off|full, reshard=yes|no, fp8=current|delayed,
    grads=float32|bfloat16 (their sums', which the optimizer reads decoupled from the parameters), layout=dp (every GPU has
    all parameters), pp (every GPU has some layers) or ep (every GPU has some experts), capacity=NUMBER (of these; what halts
    says what it needed), microbatches=NUMBER and length=NUMBER (tokens of a sequence, for a soak) beside XLA's; may be
    repeated."""
    sequences: int = 0
    """Sequences of a GPU in a step; 0 for as many as each work has by itself."""
    one_gpu: Literal["yes", "no"] = "yes"
    """Whether to time on one GPU too what fits there."""


def works(options: Options) -> Iterator[Work]:
    """Yields each work: those that keep parameters take turns with each other, and so do those that gather them again."""
    ranks = options.ranks or count_gpus() or len(jax.devices())
    for work in options.work:
        config = config_of(work, ranks, options)
        variants = dict.fromkeys((options.first, "", *options.variant))
        candidates = [jgraph_candidate("jgraph", vary(config, variant), variant, options) for variant in variants]
        if work in ON_ONE_GPU and options.one_gpu == "yes" and ranks > 1:
            candidates += [jgraph_candidate("one GPU", config.changed(fsdp=1, batch_size=config.input.batch_size // ranks), "", options)]
        candidates += [torch_candidate(peer, config, options) for peer in options.peers]
        again = [candidate for candidate in candidates if placement(candidate.labels) == "gathered again"]
        groups = [[candidate for candidate in candidates if candidate not in again], *([again] if again else [])]
        yield Work(work, {"ranks": ranks, "config": config.to_dict()}, groups)


def jgraph_candidate(system: str, config: TrainConfig, variant: str, options: Options) -> Candidate:
    return jgraph_step(
        {"system": system, "variant": variant, "ranks": config.parallel.fsdp * config.parallel.dp}, config, options
    )


def torch_candidate(peer: str, config: TrainConfig, options: Options) -> Candidate:
    how, *words = peer.split(":")
    return Candidate(
        {"system": "torch", "variant": peer, "ranks": config.parallel.fsdp},
        "benchmarks.peers.fsdp",
        {
            "config": config.to_dict(),
            "compile": how == "compile",
            **{word: word in words for word in ("reshard", "float8", "cudnn", "graph", "whole", "experts")},
        },
        ranks=config.parallel.fsdp,
        gpus=0 if options.sizes == "tiny" else config.parallel.fsdp,
    )


def config_of(work: WorkName, ranks: int, options: Options) -> TrainConfig:
    config = training(work, options)
    if options.sizes == "full" and work in LAYERS:
        config = config.changed(model=replace(config.model, num_layers=LAYERS[work]))
    return config.changed(
        batch_size=ranks * (options.sequences or SEQUENCES[work]),
        fsdp=ranks,
        graph=options.graph,
        xla_options=(*config.compile.xla_options, *options.xla_option),
    )


def vary(config: TrainConfig, variant: str) -> TrainConfig:
    """Returns the configuration with the words of a variant."""
    for word in variant.split():
        match word.split("=", 1):
            case ["graph", "auto" | "off" | "full" as graph]:
                config = config.changed(graph=graph)
            case ["reshard", "yes" | "no" as choice]:
                config = config.changed(reshard_after_forward=choice == "yes")
            case ["fp8", "current" | "delayed" as recipe]:
                config = in_fp8(config, recipe)
            case ["grads", "float32" | "bfloat16" as dtype]:
                config = config.changed(main_grads_dtype=dtype, decoupled_grad=True)
            case ["layout", "dp"]:
                config = config.changed(dp=config.parallel.fsdp, fsdp=1)
            case ["layout", "pp"]:
                config = config.changed(
                    pp=config.parallel.fsdp, fsdp=1, num_microbatches=config.input.batch_size, schedule="aligned"
                )
            case ["layout", "ep"]:
                config = config.changed(ep=config.parallel.fsdp)
            case ["microbatches", number] if number.isdigit():
                config = config.changed(num_microbatches=int(number))
            case ["capacity", number] if number.replace(".", "", 1).isdigit():
                moe = replace(config.model.moe, capacity=float(number))
                config = config.changed(model=replace(config.model, moe=moe))
            case ["length", number] if number.isdigit():
                config = config.changed(seq_len=int(number))
            case [name, _] if name not in ("graph", "reshard", "fp8", "grads", "layout", "microbatches", "capacity", "length"):
                config = config.changed(xla_options=(*config.compile.xla_options, word))
            case _:
                allowed = (
                    "graph=auto|off|full, reshard=yes|no, fp8=current|delayed, grads=float32|bfloat16, layout=dp|pp|ep, "
                    "microbatches=NUMBER, capacity=NUMBER, length=NUMBER or XLA's"
                )
                raise SystemExit(f"--variant has {word}: must be {allowed}")
    return config


def section(work: str, result: Row) -> Section:
    config, rows, ranks = (result[key] for key in ("config", "rows", "ranks"))
    peers = {how: fastest([row for row in rows if is_comparable(row, how)], "torch") for how in PLACEMENTS}
    alone, share = fastest(rows, "one GPU"), config["batch_size"] // ranks
    flops = step_flops(config) / ranks  # a GPU's, the same with one

    def scaling(row: Row) -> str:
        """Returns tokens/s over those of as many single GPUs; a GPU has as many in both, so a ratio of times."""
        return f"{alone['ms'] / row['ms']:.1%}" if alone and row["system"] == "jgraph" else ""

    def peak(row: Row) -> str:
        return COLUMNS["peak GB"](row) + " (init)" * (row.get("init_peak_bytes", 0) == row.get("peak_bytes"))

    def loss(row: Row) -> str:
        told = f", {row['skipped']} steps skipped" if row.get("skipped") else ""
        told += f", halted: {row['halted']} places needed" if row.get("halted") else ""
        return number("loss", ".5g")(row) + told

    return Section(
        f"{work}, {ranks} ranks, {share} x {config['seq_len']} tokens a rank",
        {
            "variant": named,
            "ms a step": number("ms"),
            "fastest, slowest": spread,
            "tokens/s": lambda row: f"{share * row['ranks'] * config['seq_len'] / row['ms'] * 1e3:,.0f}",
            "torch / this": lambda row: ratio(peers[placement(row)], row) if row["ranks"] == ranks else "",
            f"of {ranks} x one GPU": scaling,
            "MFU": mfu(flops),
            **COLUMNS,
            "peak GB": peak,
            "first loss": loss,
        },
        facts=f", graph {config['graph']}, XLA options: {' '.join(config['xla_options']) or 'none'}",
        notes=NOTES,
    )


BENCHMARK = Benchmark("Sharded training", __doc__, Options, works, section)
