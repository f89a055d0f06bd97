"""Model sizes and candidates that several benchmarks share."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from benchmarks.rows import Row, gpt_config_from
from benchmarks.runner import Options, TraceOptions
from benchmarks.turns import Candidate
from jgraph.precision.config import FP8Config
from jgraph.schedule import Schedule, generate
from jgraph.train.config import TrainConfig
from jgraph.train.presets import preset
from jgraph_models.gpt import GPTConfig


@dataclass(frozen=True)
class MLPSize:
    """Size of a pipeline of MLP layers `x + gelu(x @ a) @ b`. `tokens` is per microbatch."""

    d_model: int
    d_ff: int
    tokens: int
    layers: int
    microbatches: int

    @property
    def flops(self) -> float:
        """FLOPs of a step: per layer two matmuls in the forward and four in the backward, with 2 FLOPs per multiply-add."""
        return 12.0 * self.tokens * self.d_model * self.d_ff * self.layers * self.microbatches


@dataclass(frozen=True)
class GPTSize:
    """Size of a GPT that is trained on `batch` sequences of `length` tokens per microbatch."""

    model: GPTConfig
    batch: int
    length: int
    microbatches: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.model.num_layers

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        sequences = self.batch * self.microbatches
        return self.model.flops(sequences, self.length)


Size: TypeAlias = MLPSize | GPTSize


def size_from_dict(fields: dict[str, Any]) -> Size:
    """Restores a size from the JSON of its `dataclasses.asdict`."""
    if "model" not in fields:
        return MLPSize(**fields)
    rest = {name: value for name, value in fields.items() if name != "model"}
    return GPTSize(gpt_config_from(fields["model"]), **rest)


TINY = GPTConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=96, compute_dtype="float32")


def pipeline_sizes(sizes: Literal["full", "tiny"], ranks: int) -> dict[str, Size]:
    """Returns the pipeline works by name.

    Args:
        sizes: `tiny` for a machine without a GPU.
        ranks: Number of pipeline ranks. An MLP has 4 layers per rank, or 2 if it is tiny.

    Returns:
        The size of each work.
    """
    if sizes == "tiny":
        gpt = GPTSize(replace(TINY, num_layers=2 * ranks), batch=1, length=16, microbatches=2 * ranks)
        return {
            "mlp-large": MLPSize(64, 128, 32, layers=2 * ranks, microbatches=2 * ranks),
            "mlp-launch-bound": MLPSize(32, 64, 16, layers=2 * ranks, microbatches=2 * ranks),
            "gpt-1b3": gpt,
            "gpt-7b": gpt,
        }
    return {
        "mlp-large": MLPSize(4096, 16384, 4096, layers=4 * ranks, microbatches=16),
        "mlp-launch-bound": MLPSize(1024, 4096, 512, layers=4 * ranks, microbatches=16),
        "gpt-1b3": GPTSize(preset("gpt-1b3").model, batch=4, length=2048, microbatches=16),
        "gpt-7b": GPTSize(preset("gpt-7b").model, batch=1, length=2048, microbatches=16),
    }


def preset_config(name: str, options: Options) -> TrainConfig:
    """Returns the config of a preset.

    Args:
        name: Name of the preset.
        options: Flags. With `sizes="tiny"`, the model shrinks to a size that a CPU can train and keeps its architecture.

    Returns:
        The config.
    """
    config = preset(name)
    if options.sizes == "full":
        return config
    sizes = ("num_layers", "d_model", "num_heads", "head_dim", "d_ff", "vocab_size", "compute_dtype")
    groups = max(1, TINY.num_heads * config.model.num_kv_heads // config.model.num_heads)
    moe = replace(config.model.moe, num_experts=min(config.model.moe.num_experts, 16), d_ff=0)
    model = replace(config.model, **{name: getattr(TINY, name) for name in sizes}, num_kv_heads=groups, moe=moe)
    return config.changed(model=model, seq_len=32, xla_options=())


def with_fp8(config: TrainConfig, choice: str) -> TrainConfig:
    """Switches a config to FP8.

    Args:
        config: The config.
        choice: Recipe, optionally with a format and an accumulation after colons: `delayed:e4m3`, `delayed:hybrid:fast`.

    Returns:
        The new config.
    """
    choices: dict[str, Any] = dict(zip(("recipe", "format", "accumulation"), choice.split(":"), strict=False))
    return config.changed(precision="fp8", fp8=FP8Config(**choices))


def jgraph_step(labels: Row, config: TrainConfig, options: TraceOptions) -> Candidate:
    """Returns the candidate that times the step of `python -m jgraph.train`.

    Args:
        labels: First keys of its row.
        config: Config of the run.
        options: Flags.

    Returns:
        The candidate.
    """
    return Candidate(labels, "benchmarks.programs.step", {"config": config.to_dict(), "categories": options.categories})


def parse_schedule(text: str, ranks: int, microbatches: int) -> Schedule:
    """Generates a pipeline schedule.

    Args:
        text: Name in `jgraph.schedule`, optionally with the number of chunks per rank after a colon: `aligned:2`.
        ranks: Number of pipeline ranks.
        microbatches: Number of microbatches.

    Returns:
        The schedule.
    """
    name, _, chunks = text.partition(":")
    return generate(name, pp=ranks, microbatches=microbatches, chunks=int(chunks or 1))


def torch_pipeline(peer: str, size: Size, ranks: int, options: Options) -> Candidate:
    """Returns the candidate that times a schedule of torch.distributed.pipelining.

    Args:
        peer: Class name of the schedule. The suffix `:compile` adds torch.compile.
        size: Size of the work.
        ranks: Number of pipeline ranks.
        options: Flags.

    Returns:
        The candidate.
    """
    schedule, _, variant = peer.partition(":")
    return Candidate(
        {"system": "torch", "schedule": schedule, "variant": variant},
        "benchmarks.peers.pipelining",
        {"schedule": schedule, "compile": variant == "compile", "size": asdict(size)},
        ranks=ranks,
        gpus=0 if options.sizes == "tiny" else ranks,
    )
