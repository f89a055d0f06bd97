"""Peer: `torch.cuda.make_graphed_callables` and eager, on the block of the parity tests, forward and backward.

    python -m benchmarks.peers.blocks '{"variant": "eager", "size": {...}}'

Everything is bfloat16, the rotary table float32. Gradients are dropped after each iteration (`zero_grad(set_to_none=True)`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.protocol import Timer, answer, read_request, take_turns
from benchmarks.peers.torch_gpt import Block, rotary
from jgraph_models.gpt import GPTConfig


class Alone(nn.Module):
    """Holds a block with its rotary table inside: graphed callables take nothing but tensors that ask for gradients."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: Block, length: int):
        super().__init__()
        for p in block.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.ones_(p)
        self.block = block.bfloat16()
        for name, table in zip(("cos", "sin"), rotary(block.config, length, torch.zeros(())), strict=True):
            self.register_buffer(name, table)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.block(x_BTD, (self.cos, self.sin))


class Unrotated(Block):
    """Leaves out the rotary embedding, which takes several kernels here: less work than ours, so a bound from below."""

    def attention(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
        H, (B, T, D) = self.config.num_heads, x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


VARIANTS = {"graphed callables": (Block, True), "graphed callables, no rotary": (Unrotated, True), "eager": (Block, False)}


def main() -> None:
    request = read_request()
    size = request["size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu to try this script out, with eager
    config = GPTConfig(
        vocab_size=256,
        num_layers=size["num_blocks"],
        d_model=size["d_model"],
        num_heads=size["num_heads"],
        num_kv_heads=size["num_heads"],
        d_ff=size["d_ff"],
    )
    shape = (size["batch"], size["length"], config.d_model)
    torch.manual_seed(0)
    cls, graphed = VARIANTS[request["variant"]]
    blocks: Any = tuple(Alone(cls(config), size["length"]).to(device) for _ in range(size["num_blocks"]))
    parameters = [p for block in blocks for p in block.parameters()]
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    if graphed:
        samples = tuple((torch.randn_like(x, requires_grad=True),) for _ in blocks)
        blocks = torch.cuda.make_graphed_callables(blocks, samples)

    def iteration() -> None:
        y: Any = x
        for block in blocks:
            y = block(y)
        y.backward(dy)
        for tensor in (x, *parameters):
            tensor.grad = None

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    replays = 2 * len(blocks)
    iteration()
    wait()
    answer(replays=replays)

    def measure(timer: Timer) -> dict[str, Any]:
        ms = timer.back_to_back(iteration, wait)["ms"]
        return {"ms": ms, "host_us": timer.dispatch_seconds(iteration, wait) / replays * 1e6}

    take_turns(measure)


if __name__ == "__main__":
    main()
