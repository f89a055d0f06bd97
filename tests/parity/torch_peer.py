"""Trains with the PyTorch peer of the tensor and context parallelism benchmark on the CPU.

    OMP_NUM_THREADS=1 python -m tests.parity.torch_peer RANK RANKS RENDEZVOUS RUN.json...

`tests.parity.processes` runs one process per rank. Each RUN.json has the config and the flags of `tensor_step` or
`context_step`. The losses of all steps replace it.
"""

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers import partitioned
from jgraph.train.config import TrainConfig

STEPS = 3


def main(rank: int, ranks: int, rendezvous: Path, paths: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for path in paths:
        request = json.loads(path.read_text())
        config = TrainConfig.from_dict(request.pop("config"))
        mesh, device = init_device_mesh("cpu", (ranks,)), torch.device("cpu")
        with contextlib.ExitStack() as stack:
            if config.parallel.tp > 1:
                step = partitioned.tensor_step(config, mesh, device, **request)
            else:
                step = partitioned.context_step(config, mesh, device, stack, **request)
            losses = [mean(step(), ranks) for _ in range(STEPS)]
        dist.barrier()  # rank 0 replaces the file only after all ranks have read it
        if rank == 0:
            path.write_text(json.dumps(losses))
    dist.destroy_process_group()


def mean(loss: Tensor, ranks: int) -> float:
    """Returns the mean of a loss over the ranks."""
    dist.all_reduce(loss)
    return loss.item() / ranks


if __name__ == "__main__":
    rank, ranks, rendezvous, *paths = sys.argv[1:]
    main(int(rank), int(ranks), Path(rendezvous), [Path(path) for path in paths])
