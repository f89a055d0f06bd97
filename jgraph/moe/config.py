"""Settings of a mixture of experts. No jax here, so that a wrong flag is told in no time."""

import math
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

_PREFIX = "model.moe."


@dataclass(frozen=True)
class MoEConfig:
    """Settings of the layers that are mixtures of experts."""

    num_experts: int = 0
    """Experts of a layer, of which a token passes some; 0: the model is dense."""
    experts_per_token: int = 2
    """Experts that a token passes."""
    d_ff: int = 0
    """Hidden width of an expert; 0 takes the model's d_ff."""
    shared_experts: int = 0
    """Experts that every token passes besides, as one MLP of so many times the width."""
    router: Literal["softmax-topk", "topk-softmax", "sigmoid"] = "softmax-topk"
    """What a token's weights are: the largest of the softmax over all experts (Mixtral, Qwen3), the softmax over the chosen, or
    sigmoids, where a bias without gradient keeps the experts even (DeepSeek-V3)."""
    weights: Literal["normalized", "as-they-are"] = "normalized"
    """Whether a token's weights are divided by their sum."""
    weights_scale: float = 1.0
    """What a token's weights are multiplied by, after that."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss; 0 leaves it out."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss, the mean square of the log of the softmax's denominator."""
    bias_rate: float = 0.001
    """With sigmoid: what an expert's bias changes by in a step."""
    capacity: float = 1.5
    """Rows that a device may send another, over an even share; only where experts are spread over devices."""
    overflow: Literal["replay", "drop"] = "replay"
    """Whether to halt where there are more, so that the run goes on from there with a larger capacity, or to drop the rest."""

    def __post_init__(self):
        check_types(self, prefix=_PREFIX)
        for name in ("num_experts", "d_ff", "shared_experts", "balance_loss", "z_loss", "bias_rate"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), _PREFIX + name, value, "0 or positive")
        for name in ("weights_scale", "capacity"):
            value = getattr(self, name)
            require(0 < value < float("inf"), _PREFIX + name, value, "positive")
        chosen, among = self.experts_per_token, self.num_experts
        fits = chosen > 0 and (chosen <= among or not among)
        allowed = f"from 1 to `{_PREFIX}num_experts` {among}" if among else "positive"
        require(fits, f"{_PREFIX}experts_per_token", chosen, allowed)


def places(capacity: float, rows: int, devices: int) -> int:
    """Returns how many of its rows a device may send each of so many: `capacity` times an even share, rounded up to eights."""
    return min(rows, 8 * math.ceil(math.ceil(capacity * rows / devices) / 8))


def capacity_of(needed: int, rows: int, devices: int) -> float:
    """Returns a capacity with places for so many rows and a quarter more, in hundredths; that of all rows at most."""
    return min(float(devices), math.ceil(125 * needed * devices / rows) / 100)
