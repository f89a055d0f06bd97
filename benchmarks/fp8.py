"""A training step with FP8 matmuls on one GPU: jgraph, PyTorch with torchao float8, Transformer Engine, and plain JAX in bf16.

python -m benchmarks run fp8 --presets gpt-124m
python -m benchmarks run fp8 --presets gpt-1b3 --together 2     # the memory of an H200 is enough for two processes

`te RECIPE` is Transformer Engine. `benchmarks/peers/te_variant.py` describes its words. A package that is not installed results
in a row with an error.
"""

from dataclasses import dataclass

from benchmarks import single_gpu
from benchmarks.runner import Benchmark

TORCH = ("torch compile", "torch float8 tensorwise compile", "torch float8 rowwise compile")
ENGINE = (
    "torch te delayed",
    "torch te delayed bf16-params",
    "torch te delayed fp8-params",
    "torch te delayed bf16-params fp8-attention",
    "torch te current",
    "torch te current bf16-params",
    "torch te blockwise bf16-params",
)
GRAPHED = tuple(f"{variant} + CUDA graph" for variant in (*TORCH[:2], *ENGINE))
# All variants are compared with the first.
VARIANTS = ("jgraph fp8=delayed", "jgraph fp8=current", "jgraph", "jax same", *TORCH, "torch te delayed", *GRAPHED)


@dataclass(frozen=True, kw_only=True)
class Options(single_gpu.Options):
    """Flags of the benchmark."""

    presets: tuple[str, ...] = ("gpt-124m", "gpt-1b3")
    """Presets to time."""
    variants: tuple[str, ...] = VARIANTS
    """Variants of each preset. All are compared with the first."""


BENCHMARK = Benchmark("A training step in FP8", __doc__, Options, single_gpu.works, single_gpu.section)
