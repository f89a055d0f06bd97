"""A training step with its products in FP8, on one GPU: jgraph and PyTorch with torchao's float8, each beside its own bf16.

python -m benchmarks run fp8 --presets gpt-124m
python -m benchmarks run fp8 --presets gpt-1b3 --together 2     # no more of it fit in an H200 at a time
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from benchmarks import single_gpu
from benchmarks.runner import Benchmark, Work
from benchmarks.works import training
from jgraph import FP8Config

RECIPES = {"jgraph fp8 delayed": FP8Config(recipe="delayed"), "jgraph fp8 current": FP8Config()}
# The first is in every comparison.
TORCH = ("torch compile", "torch float8 tensorwise compile", "torch float8 rowwise compile")
VARIANTS = (*RECIPES, "jgraph bf16", *TORCH, *(f"{variant} + CUDA graph" for variant in TORCH[:2]))


@dataclass(frozen=True, kw_only=True)
class Options(single_gpu.Options):
    """Chooses what is run."""

    presets: tuple[str, ...] = ("gpt-124m", "gpt-1b3")
    """Configurations to time."""
    variants: tuple[str, ...] = VARIANTS
    """Of each; the first one is what all others are compared with."""


def works(options: Options) -> Iterator[Work]:
    for name in options.presets:
        config, entrants = training(name, options), []
        for variant in options.variants:
            recipe = RECIPES.get(variant)
            chosen = replace(config, precision="fp8", fp8=recipe) if recipe else config
            entrants.append(single_gpu.entrant(variant, chosen, options))
        yield Work(name, {"ranks": 1, "config": asdict(config)}, [entrants])


BENCHMARK = Benchmark("A training step in FP8", __doc__, Options, works, single_gpu.section)
