"""PyTorch peer: a LoRA training step of a transformers model with PEFT.

    python -m benchmarks.peers.peft_lora '{"variant": "eager", "config": {...}}'

The base model has random weights in bfloat16 and the sizes of the config. PEFT keeps the adapters in float32. Attention is
PyTorch's scaled_dot_product_attention, and AdamW is fused.
"""

from typing import Any

import torch

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.peers.torch_gpt import warm_up
from jgraph.train.config import TrainConfig
from jgraph_models.hugging_face import HUGGING_FACE

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def build_model(config: TrainConfig, device: str) -> Any:
    """Creates the model with adapters.

    Args:
        config: Config of the run, with adapters.
        device: Device of the model.

    Returns:
        The `peft.PeftModel`.
    """
    import peft  # pyright: ignore[reportMissingImports] - optional dependency
    import transformers

    fields = HUGGING_FACE.config(config.model, {})
    kind = getattr(transformers, fields["architectures"][0])
    base_config = kind.config_class(**{name: value for name, value in fields.items() if name != "rope_scaling"})
    base_config._attn_implementation = "sdpa"
    with torch.device(device):
        base = kind(base_config).to(torch.bfloat16)
    lora = config.lora
    choices = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(TARGETS), task_type="CAUSAL_LM")  # pyright: ignore[reportArgumentType]
    return peft.get_peft_model(base, choices)


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    variant, config = request["variant"], TrainConfig.from_dict(request["config"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build_model(config, device)
    model.train()
    if variant == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        trained, settings.learning_rate, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay, fused=True
    )
    shape = config.input.batch_size, config.input.seq_len
    tokens_BT = torch.randint(0, config.model.vocab_size, shape, device=device)
    forward = torch.compile(model) if variant == "compile" else model
    latest: dict[str, Any] = {}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        latest["loss"] = forward(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        latest["loss"].backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        optimizer.step()

    is_gpu = device == "cuda"
    if is_gpu:
        warm_up(step)
    else:
        step()
    answer(device=torch.cuda.get_device_name() if is_gpu else "cpu")
    take_turns(lambda timer: timer.back_to_back(step, torch.cuda.synchronize if is_gpu else lambda: None))
    answer(loss=float(latest["loss"]), peak_bytes=torch.cuda.max_memory_allocated() if is_gpu else 0)


if __name__ == "__main__":
    main()
