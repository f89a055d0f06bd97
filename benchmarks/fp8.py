"""A training step with its products in FP8, on one GPU: jgraph and PyTorch with torchao's float8, each beside its own bf16.

python -m benchmarks run fp8 --presets gpt-124m
python -m benchmarks run fp8 --presets gpt-1b3 --together 2     # no more of it fit in an H200 at a time
"""

from dataclasses import dataclass

from benchmarks import single_gpu
from benchmarks.runner import Benchmark

TORCH = ("torch compile", "torch float8 tensorwise compile", "torch float8 rowwise compile")
# The first is in every comparison.
VARIANTS = ("jgraph fp8=delayed", "jgraph fp8=current", "jgraph", *TORCH, *(f"{variant} + CUDA graph" for variant in TORCH[:2]))


@dataclass(frozen=True, kw_only=True)
class Options(single_gpu.Options):
    """Chooses what is run."""

    presets: tuple[str, ...] = ("gpt-124m", "gpt-1b3")
    """Configurations to time."""
    variants: tuple[str, ...] = VARIANTS
    """Rows of each; all are compared with the first."""


BENCHMARK = Benchmark("A training step in FP8", __doc__, Options, single_gpu.works, single_gpu.section)
