"""PyTorch peer: greedy generation with a static KV cache, by a loop around a compiled decode step or by `generate`.

`tuned` enables `coordinate_descent_tuning` of Inductor, as in gpt-fast. The matrix-vector products of a decode step then use
kernels of Inductor instead of cuBLAS.

python -m benchmarks.peers.decode '{"variant": "loop", "prompt": 128, "new": 256, "model": {...}}'
"""

from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.peers.torch_gpt import GPT, rotary, rotate
from benchmarks.peers.torch_run import device_name, own_device, wait
from benchmarks.rows import gpt_config_from
from jgraph_models.gpt_config import GPTConfig


@torch.no_grad()
def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    config, device = gpt_config_from(request["model"]), own_device()
    torch.manual_seed(0)
    dtype = getattr(torch, config.compute_dtype)
    prompt_1T = torch.randint(0, config.vocab_size, (1, request["prompt"]), device=device)
    name, _, tuned = request["variant"].partition(" ")
    torch._inductor.config.coordinate_descent_tuning = tuned == "tuned"
    make = {"loop": loop_generator, "transformers": transformers_generator}[name]
    run = make(config, prompt_1T, request["new"], device, dtype)
    for _ in range(3):  # compiles and records CUDA graphs
        run()
    answer(device=device_name())

    def measure(timer: Any) -> Any:
        with torch.no_grad():
            return timer.per_token(run, wait, request["new"])

    take_turns(measure)


def loop_generator(config: GPTConfig, prompt_1T: Tensor, new: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a function that generates tokens with a compiled decode step."""
    model = GPT(config).to(device=device, dtype=dtype)
    H, G, K = config.num_heads, config.num_kv_heads, config.head_size
    T, length = prompt_1T.shape[1], prompt_1T.shape[1] + new
    caches = [torch.zeros(2, 1, G, length, K, device=device, dtype=dtype) for _ in model.blocks]
    for cache in caches if device.type == "cuda" else ():
        torch._dynamo.mark_static_address(cache)  # otherwise writes to the cache prevent a CUDA graph
    tables = rotary(config, length, torch.empty(0, device=device))
    head_VD = model.embedding if config.head == "tied" else model.head

    def read(tokens_1T: Tensor, positions_T: Tensor) -> Tensor:
        """Adds tokens to the cache and returns the most likely next token."""
        x_BTD = F.embedding(tokens_1T, model.embedding)
        rows = tables[0][positions_T], tables[1][positions_T]
        mask = torch.arange(length, device=device) <= positions_T[:, None]
        block: Any
        for block, cache in zip(model.blocks, caches, strict=True):
            q, k, v = block.qkv(block.attention_norm(x_BTD)).view(1, -1, H + 2 * G, K).split([H, G, G], dim=2)
            for stored, one in zip(cache, (rotate(k, rows), v), strict=True):
                stored.index_copy_(2, positions_T, one.transpose(1, 2))
            q = rotate(q, rows).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask, enable_gqa=G != H)
            x_BTD = x_BTD + block.out(y.transpose(1, 2).reshape(1, -1, H * K))
            x_BTD = x_BTD + block.mlp(block.mlp_norm(x_BTD))
        return F.linear(model.norm(x_BTD[:, -1:]), head_VD).argmax(-1)

    token = torch.compile(read, mode="reduce-overhead") if device.type == "cuda" else read
    positions = torch.arange(length, device=device)

    def run() -> list[int]:
        with torch.no_grad():
            generated = [read(prompt_1T, positions[:T])]
            for position in range(T, length - 1):
                output = token(generated[-1], positions[position : position + 1])
                generated.append(output.clone())  # the next replay overwrites the output
            return torch.cat(generated, 1)[0].tolist()

    return run


def transformers_generator(config: GPTConfig, prompt_1T: Tensor, new: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a function that generates tokens with a Llama of transformers, which has SwiGLU."""
    import transformers

    assert config.mlp == "swiglu", "transformers needs a model with SwiGLU"
    own = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.head == "tied",
        eos_token_id=None,  # avoids a comparison per token
    )
    model = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    # With a static cache, `generate` compiles the decode step. Reuse the cache, because a new one triggers a new graph capture.
    cache = transformers.StaticCache(config=own, max_cache_len=prompt_1T.shape[1] + new)
    choices: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "past_key_values": cache, "pad_token_id": 0}
    mask = torch.ones_like(prompt_1T)

    def run() -> list[int]:
        cache.reset()
        tokens = model.generate(prompt_1T, attention_mask=mask, **choices)[0, prompt_1T.shape[1] :].tolist()
        assert len(tokens) == new
        return tokens

    return run


if __name__ == "__main__":
    main()
