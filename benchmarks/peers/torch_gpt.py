"""The GPT of `jgraph_models` in PyTorch. Serves as the reference of the parity tests and as the peer of the benchmarks.

The dtypes match jgraph: float32 weights that are cast at use (like autocast without a cache), activations and residual stream
in `compute_dtype`, and float32 for norm statistics, softmax and loss. `.double()` switches everything to float64.
"""

# B batch, T sequence, S = T + 1, D model, H query heads, G key/value heads, K head size, V vocabulary

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jgraph.train.config import OptimizerConfig
from jgraph_models.gpt_config import GPTConfig


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.compute_dtype = getattr(torch, config.compute_dtype)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config)
        if config.head == "untied":
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        # Cached: recomputation in every fusion takes a quarter of the step with torch.compile (H200, GPT 124M).
        self.rotary = None
        init_parameters(self.parameters())

    def _apply(self, *args, **kwargs):
        self.rotary = None  # dtype or device changes
        return super()._apply(*args, **kwargs)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the token embeddings and the rotary table."""
        x_BTD = F.embedding(tokens_BT, self.embedding)
        if x_BTD.dtype != torch.float64:
            x_BTD = x_BTD.to(self.compute_dtype)
        if self.rotary is None or len(self.rotary[0]) != tokens_BT.shape[1]:
            self.rotary = rotary(self.config, tokens_BT.shape[1], self.embedding)
        return x_BTD, self.rotary

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Applies the final norm and the head."""
        head_VD = self.embedding if self.config.head == "tied" else self.head
        return linear(self.norm(x_BTD), head_VD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns the logits."""
        x_BTD, rotary_TK = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary_TK)
        return self.logits(x_BTD)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Returns the mean next-token loss."""
        return cross_entropy(self(tokens_BS[:, :-1]), tokens_BS[:, 1:])


class Block(nn.Module):
    """A transformer block with pre-normalization."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        D, F_ = config.d_model, config.d_ff
        self.attention_norm, self.mlp_norm = RMSNorm(config), RMSNorm(config)
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(D, heads * config.head_size)
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = RMSNorm(config, config.head_size), RMSNorm(config, config.head_size)
        self.out = Linear(config.num_heads * config.head_size, D)
        self.up = Linear(D, 2 * F_ if config.mlp == "swiglu" else F_)
        self.down = Linear(F_, D)

    def forward(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
        """Applies attention and MLP with residual connections."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def attention(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
        """Computes causal self-attention."""
        q, k, v = self.heads(x_BTD, rotary_TK)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Projects a normalized input to queries (B, H, T, K), and keys and values (B, G, T, K)."""
        H, G = self.config.num_heads, self.config.num_kv_heads
        B, T, _ = x_BTD.shape
        q_BTHK, k_BTGK, v_BTGK = self.qkv(x_BTD).view(B, T, H + 2 * G, -1).split([H, G, G], dim=2)
        if self.config.qk_norm == "head":
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = rotate(q_BTHK, rotary_TK), rotate(k_BTGK, rotary_TK)
        return tuple(a.transpose(1, 2) for a in (q_BTHK, k_BTGK, v_BTGK))

    def mlp(self, x_BTD: Tensor) -> Tensor:
        """Applies the GELU or SwiGLU MLP."""
        h = self.up(x_BTD)
        if self.config.mlp == "gelu":
            return self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Linear(nn.Linear):
    """A projection without bias. The weight is cast at use. torchao float8 replaces this class."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the projection."""
        return linear(input, self.weight)


class RMSNorm(nn.Module):
    """RMS normalization with a scale."""

    def __init__(self, config: GPTConfig, width: int = 0):
        super().__init__()
        self.eps = config.norm_eps
        self.scale = nn.Parameter(torch.ones(width or config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last axis."""
        return F.rms_norm(x, self.scale.shape, self.scale.to(x.dtype), self.eps)


def init_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Initializes matrices from a normal distribution with standard deviation 0.02, and vectors with ones."""
    for p in parameters:
        nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.ones_(p)


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Computes the mean cross-entropy, in float32 for bfloat16 logits."""
    if logits_BTV.dtype == torch.bfloat16:
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies by a weight, output dimension first, that is cast to the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype))


def rotary(config: GPTConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotary embedding on the device of `like`, in float64 if `like` is."""
    angles_TK = rotary_angles(config, length, like.device, torch.float64 if like.dtype == torch.float64 else torch.float32)
    return angles_TK.cos(), angles_TK.sin()


def rotary_angles(config: GPTConfig, length: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the angles of the rotary embedding, of shape (length, head size / 2)."""
    exponents = torch.arange(0, config.head_size, 2, device=device, dtype=dtype) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        unscaled = ((config.rope_original_length / (2 * math.pi / frequencies) - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - unscaled) * frequencies / config.rope_factor + unscaled * frequencies
    return torch.arange(length, device=device, dtype=dtype)[:, None] * frequencies


def rotate(x_BTHK: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
    """Applies the rotary embedding in the dtype of its table. Returns the dtype of the input."""
    cos_TK, sin_TK = (a[:, None, :] for a in rotary_TK)
    a, b = x_BTHK.to(cos_TK.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos_TK - b * sin_TK, b * cos_TK + a * sin_TK], dim=-1).to(x_BTHK.dtype)


def to_float8(blocks: nn.Module, recipe: str, **options: Any) -> None:
    """Converts the projections of blocks to torchao float8 in place. `options` are fields of `Float8LinearConfig`."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=replace(Float8LinearConfig.from_recipe_name(recipe), **options))


def adamw_options(config: OptimizerConfig) -> dict[str, Any]:
    """Returns the hyperparameters as arguments of AdamW."""
    betas = config.beta1, config.beta2
    return {"lr": config.learning_rate, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Creates the fused AdamW of PyTorch. `capturable` keeps the step count on the GPU, for a CUDA graph of the update."""
    return torch.optim.AdamW(parameters, fused=True, capturable=capturable, **adamw_options(config))


class MuonAndAdamW:
    """`torch.optim.Muon` for the matrices of the blocks, and AdamW for all other parameters."""

    def __init__(self, model: "GPT", config: OptimizerConfig):
        matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers = (
            torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=0.0, fused=True),
        )

    def zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
