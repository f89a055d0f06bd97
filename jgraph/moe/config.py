"""Settings of a mixture of experts. No jax here, so that a wrong flag is reported at once."""

import math
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

_PREFIX = "model.moe."


@dataclass(frozen=True)
class MoEConfig:
    """Settings of the layers that are mixtures of experts."""

    num_experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 2
    """Experts that process each token."""
    d_ff: int = 0
    """Hidden width of an expert; 0 for the model's d_ff."""
    shared_experts: int = 0
    """Experts that process every token in addition, as one MLP of this many times the width."""
    router: Literal["softmax-topk", "topk-softmax", "sigmoid"] = "softmax-topk"
    """How the weights of a token are computed. softmax-topk takes the largest of the softmax over all experts (Mixtral, Qwen3),
    topk-softmax the softmax over the chosen experts, and sigmoid takes sigmoids, with a bias that balances the experts
    (DeepSeek-V3)."""
    weights: Literal["normalized", "as-they-are"] = "normalized"
    """Whether the weights of a token are divided by their sum."""
    weights_scale: float = 1.0
    """Factor of the weights, applied last."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss; 0 for none."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss, the mean square of the logits' log-sum-exp."""
    bias_rate: float = 0.001
    """Change of an expert's bias per step, with the router sigmoid."""
    capacity: float = 1.5
    """Rows that a device may send to another, as a multiple of an even share. Used if experts are spread over devices."""
    overflow: Literal["replay", "drop"] = "replay"
    """How rows beyond the capacity are handled: replay repeats the step with a larger capacity, drop drops them."""

    def __post_init__(self):
        check_types(self, prefix=_PREFIX)
        for name in ("num_experts", "d_ff", "shared_experts", "balance_loss", "z_loss", "bias_rate"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), _PREFIX + name, value, "0 or positive")
        for name in ("weights_scale", "capacity"):
            value = getattr(self, name)
            require(0 < value < float("inf"), _PREFIX + name, value, "positive")
        chosen, experts = self.experts_per_token, self.num_experts
        allowed = f"from 1 to `{_PREFIX}num_experts` {experts}" if experts else "positive"
        require(chosen > 0 and (chosen <= experts or not experts), f"{_PREFIX}experts_per_token", chosen, allowed)


def rows_per_pair(capacity: float, rows: int, devices: int) -> int:
    """Returns the number of rows that a device can send to each device of its group.

    Args:
        capacity: Multiple of an even share. The product is rounded up to a multiple of 8.
        rows: Rows of a device.
        devices: Devices of the group.
    """
    return min(rows, 8 * math.ceil(math.ceil(capacity * rows / devices) / 8))


def capacity_of(needed: int, rows: int, devices: int) -> float:
    """Returns the capacity for `needed` rows per pair and a quarter more, in hundredths; at most the capacity for all rows."""
    return min(float(devices), math.ceil(125 * needed * devices / rows) / 100)
