"""Tiny random models of transformers, as folders."""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch

KINDS = ("llama", "qwen2", "qwen3")
_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
# The base is small and the original length short, so that of four frequencies one stays, one is between, and two are low.
_SCALED = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
_SCALED |= {"low_freq_factor": 0.5, "high_freq_factor": 2.0}
_PLAIN = {"rope_type": "default", "rope_theta": 100.0}


@functools.cache
def transformers() -> Any:
    """The library, imported when it is used: it takes its time, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return transformers


def _config(kind: str) -> Any:
    if kind == "llama":
        return transformers().LlamaConfig(**_SIZES, num_key_value_heads=2, rms_norm_eps=1e-3, rope_parameters=_SCALED)
    if kind == "qwen2":
        return transformers().Qwen2Config(**_SIZES, num_key_value_heads=4, rope_parameters=_PLAIN, tie_word_embeddings=True)
    return transformers().Qwen3Config(**_SIZES, num_key_value_heads=2, head_dim=12, rope_parameters=_PLAIN)


def model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose every weight matters: activations of order one, no norm that does nothing, no bias of zero."""
    torch.manual_seed(0)
    made = transformers().AutoModelForCausalLM.from_config(_config(kind), attn_implementation="eager")
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise / p.shape[1] ** 0.5 if p.ndim > 1 else (0.5 * noise if name.endswith("bias") else 1 + 0.2 * noise))
    return made.to(dtype)


def save(kind: str, path: Path, dtype: torch.dtype = torch.float32, **choices) -> Path:
    model(kind, dtype).save_pretrained(path, **choices)
    return path


def load(path: Path) -> Any:
    return transformers().AutoModelForCausalLM.from_pretrained(path, dtype="auto", attn_implementation="eager")
