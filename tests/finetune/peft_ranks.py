"""Trains the adapters of the benchmark's PyTorch peer with `fully_shard` on the CPU, one process per rank.

    OMP_NUM_THREADS=1 python -m tests.finetune.peft_ranks RANK RANKS RENDEZVOUS FOLDER

Rank 0 writes FOLDER/PRESET VARIANT.npz for all `PRESETS` and `VARIANTS`.
"""

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import finetune
from benchmarks.works import preset_config
from jgraph.train.config import LoRAConfig, TrainConfig

PRESETS = ("llama3-8b", "qwen3-0.6b")  # with an untied and a tied head
VARIANTS = ("eager", "checkpointing reshard")
STEPS = 2


def config_of(preset: str) -> TrainConfig:
    """Returns a tiny config in float32."""
    config = preset_config(preset, finetune.Options(sizes="tiny"))
    return config.changed(batch_size=4, seq_len=12, lora=LoRAConfig(rank=4, alpha=8.0, base_dtype="float32"))


def main(rank: int, ranks: int, rendezvous: Path, folder: Path) -> None:
    from benchmarks.peers.peft_fsdp import training_step

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for preset in PRESETS:
        for variant in VARIANTS:
            config = config_of(preset)
            model, step = training_step(config, rank, ranks, torch.device("cpu"), variant.split())
            losses = torch.stack([step() for _ in range(STEPS)])
            dist.all_reduce(losses)
            grads = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters() if p.grad is not None}
            if rank == 0:
                np.savez(folder / f"{preset} {variant}.npz", allow_pickle=False, losses=losses.numpy() / ranks, **grads)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, rendezvous, folder = sys.argv[1:]
    main(int(rank), int(ranks), Path(rendezvous), Path(folder))
