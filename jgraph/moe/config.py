"""Settings of a mixture of experts. Does not import JAX, so that `--help` and wrong flags need no JAX."""

import math
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require

_PREFIX = "model.moe."


@dataclass(frozen=True)
class MoEConfig:
    """Settings of mixtures of experts. An expert is a SwiGLU MLP, and a router selects the experts of each token.

    Raises:
        ConfigError: If a field has the wrong type or a value that is not allowed, such as more experts per token than experts.
    """

    num_experts: int = 0
    """Number of experts per layer; 0 for a dense model."""
    experts_per_token: int = 2
    """Number of experts per token, from 1 to `num_experts`."""
    d_ff: int = 0
    """Hidden width of an expert; 0 for the hidden width of the model's MLP, `d_ff`."""
    shared_experts: int = 0
    """Number of additional experts that process every token. They are one MLP of this many times the width."""
    router: Literal["softmax-topk", "topk-softmax", "sigmoid"] = "softmax-topk"
    """Computation of the weights of a token: softmax-topk selects the largest values of the softmax over all experts (Mixtral,
    Qwen3), topk-softmax is the softmax over the selected experts, and sigmoid selects sigmoids with a bias that balances the
    experts (DeepSeek-V3)."""
    weights: Literal["normalized", "as-they-are"] = "normalized"
    """normalized divides the weights of a token by their sum; as-they-are does not."""
    weights_scale: float = 1.0
    """Factor of the weights, applied last."""
    balance_loss: float = 0.01
    """Coefficient of the load-balancing loss; 0 for none."""
    z_loss: float = 0.0
    """Coefficient of the router's z-loss, the mean square of the log-sum-exp of the logits."""
    bias_rate: float = 0.001
    """Change of an expert's bias per step, with the router sigmoid."""
    capacity: float = 1.5
    """Expert capacity: rows that a device can send to another, as a multiple of an even share. Used if experts are sharded."""
    overflow: Literal["replay", "drop"] = "replay"
    """Handling of rows beyond the capacity: replay repeats the step with a larger capacity, drop discards the rows."""

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


# A row is one token for one of its experts. A group is the `devices` that together hold all experts of a layer.
def rows_per_pair(capacity: float, rows: int, devices: int) -> int:
    """Returns how many of its rows in a microbatch a device can send to each device of its group."""
    return min(rows, 8 * math.ceil(math.ceil(capacity * rows / devices) / 8))


def capacity_of(needed: int, rows: int, devices: int) -> float:
    """Returns a larger `MoEConfig.capacity` after a step in which a device had `needed` rows for another."""
    # A quarter more than needed. `devices` suffices even if one device sends all its rows to one other.
    return min(float(devices), math.ceil(125 * needed * devices / rows) / 100)
