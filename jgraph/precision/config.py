"""Says which products are computed in FP8, and with which scales. No jax: the command line reads it."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

KEPT = ("*embed*", "*head*")


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """Matrix products in FP8, by recipes of Transformer Engine's, with scales that are powers of two."""

    recipe: Literal["current", "delayed"] = "current"
    """Scales come from an array itself (current), or from those of the steps before: a pass over memory less, and state."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """E4M3 for activations and weights with E5M2 for gradients, or E4M3 for all."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Dtype of the products that give the gradients of weights."""
    keep: tuple[str, ...] = KEPT
    """Names of parameters whose products stay as they are; patterns as in a shell."""
    blocks: Literal["all", "inner"] = "all"
    """Which numbered blocks have products in FP8: all, or all but the first and the last."""
    history: int = 1024
    """Steps whose amax delayed scaling remembers."""
    amax: Literal["max", "most_recent"] = "max"
    """What delayed scaling takes of these."""
    margin: int = 0
    """Powers of two that delayed scaling leaves free above the amax."""
    emulate: bool = False
    """Multiply the same numbers in bfloat16 on a GPU that has no FP8; CPUs always do."""

    def __post_init__(self):
        check_types(self, prefix="fp8.")
        require(self.history >= 1, "fp8.history", self.history, "at least 1")
        require(0 <= self.margin <= 16, "fp8.margin", self.margin, "in [0, 16]")
