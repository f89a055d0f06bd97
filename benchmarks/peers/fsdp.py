"""Peer: a training step of GPT under `torch.distributed.fsdp.fully_shard`, on one process a GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.fsdp '{"config": {...}, "compile": true, ...}'

Float32 parameters and AdamW moments are sharded, gathered block by block in the compute dtype; gradients are reduced in
float32, and clipped by their global norm. Model and step are those of `benchmarks/single_gpu.py`.
"""

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.harness import read_card
from benchmarks.peers.protocol import Clock, answer, request
from benchmarks.peers.ranks import join
from jgraph.config import ModelConfig, TrainConfig
from tests.parity.torch_gpt import GPT

# B batch of a rank, T sequence, S = T + 1, N tokens, V vocabulary


def main() -> None:
    asked = request()
    rank, ranks, device = join()
    tell: Callable[..., None] = answer if rank == 0 else lambda **row: None
    tell(device=f"{ranks} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'}")
    config = TrainConfig.from_dict(asked["config"])
    step = training_step(config, rank, ranks, device, compile=asked["compile"], reshard=asked["reshard"])
    measure(step, Clock(**asked["clock"]), device, tell)
    dist.barrier()  # a rank that leaves while others are still talking makes them fail
    dist.destroy_process_group()
    # Everything is told. Leaving in the usual way, torch 2.13 with gloo now and then aborts over a thread that is still there.
    os._exit(0)


def training_step(
    config: TrainConfig, rank: int, ranks: int, device: torch.device, *, compile: bool, reshard: bool
) -> Callable[[], Tensor]:
    """Forward, backward with its reduce-scatters, clipping and update on one batch; gives back the loss of this rank's rows."""
    o = config.optimizer
    model = sharded(config.model, device, ranks, compile=compile, reshard=reshard)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
        fused=True,
    )
    shape = config.batch_size, config.seq_len + 1
    rows_BS = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).reshape(ranks, -1, shape[1])[rank]
    tokens_BS = torch.tensor(rows_BS, device=device)
    inputs_BT, labels_N = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].flatten()

    def cross_entropy(logits_BTV: Tensor, labels_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_N)

    loss_fn = torch.compile(cross_entropy) if compile else cross_entropy

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(inputs_BT), labels_N)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
        return loss.detach()

    return step


def sharded(config: ModelConfig, device: torch.device, ranks: int, *, compile: bool, reshard: bool) -> GPT:
    """The model, each block gathered and reduced alone, embedding, head and last norm together.

    Args:
        compile: each block; its hooks, which gather and reduce, stay outside.
        reshard: blocks are gathered again in the backward.
    """
    torch.manual_seed(0)  # all ranks make the same weights, whole, and keep their part
    with device:
        model = GPT(config)
    # Without cast_forward_inputs=False the rotary table would lose its float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(device.type, (ranks,))
    for block in model.blocks:
        if compile:
            block.forward = torch.compile(block.forward)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # What the root has is needed again as soon as the forward is done.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def measure(step: Callable[[], Tensor], clock: Clock, device: torch.device, tell: Callable[..., None]) -> None:
    """Times steps handed over one after the other, by the slowest rank."""
    on_gpu = device.type == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def largest(value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def timed(steps: int) -> float:
        """Milliseconds a step. All ranks start together, and all get the time of the last one."""
        wait()
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        return largest((time.perf_counter() - start) / steps * 1e3)

    if on_gpu:  # the whole model was here before it was sharded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = step()
    dist.all_reduce(loss)
    tell(compile_s=time.perf_counter() - start, loss=loss.item() / dist.get_world_size())
    # How often is agreed upon by all ranks, as the times are.
    timed(2)
    ms = timed(1)
    ms = timed(math.ceil(clock.warmup_seconds * 1e3 / ms))
    steps = math.ceil(clock.seconds * 1e3 / ms)
    repeats_ms = [timed(steps) for _ in range(clock.repeats)]
    tell(ms=statistics.median(repeats_ms), repeats_ms=repeats_ms, steps=steps)
    with ThreadPoolExecutor(1) as pool:  # the card is read while it works, but not while it is timed
        reading = pool.submit(read_card)
        timed(steps)
    watts, mhz = reading.result() or (None, None)
    peak = int(largest(torch.cuda.max_memory_allocated() if on_gpu else 0)) or None
    tell(power_watts=watts, sm_clock_mhz=mhz, peak_bytes=peak)


if __name__ == "__main__":
    main()
