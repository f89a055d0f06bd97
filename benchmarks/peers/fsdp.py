"""Peer: a training step of GPT under `torch.distributed.fsdp.fully_shard`, one process a GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.fsdp '{"config": {...}, "compile": true, ...}'

Float32 parameters and AdamW moments are sharded, gathered block by block in the compute dtype; gradients are reduced in
float32, and clipped by their global norm. With `float8` the blocks' weights are gathered in it, by scales that are made for all
of them at once after the update, as torchao says. Model and step are those of `benchmarks/single_gpu.py`.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import torch_moe
from benchmarks.peers.ranks import Ranks
from benchmarks.peers.torch_gpt import GPT, adamw, draw, to_float8, warm_up
from jgraph.train.config import TrainConfig
from jgraph_models.gpt import GPTConfig

# B batch of a rank, T sequence, S = T + 1, N tokens, V vocabulary


def main() -> None:
    request = json.loads(sys.argv[1])
    here = Ranks.join()
    here.tell(device=f"{here.ranks} x {torch.cuda.get_device_name() if here.on_gpu else 'cpu'}")
    config = TrainConfig.from_dict(request["config"])
    how = {name: request[name] for name in ("compile", "reshard", "float8", "graph", "whole", "experts")}
    step = training_step(config, here.rank, here.ranks, here.device, **how)
    if request["cudnn"]:
        step = with_cudnn(step)
    if here.on_gpu:  # a block was whole here before it was sharded, or all of them
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    loss = step()
    dist.all_reduce(loss)
    here.tell(compile_s=time.perf_counter() - start, loss=loss.item() / here.ranks)
    graph = captured(step) if request["graph"] and here.on_gpu else None
    run = graph.replay if graph else step
    here.timed(run, 2)
    here.take_turns(run, each=False)
    here.tell(peak_bytes=here.peak_bytes())
    if graph:
        graph.reset()  # while it is there, what it has captured of NCCL cannot be ended
    dist.all_reduce(loss := step())
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite any more")
    here.leave()


def training_step(
    config: TrainConfig,
    rank: int,
    ranks: int,
    device: torch.device,
    *,
    compile: bool,
    reshard: bool,
    float8: bool,
    graph: bool,
    whole: bool,
    experts: bool,
) -> Callable[[], Tensor]:
    """Returns a step on one batch (forward, backward, clipping, update) that gives back the loss of this rank's rows."""
    assert graph or not whole, "what gathers blocks stays outside of what is compiled"
    assert not (graph and (float8 or reshard)), "replicas gather nothing"
    place = shard_of(config.model, device, ranks) if not graph else lambda part, reshard: None
    made_here = {"place": partial(place, reshard=reshard), "spread": ranks if experts else 1}
    model = made(config.model, device, compile=compile and not whole, float8=float8, **made_here)
    # What the root has is needed again as soon as the forward is done.
    place(model, reshard=False)
    optimizer = adamw(model, config.optimizer, capturable=graph and device.type == "cuda")
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), config.optimizer.clip_norm)
    if graph:
        clip = flat_clip(model, config.optimizer.clip_norm, ranks)
    if experts:
        clip = clip_with_experts(model, optimizer, config.optimizer.clip_norm, ranks)
    shape = config.input.batch_size, config.input.seq_len + 1
    rows_BS = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).reshape(ranks, -1, shape[1])[rank]
    tokens_BS = torch.tensor(rows_BS, device=device)
    inputs_BT, labels_N = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].flatten()

    def cross_entropy(logits_BTV: Tensor, labels_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_N)

    loss_fn = torch.compile(cross_entropy) if compile else cross_entropy

    def forward() -> Tensor:
        if not config.model.moe.num_experts:
            return loss_fn(model(inputs_BT), labels_N)
        logits_BTV, balance = model(inputs_BT)
        return loss_fn(logits_BTV, labels_N) + config.model.moe.balance_loss * balance

    if whole:
        with torch.no_grad():
            model.loss(tokens_BS)  # makes the rotary table, outside of what is compiled
        forward = partial(torch.compile(model.loss) if compile else model.loss, tokens_BS)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        loss.backward()
        clip()
        optimizer.step()
        if float8:
            precompute_scales(model)
        return loss.detach()

    return step


