"""The GPT of `torch_gpt` built from Transformer Engine's layers, in bfloat16 or in FP8.

Attention, projections and norms are `transformer_engine.pytorch.TransformerLayer`. The embedding, the final norm, the head and
the loss are PyTorch, compiled as in the other peers. Same number of parameters and FLOPs as `torch_gpt.GPT`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.te_layers import (
    autocast,
    init_weight,
    make_recipe,
    params_dtype,
    quantized_init,
    rotary_angles,
    transformer_layer,
)
from benchmarks.peers.te_variant import TEVariant
from benchmarks.peers.torch_gpt import cross_entropy, linear
from jgraph_models.gpt_config import GPTConfig


class GPT(nn.Module):
    """A GPT with blocks of Transformer Engine.

    Args:
        config: Sizes. Norms are RMSNorm.
        variant: Precision of matmuls and parameters.
        make_block: Creates a block from the config, the dtype of its parameters and its index.
    """

    def __init__(self, config: GPTConfig, variant: TEVariant, make_block: Callable[..., nn.Module] = transformer_layer):
        super().__init__()
        self.config, self.recipe = config, make_recipe(variant)
        dtype = params_dtype(variant)
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=dtype))
        init_weight(self.embedding)
        if config.head == "untied":
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=dtype))
            init_weight(self.head)
        with quantized_init(variant, self.recipe):
            self.blocks = nn.ModuleList(make_block(config, dtype, layer) for layer in range(config.num_layers))
        self.scale = nn.Parameter(torch.ones(config.d_model, dtype=dtype))
        self.angles: Tensor | None = None
        self.tail = torch.compile(self._tail)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Returns the mean next-token loss, plus the penalty of the blocks."""
        if self.angles is None:
            self.angles = rotary_angles(self.config, tokens_BS.shape[1] - 1, tokens_BS.device)
        x_BTD = F.embedding(tokens_BS[:, :-1], self.embedding).to(getattr(torch, self.config.compute_dtype))
        with autocast(self.recipe):
            x_BTD, penalty = self.apply_blocks(x_BTD, self.angles)
        head_VD = self.embedding if self.config.head == "tied" else self.head
        return self.tail(x_BTD, head_VD, self.scale, tokens_BS[:, 1:].contiguous()) + penalty

    def apply_blocks(self, x_BTD: Tensor, angles: Tensor) -> tuple[Tensor, Tensor | float]:
        """Applies the blocks. Returns the new residual stream and a penalty to add to the loss."""
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary_pos_emb=angles)
        return x_BTD, 0.0

    def _tail(self, x_BTD: Tensor, head_VD: Tensor, scale: Tensor, labels_BT: Tensor) -> Tensor:
        x_BTD = F.rms_norm(x_BTD, scale.shape, scale.to(x_BTD.dtype), self.config.norm_eps)
        return cross_entropy(linear(x_BTD, head_VD), labels_BT)


def build_sharded(config: GPTConfig, variant: TEVariant, device: torch.device, shard: Callable[[nn.Module], object]) -> GPT:
    """Builds the model with sharded blocks, with the same weights on every rank. The other parameters are not sharded."""

    def sharded_layer(config: GPTConfig, dtype: torch.dtype, layer: int) -> nn.Module:
        block = transformer_layer(config, dtype, layer)
        shard(block)
        return block

    torch.manual_seed(0)
    with torch.device(device):
        return GPT(config, variant, sharded_layer)
