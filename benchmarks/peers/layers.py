"""PyTorch peer: forward and backward of mixture-of-experts layers on random activations, with bfloat16 weights.

Layers of Transformer Engine need the word `bf16-params` or `fp8-params` (`te_variant.py`).

    python -m benchmarks.peers.layers '{"variant": "torch compile + CUDA graph", "config": {...}}'

Gradients are set to None after each iteration.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.protocol import read_request
from benchmarks.peers.te_variant import is_te, parse_variant
from benchmarks.peers.torch_gpt import init_parameters, rotary
from benchmarks.peers.torch_moe import Block, apply_blocks
from benchmarks.peers.torch_run import capture, compiled, own_device, time_steps, warm_up
from jgraph.train.config import TrainConfig
from jgraph_models.gpt_config import GPTConfig


def build_layers(variant: str, model: GPTConfig, x_BTD: Tensor) -> tuple[nn.ModuleList, Any, Any]:
    """Creates the layers on the default device. Returns them, the function that applies them, and the rotary table."""
    T = x_BTD.shape[1]
    if not is_te(variant):
        blocks = nn.ModuleList([Block(model) for _ in range(model.num_layers)])
        init_parameters(blocks.parameters())
        blocks.to(x_BTD.dtype)  # the router computes in float32 nevertheless
        return blocks, apply_blocks, rotary(model, T, torch.empty(0))
    chosen = parse_variant(variant)
    from benchmarks.peers import te_layers, te_moe  # optional dependency

    table = te_layers.rotary_angles(model, T)
    blocks, call, recipe = te_moe.make_layers(model, chosen)
    if chosen.graph == "attention":
        te_moe.graph_attention(blocks, x_BTD, table, recipe)
    return blocks, call, table


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    variant, config = request["variant"], TrainConfig.from_dict(request["config"])
    model, device = config.model, own_device()  # the CPU has no CUDA graphs
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    dtype = getattr(torch, model.compute_dtype)
    with device:
        x_BTD, dy_BTD = (torch.randn(config.input.batch_size, config.input.seq_len, model.d_model).to(dtype) for _ in range(2))
        blocks, call, table = build_layers(variant, model, x_BTD)
    x_BTD.requires_grad_()
    parameters = [x_BTD, *blocks.parameters()]
    call = compiled(call, variant)

    def iteration() -> None:
        for tensor in parameters:
            tensor.grad = None
        y_BTD, balance = call(blocks, x_BTD, table)
        torch.autograd.backward((y_BTD, balance), (dy_BTD, torch.full_like(balance, model.moe.balance_loss)))

    if device.type == "cuda":
        warm_up(iteration)
    run = capture(iteration).replay if "CUDA graph" in variant else iteration
    run()
    time_steps(run)


if __name__ == "__main__":
    main()
