"""PyTorch peer: a training step of GPT on one GPU with fused AdamW and clipping by the global norm.

    python -m benchmarks.peers.single_gpu '{"variant": "torch compile + CUDA graph", "config": {...}}'

The model is the reference of the parity tests, with dense MLPs or mixtures of experts, or a model of the same size from layers
of Transformer Engine ("torch te delayed + CUDA graph"). "+ CUDA graph" captures the whole step.
"""

from typing import Any

import torch

from benchmarks.peers import torch_gpt, torch_moe
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.peers.torch_gpt import adamw, to_float8, warm_up
from jgraph.train.config import TrainConfig


def build_model(variant: str, config: TrainConfig) -> tuple[Any, torch.optim.Optimizer]:
    """Creates the model and the optimizer of a variant on the default device.

    Args:
        variant: The variant.
        config: Config of the run.

    Returns:
        The model and the optimizer.
    """
    settings = variant.split()
    if "te" not in settings:
        model = (torch_moe.GPT if config.model.moe.num_experts else torch_gpt.GPT)(config.model)
        return model, adamw(model, config.optimizer, capturable=True)
    from benchmarks.peers import te_gpt  # optional dependency

    dtype = torch.bfloat16 if "bf16-params" in settings else torch.float32
    model = te_gpt.GPT(config.model, settings[2], dtype)
    if dtype == torch.bfloat16:
        return model, te_gpt.fused_adam(model, config.optimizer)
    return model, adamw(model, config.optimizer, capturable=True)


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
    # No CUDA graphs of Inductor: they copy the inputs. The whole step is captured below.
    mode = "max-autotune-no-cudagraphs" if "max-autotune" in variant else None
    loss_fn = torch.compile(model.loss, mode=mode) if "compile" in variant else model.loss
    latest: dict[str, Any] = {}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        latest["loss"] = loss_fn(tokens_BS)
        latest["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()

    warm_up(step)
    run: Any = step
    if "graph" in variant:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
        torch.cuda.empty_cache()  # frees the memory of the eager steps; the graph has its own pool
    answer(device=torch.cuda.get_device_name())
    take_turns(lambda timer: timer.back_to_back(run, torch.cuda.synchronize))
    answer(loss=float(latest["loss"]), peak_bytes=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
