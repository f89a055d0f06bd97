"""PyTorch peer: a training step of GPT on one GPU with fused AdamW and clipping by the global norm.

    python -m benchmarks.peers.single_gpu '{"variant": "torch compile + CUDA graph", "config": {...}}'

The model is the reference of the parity tests, with dense MLPs or mixtures of experts, or a model of the same size from layers
of Transformer Engine (`te_variant.py`). "+ CUDA graph" captures the whole step, except FusedAdam with FP8 parameters.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import torch_gpt, torch_moe
from benchmarks.peers.protocol import answer, read_request
from benchmarks.peers.te_variant import is_te, parse_variant
from benchmarks.peers.torch_gpt import adamw, to_float8
from benchmarks.peers.torch_run import capture, compiled, time_steps, warm_up
from jgraph.train.config import TrainConfig


def build_model(variant: str, config: TrainConfig) -> tuple[Any, torch.optim.Optimizer]:
    """Creates the model and the optimizer of a variant on the default device."""
    if not is_te(variant):
        model = (torch_moe.GPT if config.model.moe.num_experts else torch_gpt.GPT)(config.model)
        return model, adamw(model.parameters(), config.optimizer, capturable=True)
    chosen = parse_variant(variant)
    from benchmarks.peers import te_gpt, te_layers, te_moe  # optional dependency

    model = (te_moe.GPT if config.model.moe.num_experts else te_gpt.GPT)(config.model, chosen)
    if chosen.graph == "attention":
        x_BTD = torch.empty(config.input.batch_size, config.input.seq_len, config.model.d_model, dtype=torch.bfloat16)
        te_moe.graph_attention(model.blocks, x_BTD, te_layers.rotary_angles(config.model, config.input.seq_len), model.recipe)
    return model, te_layers.make_optimizer(model, config.optimizer, chosen)


def make_step(
    variant: str, config: TrainConfig, model: Any, optimizer: torch.optim.Optimizer, tokens_BS: torch.Tensor
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Compiles or captures the training step of a variant, and warms it up. Returns it with a dict of its latest `loss`."""
    loss_fn = compiled(model.loss, variant)
    latest: dict[str, Any] = {}

    def gradients() -> None:
        optimizer.zero_grad(set_to_none=True)
        latest["loss"] = loss_fn(tokens_BS)
        latest["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)

    def step() -> None:
        gradients()
        optimizer.step()

    warm_up(step)
    if "CUDA graph" not in variant:
        return step, latest
    is_whole = "fp8-params" not in variant
    graph = capture(step if is_whole else gradients)
    return graph.replay if is_whole else lambda: (graph.replay(), optimizer.step()), latest


def main() -> None:
    """Entry point of the candidate process."""
    request = read_request()
    variant, config = request["variant"], TrainConfig.from_dict(request["config"])
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model, optimizer = build_model(variant, config)
    tokens_BS = torch.randint(0, config.model.vocab_size, (config.input.batch_size, config.input.seq_len + 1), device="cuda")
    with torch.no_grad():
        model.loss(tokens_BS)  # creates the rotary table before compilation
    if "float8" in variant:
        to_float8(model.blocks, variant.split()[2])
    run, latest = make_step(variant, config, model, optimizer, tokens_BS)
    time_steps(run)
    answer(loss=float(latest["loss"]))


if __name__ == "__main__":
    main()
