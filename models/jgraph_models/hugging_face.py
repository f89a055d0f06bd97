"""Maps Llama, Qwen and Mixtral to Hugging Face folders and back: config.json and tensors. Does not import JAX."""

from collections.abc import Iterator, Mapping
from typing import Any

from jgraph.errors import ConfigError, require
from jgraph.interop.fields import boolean, integer, mapping, number, string, strings
from jgraph.interop.names import HuggingFace, Part, side_by_side
from jgraph.moe.config import MoEConfig
from jgraph_models.gpt_config import GPTConfig

# The tensors that each parameter concatenates, outside of blocks and in a block. Letters name the sizes of a tensor's axes:
# D model, V vocabulary, F hidden, Q queries, G keys or values, K head, E experts.
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
}
_MLP = {
    "mlp/up/kernel": {"mlp.gate_proj.weight": "FD", "mlp.up_proj.weight": "FD"},
    "mlp/down/kernel": {"mlp.down_proj.weight": "DF"},
}
# Mixtures of experts, in place of the MLP; {} is the index of an expert.
_MIXTRAL = {
    "mlp/router_DE": {"block_sparse_moe.gate.weight": "ED"},
    "mlp/up_EDF2": {"block_sparse_moe.experts.{}.w1.weight": "FD", "block_sparse_moe.experts.{}.w3.weight": "FD"},
    "mlp/down_EFD": {"block_sparse_moe.experts.{}.w2.weight": "DF"},
}
_QWEN3_MOE = {
    "mlp/router_DE": {"mlp.gate.weight": "ED"},
    "mlp/up_EDF2": {"mlp.experts.{}.gate_proj.weight": "FD", "mlp.experts.{}.up_proj.weight": "FD"},
    "mlp/down_EFD": {"mlp.experts.{}.down_proj.weight": "DF"},
}
_TRANSPOSED = ("kernel", "head_DV", "router_DE", "up_EDF2", "down_EFD")
# Settings and fields of config.json that are the same in every architecture.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
_EPSILON = {"norm_eps": "rms_norm_eps"}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
# Settings that distinguish the architectures of dense models, and of mixtures of experts.
_DENSE = {
    "LlamaForCausalLM": {"attention_bias": "none", "qk_norm": "none"},
    "Qwen2ForCausalLM": {"attention_bias": "qkv", "qk_norm": "none"},
    "Qwen3ForCausalLM": {"attention_bias": "none", "qk_norm": "head"},
}
_MIXTURES = {
    "MixtralForCausalLM": {"attention_bias": "none", "qk_norm": "none"},
    "Qwen3MoeForCausalLM": {"attention_bias": "none", "qk_norm": "head"},
}
_ARCHITECTURES = _DENSE | _MIXTURES
_TYPES = {name.removesuffix("ForCausalLM").lower().replace("moe", "_moe"): name for name in _ARCHITECTURES}
# Allowed values of fields of config.json, for features that these models do not support. A field may be missing.
_MUST: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "router_jitter_noise": (0, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


def tensors(config: GPTConfig) -> Iterator[tuple[str, Part]]:
    """Yields parameter name and `Part` of every tensor of a model in a Hugging Face folder: first those outside the layers."""
    K, E = config.head_size, config.moe.num_experts
    widths = {"D": config.d_model, "V": config.vocab_size, "F": config.moe.d_ff or config.d_ff if E else config.d_ff, "K": K}
    widths |= {"Q": config.num_heads * K, "G": config.num_kv_heads * K, "E": E}

    def parts_of(param: str, names: Mapping[str, str], layer: int | None = None) -> Iterator[Part]:
        prefix = "" if layer is None else f"model.layers.{layer}."
        lead = (layer,) if layer is not None and config.scan_layers else ()
        order = "transposed" if param.endswith(_TRANSPOSED) else "same"

        def parts(expert: tuple[int, ...] = ()) -> tuple[Part, ...]:
            shapes = {prefix + name.format(*expert): tuple(widths[axis] for axis in axes) for name, axes in names.items()}
            return side_by_side(shapes, order=order, lead=(*lead, *expert))

        if any("{}" in name for name in names):
            for expert in range(E):
                yield from parts((expert,))
        else:
            yield from parts()

    outer = dict(_OUTER)
    # Mixtral has no norm of queries and keys, and Qwen3 has.
    mixture = _MIXTRAL if config.qk_norm == "none" else _QWEN3_MOE
    block = _BLOCK | (mixture if E else _MLP)
    if config.head == "tied":
        del outer["head_DV"]
    if config.attention_bias == "none":
        del block["attention/qkv/bias"]
    if config.qk_norm == "none":
        del block["attention/q_norm/scale"], block["attention/k_norm/scale"]
    for param, names in outer.items():
        yield from ((param, part) for part in parts_of(param, names))
    for layer in range(config.num_layers):
        for param, names in block.items():
            name = f"blocks/{param}" if config.scan_layers else f"blocks/{layer}/{param}"
            yield from ((name, part) for part in parts_of(param, names, layer))


def ignored(config: GPTConfig) -> tuple[str, ...]:
    """Returns shell patterns of tensors that are not read: the rotary frequencies, which are constants."""
    return ("*.rotary_emb.inv_freq",)


def copies(config: GPTConfig) -> dict[str, str]:
    """Returns the name of the head and that of the embedding if the head is tied."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.head == "tied" else {}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the settings that the config.json of transformers 4 or 5 determines. Raises ConfigError for another model."""
    names = strings(config, "architectures") or [_TYPES.get(string(config, "model_type", ""), "missing")]
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise _unsupported("architectures", ", ".join(map(str, names)), f"one of {', '.join(_ARCHITECTURES)}")
    for name, allowed in _MUST.items():
        if name in config and config[name] not in allowed:
            raise _unsupported(name, config[name], f"{allowed[0]}".lower())
    if "sliding_attention" in strings(config, "layer_types"):
        raise _unsupported("layer_types", "sliding_attention", "full_attention in every layer")
    if names[0] == "MixtralForCausalLM" and config.get("sliding_window") is not None:
        raise _unsupported("sliding_window", config["sliding_window"], "null")
    found: dict[str, Any] = {own: integer(config, theirs) for own, theirs in _SIZES.items()}
    found |= {own: number(config, theirs) for own, theirs in _EPSILON.items()}
    found["d_ff"] = integer(config, "intermediate_size")
    found["moe"] = _moe_settings(config, names[0]) if names[0] in _MIXTURES else {"num_experts": 0}
    found |= _ARCHITECTURES[names[0]] | _rotary_settings(config, names[0]) | {"mlp": "swiglu"}
    found["num_kv_heads"] = integer(config, "num_key_value_heads", found["num_heads"])
    head_dim = integer(config, "head_dim", 0, least=0)
    found["head_dim"] = 0 if head_dim * found["num_heads"] == found["d_model"] else head_dim
    found["head"] = "tied" if boolean(config, "tie_word_embeddings", False) else "untied"
    return found


def _moe_settings(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    width = integer(config, "intermediate_size")
    experts = "num_local_experts"
    if architecture == "MixtralForCausalLM":  # has one width, the width of an expert, and normalizes weights
        expert_width = 0
        is_normalized = True
    else:
        expert_width = integer(config, "moe_intermediate_size")
        is_normalized = boolean(config, "norm_topk_prob", False)
        experts = experts if experts in config else "num_experts"
    return {
        "num_experts": integer(config, experts),
        "experts_per_token": integer(config, "num_experts_per_tok"),
        "d_ff": 0 if expert_width == width else expert_width,
        "shared_experts": 0,
        "router": "softmax-topk",
        "weights": "normalized" if is_normalized else "as-they-are",
        "weights_scale": 1.0,
        "balance_loss": number(config, "router_aux_loss_coef", 0.001),
    }


def _rotary_settings(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    # transformers 5 has one group of fields. Earlier versions have the base outside of the group, and different names.
    rope = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    kind = string(rope, "rope_type", string(rope, "type", "default"))
    default = 1e6 if architecture == "MixtralForCausalLM" else 1e4
    found: dict[str, Any] = {"rope_theta": number(rope, "rope_theta", number(config, "rope_theta", default))}
    if (fraction := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
        raise _unsupported("partial_rotary_factor", fraction, "1")
    if kind == "default":
        return found | {"rope_scaling": "none"} | {own: getattr(GPTConfig, own) for own in _SCALING}
    if kind != "llama3":
        raise _unsupported("rope_type", kind, "default or llama3")
    for own, theirs in _SCALING.items():
        found[own] = integer(rope, theirs) if own == "rope_original_length" else number(rope, theirs)
    return found | {"rope_scaling": "llama3"}


def config(settings: GPTConfig, base: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the config.json of a model, for transformers 4 and 5. Fields of `base` that it does not determine remain."""
    if settings.mlp != "swiglu":
        raise ConfigError(f"`model.mlp` is {settings.mlp}: must be swiglu in a Hugging Face folder", field="model.mlp")
    features = {"attention_bias": settings.attention_bias, "qk_norm": settings.qk_norm}
    among, besides = (_MIXTURES, " and `model.moe.num_experts`") if settings.moe.num_experts else (_DENSE, "")
    if features not in among.values():
        raise ConfigError(
            f"`model.attention_bias` is {settings.attention_bias}: must be none in a Hugging Face folder with `model.qk_norm` "
            f"{settings.qk_norm}{besides}",
            field="model.attention_bias",
        )
    kind = next(kind for kind, name in _TYPES.items() if among.get(name) == features)
    found: dict[str, Any] = {"architectures": [_TYPES[kind]], "model_type": kind, "hidden_act": "silu"}
    found |= {theirs: getattr(settings, own) for own, theirs in (_SIZES | _EPSILON).items()}
    found["intermediate_size"] = settings.d_ff
    if settings.moe.num_experts:
        found |= _moe_config(settings.moe, settings.d_ff, kind)
    found |= {"num_key_value_heads": settings.num_kv_heads, "head_dim": settings.head_size}
    found |= {"tie_word_embeddings": settings.head == "tied", "rope_theta": settings.rope_theta, "rope_scaling": None}
    if settings.rope_scaling == "llama3":
        found["rope_scaling"] = {theirs: getattr(settings, own) for own, theirs in _SCALING.items()} | {"rope_type": "llama3"}
    return {name: value for name, value in base.items() if name != "rope_parameters"} | found


def _moe_config(moe: MoEConfig, d_ff: int, kind: str) -> dict[str, Any]:
    context = "in a Hugging Face folder"
    require(moe.router != "sigmoid", "model.moe.router", moe.router, f"softmax-topk or topk-softmax {context}")
    require(moe.shared_experts == 0, "model.moe.shared_experts", moe.shared_experts, f"0 {context}")
    require(moe.weights_scale == 1, "model.moe.weights_scale", moe.weights_scale, f"1 {context}")
    # A softmax over the selected experts equals a softmax over all experts, divided by the sum over the selected experts.
    is_normalized = moe.router == "topk-softmax" or moe.weights == "normalized"
    found = {"num_experts_per_tok": moe.experts_per_token, "router_aux_loss_coef": moe.balance_loss}
    if kind == "mixtral":
        require(is_normalized, "model.moe.weights", moe.weights, f"normalized {context} with `model.qk_norm` none")
        return found | {"num_local_experts": moe.num_experts, "intermediate_size": moe.d_ff or d_ff}
    found |= {"num_experts": moe.num_experts, "moe_intermediate_size": moe.d_ff or d_ff, "norm_topk_prob": is_normalized}
    return found | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _unsupported(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"`{name}` is {value}: must be {allowed}", field=name)


HUGGING_FACE = HuggingFace(settings, config, tensors, ignored, copies)
