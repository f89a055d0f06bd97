"""How Llama, Qwen2 and Qwen3 are called in a Hugging Face folder: config.json and tensors, each in both directions. No jax."""

from collections.abc import Mapping
from typing import Any

from jgraph.errors import ConfigError
from jgraph.interop.names import HuggingFace, Part, side_by_side
from jgraph_models.gpt_config import GPTConfig

# Our parameters outside the blocks, and those of a block, with the tensors that they are made of, side by side. The widths of
# a tensor's rows and columns are named: D model, V vocabulary, F hidden, Q queries, G keys or values, K head.
_OUTER = {
    "embedding_VD": {"model.embed_tokens.weight": "VD"},
    "norm/scale": {"model.norm.weight": "D"},
    "head_DV": {"lm_head.weight": "VD"},
}
_BLOCK = {
    "attention_norm/scale": {"input_layernorm.weight": "D"},
    "attention/qkv/kernel": {"self_attn.q_proj.weight": "QD", "self_attn.k_proj.weight": "GD", "self_attn.v_proj.weight": "GD"},
    "attention/qkv/bias": {"self_attn.q_proj.bias": "Q", "self_attn.k_proj.bias": "G", "self_attn.v_proj.bias": "G"},
    "attention/q_norm/scale": {"self_attn.q_norm.weight": "K"},
    "attention/k_norm/scale": {"self_attn.k_norm.weight": "K"},
    "attention/out/kernel": {"self_attn.o_proj.weight": "DQ"},
    "mlp_norm/scale": {"post_attention_layernorm.weight": "D"},
    "mlp/up/kernel": {"mlp.gate_proj.weight": "FD", "mlp.up_proj.weight": "FD"},
    "mlp/down/kernel": {"mlp.down_proj.weight": "DF"},
}
# Settings that have one name there and one here, in every architecture.
_SAME = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
# What sets the architectures apart.
_ARCHITECTURES = {
    "LlamaForCausalLM": {"attention_bias": "none", "qk_norm": "none"},
    "Qwen2ForCausalLM": {"attention_bias": "qkv", "qk_norm": "none"},
    "Qwen3ForCausalLM": {"attention_bias": "none", "qk_norm": "head"},
}
_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in _ARCHITECTURES}
# What these models do not do: the values with which a config.json says so. A key that is not there says so too.
_MUST: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
}


def parts(config: GPTConfig) -> dict[str, tuple[Part, ...]]:
    """Returns the tensors that each of our parameters is made of, by its name."""
    K = config.head_size
    widths = {"D": config.d_model, "V": config.vocab_size, "F": config.d_ff, "K": K}
    widths |= {"Q": config.num_heads * K, "G": config.num_kv_heads * K}

    def of(own: str, tensors: Mapping[str, str], layer: int | None = None) -> tuple[Part, ...]:
        prefix = "" if layer is None else f"model.layers.{layer}."
        shapes = {prefix + name: tuple(widths[axis] for axis in axes) for name, axes in tensors.items()}
        lead = (layer,) if layer is not None and config.scan_layers else ()
        return side_by_side(shapes, order="transposed" if own.endswith(("kernel", "head_DV")) else "same", lead=lead)

    found = {own: of(own, tensors) for own, tensors in _OUTER.items() if own != "head_DV" or config.head == "untied"}
    for own, tensors in _BLOCK.items():
        if (own.endswith("bias") and config.attention_bias == "none") or (
            own.startswith(("attention/q_norm", "attention/k_norm")) and config.qk_norm == "none"
        ):
            continue
        by_layer = [of(own, tensors, layer) for layer in range(config.num_layers)]
        if config.scan_layers:
            found[f"blocks/{own}"] = sum(by_layer, ())
        else:
            found |= {f"blocks/{layer}/{own}": own_parts for layer, own_parts in enumerate(by_layer)}
    return found


def ignored(config: GPTConfig) -> tuple[str, ...]:
    """Returns patterns of tensors that may be there besides: constants, and a head that is the embedding."""
    return ("*.rotary_emb.inv_freq", *["lm_head.weight"] * (config.head == "tied"))


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a model that a config.json determines.

    Raises:
        ConfigError: it is of another architecture, asks for what these models do not do, or lacks a size.
    """
    names = config.get("architectures") or [_TYPES.get(str(config.get("model_type")), "missing")]
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise _cannot("architectures", ", ".join(map(str, names)), f"one of {', '.join(_ARCHITECTURES)}")
    for name, allowed in _MUST.items():
        if name in config and config[name] not in allowed:
            raise _cannot(name, config[name], f"{allowed[0]}".lower())
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise _cannot("layer_types", "sliding_attention", "full_attention in every layer")
    try:
        found = {own: config[theirs] for own, theirs in _SAME.items()}
    except KeyError as e:
        raise _cannot(e.args[0], "missing", "given") from None
    found |= _ARCHITECTURES[names[0]] | _rotary(config) | {"mlp": "swiglu"}
    found["num_kv_heads"] = config.get("num_key_value_heads") or found["num_heads"]
    head_dim = config.get("head_dim") or 0
    found["head_dim"] = 0 if head_dim * found["num_heads"] == found["d_model"] else head_dim
    found["head"] = "tied" if config.get("tie_word_embeddings", False) else "untied"
    return found


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 has one group; before, the base stood alone and the rest was called otherwise.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found: dict[str, Any] = {"rope_theta": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))}
    if (fraction := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise _cannot("partial_rotary_factor", fraction, "1")
    if kind == "default":
        return found | {"rope_scaling": "none"} | {own: getattr(GPTConfig, own) for own in _SCALING}
    if kind != "llama3":
        raise _cannot("rope_type", kind, "default or llama3")
    for own, theirs in _SCALING.items():
        if theirs not in rope:
            raise _cannot(theirs, "missing", "given with rope_type llama3")
        found[own] = rope[theirs] if own == "rope_original_length" else float(rope[theirs])
    return found | {"rope_scaling": "llama3"}


def config(settings: GPTConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a model with these settings, as transformers 4 and 5 read it; the rest is as in `base`.

    Raises:
        ConfigError: there is no such architecture.
    """
    if settings.mlp != "swiglu":
        raise ConfigError(f"`model.mlp` is {settings.mlp}: must be swiglu in a Hugging Face folder", field="model.mlp")
    apart = {"attention_bias": settings.attention_bias, "qk_norm": settings.qk_norm}
    if apart not in _ARCHITECTURES.values():
        raise ConfigError(
            f"`model.attention_bias` is {settings.attention_bias}: must be none in a Hugging Face folder with `model.qk_norm` "
            f"{settings.qk_norm}",
            field="model.attention_bias",
        )
    kind = next(kind for kind, name in _TYPES.items() if _ARCHITECTURES[name] == apart)
    found: dict[str, Any] = {"architectures": [_TYPES[kind]], "model_type": kind, "hidden_act": "silu"}
    found |= {theirs: getattr(settings, own) for own, theirs in _SAME.items()}
    found |= {"num_key_value_heads": settings.num_kv_heads, "head_dim": settings.head_size}
    found |= {"tie_word_embeddings": settings.head == "tied", "rope_theta": settings.rope_theta, "rope_scaling": None}
    if settings.rope_scaling == "llama3":
        found["rope_scaling"] = {theirs: getattr(settings, own) for own, theirs in _SCALING.items()} | {"rope_type": "llama3"}
    return {name: value for name, value in base.items() if name != "rope_parameters"} | found


def _cannot(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"`{name}` is {value}: must be {allowed}", field=name)


HUGGING_FACE = HuggingFace(settings, config, parts, ignored)
