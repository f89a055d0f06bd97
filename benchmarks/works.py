"""Works that several benchmarks share: sizes of what is trained, and the processes that train it."""

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
    d_model: int
    d_ff: int
    tokens: int
    layers: int
    microbatches: int

    @property
    def flops(self) -> float:
        """Returns the FLOPs of a step: two products a layer, each with two more in the backward; 2 FLOPs a multiplication."""
        return 12.0 * self.tokens * self.d_model * self.d_ff * self.layers * self.microbatches


@dataclass(frozen=True)
class GPTSize:
    """Sizes a GPT, trained on `batch` sequences of `length` a microbatch."""

    model: GPTConfig
    batch: int
    length: int
    microbatches: int

    @property
    def layers(self) -> int:
        return self.model.num_layers

    @property
    def flops(self) -> float:
        """Returns the FLOPs of a step."""
        sequences = self.batch * self.microbatches
        return self.model.flops(sequences, self.length)


Size: TypeAlias = MLPSize | GPTSize


def size_from_dict(fields: dict[str, Any]) -> Size:
    """Inverts `dataclasses.asdict`, through JSON."""
    if "model" not in fields:
        return MLPSize(**fields)
    rest = {name: value for name, value in fields.items() if name != "model"}
    return GPTSize(gpt_config_from(fields["model"]), **rest)


TINY = GPTConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=96, compute_dtype="float32")


def pipeline_sizes(sizes: Literal["full", "tiny"], ranks: int) -> dict[str, Size]:
    """Returns works of pipelines by name; an MLP has 4 layers a rank, 2 if it is tiny."""
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


def training(name: str, options: Options) -> TrainConfig:
    """Returns a preset; of tiny sizes, one of its family that a CPU trains."""
    config = preset(name)
    if options.sizes == "full":
        return config
    sizes = ("num_layers", "d_model", "num_heads", "head_dim", "d_ff", "vocab_size", "compute_dtype")
    groups = max(1, TINY.num_heads * config.model.num_kv_heads // config.model.num_heads)
    moe = replace(config.model.moe, num_experts=min(config.model.moe.num_experts, 16), d_ff=0)
    model = replace(config.model, **{name: getattr(TINY, name) for name in sizes}, num_kv_heads=groups, moe=moe)
    return config.changed(model=model, seq_len=32, xla_options=())


def in_fp8(config: TrainConfig, choice: str) -> TrainConfig:
    """Returns a run in FP8 by its recipe, with a format after a colon: `delayed:e4m3`."""
    recipe, _, format = choice.partition(":")
    choices: dict[str, Any] = {"recipe": recipe} | ({"format": format} if format else {})
    return config.changed(precision="fp8", fp8=FP8Config(**choices))


def jgraph_step(labels: Row, config: TrainConfig, options: TraceOptions) -> Candidate:
    """Returns ours: the step of `python -m jgraph.train`."""
    return Candidate(labels, "benchmarks.programs.step", {"config": config.to_dict(), "categories": options.categories})


def parse_schedule(text: str, ranks: int, microbatches: int) -> Schedule:
    """Generates a schedule by its name in `jgraph.schedule`, with chunks a rank after a colon: `aligned:2`."""
    name, _, chunks = text.partition(":")
    return generate(name, pp=ranks, microbatches=microbatches, chunks=int(chunks or 1))


def torch_pipeline(peer: str, size: Size, ranks: int, options: Options) -> Candidate:
    """Asks for a schedule of torch.distributed.pipelining, `:compile` for torch.compile."""
    schedule, _, variant = peer.partition(":")
    return Candidate(
        {"system": "torch", "schedule": schedule, "variant": variant},
        "benchmarks.peers.pipelining",
        {"schedule": schedule, "compile": variant == "compile", "size": asdict(size)},
        ranks=ranks,
        gpus=0 if options.sizes == "tiny" else ranks,
    )
