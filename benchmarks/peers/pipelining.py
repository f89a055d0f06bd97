"""Peer: a schedule of `torch.distributed.pipelining` on stages of x + gelu(x @ a) @ b, or of GPT. Rank 0 prints a row a size.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.pipelining '{"schedule": "Schedule1F1B", ...}'

MLP: weights, activations and gradients are bfloat16. GPT: as in the parity tests, float32 weights cast at use; embedding on the
first stage, norm, head and cross-entropy on the last. Tied, the two have a matrix each here, so their gradients are not summed,
which is less than jgraph does. torch adds the microbatches' gradients up in the parameters' dtype.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from benchmarks.peers.protocol import Clock, answer, request
from benchmarks.peers.ranks import join
from jgraph.config import ModelConfig
from tests.parity.torch_gpt import Block, RMSNorm, linear, rotary

# M microbatches, B batch, T sequence, N tokens, D model, V vocabulary


@dataclass(frozen=True)
class Job:
    """What a schedule is to play.

    Attributes:
        module: makes a stage, of its number.
        first, between, last: samples of what goes into the first stage, from one to the next, and out of the last.
        batch, target: of all microbatches.
    """

    module: Callable[[int], nn.Module]
    first: Tensor
    between: Tensor
    last: Tensor
    batch: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


class MLP(nn.Module):
    def __init__(self, d_model: int, d_ff: int, device: torch.device):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False, dtype=torch.bfloat16, device=device)
        self.down = nn.Linear(d_ff, d_model, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.down(F.gelu(self.up(x_ND), approximate="tanh"))


class Part(nn.Module):
    """A stage of GPT."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, length: int, *, layers: int, is_first: bool, is_last: bool):
        super().__init__()
        shape = config.vocab_size, config.d_model
        self.dtype = getattr(torch, config.compute_dtype)
        self.embedding = nn.Parameter(torch.empty(shape)) if is_first else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(layers))
        self.norm = RMSNorm(config) if is_last else None
        self.head = nn.Parameter(torch.empty(shape)) if is_last else None
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.ndim > 1 else nn.init.ones_(p)
        for name, table in zip(("cos", "sin"), rotary(config, length, torch.zeros(())), strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = F.embedding(x, self.embedding).to(self.dtype)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return x if self.norm is None or self.head is None else linear(self.norm(x), self.head)


def main() -> None:
    asked = request()
    rank, ranks, device = join()
    torch.manual_seed(rank)
    for name, size in asked["sizes"].items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = measure(asked["schedule"], asked["compile"], size, Clock(**asked["clock"]), rank, ranks, device)
        if rank == 0:
            answer(size=name, schedule=asked["schedule"], **row)
    dist.destroy_process_group()


def mlp_job(size: dict[str, Any], num_stages: int, device: torch.device) -> Job:
    def module(stage: int) -> nn.Module:
        return nn.Sequential(*(MLP(size["d_model"], size["d_ff"], device) for _ in range(size["layers"] // num_stages)))

    sample = torch.zeros(size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    inner = sample.clone().requires_grad_()  # torch 2.13 sends gradients only to where these samples ask for them
    x = torch.randn(size["microbatches"] * size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    return Job(module, sample, inner, inner, x, x, lambda y, _: 0.5e-3 * y.float().square().sum())


def gpt_job(size: dict[str, Any], num_stages: int, device: torch.device) -> Job:
    config, B, T = ModelConfig(**size["model"]), size["batch"], size["length"]
    dtype = getattr(torch, config.compute_dtype)

    def module(stage: int) -> nn.Module:
        layers, last = config.num_layers // num_stages, stage == num_stages - 1
        return Part(config, T, layers=layers, is_first=stage == 0, is_last=last).to(device)

    def sample(width: int) -> Tensor:
        return torch.zeros(B, T, width, dtype=dtype, device=device).requires_grad_()

    def loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())

    tokens_NS = torch.randint(0, config.vocab_size, (size["microbatches"] * B, T + 1), device=device)
    batch, target = tokens_NS[:, :-1].contiguous(), tokens_NS[:, 1:].contiguous()
    return Job(module, batch[:B], sample(config.d_model), sample(config.vocab_size), batch, target, loss)


def measure(
    name: str, compile: bool, size: dict[str, Any], clock: Clock, rank: int, ranks: int, device: torch.device
) -> dict[str, Any]:
    cls = getattr(schedules, name)
    several = issubclass(cls, schedules.PipelineScheduleMulti)
    is_vee = "ZBV" in name or "DualPipeV" in name
    where = [rank] if not several else [rank, 2 * ranks - 1 - rank] if is_vee else [rank, rank + ranks]
    num_stages = ranks * len(where)
    job = (gpt_job if "model" in size else mlp_job)(size, num_stages, device)
    modules = [job.module(stage) for stage in where]
    loss = job.loss
    if compile:
        # Where the backward is split, torch walks one graph twice, which frees nothing the first time.
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
        for module, stage in zip(modules, where, strict=True)
    ]
    schedule = cls(stages if several else stages[0], size["microbatches"], loss_fn=loss, scale_grads=False)
    args = (job.batch,) if 0 in where else ()
    extra = {"target": job.target} if last in where else {}

    def step():
        schedule.step(*args, **extra, **({"losses": []} if extra else {}))
        for module in modules:
            module.zero_grad(set_to_none=True)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def timed(steps: int = 1) -> tuple[float, float]:
        """Milliseconds a step until the last rank is done, and until it has handed all over. All ranks start together."""
        wait()
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - start
        wait()
        times = torch.tensor([time.perf_counter() - start, host], dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        ms, host_ms = (times * 1e3 / steps).tolist()
        return ms, host_ms

    # How often is agreed upon by all ranks, as the times are.
    for _ in range(2):
        timed()
    ms = timed()[0]
    for _ in range(math.ceil(clock.warmup_seconds * 1e3 / ms)):
        ms = timed()[0]
    steps = math.ceil(clock.seconds * 1e3 / ms)
    repeats = [[timed() for _ in range(steps)] for _ in range(clock.repeats)]
    repeats_ms = [statistics.fmean(ms for ms, _ in repeat) for repeat in repeats]
    return {
        "ms": statistics.median(repeats_ms),
        "repeats_ms": repeats_ms,
        "stream_ms": statistics.median(timed(steps)[0] for _ in range(clock.repeats)),
        "host_ms": statistics.median(host for repeat in repeats for _, host in repeat),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


if __name__ == "__main__":
    main()
