"""Peer: a schedule of `torch.distributed.pipelining` on stages of x + gelu(x @ a) @ b. Rank 0 prints a row a size.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.pipelining '{"schedule": "Schedule1F1B", ...}'

Weights, activations and gradients are bfloat16: torch adds the microbatches' gradients up in the parameters' dtype.
"""

import math
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F

from benchmarks.peers.protocol import Clock, answer, request


class MLP(nn.Module):
    def __init__(self, d_model: int, d_ff: int, device: torch.device):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False, dtype=torch.bfloat16, device=device)
        self.down = nn.Linear(d_ff, d_model, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, x_ND: Tensor) -> Tensor:
        return x_ND + self.down(F.gelu(self.up(x_ND), approximate="tanh"))


def main() -> None:
    asked = request()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()  # elsewhere on the CPU, to try this script out
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(rank)
    for name, size in asked["sizes"].items():
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row = measure(asked["schedule"], size, Clock(**asked["clock"]), rank, ranks, device)
        if rank == 0:
            answer(size=name, schedule=asked["schedule"], **row)
    dist.destroy_process_group()


def measure(name: str, size: dict[str, int], clock: Clock, rank: int, ranks: int, device: torch.device) -> dict:
    cls = getattr(schedules, name)
    several = issubclass(cls, schedules.PipelineScheduleMulti)
    where = [rank] if not several else [rank, 2 * ranks - 1 - rank] if "ZBV" in name else [rank, rank + ranks]
    num_stages = ranks * len(where)
    modules = [
        nn.Sequential(*(MLP(size["d_model"], size["d_ff"], device) for _ in range(size["layers"] // num_stages))) for _ in where
    ]
    sample = torch.zeros(size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    inner = sample.clone().requires_grad_()  # torch 2.13 sends gradients only to where these samples ask for them
    stages = [
        PipelineStage(module, stage, num_stages, device, input_args=(inner if stage else sample,), output_args=(inner,))
        for module, stage in zip(modules, where, strict=True)
    ]
    schedule = cls(
        stages if several else stages[0],
        size["microbatches"],
        loss_fn=lambda y, _: 0.5e-3 * y.float().square().sum(),
        scale_grads=False,
    )
    x = torch.randn(size["microbatches"] * size["tokens"], size["d_model"], dtype=torch.bfloat16, device=device)
    args = (x,) if 0 in where else ()
    last = num_stages - 1 in where

    def step():
        schedule.step(*args, **({"target": x, "losses": []} if last else {}))
        for module in modules:
            module.zero_grad(set_to_none=True)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()

    def timed() -> tuple[float, float]:
        """Milliseconds until the last rank is done, and until it has handed everything over. All ranks start together."""
        wait()
        dist.barrier()
        wait()
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        wait()
        times = torch.tensor([time.perf_counter() - start, host], dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        ms, host_ms = (times * 1e3).tolist()
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
        "host_ms": statistics.median(host for repeat in repeats for _, host in repeat),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


if __name__ == "__main__":
    main()
