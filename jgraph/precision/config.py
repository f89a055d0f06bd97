"""The recipe for FP8 matmuls. Imports no jax, because the command line reads it."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

DEFAULT_KEEP = ("*embed*", "*head*")

# Without these options XLA may give an FP8 matmul to Triton, or merge the matmuls of two microbatches. Both run in bfloat16.
XLA_OPTIONS = ("xla_gpu_enable_triton_gemm=false", "xla_gpu_dot_merger_threshold_mb=0")


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """A recipe for FP8 matmuls with power-of-two scales, after the recipes of Transformer Engine."""

    recipe: Literal["current", "delayed"] = "current"
    """Source of scales: the array itself (current), or its amax history (delayed). The latter saves a pass over memory."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """E4M3 for activations and weights with E5M2 for gradients (hybrid), or E4M3 for all arrays (e4m3)."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Dtype of the wgrad matmuls."""
    keep: tuple[str, ...] = DEFAULT_KEEP
    """Shell patterns of parameter names. Matmuls with these parameters are not quantized."""
    blocks: Literal["all", "inner"] = "all"
    """Numbered blocks with FP8 matmuls: all, or all except the first and the last."""
    history: int = 1024
    """Length of the amax history of delayed scaling, in steps."""
    amax: Literal["max", "most_recent"] = "max"
    """How delayed scaling reduces an amax history."""
    margin: int = 0
    """Binary orders of magnitude that delayed scaling leaves free above the amax."""
    emulate: bool = False
    """Emulates FP8 in bfloat16 on a GPU without FP8. CPUs always emulate it."""

    def __post_init__(self):
        check_types(self, prefix="fp8.")
        require(self.history >= 1, "fp8.history", self.history, "at least 1")
        require(0 <= self.margin <= 16, "fp8.margin", self.margin, "in [0, 16]")
