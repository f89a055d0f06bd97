"""How a process of a peer becomes one of its ranks."""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int, torch.device]:
    """Joins the ranks that torchrun started: this one's number, how many there are, and its device, a GPU if there is one."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()  # elsewhere on the CPU, to try a script out
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.set_float32_matmul_precision("high")
    return rank, ranks, device
