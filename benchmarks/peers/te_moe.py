"""Mixtures of experts from Transformer Engine: fused router, permutation by an expert mask, and `GroupedLinear`.

The rows of an expert are padded to the alignment of the FP8 recipe. `GroupedLinear` reads the number of rows per expert on the
host. Therefore each layer waits for the GPU, and a CUDA graph cannot capture it. With cuBLASLt 13.4 or newer (13.5 for FP8),
`GroupedLinear` can read the numbers on the GPU. The model uses this path if it is supported.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import te_gpt
from benchmarks.peers.te_layers import attention_options, autocast, init_weight, make_recipe, params_dtype, quantized_init
from benchmarks.peers.te_library import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    get_align_size_for_quantization,
    is_module_grouped_tensor_path_supported,
    te,
)
from benchmarks.peers.te_variant import TEVariant
from benchmarks.peers.torch_moe import apply_blocks
from jgraph.moe.config import MoEConfig
from jgraph_models.gpt_config import GPTConfig

# B batch, T sequence, N tokens, M rows, E experts, D model, F hidden


class GPT(te_gpt.GPT):
    """A GPT with a mixture of experts in every block."""

    def __init__(self, config: GPTConfig, variant: TEVariant):
        super().__init__(config, variant, lambda *args: Block(*args, recipe=make_recipe(variant)))

    def apply_blocks(self, x_BTD: Tensor, angles: Tensor) -> tuple[Tensor, Tensor | float]:
        """Applies the blocks. The penalty is the weighted balance loss."""
        x_BTD, balance = apply_blocks(self.blocks, x_BTD, angles)
        return x_BTD, self.config.moe.balance_loss * balance


class Block(nn.Module):
    """A transformer block with a mixture of experts."""

    def __init__(self, config: GPTConfig, dtype: torch.dtype, layer: int, recipe: Any):
        super().__init__()
        self.attention = te.MultiheadAttention(
            config.d_model,
            config.num_heads,
            input_layernorm=True,
            attn_mask_type="causal",
            qkv_format="bshd",
            layer_number=layer + 1,
            **attention_options(config, dtype),
        )
        self.norm = te.RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype)
        self.moe = MoE(config.d_model, config.d_ff, config.moe, dtype, recipe)

    def forward(self, x_BTD: Tensor, rotary_pos_emb: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new residual stream and the balance loss."""
        x_BTD = x_BTD + self.attention(x_BTD, rotary_pos_emb=rotary_pos_emb)
        y_BTD, balance = self.moe(self.norm(x_BTD))
        return x_BTD + y_BTD, balance


class MoE(nn.Module):
    """A mixture of experts with softmax top-k routing and SwiGLU experts. `d_ff` is for experts without a width in `config`."""

    def __init__(self, d_model: int, d_ff: int, config: MoEConfig, dtype: torch.dtype, recipe: Any):
        super().__init__()
        assert (config.router, config.shared_experts, config.z_loss) == ("softmax-topk", 0, 0)
        self.config, E, F_ = config, config.num_experts, config.d_ff or d_ff
        self.alignment = get_align_size_for_quantization(recipe) if recipe else 1
        self.splits_on_gpu = is_module_grouped_tensor_path_supported(recipe, torch.bfloat16)
        self.router = nn.Parameter(torch.empty(E, d_model, dtype=dtype))
        init_weight(self.router)
        options = {
            "bias": False,
            "params_dtype": dtype,
            "init_method": init_weight,
            "use_grouped_tensor": self.splits_on_gpu,
        }
        self.up = te.GroupedLinear(E, d_model, 2 * F_, **options)
        self.down = te.GroupedLinear(E, F_, d_model, **options)
        self.activation = te.ops.SwiGLU()

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output and the balance loss of Switch Transformer (arXiv:2101.03961), as `torch_moe.MoE` defines it."""
        x_ND, k, E = x_BTD.flatten(0, 1), self.config.experts_per_token, self.config.num_experts
        with torch.autocast("cuda", enabled=False):
            logits_NE = F.linear(x_ND.float(), self.router.float())
        # Top-k before the softmax equals a softmax over all experts with normalized weights.
        is_normalized, scale = self.config.weights == "normalized", self.config.weights_scale
        weights_NE, mask_NE = fused_topk_with_score_function(
            logits_NE, k, not is_normalized, None, None, scale, "softmax", None
        )
        counts_E = mask_NE.sum(0)
        _, probabilities_NE = fused_compute_score_for_moe_aux_loss(logits_NE, k, "softmax")
        # Transformer Engine divides by k, torch_moe does not.
        balance = fused_moe_aux_loss(probabilities_NE, counts_E, len(x_ND), E, k, float(k))

        if self.alignment > 1:
            rows_MD, _, order, offsets_E, counts_E = te.moe_permute_and_pad_with_probs(
                x_ND, weights_NE, mask_NE, counts_E, self.alignment
            )
        else:
            (rows_MD, order), offsets_E = te.moe_permute(x_ND, mask_NE, len(x_ND) * k), None
        splits_E = counts_E if self.splits_on_gpu else counts_E.cpu()
        rows_MD = self.down(self.activation(self.up(rows_MD, splits_E)), splits_E)
        y_ND = te.moe_unpermute(rows_MD, order, merging_probs=weights_NE, restore_shape=x_ND.shape, pad_offsets=offsets_E)
        return y_ND.view_as(x_BTD), balance


def graph_attention(blocks: nn.ModuleList, x_BTD: Tensor, angles: Tensor, recipe: Any) -> None:
    """Replaces the attention of each block by CUDA graphs, in place. The MLPs cannot be captured."""
    samples = tuple((torch.randn_like(x_BTD, requires_grad=True),) for _ in blocks)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        te.make_graphed_callables(
            tuple(block.attention for block in blocks),
            samples,
            sample_kwargs=tuple({"rotary_pos_emb": angles} for _ in blocks),
            enabled=recipe is not None,
            recipe=recipe,
            clone_param_grads_on_return=False,  # the optimizer reads the gradients before the next replay
        )


def make_layers(config: GPTConfig, variant: TEVariant) -> tuple[nn.ModuleList, Any, Any]:
    """Creates the blocks without embedding and head. Returns them, their `apply_blocks` in FP8 or not, and the recipe."""
    recipe = make_recipe(variant)
    with quantized_init(variant, recipe):
        blocks = nn.ModuleList(Block(config, params_dtype(variant), layer, recipe) for layer in range(config.num_layers))

    def call(blocks: nn.ModuleList, x_BTD: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(recipe):
            return apply_blocks(blocks, x_BTD, angles)

    return blocks, call, recipe
