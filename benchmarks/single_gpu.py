"""One training step on one GPU: jgraph against PyTorch, the same model, dtype policy, optimizer and clipping.

python -m benchmarks run single_gpu --presets launch-bound gpt-124m --timeout 400
python -m benchmarks run single_gpu --presets gpt-1b3 --together 2     # no more of it fit in an H200 at a time
python -m benchmarks run single_gpu --presets launch-bound --variants jgraph "jgraph attention=fused norm=fused"
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.rows import Row, named, ratio, spread, step_flops
from benchmarks.runner import Benchmark, TraceOptions, Work
from benchmarks.tables import COLUMNS, Section, mfu, number
from benchmarks.turns import Candidate
from benchmarks.works import in_fp8, training, jgraph_step
from jgraph.train.config import TrainConfig

# The first is in every comparison. The last takes torch minutes to compile: what --timeout ends is a row that says so.
COMPILED = ("torch compile", "torch compile + CUDA graph", "torch compile max-autotune + CUDA graph")
PLAIN = ("jax same", "jax same flatten", "jax stock", "jax stock flatten")
VARIANTS = ("jgraph", "jgraph graph=off", *PLAIN, "torch eager", "torch CUDA graph", *COMPILED)


@dataclass(frozen=True, kw_only=True)
class Options(TraceOptions):
    """Chooses what is run."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m", "gpt-1b3")
    """Configurations to time."""
    variants: tuple[str, ...] = VARIANTS
    """Rows of each; all are compared with the first. `jgraph NAME=TEXT` sets what the model or XLA calls so, or the recipe:
    `fp8=delayed`, `fp8=current:e4m3`."""


def works(options: Options) -> Iterator[Work]:
    for name in options.presets:
        config = training(name, options)
        candidates = [candidate(variant, config, options) for variant in options.variants]
        yield Work(name, {"ranks": 1, "config": config.to_dict()}, [candidates])


def candidate(variant: str, config: TrainConfig, options: TraceOptions) -> Candidate:
    system, _, how = variant.partition(" ")
    row = {"system": system, "variant": how}
    if system == "torch":
        request = {"variant": variant, "config": config.to_dict()}
        return Candidate(row, "benchmarks.peers.single_gpu", request, gpus=1)
    if system == "jax":
        return Candidate(row, "benchmarks.peers.plain_jax", {"variant": how.split(), "config": config.to_dict()})
    config = config.changed(graph="auto")
    for text in how.split():
        setting, _, value = text.partition("=")
        if setting == "graph":
            config = config.changed(graph=value)
        elif setting == "fp8":
            config = in_fp8(config, value)
        elif setting.startswith("xla_"):
            config = config.changed(xla_options=(*config.compile.xla_options, text))
        else:
            config = config.changed(model=replace(config.model, **{setting: value}))
    return jgraph_step(row, config, options)


def section(name: str, result: Row) -> Section:
    config, rows = result["config"], result["rows"]
    ours, flops = rows[0] if rows else {}, step_flops(config)

    return Section(
        f"{name}, {config['batch_size']}x{config['seq_len']} tokens",
        {
            "variant": named,
            "ms, median": number("ms", ".3f"),
            "fastest, slowest": spread,
            "this / jgraph": lambda row: ratio(row, ours),
            "TFLOP/s": lambda row: f"{flops / row['ms'] / 1e9:.0f}",
            "MFU": mfu(flops),
            **{name: COLUMNS[name] for name in ("peak GB", "W", "MHz")},
        },
        notes=ours.get("capture") or "",
    )


BENCHMARK = Benchmark("One training step on one GPU", __doc__, Options, works, section)
