"""One training step on one GPU: jgraph, plain JAX, PyTorch and Transformer Engine with the same model, dtypes and optimizer.

python -m benchmarks run single_gpu --presets launch-bound gpt-124m --timeout 400
python -m benchmarks run single_gpu --presets gpt-1b3 --together 2     # the memory of an H200 is enough for two processes
python -m benchmarks run single_gpu --presets launch-bound --variants jgraph "jgraph attention=fused norm=fused"
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers import plain_jax
from benchmarks.rows import Row, step_flops
from benchmarks.runner import Benchmark, TraceOptions, Work
from benchmarks.tables import Section, against_first, mfu, number, step_section, teraflops
from benchmarks.turns import Candidate
from benchmarks.works import jgraph_step, preset_config, vary
from jgraph.train.config import TrainConfig

# The first variant runs in every round. max-autotune compiles for minutes and may reach --timeout: its row then has an error.
COMPILED = ("torch compile", "torch compile + CUDA graph", "torch compile max-autotune + CUDA graph")
PLAIN = ("jax same", "jax same nnx", "jax same flatten", "jax stock", "jax stock flatten")
ENGINE = ("torch te bf16", "torch te bf16 + CUDA graph", "torch te bf16 bf16-params + CUDA graph")
VARIANTS = ("jgraph", "jgraph graph=off", *PLAIN, "torch eager", "torch CUDA graph", *COMPILED, *ENGINE)
SIZE = {"arrays": number("arrays", ".0f"), "kernels": number("kernels", ".0f"), "host, ms": number("host_ms", ".2f")}


@dataclass(frozen=True, kw_only=True)
class Options(TraceOptions):
    """Flags of the benchmark."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m", "gpt-1b3")
    """Presets to time."""
    variants: tuple[str, ...] = VARIANTS
    """Variants of each preset. All are compared with the first. `jgraph NAME=VALUE` has the settings of
    `benchmarks.works.vary`. `benchmarks/peers/plain_jax.py` describes `jax` variants, and `benchmarks/peers/te_variant.py`
    those of Transformer Engine, `torch te ...`."""


def works(options: Options) -> Iterator[Work]:
    """Yields one work per preset."""
    for name in options.presets:
        config = preset_config(name, options)
        candidates = [candidate(variant, config, options) for variant in options.variants]
        yield Work(name, {"ranks": 1, "config": config.to_dict()}, [candidates])


def candidate(variant: str, config: TrainConfig, options: TraceOptions) -> Candidate:
    """Returns the candidate of a variant: system and settings, such as "jgraph graph=off", "jax stock", "torch compile"."""
    system, _, settings = variant.partition(" ")
    row = {"system": system, "variant": settings}
    if system == "torch":
        request = {"variant": variant, "config": config.to_dict()}
        return Candidate(row, "benchmarks.peers.single_gpu", request, gpus=1)
    if system == "jax":
        if any(word in plain_jax.OWN for word in settings.split()):
            row["system"] = "jax + jgraph"
        return Candidate(row, "benchmarks.peers.plain_jax", {"variant": settings.split(), "config": config.to_dict()})
    return jgraph_step(row, vary(config.changed(graph="auto"), settings), options)


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    config = result["config"]
    flops = step_flops(config)
    cells = {"time / jgraph": against_first(result), "TFLOP/s": teraflops(flops), "MFU": mfu(flops)}
    if any("kernels" in row for row in result["rows"]):  # results before 2026-11-24 do not have it
        cells |= SIZE
    return step_section(f"{name}, {config['batch_size']}x{config['seq_len']} tokens", result, cells)


BENCHMARK = Benchmark("One training step on one GPU", __doc__, Options, works, section)
