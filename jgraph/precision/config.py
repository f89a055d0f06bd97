"""Which products are computed in FP8, and with which scales. No jax: the command line reads it."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

KEPT = ("*embed*", "*head*")


@dataclass(frozen=True)
class FP8Config:
    """A recipe for matrix products in FP8, as Transformer Engine has them, with scales that are powers of two.

    Attributes:
        recipe: `current` takes the scale of an array from the array itself, `delayed` from those of the steps before,
            which saves a pass over memory and needs state.
        format: `hybrid` has E4M3 for activations and weights and E5M2 for gradients; `e4m3` has it for all.
        wgrad: whether the products that give a weight's gradient are in `fp8` too, or in `bf16`.
        keep: names of parameters whose products stay as they are, patterns as in a shell.
        blocks: whether products are in FP8 in `all` numbered blocks, or in the `inner` ones, without the first and the last.
        history: steps whose amax delayed scaling remembers.
        amax: whether delayed scaling takes the `max` of these, or the `most_recent`.
        margin: powers of two that delayed scaling leaves free above the amax.
        emulate: computes the same numbers in bfloat16 products on a GPU without FP8. CPUs always do.
    """

    recipe: Literal["current", "delayed"] = "current"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    wgrad: Literal["fp8", "bf16"] = "fp8"
    keep: tuple[str, ...] = KEPT
    blocks: Literal["all", "inner"] = "all"
    history: int = 1024
    amax: Literal["max", "most_recent"] = "max"
    margin: int = 0
    emulate: bool = False

    def __post_init__(self):
        check_types(self, prefix="fp8.")
        require(self.history >= 1, "fp8.history", self.history, "at least 1")
        require(0 <= self.margin <= 16, "fp8.margin", self.margin, "in [0, 16]")
