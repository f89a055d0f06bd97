"""PyTorch peer: a schedule of `torch.distributed.pipelining` on MLP or GPT stages. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.pipelining '{"schedule": "Schedule1F1B", ...}'

The MLP uses bfloat16 for weights, activations and gradients. The GPT has float32 weights that are cast at use. The embedding is
on the first stage; norm, head and loss are on the last. A tied head has its own matrix here, so this peer does not sum the two
gradients, unlike jgraph. PyTorch accumulates gradients in the dtype of the parameters.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from benchmarks.peers.ranks import RankContext
from benchmarks.peers.torch_gpt import Block, RMSNorm, cross_entropy, init_parameters, linear, rotary
from benchmarks.rows import gpt_config_from
from jgraph_models.gpt import GPTConfig

# M microbatches, B batch, T sequence, N tokens, D model, V vocabulary


@dataclass(frozen=True)
class PipelineJob:
    """The stages, the batch and the loss of a pipeline.

    `first`, `between` and `last` are samples of inputs and outputs of stages.
    """

    module: Callable[[int], nn.Module]
    first: Tensor
    between: Tensor
    last: Tensor
    batch: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class MLP(nn.Module):
    """A residual MLP in bfloat16."""

    def __init__(self, d_model: int, d_ff: int, device: torch.device):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False, dtype=torch.bfloat16, device=device)
        self.down = nn.Linear(d_ff, d_model, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Returns `x + gelu(x @ a) @ b`."""
        return x_ND + self.down(F.gelu(self.up(x_ND), approximate="tanh"))


class GPTStage(nn.Module):
    """A pipeline stage of GPT."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, length: int, *, layers: int, is_first: bool, is_last: bool):
        super().__init__()
        shape = config.vocab_size, config.d_model
        self.dtype = getattr(torch, config.compute_dtype)
        self.embedding = nn.Parameter(torch.empty(shape)) if is_first else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.norm = RMSNorm(config) if is_last else None
        self.head = nn.Parameter(torch.empty(shape)) if is_last else None
        init_parameters(self.parameters())
        for name, table in zip(("cos", "sin"), rotary(config, length, torch.zeros(())), strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens (first stage) or activations to activations or logits (last stage)."""
        if self.embedding is not None:
            x = F.embedding(x, self.embedding).to(self.dtype)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return x if self.norm is None or self.head is None else linear(self.norm(x), self.head)


def main() -> None:
    """Entry point of each rank."""
    request = json.loads(sys.argv[1])
    context = RankContext.join()
    torch.manual_seed(context.rank)
    step = pipeline_step(request["schedule"], request["compile"], request["size"], context)
    for _ in range(3):
        context.timed(step)
    context.take_turns(step, each=True)
    alone = [context.timed(step) for _ in range(5)]
    stream_ms, _ = context.timed(step, 5)
    context.answer(stream_ms=stream_ms, host_ms=statistics.median(host for _, host in alone), peak_bytes=context.peak_bytes())
    context.leave()


def mlp_job(size: dict[str, Any], num_stages: int, device: torch.device) -> PipelineJob:
    """Creates the job of an MLP."""

    def module(stage: int) -> nn.Module:
        return nn.Sequential(*(MLP(size["d_model"], size["d_ff"], device) for _ in range(size["layers"] // num_stages)))

    sample = torch.zeros(size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    inner = sample.clone().requires_grad_()  # torch 2.13 sends gradients only if the samples require them
    x = torch.randn(size["microbatches"] * size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    return PipelineJob(module, sample, inner, inner, x, x, lambda y, _: 0.5e-3 * y.float().square().sum())


def gpt_job(size: dict[str, Any], num_stages: int, device: torch.device) -> PipelineJob:
    """Creates the job of a GPT."""
    config, B, T = gpt_config_from(size["model"]), size["batch"], size["length"]
    dtype = getattr(torch, config.compute_dtype)

    def module(stage: int) -> nn.Module:
        layers, last = config.num_layers // num_stages, stage == num_stages - 1
        return GPTStage(config, T, layers=layers, is_first=stage == 0, is_last=last).to(device)

    def sample(width: int) -> Tensor:
        return torch.zeros(B, T, width, dtype=dtype, device=device).requires_grad_()

    tokens_NS = torch.randint(0, config.vocab_size, (size["microbatches"] * B, T + 1), device=device)
    batch, target = tokens_NS[:, :-1].contiguous(), tokens_NS[:, 1:].contiguous()
    return PipelineJob(module, batch[:B], sample(config.d_model), sample(config.vocab_size), batch, target, cross_entropy)


def pipeline_step(name: str, compile: bool, size: dict[str, Any], context: RankContext) -> Callable[[], None]:
    """Builds the stages of this rank, and returns a function that dispatches a step of a schedule class."""
    rank, ranks, device = context.rank, context.ranks, context.device
    cls = getattr(schedules, name)
    is_multi_stage = issubclass(cls, schedules.PipelineScheduleMulti)
    is_vee = "ZBV" in name or "DualPipeV" in name
    local_stages = [rank] if not is_multi_stage else [rank, 2 * ranks - 1 - rank] if is_vee else [rank, rank + ranks]
    num_stages = ranks * len(local_stages)
    job = (gpt_job if "model" in size else mlp_job)(size, num_stages, device)
    modules = [job.module(stage) for stage in local_stages]
    loss = job.loss
    if compile:
        # A split backward runs the autograd graph twice, so the first run must not free its buffers.
        functorch.donated_buffer = "1F1B" in name
        for module in modules:
            module.compile()
        loss = torch.compile(loss)
    last = num_stages - 1
    stages = [
        PipelineStage(
            module,
            stage,
            num_stages,
            device,
            input_args=(job.between if stage else job.first,),
            output_args=(job.last if stage == last else job.between,),
        )
        for module, stage in zip(modules, local_stages, strict=True)
    ]
    schedule = cls(stages if is_multi_stage else stages[0], size["microbatches"], loss_fn=loss, scale_grads=False)
    args = (job.batch,) if 0 in local_stages else ()
    extra = {"target": job.target} if last in local_stages else {}

    def step() -> None:
        schedule.step(*args, **extra, **({"losses": []} if extra else {}))
        for module in modules:
            module.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
