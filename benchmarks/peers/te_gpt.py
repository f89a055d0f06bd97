"""The GPT of `torch_gpt` built from Transformer Engine's layers, in bfloat16 or in FP8.

Attention, projections and norms are `transformer_engine.pytorch.TransformerLayer`. The embedding, the final norm, the head and
the loss are PyTorch, compiled as in the other peers. Same number of parameters and FLOPs as `torch_gpt.GPT`.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportMissingImports=false

import contextlib

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_engine import pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.optimizers import FusedAdam

from benchmarks.peers.torch_gpt import cross_entropy, init_parameters, linear
from jgraph.train.config import OptimizerConfig
from jgraph_models.gpt import GPTConfig

RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}


class GPT(nn.Module):
    """A GPT with blocks of Transformer Engine.

    Args:
        config: Sizes. Norms are RMSNorm, heads and embedding are tied.
        scaling: A key of `RECIPES`, or "bf16" for no FP8.
        dtype: dtype of the parameters.
    """

    def __init__(self, config: GPTConfig, scaling: str, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.recipe = RECIPES[scaling]() if scaling in RECIPES else None
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=dtype))
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                config.d_model,
                config.d_ff,
                config.num_heads,
                num_gqa_groups=config.num_kv_heads,
                layernorm_epsilon=config.norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                normalization="RMSNorm",
                activation="gelu" if config.mlp == "gelu" else "swiglu",
                bias=False,
                fuse_qkv_params=True,
                attn_input_format="bshd",
                params_dtype=dtype,
                layer_number=layer + 1,
            )
            for layer in range(config.num_layers)
        )
        self.scale = nn.Parameter(torch.ones(config.d_model, dtype=dtype))
        with torch.no_grad():
            init_parameters(self.parameters())
        self.rotary = te.RotaryPositionEmbedding(config.head_size)
        self.angles: Tensor | None = None
        self.tail = torch.compile(self._tail)

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Returns the mean next-token loss."""
        if self.angles is None:
            self.angles = self.rotary(tokens_BS.shape[1] - 1).cuda()
        x_BTD = F.embedding(tokens_BS[:, :-1], self.embedding).to(torch.bfloat16)
        in_fp8 = te.autocast(enabled=True, recipe=self.recipe) if self.recipe else contextlib.nullcontext()
        # Without the cache, weights are cast at each use: a cached cast would be captured once and then be stale.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), in_fp8:
            for block in self.blocks:
                x_BTD = block(x_BTD, rotary_pos_emb=self.angles)
        return self.tail(x_BTD, self.embedding, self.scale, tokens_BS[:, 1:].contiguous())

    def _tail(self, x_BTD: Tensor, head_VD: Tensor, scale: Tensor, labels_BT: Tensor) -> Tensor:
        x_BTD = F.rms_norm(x_BTD, scale.shape, scale.to(x_BTD.dtype), self.config.norm_eps)
        return cross_entropy(linear(x_BTD, head_VD), labels_BT)


def fused_adam(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Creates the AdamW of Transformer Engine with float32 master weights, for a captured step.

    Args:
        model: Model with bfloat16 parameters.
        config: Hyperparameters.

    Returns:
        The optimizer.
    """
    return FusedAdam(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        adam_w_mode=True,
        capturable=True,
        master_weights=True,
    )
