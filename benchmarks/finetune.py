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
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, TraceOptions, Work
from benchmarks.tables import Section, against_first, step_section, tokens_per_second
from benchmarks.turns import Candidate
from benchmarks.works import preset_config, torch_ranks
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
    if ranks > 1:
        return torch_ranks(row, "benchmarks.peers.peft_fsdp", request, ranks, options)
    return Candidate(row, "benchmarks.peers.peft_lora", request, gpus=int(options.sizes == "full"))


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config = result["config"]
    cells = {"tokens/s": tokens_per_second(config["batch_size"] * config["seq_len"]), "time / jgraph": against_first(result)}
    ranks = f", {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return step_section(f"{name}, LoRA of rank {config['lora']['rank']}{ranks}", result, cells)


BENCHMARK = Benchmark("Fine-tuning with LoRA", __doc__, Options, works, section)