def precompute_scales(model: GPT) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def with_cudnn(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a step whose attention is cuDNN's wherever that can be."""
    backends = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH

    def run() -> Tensor:
        with sdpa_kernel([*backends], set_priority=True):
            return step()

    return run


def made(
    config: GPTConfig,
    device: torch.device,
    *,
    compile: bool,
    float8: bool,
    place: Callable[[nn.Module], object],
    spread: int = 1,
) -> GPT:
    """Makes the model block by block, the same weights on every rank.

    Args:
        compile: each block; what gathers and reduces stays outside.
        float8: of the blocks' projections; a CPU, to try this out, emulates it.
        place: is given each block as soon as it has its weights.
        spread: ranks that experts are spread over.
    """
    with torch.device("meta"):
        model = torch_moe.GPT(config, spread) if config.moe.num_experts else GPT(config)
    torch.manual_seed(0)

    def fill(part: nn.Module, *, recurse: bool = True) -> None:
        part.to_empty(device=device, recurse=recurse)
        draw(part.parameters(recurse))

    fill(model, recurse=False)
    for block in model.blocks:
        fill(block)
        if float8:
            to_float8(block, "tensorwise", enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
        if compile:
            block.forward = torch.compile(block.forward)
        place(block)
    fill(model.norm)
    return model


def shard_of(config: GPTConfig, device: torch.device, ranks: int) -> Callable[..., None]:
    """Returns what leaves each rank its part of a block, or of all that is no block, gathered and reduced together."""
    # Without cast_forward_inputs=False the rotary table would lose its float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(device.type, (ranks,))

    def place(part: nn.Module, *, reshard: bool) -> None:
        own = {p for p in spread_parameters(part) if not p.is_meta}
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=own)

    return place


def spread_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Returns the experts' parameters that a rank has of its own."""
    layers = [layer for layer in part.modules() if isinstance(layer, torch_moe.SpreadMoE)]
    return [p for layer in layers for p in (layer.up, layer.down)]


def clip_with_experts(model: GPT, optimizer: torch.optim.Optimizer, norm: float, ranks: int) -> Callable[[], None]:
    """Returns what clips by the norm of all gradients, where those of experts are each on one rank, and sums over the ranks."""
    own = spread_parameters(model)
    others = [p for p in model.parameters() if all(p is not other for other in own)]
    # One kernel does not update sharded parameters and others.
    (group,) = optimizer.param_groups
    group["params"] = others
    optimizer.add_param_group({"params": own})

    def clip() -> None:
        for p in own:
            assert p.grad is not None
            p.grad.mul_(1 / ranks)  # the others' are means over the ranks
        shared = torch.nn.utils.get_total_norm([p.grad for p in others if p.grad is not None])
        shared = shared.full_tensor() if isinstance(shared, DTensor) else shared
        total = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]).square()
        dist.all_reduce(total)
        total = (total + shared.square()).sqrt()
        for part in (own, others):
            torch.nn.utils.clip_grads_with_norm_(part, norm, total)

    return clip


def flat_clip(model: GPT, norm: float, ranks: int) -> Callable[[], None]:
    """Returns what makes the ranks' gradients their mean, clipped: parts of a flat array, for few kernels."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters), device=parameters[0].device)
    parts = [part.view_as(p) for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)]

    def clip() -> None:
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None], out=flat)
        dist.all_reduce(flat)
        flat.mul_((norm / torch.linalg.vector_norm(flat)).clamp(max=1 / ranks))
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part

    return clip


def captured(step: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Captures a step, whose inputs stay where they are, with its all-reduce."""
    warm_up(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog is another thread and asks for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    torch.cuda.empty_cache()
    return graph


if __name__ == "__main__":
    main()
