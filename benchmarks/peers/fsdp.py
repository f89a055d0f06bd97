"""Peer: a training step of GPT under `torch.distributed.fsdp.fully_shard`, on one process a GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.fsdp '{"config": {...}, "compile": true, ...}'

Float32 parameters and AdamW moments are sharded, gathered block by block in the compute dtype; gradients are reduced in
float32, and clipped by their global norm. With `float8` the blocks' weights are gathered in it, by scales that are made for all
of them at once after the update, as torchao says. Model and step are those of `benchmarks/single_gpu.py`.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.peers.ranks import Ranks
from benchmarks.peers.torch_gpt import GPT, adamw, to_float8
from jgraph.training.config import TrainConfig
from jgraph_models.gpt import GPTConfig

# B batch of a rank, T sequence, S = T + 1, N tokens, V vocabulary


def main() -> None:
    asked = json.loads(sys.argv[1])
    here = Ranks.join()
    here.tell(device=f"{here.ranks} x {torch.cuda.get_device_name() if here.on_gpu else 'cpu'}")
    config = TrainConfig.from_dict(asked["config"])
    how = {name: asked[name] for name in ("compile", "reshard", "float8")}
    step = training_step(config, here.rank, here.ranks, here.device, **how)
    if here.on_gpu:  # the whole model was here before it was sharded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = step()
    dist.all_reduce(loss)
    here.tell(compile_s=time.perf_counter() - start, loss=loss.item() / here.ranks)
    here.timed(step, 2)
    here.take_turns(step, each=False)
    here.tell(peak_bytes=here.peak_bytes())
    dist.all_reduce(loss := step())
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite any more")
    here.leave()


def training_step(
    config: TrainConfig, rank: int, ranks: int, device: torch.device, *, compile: bool, reshard: bool, float8: bool
) -> Callable[[], Tensor]:
    """Returns a step on one batch (forward, backward, clipping, update) that gives back the loss of this rank's rows."""
    model = sharded(config.model, device, ranks, compile=compile, reshard=reshard, float8=float8)
    optimizer = adamw(model, config.optimizer)
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
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        if float8:
            precompute_scales(model)
        return loss.detach()

    return step


def precompute_scales(model: GPT) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def sharded(config: GPTConfig, device: torch.device, ranks: int, *, compile: bool, reshard: bool, float8: bool) -> GPT:
    """Makes the model, each block gathered and reduced alone, embedding, head and last norm together.

    Args:
        compile: each block; its hooks, which gather and reduce, stay outside.
        reshard: blocks are gathered again in the backward.
        float8: of the blocks' projections; a CPU, to try this out, emulates it.
    """
    torch.manual_seed(0)  # all ranks make the same weights, whole, and keep their part
    with device:
        model = GPT(config)
    if float8:
        to_float8(model, "tensorwise", enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
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


if __name__ == "__main__":
    main()
