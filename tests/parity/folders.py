"""Folders with tiny random models of transformers."""

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

KINDS = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# The small base and the short original length make one of four frequencies high, one medium and two low.
_SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
_SCALED |= {"low_freq_factor": 0.5, "high_freq_factor": 2.0}
_PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@functools.cache
def transformers() -> Any:
    """Imports the library on first use, because the import is slow and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return transformers


def _config(kind: str) -> Any:
    if kind == "llama":
        return transformers().LlamaConfig(**_SIZES, num_key_value_heads=2, rms_norm_eps=1e-3, rope_parameters=_SCALED)
    if kind == "qwen2":
        return transformers().Qwen2Config(**_SIZES, num_key_value_heads=4, rope_parameters=_PLAIN, tie_word_embeddings=True)
    if kind == "qwen3":
        return transformers().Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=12, rope_parameters=_PLAIN)
    sizes: Any = _SIZES | {"num_key_value_heads": 2, "num_experts_per_tok": 3, "rope_parameters": _PLAIN}
    if kind == "mixtral":
        return transformers().MixtralConfig(**sizes, num_local_experts=5, router_aux_loss_coef=0.5)
    return transformers().Qwen3MoeConfig(
        **sizes, head_dim=12, num_experts=5, moe_intermediate_size=24, router_aux_loss_coef=0.5
    )


def model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Returns a model with activations of order one, random norm scales and nonzero biases, so every weight has an effect."""
    torch.manual_seed(0)
    built = transformers().AutoModelForCausalLM.from_config(_config(kind), attn_implementation="eager")
    with torch.no_grad():
        for name, p in built.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim > 1 else (0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise))
    return built.to(dtype)


def save(kind: str, path: Path, dtype: torch.dtype = torch.float32, **choices) -> Path:
    model(kind, dtype).save_pretrained(path, **choices)
    return path


def load(path: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager")


def balance_loss(model: Any, router_logits: torch.Tensor) -> torch.Tensor:
    """Returns the load-balancing loss of an MoE layer, computed from its router logits."""
    own = sys.modules[type(model).__module__].load_balancing_loss_func
    return own((router_logits,), model.num_experts, model.num_experts_per_tok)


def as_saved(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Renames tensors of a model to the names in its folder, and splits them by expert."""
    is_mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        prefix, is_experts, of = name.partition(".experts.")
        if not is_experts:
            found[name] = tensor
        for number, expert in enumerate(tensor if is_experts else ()):
            both = zip((gate, up), expert.chunk(2), strict=True) if of == "gate_up_proj" else [(down, expert)]
            found |= {f"{prefix}.experts.{number}.{own}.weight": part for own, part in both}
    return found
