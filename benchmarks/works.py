"""Model sizes and candidates that several benchmarks share."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from benchmarks.rows import Row, gpt_config_from
from benchmarks.runner import MultiGPUOptions, Options, TraceOptions
from benchmarks.turns import Candidate
from jgraph.precision.config import FP8Config
from jgraph.schedule import Schedule, generate
from jgraph.train.config import FIELDS, TrainConfig
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
    """Returns the pipeline works by name. An MLP has 4 layers per rank, or 2 if it is tiny."""
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
    """Returns the config of a preset. With `sizes="tiny"`, the model has its architecture in a size that a CPU can train."""
    config = preset(name)
    if options.sizes == "full":
        return config
    sizes = ("num_layers", "d_model", "num_heads", "head_dim", "d_ff", "vocab_size", "compute_dtype")
    groups = max(1, TINY.num_heads * config.model.num_kv_heads // config.model.num_heads)
    moe = replace(config.model.moe, num_experts=min(config.model.moe.num_experts, 16), d_ff=0)
    model = replace(config.model, **{name: getattr(TINY, name) for name in sizes}, num_kv_heads=groups, moe=moe)
    return config.changed(model=model, seq_len=32, xla_options=())


def with_fp8(config: TrainConfig, choice: str) -> TrainConfig:
    """Switches a config to FP8: a recipe, optionally with format and accumulation, such as `delayed:hybrid:fast`."""
    choices: dict[str, Any] = dict(zip(("recipe", "format", "accumulation"), choice.split(":"), strict=False))
    return config.changed(precision="fp8", fp8=FP8Config(**choices))


def vary(config: TrainConfig, settings: str) -> TrainConfig:
    """Applies the settings of a jgraph variant to a config.

    Args:
        config: The config.
        settings: Words `NAME=VALUE`. A name is a field of the config, its model or its optimizer (`graph=full`, `remat=layer`,
            `head_precision=fp8`), an XLA option (`xla_...`), or one of these:

            - `fp8=RECIPE[:FORMAT[:ACCUMULATION]]`: FP8 matmuls, as in `with_fp8`.
            - `layout=dp|pp|ep|tp|cp`: data, pipeline, expert, tensor or context parallelism on the devices of `fsdp`.
            - `grads=DTYPE`: dtype of the accumulated gradients, which the optimizer reads.
            - `reshard=yes|no`: gather parameters again for the backward.
            - `capacity=NUMBER`: capacity of the experts.

    Returns:
        The new config.

    Raises:
        SystemExit: If a name or a value is unknown.
    """
    for setting in settings.split():
        name, _, value = setting.partition("=")
        try:
            config = _with_setting(config, name, value)
        except (KeyError, TypeError, ValueError) as error:
            raise SystemExit(f"the variant {settings!r} has the unknown setting {setting}: {error}") from None
    return config


def _with_setting(config: TrainConfig, name: str, value: str) -> TrainConfig:
    """Applies one setting of `vary`. Raises KeyError, TypeError or ValueError if it is unknown."""
    devices = config.parallel.fsdp
    match name, value:
        case "fp8", _:
            return with_fp8(config, value)
        case "grads", _:
            return config.changed(main_grads_dtype=value, decoupled_grad=True)
        case "reshard", _:
            return config.changed(gather_per="pass" if _parsed(value, False) else "step")
        case "capacity", _:
            return config.changed(model=replace(config.model, moe=replace(config.model.moe, capacity=float(value))))
        case "layout", "ep":
            return config.changed(ep=devices)
        case "layout", "pp":
            return config.changed(pp=devices, fsdp=1, num_microbatches=config.input.batch_size, schedule="aligned")
        case "layout", "dp" | "tp" | "cp":
            return config.changed(**{value: devices}, fsdp=1)
        case _ if name.startswith("xla_"):
            return config.changed(xla_options=(*config.compile.xla_options, f"{name}={value}"))
        case _ if name in FIELDS:
            return config.changed(**{name: _parsed(value, config.to_dict()[name])})
    part = "model" if hasattr(config.model, name) else "optimizer"
    settings: Any = getattr(config, part)
    return config.changed(**{part: replace(settings, **{name: _parsed(value, asdict(settings)[name])})})


def _parsed(value: str, old: Any) -> Any:
    """Converts the text of a value to the type of the old value. Raises KeyError, TypeError or ValueError."""
    return {"yes": True, "no": False}[value] if isinstance(old, bool) else type(old)(value)


def jgraph_step(labels: Row, config: TrainConfig, options: TraceOptions) -> Candidate:
    """Returns the candidate that times the step of `python -m jgraph.train`."""
    return Candidate(labels, "benchmarks.programs.step", {"config": config.to_dict(), "categories": options.categories})


def parse_schedule(text: str, ranks: int, microbatches: int) -> Schedule:
    """Generates a schedule by name, optionally with the number of chunks per rank after a colon: `aligned:2`."""
    name, _, chunks = text.partition(":")
    return generate(name, pp=ranks, microbatches=microbatches, chunks=int(chunks or 1))


def torch_ranks(labels: Row, module: str, request: Row, ranks: int, options: Options) -> Candidate:
    """Returns the candidate of a PyTorch peer with one process per GPU. Tiny sizes run on the CPU."""
    return Candidate(labels, module, request, ranks=ranks, gpus=0 if options.sizes == "tiny" else ranks)


def with_options(config: TrainConfig, options: MultiGPUOptions) -> TrainConfig:
    """Applies the flags for all jgraph programs to a config."""
    return config.changed(graph=options.graph, xla_options=(*config.compile.xla_options, *options.xla_option))


def torch_pipeline(peer: str, size: Size, ranks: int, options: Options) -> Candidate:
    """Returns the candidate of a schedule class of torch.distributed.pipelining. The suffix `:compile` adds torch.compile."""
    schedule, _, variant = peer.partition(":")
    labels = {"system": "torch", "schedule": schedule, "variant": variant}
    request = {"schedule": schedule, "compile": variant == "compile", "size": asdict(size)}
    return torch_ranks(labels, "benchmarks.peers.pipelining", request, ranks, options)
