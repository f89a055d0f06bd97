"""PyTorch peer: forward and backward of GPT blocks with `make_graphed_callables`, and in eager mode.

    python -m benchmarks.peers.blocks '{"variant": "eager", "size": {...}}'

The blocks are those of the parity tests, or of Transformer Engine with the prefix `te`, in bfloat16 with a float32 rotary
table. Gradients are set to None after each iteration.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportAttributeAccessIssue=false

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.protocol import Timer, answer, read_request, take_turns
from benchmarks.peers.torch_gpt import Block, init_parameters, rotary
from benchmarks.peers.torch_run import own_device, wait
from jgraph_models.gpt import GPTConfig


class StandaloneBlock(nn.Module):
    """A block that owns its rotary table, because graphed callables accept only inputs that require gradients."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block: Block, length: int):
        super().__init__()
        init_parameters(block.parameters())
        self.block = block.bfloat16()
        for name, table in zip(("cos", "sin"), rotary(block.config, length, torch.zeros(())), strict=True):
            self.register_buffer(name, table)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Applies the block."""
        return self.block(x_BTD, (self.cos, self.sin))


class BlockWithoutRotary(Block):
    """A block without rotary embedding: a lower bound for PyTorch, where the embedding takes several kernels."""

    def attention(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> Tensor:
        """Computes causal self-attention. Ignores `rotary_TK`."""
        H, (B, T, D) = self.config.num_heads, x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


VARIANTS = {
    "graphed callables": (Block, True),
    "graphed callables, no rotary": (BlockWithoutRotary, True),
    "eager": (Block, False),
}
# Whether each replay copies its parameter gradients (owned gradients), or returns the static buffers of the graph.
TE_VARIANTS = {"te graphed callables": True, "te graphed callables, aliased gradients": False}


def build_blocks(variant: str, config: GPTConfig, length: int, device: torch.device) -> tuple[nn.Module, ...]:
    """Creates the blocks of a variant, not yet graphed."""
    if variant in VARIANTS:
        cls, _ = VARIANTS[variant]
        return tuple(StandaloneBlock(cls(config), length).to(device) for _ in range(config.num_layers))
    from benchmarks.peers import te_layers  # optional dependency

    return tuple(te_layers.StandaloneBlock(config, length) for _ in range(config.num_layers))


def graph_blocks(variant: str, blocks: tuple[nn.Module, ...], x: Tensor) -> Any:
    """Captures the blocks in CUDA graphs if the variant has them."""
    samples = tuple((torch.randn_like(x, requires_grad=True),) for _ in blocks)
    if variant in TE_VARIANTS:
        from benchmarks.peers.te_library import te

        return te.make_graphed_callables(blocks, samples, clone_param_grads_on_return=TE_VARIANTS[variant])
    _, is_graphed = VARIANTS[variant]
    return torch.cuda.make_graphed_callables(blocks, samples) if is_graphed else blocks


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    size = request["size"]
    device = own_device()  # the CPU supports the eager variant
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
    modules = build_blocks(request["variant"], config, size["length"], device)
    parameters = [p for block in modules for p in block.parameters()]
    x, dy = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    blocks = graph_blocks(request["variant"], modules, x)

    def iteration() -> None:
        y: Any = x
        for block in blocks:
            y = block(y)
        y.backward(dy)
        for tensor in (x, *parameters):
            tensor.grad = None

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
