"""PyTorch peer: a LoRA training step of a transformers model with PEFT.

    python -m benchmarks.peers.peft_lora '{"variant": "eager", "config": {...}}'

The base model has random weights in bfloat16 and the sizes of the config. PEFT keeps the adapters in float32, and autocast
computes them in bfloat16. Attention is PyTorch's scaled_dot_product_attention, and AdamW is fused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.protocol import read_request
from benchmarks.peers.torch_gpt import adamw, init_parameters
from benchmarks.peers.torch_run import own_device, time_steps, training_step, warm_up
from jgraph.train.config import TrainConfig
from jgraph_models.hugging_face import HUGGING_FACE

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_model(config: TrainConfig, device: torch.device, prepare: Callable[[nn.Module], object] = lambda layer: None) -> Any:
    """Creates the model with adapters, with the same weights in every process. Calls `prepare` with each initialized layer.

    The matrices of the adapters are all random, so that all have gradients.
    """
    import peft  # pyright: ignore[reportMissingImports] - optional dependency
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers builds no mask for an attention function that it does not know, and `sdpa_attention_forward` is then causal.
    # Its search for packed sequences would wait for the GPU in each step, and would pass a dense mask under torch.compile.
    transformers.AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    fields = HUGGING_FACE.config(config.model, {})
    kind = getattr(transformers, fields["architectures"][0])
    base_config = kind.config_class(**{name: value for name, value in fields.items() if name != "rope_scaling"})
    base_config._attn_implementation = "causal_sdpa"
    lora = config.lora
    choices = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(TARGETS), task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    with torch.device("meta"):
        base = kind(base_config).to(getattr(torch, lora.base_dtype))
        model = peft.get_peft_model(base, choices)
    torch.manual_seed(0)
    decoder = base.model

    def fill(part: nn.Module) -> None:
        part.to_empty(device=device)
        init_parameters(part.parameters())

    for layer in decoder.layers:
        fill(layer)
        prepare(layer)
    for part in (decoder.embed_tokens, decoder.norm, base.lm_head):
        fill(part)
    base.tie_weights()
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(base_config)  # computes its frequencies
    return model.train()


def make_step(model: Any, config: TrainConfig, tokens_BT: Tensor, forward: Callable[..., Any]) -> Callable[[], Tensor]:
    """Returns a training step of the adapters on a fixed batch. `forward` is the model, or a compiled version of it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return training_step(
        lambda: forward(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss,
        adamw(trained, config.optimizer),
        partial(torch.nn.utils.clip_grad_norm_, trained, config.optimizer.clip_norm),
    )


def checkpoint_layers(model: Any) -> None:
    """Recomputes the decoder layers in the backward, as TRL does by default."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def main() -> None:
    """Entry point of the candidate process."""
    from peft.helpers import disable_input_dtype_casting  # pyright: ignore[reportMissingImports] - optional dependency

    request = read_request()
    variant, config = request["variant"], TrainConfig.from_dict(request["config"])
    device = own_device()
    torch.set_float32_matmul_precision("high")
    model = build_model(config, device)
    if variant == "checkpointing":
        checkpoint_layers(model)
    called = torch.compile(model) if variant == "compile" else model
    compute_dtype = getattr(torch, config.model.compute_dtype)
    is_mixed = compute_dtype != torch.float32

    def forward(**inputs: Any) -> Any:
        with torch.autocast(device.type, compute_dtype, enabled=is_mixed):
            return called(**inputs)

    tokens_BT = torch.randint(0, config.model.vocab_size, (config.input.batch_size, config.input.seq_len), device=device)
    step = make_step(model, config, tokens_BT, forward)
    # Autocast casts the adapters. PEFT's own cast of their inputs to float32 would copy each input.
    with disable_input_dtype_casting(model, active=is_mixed):
        loss = float(step())
        if device.type == "cuda":
            warm_up(step)
        time_steps(step, loss=loss)


if __name__ == "__main__":
    main()
