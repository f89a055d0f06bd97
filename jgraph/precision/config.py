"""The recipe for FP8 matmuls. Does not import JAX, because the command line needs it for `--help` and wrong flags."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

DEFAULT_KEEP = ("*embed*", "*head*")

# Without these options, XLA may compile an FP8 matmul with Triton or merge the matmuls of two microbatches. Both then run in
# bfloat16.
XLA_OPTIONS = ("xla_gpu_enable_triton_gemm=false", "xla_gpu_dot_merger_threshold_mb=0")


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """A recipe for FP8 matmuls with power-of-two scales, after the recipes of Transformer Engine."""

    recipe: Literal["current", "delayed"] = "current"
    """Source of the scales: the array itself (current), or its amax history (delayed), which saves one read of the array."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 formats: E4M3 for activations and weights and E5M2 for gradients (hybrid), or E4M3 for all arrays (e4m3)."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Precision of the wgrad matmuls. Grouped matmuls always use bf16."""
    keep: tuple[str, ...] = DEFAULT_KEEP
    """Shell patterns of parameter names. Matmuls with matching parameters are not quantized."""
    blocks: Literal["all", "inner"] = "all"
    """Numbered blocks with FP8 matmuls: all of them, or all except the first and the last (inner)."""
    history: int = 1024
    """Length of the amax history of delayed scaling, in steps; at least 1."""
    amax: Literal["max", "most_recent"] = "max"
    """Reduction of the amax history in delayed scaling: its maximum, or its most recent entry."""
    margin: int = 0
    """Delayed scaling divides its scales by 2**margin; from 0 to 16."""
    emulate: bool = False
    """Emulates FP8 in bfloat16 on a GPU without FP8. CPUs always emulate it."""

    def __post_init__(self):
        check_types(self, prefix="fp8.")
        require(self.history >= 1, "fp8.history", self.history, "at least 1")
        require(0 <= self.margin <= 16, "fp8.margin", self.margin, "in [0, 16]")
