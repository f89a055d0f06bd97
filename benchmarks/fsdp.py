r"""Training with fully sharded state on the GPUs of one machine: `jgraph.train --fsdp`, plain JAX and PyTorch's `fully_shard`.

    python -m benchmarks run fsdp --work gpt-1b3 gpt-7b
    python -m benchmarks run fsdp --name fsdp_fp8 --first fp8=delayed --variant fp8=current \
        --plain --peers compile compile:float8 --one-gpu no --together 2      # gpt-7b on two H200s needs --together 1
    python -m benchmarks run fsdp --work llama3-8b --name fsdp_fp8_llama --first "fp8=delayed graph=full grads=float32" \
        --plain --peers compile:float8 --one-gpu no --together 1

jgraph on one GPU, with the same number of tokens per GPU, measures the scaling. All times are whole steps that are dispatched
back to back: forward, backward, gradient clipping, AdamW.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.peers.te_variant import is_te, parse_sharded_variant
from benchmarks.rows import PLACEMENTS, Row, fastest, is_comparable, placement, ratio, row_name, spread, step_flops
from benchmarks.runner import Benchmark, MultiGPUOptions, SoakOptions, VariantOptions, Work
from benchmarks.tables import COLUMNS, Section, mfu, number
from benchmarks.turns import Candidate
from benchmarks.works import jgraph_step, preset_config, torch_ranks, vary, with_options
from jgraph.train.config import TrainConfig

WorkName = Literal["launch-bound", "gpt-1b3", "gpt-7b", "llama3-8b", "gpt-moe", "qwen3-30b-a3b"]

# Sequences per GPU and step.
SEQUENCES: dict[WorkName, int] = {
    "launch-bound": 2,
    "gpt-1b3": 8,
    "gpt-7b": 2,
    "llama3-8b": 1,
    "gpt-moe": 16,
    "qwen3-30b-a3b": 4,
}
LAYERS: dict[WorkName, int] = {"qwen3-30b-a3b": 4}  # the model has more
FIT_ON_ONE_GPU = ("launch-bound", "gpt-1b3", "gpt-moe")

NOTES = (
    "torch / row compares with the fastest PyTorch variant of the same placement: parameters kept after the forward, resharded "
    "and gathered again in the backward, or replicated. Kept parameters are also compared with replicated PyTorch. FLOPs of a "
    "step are 6 x tokens x (matmul weights + layers x width x sequence length), without the embedding and without recompute. "
    "Peak memory is of the fullest GPU; (init) means that the initialization took more than a step. The compilation time of "
    "torch is its first step. Graph launches and updates are per step, for all GPUs."
)


@dataclass(frozen=True, kw_only=True)
class Options(MultiGPUOptions, SoakOptions, VariantOptions):
    """Flags of the benchmark."""

    work: tuple[WorkName, ...] = ("gpt-1b3", "gpt-7b")
    """Presets to train."""
    plain: tuple[str, ...] = ("same", "stock", "same tuned", "stock tuned")
    """Plain JAX variants: NamedSharding of the state and the partitioner, as `benchmarks/peers/plain_jax.py` describes. Works
    with experts skip them. Pass the flag without values to skip plain JAX."""
    peers: tuple[str, ...] = ("compile", "compile:reshard", "eager")
    """PyTorch variants: `eager` or `compile` (each block and the loss), with suffixes. `:reshard` frees parameters after the
    forward. `:float8` uses torchao float8 with an FP8 all-gather. `:cudnn` prefers cuDNN attention. `:graph` replicates the
    model and captures the step in one CUDA graph; `:whole:graph` also compiles the model as a whole. `:experts` uses expert
    parallelism. `:muon` updates the matrices of the blocks with `torch.optim.Muon`. `te RECIPE` has blocks of Transformer
    Engine (`benchmarks/peers/te_variant.py`), optionally with `:reshard`, or with `:graph` and float32 parameters. Pass the
    flag without values to skip PyTorch."""
    sequences: int = 0
    """Sequences per GPU and step. 0 uses the default of the work."""
    one_gpu: Literal["yes", "no"] = "yes"
    """Also time each work on one GPU, if it fits."""


def works(options: Options) -> Iterator[Work]:
    """Yields the works. Variants that reshard parameters are timed in rounds of their own."""
    ranks = options.num_ranks
    for work in options.work:
        config = config_of(work, ranks, options)
        candidates = [jgraph_candidate("jgraph", vary(config, variant), variant, options) for variant in options.variants]
        if work in FIT_ON_ONE_GPU and options.one_gpu == "yes" and ranks > 1:
            candidates += [
                jgraph_candidate("one GPU", config.changed(fsdp=1, batch_size=config.input.batch_size // ranks), "", options)
            ]
        if not config.model.moe.num_experts:
            candidates += [plain_candidate(variant, config) for variant in options.plain]
        candidates += [torch_candidate(peer, config, options) for peer in options.peers]
        resharded = [candidate for candidate in candidates if placement(candidate.labels) == "resharded"]
        kept = [candidate for candidate in candidates if candidate not in resharded]
        groups = [kept, *([resharded] if resharded else [])]
        yield Work(work, {"ranks": ranks, "config": config.to_dict()}, groups)


def jgraph_candidate(system: str, config: TrainConfig, variant: str, options: Options) -> Candidate:
    """Returns a candidate of jgraph."""
    return jgraph_step({"system": system, "variant": variant, "ranks": config.parallel.data_ranks}, config, options)


def plain_candidate(variant: str, config: TrainConfig) -> Candidate:
    """Returns a candidate of plain JAX."""
    labels = {"system": "jax", "variant": variant, "ranks": config.parallel.shards}
    return Candidate(labels, "benchmarks.peers.plain_jax", {"variant": variant.split(), "config": config.to_dict()})


def torch_candidate(peer: str, config: TrainConfig, options: Options) -> Candidate:
    """Returns a candidate of PyTorch. Exits if Transformer Engine does not support the variant or the work."""
    mode, *suffixes = peer.split(":")
    if is_te(mode):
        allowed = ([], ["reshard"], ["graph"]) if parse_sharded_variant(mode).params == "float32" else ([], ["reshard"])
        if suffixes not in allowed or config.model.moe.num_experts:
            reason = "needs a dense work, and takes the suffix :reshard, or :graph with float32 parameters"
            raise SystemExit(f"--peers has {peer!r}: Transformer Engine {reason}")
    ranks = config.parallel.shards
    request = {"config": config.to_dict(), "te": mode if is_te(mode) else "", "compile": mode == "compile"}
    request |= {name: name in suffixes for name in ("reshard", "float8", "cudnn", "graph", "whole", "experts", "muon")}
    return torch_ranks({"system": "torch", "variant": peer, "ranks": ranks}, "benchmarks.peers.fsdp", request, ranks, options)


def config_of(work: WorkName, ranks: int, options: Options) -> TrainConfig:
    """Returns the config of a work."""
    config = preset_config(work, options)
    if options.sizes == "full" and work in LAYERS:
        config = config.changed(model=replace(config.model, num_layers=LAYERS[work]))
    return with_options(config.changed(batch_size=ranks * (options.sequences or SEQUENCES[work]), fsdp=ranks), options)


def section(work: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config, rows, ranks = (result[key] for key in ("config", "rows", "ranks"))
    peers = {kind: fastest([row for row in rows if is_comparable(row, kind)], "torch") for kind in PLACEMENTS}
    alone, plain, share = fastest(rows, "one GPU"), fastest(rows, "jax"), config["batch_size"] // ranks
    flops = step_flops(config) / ranks  # per GPU, also for the row of one GPU

    def scaling(row: Row) -> str:
        """Returns the scaling efficiency. Tokens per GPU are equal, so it is a ratio of step times."""
        return f"{alone['ms'] / row['ms']:.1%}" if alone and row["system"] == "jgraph" else ""

    def peak(row: Row) -> str:
        return COLUMNS["peak memory, GB"](row) + " (init)" * (row.get("init_peak_bytes", 0) == row.get("peak_bytes"))

    def loss(row: Row) -> str:
        text = number("loss", ".5g")(row)
        text += f", skipped steps: {row['skipped']}" if row.get("skipped") else ""
        return text + (f", aborted: needs an expert capacity of {row['halted']}" if row.get("halted") else "")

    return Section(
        f"{work}, {ranks} ranks, {share} x {config['seq_len']} tokens per rank",
        {
            "variant": row_name,
            "step, ms": number("ms"),
            "fastest, slowest, ms": spread,
            "tokens/s": lambda row: f"{share * row['ranks'] * config['seq_len'] / row['ms'] * 1e3:,.0f}",
            "torch / row": lambda row: ratio(peers[placement(row)], row) if row["ranks"] == ranks else "",
            **({"jax / row": lambda row: ratio(plain, row) if is_comparable(row, "kept") else ""} if plain else {}),
            f"throughput / {ranks} x one GPU": scaling,
            "MFU": mfu(flops),
            **COLUMNS,
            "peak memory, GB": peak,
            "first loss": loss,
        },
        facts=f", graph {config['graph']}, XLA options: {' '.join(config['xla_options']) or 'none'}",
        notes=NOTES + " jax / row compares with the fastest plain JAX variant, which keeps parameters." * bool(plain),
    )


BENCHMARK = Benchmark("Sharded training", __doc__, Options, works, section)
