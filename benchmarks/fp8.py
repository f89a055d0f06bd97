"""A training step with its matmuls in FP8 on one GPU: jgraph, PyTorch with torchao's float8, and Transformer Engine.

python -m benchmarks run fp8 --presets gpt-124m
python -m benchmarks run fp8 --presets gpt-1b3 --together 2     # no more of it fit in an H200 at a time

`te RECIPE` is Transformer Engine with float32 parameters and PyTorch's fused AdamW; `bf16-params` has bfloat16 parameters and
Transformer Engine's FusedAdam with float32 master weights. A peer that is not installed leaves a row with its error.
"""

from dataclasses import dataclass

from benchmarks import single_gpu
from benchmarks.runner import Benchmark

TORCH = ("torch compile", "torch float8 tensorwise compile", "torch float8 rowwise compile")
ENGINE = ("torch te delayed", "torch te delayed bf16-params", "torch te current")
GRAPHED = tuple(f"{variant} + CUDA graph" for variant in (*TORCH[:2], *ENGINE))
# Every other variant is compared with the first.
VARIANTS = ("jgraph fp8=delayed", "jgraph fp8=current", "jgraph", *TORCH, "torch te delayed", *GRAPHED)


@dataclass(frozen=True, kw_only=True)
class Options(single_gpu.Options):
    """Chooses what is run."""

    presets: tuple[str, ...] = ("gpt-124m", "gpt-1b3")
    """Configurations to time."""
    variants: tuple[str, ...] = VARIANTS
    """Rows of each; all are compared with the first."""


BENCHMARK = Benchmark("A training step in FP8", __doc__, Options, single_gpu.works, single_gpu.section)
