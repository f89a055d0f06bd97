"""The recipe for FP8 matmuls. Does not import JAX, because the command line needs it for `--help` and wrong flags."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require
from jgraph.settings import may_change

DEFAULT_KEEP = ("*embed*", "*head*")

# Without these options, XLA may compile an FP8 matmul with Triton, or merge two matmuls that share an operand. Both then run
# in bfloat16.
XLA_OPTIONS = ("xla_gpu_enable_triton_gemm=false", "xla_gpu_dot_merger_threshold_mb=0")


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """A recipe for FP8 matmuls with power-of-two scales, after the recipes of Transformer Engine.

    The amax of an array is its largest magnitude. wgrad is the matmul that computes the gradient of a weight. A grouped matmul
    is a matmul of a mixture of experts, `jgraph.kernels.grouped.grouped_dot`.

    Raises:
        ConfigError: If a field has the wrong type or a value that is not allowed.
    """

    recipe: Literal["current", "delayed", "mxfp8"] = "current"
    """Source of the scales: the amax of the array itself (current), the amax of the array in previous steps (delayed), which
    saves one read of the array and adds state, or the amax of each block of 32 elements (mxfp8), which needs a Blackwell
    GPU."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """FP8 formats: E4M3 for activations and weights and E5M2 for gradients (hybrid), or E4M3 for all arrays (e4m3).
    The recipe mxfp8 uses E4M3 for all arrays."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Precision of the operands of the wgrad matmuls: fp8 or bf16. For bf16, they are not quantized. The wgrad of a grouped
    matmul is always bf16."""
    accumulation: Literal["full", "fast"] = "full"
    """Accumulation of dgrad and wgrad in the tensor cores: full adds partial sums in float32, fast keeps about 14 bits and is
    faster. The forward pass is always fast. No effect on grouped matmuls."""
    keep: tuple[str, ...] = DEFAULT_KEEP
    """Shell patterns of parameter names such as `blocks/0/mlp/up/kernel`; `*` also matches `/`. Matmuls with a matching
    parameter are not quantized. A pattern that is not a default must match a parameter."""
    blocks: Literal["all", "inner"] = "all"
    """Numbered blocks with FP8 matmuls: all of them, or all except the first `first` and the last `last` blocks (inner). The
    number of a block is the first number in the names of its parameters. Matmuls outside numbered blocks are quantized in both
    cases."""
    first: int = 1
    """Number of first blocks that `blocks` inner does not quantize; at least 0. Must be 1 if `blocks` is all."""
    last: int = 1
    """Number of last blocks that `blocks` inner does not quantize; at least 0. Must be 1 if `blocks` is all."""
    compute: Literal["fp8", "calibrate"] = may_change("fp8", "calibration and FP8 update the same amax histories")
    """Precision of the matmuls: FP8, or their own dtype while the amax histories of delayed scaling are updated (calibrate). A
    run that was calibrated resumes in FP8 with these histories."""
    history: int = 1024
    """Length of the amax history of delayed scaling, in steps; at least 1."""
    amax: Literal["max", "most_recent"] = "max"
    """Reduction of the amax history in delayed scaling: its maximum (max), or its latest entry (most_recent)."""
    margin: int = 0
    """Delayed scaling divides its scales by 2**margin; an integer from 0 to 16."""
    emulate: bool = False
    """Emulates FP8 in bfloat16 on a GPU without FP8. CPUs always emulate it."""

    def __post_init__(self):
        check_types(self, prefix="fp8.")
        require(self.history >= 1, "fp8.history", self.history, "at least 1")
        require(0 <= self.margin <= 16, "fp8.margin", self.margin, "in [0, 16]")
        for name, count in (("fp8.first", self.first), ("fp8.last", self.last)):
            require(count >= 0, name, count, "at least 0")
            require(count == 1 or self.blocks == "inner", name, count, "1 if `fp8.blocks` is all")
        allowed = f"fp8 if `fp8.recipe` is {self.recipe}"
        require(self.compute == "fp8" or self.recipe == "delayed", "fp8.compute", self.compute, allowed)

    @property
    def calibrates(self) -> bool:
        """True if the matmuls are not quantized, and only their amax histories are updated."""
        return self.compute == "calibrate"
