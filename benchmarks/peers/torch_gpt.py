"""The GPT of `jgraph_models` in PyTorch: the reference of the parity tests and the peer of the benchmarks, in one.

Dtype policy as ours: float32 weights cast at use (what autocast does without its cache), activations and residual stream in
`compute_dtype`, statistics of norms, attention and the loss in float32. After `.double()` all of it is float64.
"""

# B batch, T sequence, S = T + 1, D model, H query heads, G key/value heads, K head size, V vocabulary

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jgraph.train.config import OptimizerConfig
from jgraph_models.gpt import GPTConfig


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.compute_dtype = getattr(torch, config.compute_dtype)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config)
        if config.head == "untied":
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        # Made once: recomputed in every fusion that reads them, they cost torch.compile a quarter of its step (H200, GPT 124M).
        self.rotary = None
        draw(self.parameters())

    def _apply(self, *args, **kwargs):
        self.rotary = None  # of another dtype or device from now on
        return super()._apply(*args, **kwargs)

    def embed(self, tokens_BT: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x_BTD = F.embedding(tokens_BT, self.embedding)
        if x_BTD.dtype != torch.float64:
            x_BTD = x_BTD.to(self.compute_dtype)
        if self.rotary is None or len(self.rotary[0]) != tokens_BT.shape[1]:
            self.rotary = rotary(self.config, tokens_BT.shape[1], self.embedding)
        return x_BTD, self.rotary

    def logits(self, x_BTD: Tensor) -> Tensor:
        head_VD = self.embedding if self.config.head == "tied" else self.head
        return linear(self.norm(x_BTD), head_VD)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD, rotary_TK = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary_TK)
        return self.logits(x_BTD)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        return cross_entropy(self(tokens_BS[:, :-1]), tokens_BS[:, 1:])


class Block(nn.Module):
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
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def attention(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
        H, G = self.config.num_heads, self.config.num_kv_heads
        B, T, _ = x_BTD.shape
        q_BTHK, k_BTGK, v_BTGK = self.qkv(x_BTD).view(B, T, H + 2 * G, -1).split([H, G, G], dim=2)
        if self.config.qk_norm == "head":
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = rotate(q_BTHK, rotary_TK), rotate(k_BTGK, rotary_TK)
        q, k, v = (a.transpose(1, 2) for a in (q_BTHK, k_BTGK, v_BTGK))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=G != H)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    def mlp(self, x_BTD: Tensor) -> Tensor:
        h = self.up(x_BTD)
        if self.config.mlp == "gelu":
            return self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Linear(nn.Linear):
    """A projection without bias, whose weight is cast at use; what torchao's float8 takes the place of."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, config: GPTConfig, width: int = 0):
        super().__init__()
        self.eps = config.norm_eps
        self.scale = nn.Parameter(torch.ones(width or config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale.to(x.dtype), self.eps)


def draw(parameters: Iterable[nn.Parameter]) -> None:
    """Draws weights, in the order of the parameters."""
    for p in parameters:
        nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.ones_(p)


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    if logits_BTV.dtype == torch.bfloat16:
        logits_BTV = logits_BTV.float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rotary(config: GPTConfig, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, config.head_size, 2, device=like.device, dtype=dtype) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = ((config.rope_original_length / (2 * math.pi / frequencies) - low) / (high - low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / config.rope_factor + kept * frequencies
    angles_TK = torch.arange(length, device=like.device, dtype=dtype)[:, None] * frequencies
    return angles_TK.cos(), angles_TK.sin()


def rotate(x_BTHK: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
    cos_TK, sin_TK = (a[:, None, :] for a in rotary_TK)
    a, b = x_BTHK.to(cos_TK.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos_TK - b * sin_TK, b * cos_TK + a * sin_TK], dim=-1).to(x_BTHK.dtype)


def to_float8(blocks: nn.Module, recipe: str, **options: Any) -> None:
    """Puts torchao's float8 in the place of blocks' projections, by a recipe of its: `tensorwise`, `rowwise`, ..."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=replace(Float8LinearConfig.from_recipe_name(recipe), **options))


def adamw(model: nn.Module, config: OptimizerConfig, *, capturable: bool = False) -> torch.optim.Optimizer:
    """Returns the fused AdamW that the peers of a training step update with."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=capturable,
    )


def warm_up(step: Callable[[], Any]) -> None:
    """Runs a step on a stream of its own until all that it makes once is made, so that it can be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
