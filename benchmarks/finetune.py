"""Fine-tuning with LoRA: jgraph beside PEFT with transformers, on a model with the sizes of a Hugging Face folder.

    python -m benchmarks run finetune
    python -m benchmarks run finetune --preset qwen3-0.6b --batch-size 8 --seq-len 2048 --rank 16
    python -m benchmarks run finetune --ranks 2 --preset llama3-8b --batch-size 2 --seq-len 8192 --name finetune2 --together 1

Both sides train the same adapters on all linear layers, with frozen weights in bfloat16, adapters in float32 and AdamW for the
adapters. A step computes the loss of all tokens of random sequences. On several GPUs, jgraph trains with `--fsdp` and PEFT with
`fully_shard`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import single_gpu
from benchmarks.rows import Row, ratio, row_name, spread
from benchmarks.runner import Benchmark, TraceOptions, Work
from benchmarks.tables import COLUMNS, Section, number
from benchmarks.turns import Candidate
from benchmarks.works import preset_config
from jgraph.train.config import LoRAConfig, TrainConfig

VARIANTS = ("jgraph", "jgraph fp8=delayed:e4m3", "jgraph remat=layer", "peft eager", "peft compile", "peft checkpointing")


@dataclass(frozen=True, kw_only=True)
class Options(TraceOptions):
    """Flags of the benchmark."""

    preset: str = "qwen3-0.6b"
    """Preset with the sizes of the model."""
    ranks: int = 1
    """Number of GPUs. Weights and adapters are sharded over several GPUs."""
    batch_size: int = 8
    """Sequences per step, on all GPUs."""
    seq_len: int = 2048
    """Predicted tokens per sequence."""
    rank: int = 16
    """Rank of the adapters."""
    variants: tuple[str, ...] = VARIANTS
    """Variants. All are compared with the first. `jgraph` has the settings of `benchmarks.works.vary`.
    `peft` is `eager`, `compile` (torch.compile) or `checkpointing` (gradient checkpointing, as TRL's default). On several
    GPUs, `peft` takes one or more of the words that `benchmarks/peers/peft_fsdp.py` describes."""


def works(options: Options) -> Iterator[Work]:
    """Yields the only work."""
    config = preset_config(options.preset, options)
    tiny = {"batch_size": 2, "seq_len": 32} if options.sizes == "tiny" else {}
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len} | tiny
    lora = LoRAConfig(rank=options.rank, alpha=2.0 * options.rank, base_dtype="bfloat16")
    config = config.changed(**sizes, fsdp=options.ranks, lora=lora)
    candidates = [candidate(variant, config, options) for variant in options.variants]
    name = f"{options.preset}, {sizes['batch_size']}x{sizes['seq_len']} tokens"
    yield Work(name, {"ranks": options.ranks, "config": config.to_dict()}, [candidates])


def candidate(variant: str, config: TrainConfig, options: TraceOptions) -> Candidate:
    """Returns the candidate of a variant: "jgraph fp8=delayed:e4m3", "peft compile"."""
    system, _, settings = variant.partition(" ")
    if system != "peft":
        return single_gpu.candidate(variant, config, options)
    row, ranks = {"system": "torch", "variant": variant}, config.parallel.shards
    request = {"variant": settings, "config": config.to_dict()}
    gpus = ranks if options.sizes == "full" else 0
    if ranks > 1:
        return Candidate(row, "benchmarks.peers.peft_fsdp", request, ranks=ranks, gpus=gpus)
    return Candidate(row, "benchmarks.peers.peft_lora", request, gpus=gpus)


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config, rows = result["config"], result["rows"]
    tokens, ours = config["batch_size"] * config["seq_len"], rows[0] if rows else {}
    return Section(
        f"{name}, LoRA of rank {config['lora']['rank']}" + f", {result['ranks']} ranks" * (result["ranks"] > 1),
        {
            "variant": row_name,
            "median step, ms": number("ms", ".3f"),
            "fastest, slowest, ms": spread,
            "tokens/s": lambda row: f"{tokens / row['ms'] * 1e3:,.0f}",
            "time / jgraph": lambda row: ratio(row, ours),
            **{name: COLUMNS[name] for name in ("peak memory, GB", "power, W", "clock, MHz")},
        },
        notes=ours.get("capture") or "",
    )


BENCHMARK = Benchmark("Fine-tuning with LoRA", __doc__, Options, works, section)
