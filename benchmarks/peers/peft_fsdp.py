"""PyTorch peer: a LoRA training step of a transformers model with PEFT and `fully_shard`, one process per GPU.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.peers.peft_fsdp '{"variant": "compile", "config": {...}}'

The model is that of `benchmarks/peers/peft_lora.py`. Frozen weights are sharded in bfloat16 and gathered layer by layer. The
float32 adapters are gathered in bfloat16 with the layer, and their gradients are reduced in float32. A variant is one or more
words:

    eager          no torch.compile
    compile        compiles each decoder layer and the loss
    checkpointing  recomputes the layers in the backward
    reshard        frees gathered layers after the forward
    cudnn          prefers cuDNN attention
"""

import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.fsdp import make_sharder
from benchmarks.peers.peft_lora import build_model, checkpoint_layers, make_step
from benchmarks.peers.ranks import RankContext, time_ranks
from benchmarks.peers.torch_run import Step, random_tokens, with_cudnn
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig

WORDS = {"eager", "compile", "checkpointing", "reshard", "cudnn"}


def build(context: RankContext, request: Row, config: TrainConfig) -> Step:
    """Builds the step of a request."""
    return training_step(config, context.rank, context.ranks, context.device, request["variant"].split())[1]


def training_step(
    config: TrainConfig, rank: int, ranks: int, device: torch.device, words: Collection[str]
) -> tuple[Any, Callable[[], Tensor]]:
    """Builds the training step on a fixed batch. Returns the `peft.PeftModel` and the step."""
    assert WORDS.issuperset(words), f"the variant has words besides {', '.join(sorted(WORDS))}"
    # A group mixes frozen bfloat16 with trained float32 parameters: all are gathered in the compute dtype.
    shard = make_sharder(config.model, device, ranks)

    def prepare(layer: nn.Module) -> None:
        if "compile" in words:  # collectives stay outside of the compiled code
            layer.forward = torch.compile(layer.forward)
        shard(layer, reshard="reshard" in words)

    model = build_model(config, device, prepare)
    if "checkpointing" in words:
        checkpoint_layers(model)
    base = model.get_base_model()
    if "compile" in words:
        base.loss_function = torch.compile(base.loss_function)
    if not base.config.tie_word_embeddings:
        shard(base.lm_head, reshard=False)  # gathered during the last layers instead of before the first
    shard(base, reshard=False)
    step = make_step(model, config, random_tokens(config, config.input.seq_len, device, rank=rank, ranks=ranks), model)
    return model, with_cudnn(step) if "cudnn" in words else step


if __name__ == "__main__":
    importlib.import_module("peft")  # takes seconds: before the wait for the start, in parallel with the other processes
    time_ranks(build)
