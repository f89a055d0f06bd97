"""Layers, precision and optimizer of Transformer Engine, configured by a variant.

Settings follow the documentation of Transformer Engine 2.20: one fused q, k and v projection, attention of cuDNN, no dropout
and no bias. Weights are quantized in each forward, because a step has one microbatch and a cache would have no hits.
`fuse_wgrad_accumulation` is off: without accumulation, float32 gradients only double the bytes that the optimizer reads.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportAttributeAccessIssue=false

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.peers import torch_gpt
from benchmarks.peers.te_library import FusedAdam, recipes, te
from benchmarks.peers.te_variant import TEVariant
from jgraph.train.config import OptimizerConfig
from jgraph_models.gpt_config import GPTConfig


def make_recipe(variant: TEVariant) -> Any:
    """Returns the FP8 recipe of a variant with the defaults of Transformer Engine, or None for bfloat16."""
    if variant.grouped == "cutlass":
        os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = "1"  # Transformer Engine has no argument for it
    fp8_attention = variant.attention == "fp8"
    match variant.recipe:
        case "delayed":
            return recipes.DelayedScaling(fp8_dpa=fp8_attention, fp8_mha=fp8_attention)
        case "current":
            return recipes.Float8CurrentScaling(fp8_dpa=fp8_attention, fp8_mha=fp8_attention)
        case "blockwise":
            return recipes.Float8BlockScaling()
    return None


def params_dtype(variant: TEVariant) -> torch.dtype:
    """Returns the dtype of parameters that are not in FP8."""
    return torch.float32 if variant.params == "float32" else torch.bfloat16


def quantized_init(variant: TEVariant, recipe: Any) -> contextlib.AbstractContextManager[None]:
    """Returns the context that creates the parameters of the blocks, in FP8 if the variant has them."""
    return te.quantized_model_init(enabled=True, recipe=recipe) if variant.params == "fp8" else contextlib.nullcontext()


@contextlib.contextmanager
def autocast(recipe: Any) -> Iterator[None]:
    """Computes in bfloat16, and matmuls of Transformer Engine in FP8 if `recipe` is not None."""
    in_fp8 = te.autocast(enabled=True, recipe=recipe) if recipe else contextlib.nullcontext()
    # Without the cache, weights are cast at each use: a cached cast would be captured once and then be stale.
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), in_fp8:
        yield


def init_weight(weight: Tensor) -> None:
    """Initializes a matrix from a normal distribution with standard deviation 0.02."""
    nn.init.normal_(weight, std=0.02)


def attention_options(config: GPTConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments that `te.TransformerLayer` and `te.MultiheadAttention` share."""
    return {
        "num_gqa_groups": config.num_kv_heads,
        "kv_channels": config.head_size,
        "layernorm_epsilon": config.norm_eps,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "bias": False,
        "fuse_qkv_params": True,
        "qk_norm_type": "RMSNorm" if config.qk_norm == "head" else None,
        "qk_norm_eps": config.norm_eps,
        "qk_norm_before_rope": True,
        "params_dtype": dtype,
        "init_method": init_weight,
        "output_layer_init_method": init_weight,
    }


def transformer_layer(config: GPTConfig, dtype: torch.dtype, layer: int) -> nn.Module:
    """Creates a dense block."""
    return te.TransformerLayer(
        config.d_model,
        config.d_ff,
        config.num_heads,
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        activation=config.mlp,
        attn_input_format="bshd",
        layer_number=layer + 1,
        **attention_options(config, dtype),
    )


def rotary_angles(config: GPTConfig, length: int, device: torch.device | str = "cuda") -> Tensor:
    """Computes the angles as `te.RotaryPositionEmbedding`, which has no scaling of Llama 3: (length, 1, 1, head size)."""
    angles_TK = torch_gpt.rotary_angles(config, length, device)
    return torch.cat([angles_TK, angles_TK], dim=-1)[:, None, None]


class StandaloneBlock(nn.Module):
    """A dense block in bfloat16 that owns its rotary table, because graphed callables have inputs that require gradients."""

    angles: Tensor

    def __init__(self, config: GPTConfig, length: int):
        super().__init__()
        self.block = transformer_layer(config, torch.bfloat16, layer=0)
        self.register_buffer("angles", rotary_angles(config, length))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Applies the block."""
        return self.block(x_BTD, rotary_pos_emb=self.angles)


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, variant: TEVariant, *, capturable: bool = True
) -> torch.optim.Optimizer:
    """Creates the AdamW of a variant: of PyTorch for float32 parameters, else FusedAdam with float32 master weights.

    FusedAdam cannot update FP8 parameters in a CUDA graph.
    """
    if variant.params == "float32":
        return torch_gpt.adamw(model.parameters(), config, capturable=capturable)
    optimizer = FusedAdam(
        model.parameters(),
        **torch_gpt.adamw_options(config),
        adam_w_mode=True,
        capturable=capturable and variant.params == "bfloat16",
        master_weights=True,
    )
    if (variant.params, variant.recipe) == ("fp8", "delayed"):
        optimizer.register_step_post_hook(lambda *_: drop_transposes(model))
    return optimizer


def drop_transposes(model: nn.Module) -> None:
    """Drops the transposed copies of FP8 parameters, which the in-place update of FusedAdam leaves outdated."""
    for p in model.parameters():
        quantized: Any = p._local_tensor if isinstance(p, DTensor) else p  # to_local() returns a view without the copy
        if isinstance(quantized, te.Float8Tensor):
            quantized.update_usage(rowwise_usage=True, columnwise_usage=False)
