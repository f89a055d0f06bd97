"""Transformer Engine peer: grouped matmuls with `te.GroupedLinear`.

    python -m benchmarks.peers.te_grouped '{"variant": "te bf16", "shape": [64, 32, 16, 4], "groups": [16, 16, 16, 16]}'

The module has no separate matmuls. Each one is timed as the forward and a backward with only this gradient, minus the forward.
With an FP8 recipe, the time includes the quantization of rows and weights, and the padding of each group to the alignment of
the recipe. `+ CUDA graph` removes the host time. It is valid only for a fixed number of rows per group.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportAttributeAccessIssue=false

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.protocol import Run, Timer, answer, read_request, take_turns
from benchmarks.peers.te_layers import autocast, make_recipe
from benchmarks.peers.te_library import get_align_size_for_quantization, is_module_grouped_tensor_path_supported, te
from benchmarks.peers.te_variant import parse_variant
from benchmarks.peers.torch_run import capture, device_name, wait, warm_up

# M rows, G groups, K and N dimensions of the matrix of a group


def grouped_runs(request: dict[str, Any]) -> dict[str, Run]:
    """Returns the warm functions to time by leg: the forward, and the forward with the backward of each other leg."""
    variant, (M, K, N, G) = parse_variant(request["variant"]), request["shape"]
    recipe = make_recipe(variant)
    splits_on_gpu = is_module_grouped_tensor_path_supported(recipe, torch.bfloat16)
    x_MK, dy_MN = (torch.randn(M, width, device="cuda", dtype=torch.bfloat16) for width in (K, N))
    sizes_G: list[int] = request["groups"]
    alignment = get_align_size_for_quantization(recipe) if recipe else 1
    padded_G = [math.ceil(size / alignment) * alignment for size in sizes_G]
    splits_G = torch.tensor(padded_G, device="cuda" if splits_on_gpu else "cpu")
    padding, unpadding = te.Fp8Padding(G, alignment), te.Fp8Unpadding(G, alignment)  # return their input if it is aligned

    def linear(**options: Any) -> Any:
        return te.GroupedLinear(G, K, N, bias=False, params_dtype=torch.bfloat16, use_grouped_tensor=splits_on_gpu, **options)

    def forward(module: Any, x: Tensor) -> Tensor:
        with autocast(recipe):
            return unpadding(module(padding(x, sizes_G)[0], splits_G), sizes_G)

    whole, frozen, fused = linear(), linear(), linear(fuse_wgrad_accumulation=True)
    frozen.requires_grad_(False)
    for weight in fused.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    wanting_x = x_MK.detach().requires_grad_()
    weights = list(whole.parameters())

    def fused_wgrad() -> None:
        forward(fused, x_MK).backward(dy_MN)

    steps: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(whole, wanting_x),
        "dgrad": lambda: torch.autograd.grad(forward(frozen, wanting_x), wanting_x, dy_MN),
        "wgrad": lambda: torch.autograd.grad(forward(whole, x_MK), weights, dy_MN),
        "onto_float32": fused_wgrad,
    }
    runs: dict[str, Run] = {}
    for name, step in steps.items():
        warm_up(step)
        runs[name] = capture(step).replay if variant.graph == "step" else step
    return runs


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    torch.manual_seed(0)
    runs = grouped_runs(request)
    answer(device=device_name())

    def measure(timer: Timer) -> dict[str, Any]:
        timed = timer.each(runs, wait)
        forward_ms = timed["forward_ms"]
        legs = {f"{name}_ms": timed[f"{name}_ms"] - (forward_ms if name != "forward" else 0.0) for name in runs}
        return legs | {"ms": sum(legs.values()), "power_watts": timed["power_watts"]}

    take_turns(measure)


if __name__ == "__main__":
    main()
