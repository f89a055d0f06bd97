"""Settings of a mixture of experts. No jax here, so that a wrong flag is told in no time."""

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
    """What a token's weights are: of the softmax over all experts the largest (Mixtral, Qwen3), the softmax over the chosen ones,
    or sigmoids, where a bias without gradient keeps the experts even (DeepSeek-V3)."""
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

    def __post_init__(self):
        check_types(self, prefix=_PREFIX)
        for name in ("num_experts", "d_ff", "shared_experts", "balance_loss", "z_loss", "bias_rate"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), _PREFIX + name, value, "0 or positive")
        require(0 < self.weights_scale < float("inf"), f"{_PREFIX}weights_scale", self.weights_scale, "positive")
        chosen, among = self.experts_per_token, self.num_experts
        fits = chosen > 0 and (chosen <= among or not among)
        require(
            fits, f"{_PREFIX}experts_per_token", chosen, f"1 to the {among} of `{_PREFIX}num_experts`" if among else "positive"
        )
