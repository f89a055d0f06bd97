"""Peer: greedy text in PyTorch, from a static cache: a plain loop around a compiled token, or transformers' own generate.

With `tuned`, Inductor searches for the best tiles (`coordinate_descent_tuning`, as gpt-fast does), and the products of a token
are its own kernels instead of cuBLAS's.

python -m benchmarks.peers.decode '{"variant": "loop", "prompt": 128, "new": 256, "model": {...}}'
"""

from typing import Any

import torch
import torch._inductor.config
from torch.nn import functional as F

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.peers.torch_gpt import GPT, rotary, rotate
from benchmarks.rows import gpt_config_from
from jgraph_models.gpt_config import GPTConfig


@torch.no_grad()
def main() -> None:
    request = read_request()
    config, device = gpt_config_from(request["model"]), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = getattr(torch, config.compute_dtype)
    prompt_1T = torch.randint(0, config.vocab_size, (1, request["prompt"]), device=device)
    name, _, tuned = request["variant"].partition(" ")
    torch._inductor.config.coordinate_descent_tuning = tuned == "tuned"
    make = {"loop": plain_loop, "transformers": of_transformers}[name]
    run = make(config, prompt_1T, request["new"], device, dtype)
    for _ in range(3):  # compiles, then records CUDA graphs
        run()
    answer(device=torch.cuda.get_device_name() if device == "cuda" else "cpu")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def measure(timer: Any) -> Any:
        with torch.no_grad():
            timed = timer.back_to_back(run, wait)
        return timed | {"ms": timed["ms"] / request["new"]}

    take_turns(measure)


def plain_loop(config: GPTConfig, prompt_1T: torch.Tensor, new: int, device: str, dtype: torch.dtype) -> Any:
    model = GPT(config).to(device=device, dtype=dtype)
    H, G, K = config.num_heads, config.num_kv_heads, config.head_size
    T, length = prompt_1T.shape[1], prompt_1T.shape[1] + new
    caches = [torch.zeros(2, 1, G, length, K, device=device, dtype=dtype) for _ in model.blocks]
    for cache in caches if device == "cuda" else ():
        torch._dynamo.mark_static_address(cache)  # or what writes to it would not be recorded
    tables = rotary(config, length, torch.empty(0, device=device))
    head_VD = model.embedding if config.head == "tied" else model.head

    def read(tokens_1T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Reads tokens into the cache; returns the one that the last of them makes likeliest."""
        x_BTD = F.embedding(tokens_1T, model.embedding)
        rows = tables[0][positions_T], tables[1][positions_T]
        mask = torch.arange(length, device=device) <= positions_T[:, None]
        block: Any
        for block, cache in zip(model.blocks, caches, strict=True):
            q, k, v = block.qkv(block.attention_norm(x_BTD)).view(1, -1, H + 2 * G, K).split([H, G, G], dim=2)
            for kept, one in zip(cache, (rotate(k, rows), v), strict=True):
                kept.index_copy_(2, positions_T, one.transpose(1, 2))
            q = rotate(q, rows).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=mask, enable_gqa=G != H)
            x_BTD = x_BTD + block.out(y.transpose(1, 2).reshape(1, -1, H * K))
            x_BTD = x_BTD + block.mlp(block.mlp_norm(x_BTD))
        return F.linear(model.norm(x_BTD[:, -1:]), head_VD).argmax(-1)

    token = torch.compile(read, mode="reduce-overhead") if device == "cuda" else read
    places = torch.arange(length, device=device)

    def run() -> list[int]:
        with torch.no_grad():
            found = [read(prompt_1T, places[:T])]
            for position in range(T, length - 1):
                found.append(token(found[-1], places[position : position + 1]).clone())  # a replay takes the buffer
            return torch.cat(found, 1)[0].tolist()

    return run


def of_transformers(config: GPTConfig, prompt_1T: torch.Tensor, new: int, device: str, dtype: torch.dtype) -> Any:
    import transformers

    assert config.mlp == "swiglu", "a Llama has SwiGLU"
    own = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.head == "tied",
        eos_token_id=None,  # or each token would be compared with it
    )
    model = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    # Generate compiles a token for it on a GPU. Kept from call to call: for one that lies elsewhere, graphs are recorded anew.
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
