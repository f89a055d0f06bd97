"""PyTorch peer: a training step of GPT with `torch.distributed.fsdp.fully_shard`, one process per GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.fsdp '{"config": {...}, "compile": true, ...}'

Float32 parameters and AdamW moments are sharded, and gathered block by block in the compute dtype. Gradients are reduced in
float32 and clipped by the global norm. With `float8`, weights are gathered in FP8, and their scales are computed in one call
after the update, as torchao recommends. Model and step are those of `benchmarks/single_gpu.py`. With `te`, the blocks are
layers of Transformer Engine, in the precision of a variant of `te_variant.py`.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import torch_moe
from benchmarks.peers.ranks import RankContext
from benchmarks.peers.te_variant import parse_sharded_variant
from benchmarks.peers.torch_gpt import GPT, MuonAndAdamW, adamw, init_parameters, to_float8, warm_up
from jgraph.train.config import TrainConfig
from jgraph_models.gpt import GPTConfig

# B batch of a rank, T sequence, S = T + 1, N tokens, V vocabulary


def main() -> None:
    """Entry point of each rank."""
    request = json.loads(sys.argv[1])
    context = RankContext.join()
    context.answer(device=f"{context.ranks} x {torch.cuda.get_device_name() if context.on_gpu else 'cpu'}")
    config = TrainConfig.from_dict(request["config"])
    flags = {name: request[name] for name in ("te", "compile", "reshard", "float8", "graph", "whole", "experts", "muon")}
    step = training_step(config, context.rank, context.ranks, context.device, **flags)
    if request["cudnn"]:
        step = with_cudnn(step)
    context.time_training(step, capture_graph if request["graph"] else None)
    context.leave()


def training_step(
    config: TrainConfig,
    rank: int,
    ranks: int,
    device: torch.device,
    *,
    te: str,
    compile: bool,
    reshard: bool,
    float8: bool,
    graph: bool,
    whole: bool,
    experts: bool,
    muon: bool,
) -> Callable[[], Tensor]:
    """Builds the training step: forward, backward, clipping and update on a fixed batch.

    Args:
        config: Config of the run.
        rank: This rank.
        ranks: Number of ranks.
        device: Device of this rank.
        te: Variant of Transformer Engine, or an empty string for the model of `torch_gpt`.
        compile: Compile each block and the loss.
        reshard: Free gathered parameters after the forward.
        float8: Use torchao float8 in the blocks.
        graph: Replicate the model instead of sharding it, so that the step can be captured.
        whole: Compile the whole model. Requires `graph`.
        experts: Use expert parallelism.
        muon: Update the matrices of the blocks with Muon.

    Returns:
        A function that runs a step and returns the loss of the rows of this rank.
    """
    assert graph or not whole, "whole requires graph: fully_shard hooks cannot be compiled"
    assert not (graph and (float8 or reshard)), "graph replicates the model, so float8 and reshard do not apply"
    shard = make_sharder(config.model, device, ranks) if not graph else lambda part, reshard: None
    if te:
        model, optimizer = build_te_model(te, config, device, shard, reshard=reshard, capturable=graph)
    else:
        options = {"shard": partial(shard, reshard=reshard), "expert_ranks": ranks if experts else 1}
        model = build_model(config.model, device, compile=compile and not whole, float8=float8, **options)
        # The backward needs the parameters of the root right after the forward.
        shard(model, reshard=False)
        optimizer: Any = adamw(model, config.optimizer, capturable=graph and device.type == "cuda")
        if muon:
            optimizer = MuonAndAdamW(model, config.optimizer)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), config.optimizer.clip_norm)
    if graph:
        clip = make_replica_clip(model, config.optimizer.clip_norm, ranks)
    if experts:
        clip = make_expert_clip(model, optimizer, config.optimizer.clip_norm, ranks)
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

    if te:
        forward = partial(model.loss, tokens_BS)
    elif whole:
        with torch.no_grad():
            model.loss(tokens_BS)  # creates the rotary table before compilation
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


def build_te_model(
    variant: str,
    config: TrainConfig,
    device: torch.device,
    shard: Callable[..., None],
    *,
    reshard: bool,
    capturable: bool,
) -> tuple[Any, torch.optim.Optimizer]:
    """Builds the model of Transformer Engine and its optimizer.

    Args:
        variant: Name of the variant, as in `te_variant.py`.
        config: Config of the run.
        device: Device of this rank.
        shard: Shards a module, as `make_sharder` returns it.
        reshard: Free gathered parameters of blocks after the forward.
        capturable: Keep the step count on the GPU, so that a CUDA graph can capture the update.

    Returns:
        The model, with FSDP hooks around its method `loss`, and the optimizer.
    """
    from benchmarks.peers import te_gpt, te_layers  # optional dependency

    chosen = parse_sharded_variant(variant)
    model = te_gpt.build_sharded(config.model, chosen, device, partial(shard, reshard=reshard))
    shard(model, reshard=False)
    register_fsdp_forward_method(model, "loss")
    return model, te_layers.make_optimizer(model, config.optimizer, chosen, capturable=capturable)


def precompute_scales(model: GPT) -> None:
    """Computes the FP8 scales of all weights in one call."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def with_cudnn(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a step that prefers the attention of cuDNN. Call it before the first step."""
    # Its key lacks the backend: a compiled step would use the attention of an earlier process with another backend.
    functorch_config.enable_autograd_cache = False
    backends = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH

    def run() -> Tensor:
        with sdpa_kernel([*backends], set_priority=True):
            return step()

    return run


