"""Trains the GPT of the parity tests with PyTorch's `fully_shard` on the CPU. `test_fsdp.py` runs one process per rank.

    OMP_NUM_THREADS=1 python -m tests.parity.torch_fsdp RANK RANKS RENDEZVOUS RUN.npz...

RENDEZVOUS is the path of a file that does not exist yet. Each RUN.npz is an input from `write`; the results replace it.
"""

# B batch, S sequence with the next token

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.torch_gpt import GPT
from jgraph.train.config import OptimizerConfig
from jgraph.train.model import settings_from
from jgraph_models.gpt import GPTConfig

Arrays = dict[str, np.ndarray]


def write(path: Path, model: GPTConfig, optimizer: OptimizerConfig, microbatches: int, arrays: Arrays) -> None:
    """Writes the input of a training run.

    Args:
        path: Path of the file.
        model: Model configuration. Gathered parameters have its compute dtype. Gradients are always reduced in float32.
        optimizer: Optimizer configuration. The learning rate is ignored.
        microbatches: Microbatches per step.
        arrays: `learning_rates` (steps,), `tokens` (steps, B, S), and the weights with PyTorch's names.
    """
    settings = {"model": dataclasses.asdict(model), "optimizer": dataclasses.asdict(optimizer), "microbatches": microbatches}
    save(path, {"settings": np.array(json.dumps(settings))} | arrays)


def main(rank: int, ranks: int, rendezvous: Path, paths: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for path in paths:
        with np.load(path) as run:
            result = train(rank, ranks, **json.loads(str(run["settings"])), arrays={k: run[k] for k in run if k != "settings"})
        dist.barrier()  # rank 0 replaces the file only after all ranks have read it
        if rank == 0:
            save(path, result)
    dist.destroy_process_group()


def train(rank: int, ranks: int, model: dict, optimizer: dict, microbatches: int, arrays: Arrays) -> Arrays:
    """Trains on every rank. Returns the losses, the gradient norms and the final weights."""
    steps_BS, rates = torch.tensor(arrays.pop("tokens"), dtype=torch.int64), arrays.pop("learning_rates").tolist()
    gpt = sharded(settings_from(GPTConfig, model), arrays, ranks)
    # JSON has lists instead of tuples.
    settings = OptimizerConfig(**{name: tuple(v) if isinstance(v, list) else v for name, v in optimizer.items()})
    matrices, vectors = ([p for p in gpt.parameters() if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses, norms = [], []
    for tokens_BS, rate in zip(steps_BS, rates, strict=True):
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad()
        loss = torch.zeros(())
        for part_BS in tokens_BS.chunk(microbatches):
            part = gpt.loss(part_BS.chunk(ranks)[rank]) / microbatches
            part.backward()  # reduce-scatters the mean over the ranks and accumulates it
            loss += part.detach()
        norms.append(full(torch.nn.utils.clip_grad_norm_(gpt.parameters(), settings.clip_norm)))
        adamw.step()
        dist.all_reduce(loss)
        losses.append(loss / ranks)
    metrics = {"losses": torch.stack(losses).numpy(), "gradient norms": torch.stack(norms).numpy()}
    return metrics | {name: full(p).numpy() for name, p in gpt.named_parameters()}


def sharded(config: GPTConfig, weights: Arrays, ranks: int) -> GPT:
    """Returns the GPT with these weights. Each block and the rest of the model are separate `fully_shard` groups."""
    gpt = GPT(config)
    gpt.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.compute_dtype == "float32" else getattr(torch, config.compute_dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # keep the rotary tables in float32
    )
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return gpt


def save(path: Path, arrays: Arrays) -> None:
    np.savez(path, allow_pickle=False, **arrays)


def full(tensor) -> Tensor:
    return tensor.detach().full_tensor()


if __name__ == "__main__":
    rank, ranks, rendezvous, *paths = sys.argv[1:]
    main(int(rank), int(ranks), Path(rendezvous), [Path(path) for path in paths])