def build_model(
    config: GPTConfig,
    device: torch.device,
    *,
    compile: bool,
    float8: bool,
    shard: Callable[[nn.Module], object],
    expert_ranks: int = 1,
) -> GPT:
    """Builds the model block by block, with the same weights on every rank.

    Args:
        config: Config of the model.
        device: Device of this rank.
        compile: Compile each block. Collectives stay outside of the compiled code.
        float8: Use torchao float8 in the projections of the blocks. Emulated on a CPU.
        shard: Called with each block after its initialization.
        expert_ranks: Number of ranks that share the experts.

    Returns:
        The model.
    """
    with torch.device("meta"):
        model = torch_moe.GPT(config, expert_ranks) if config.moe.num_experts else GPT(config)
    torch.manual_seed(0)

    def fill(part: nn.Module, *, recurse: bool = True) -> None:
        part.to_empty(device=device, recurse=recurse)
        init_parameters(part.parameters(recurse))

    fill(model, recurse=False)
    for block in model.blocks:
        fill(block)
        if float8:
            to_float8(block, "tensorwise", enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
        if compile:
            block.forward = torch.compile(block.forward)
        shard(block)
    fill(model.norm)
    return model


def make_sharder(config: GPTConfig, device: torch.device, ranks: int) -> Callable[..., None]:
    """Returns a function that shards a module as one FSDP group.

    Args:
        config: Config of the model.
        device: Device of this rank.
        ranks: Number of ranks.

    Returns:
        A function of a module and `reshard`, which frees its parameters after the forward.
    """
    # cast_forward_inputs=False keeps the rotary table in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    mesh = init_device_mesh(device.type, (ranks,))

    def shard(part: nn.Module, *, reshard: bool) -> None:
        own = {p for p in expert_parameters(part) if not p.is_meta}
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=own)

    return shard


def expert_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of the experts that this rank owns."""
    layers = [layer for layer in part.modules() if isinstance(layer, torch_moe.ExpertParallelMoE)]
    return [p for layer in layers for p in (layer.up, layer.down)]


def make_expert_clip(model: GPT, optimizer: torch.optim.Optimizer, norm: float, ranks: int) -> Callable[[], None]:
    """Returns a function that clips by the global norm with expert parallelism.

    Args:
        model: The model.
        optimizer: Its optimizer. Experts move to a parameter group of their own.
        norm: Maximum norm.
        ranks: Number of ranks.

    Returns:
        A function that clips all gradients in place.
    """
    own = expert_parameters(model)
    others = [p for p in model.parameters() if all(p is not other for other in own)]
    # The fused update cannot mix DTensors and plain tensors.
    (group,) = optimizer.param_groups
    group["params"] = others
    optimizer.add_param_group({"params": own})

    def clip() -> None:
        for p in own:
            assert p.grad is not None
            p.grad.mul_(1 / ranks)  # the other gradients are means over the ranks
        shared = torch.nn.utils.get_total_norm([p.grad for p in others if p.grad is not None])
        shared = shared.full_tensor() if isinstance(shared, DTensor) else shared
        total = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]).square()
        dist.all_reduce(total)
        total = (total + shared.square()).sqrt()
        for part in (own, others):
            torch.nn.utils.clip_grads_with_norm_(part, norm, total)

    return clip


def make_replica_clip(model: GPT, norm: float, ranks: int) -> Callable[[], None]:
    """Returns a function that averages the gradients of replicas and clips them. Uses one flat array, for few kernels.

    Args:
        model: The model.
        norm: Maximum norm.
        ranks: Number of ranks.

    Returns:
        A function that replaces the gradients.
    """
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


def capture_graph(step: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """Captures a step with its all-reduce in a CUDA graph. The inputs keep their addresses."""
    warm_up(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # The watchdog thread of NCCL queries events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    torch.cuda.empty_cache()
    return graph


if __name__ == "__main__":
    main()
