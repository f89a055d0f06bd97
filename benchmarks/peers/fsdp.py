"""PyTorch peer: a training step of GPT with `torch.distributed.fsdp.fully_shard`, one process per GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.peers.fsdp '{"config": {...}, "compile": true, ...}'

Float32 parameters and AdamW moments are sharded, and gathered block by block in the compute dtype. Gradients are reduced in
float32 and clipped by the global norm. With `float8`, weights are gathered in FP8, and their scales are computed in one call
after the update, as torchao recommends. Model and step are those of `benchmarks/single_gpu.py`. With `te`, the blocks are
layers of Transformer Engine, in the precision of a variant of `te_variant.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from benchmarks.peers import torch_moe
from benchmarks.peers.ranks import RankContext, time_ranks
from benchmarks.peers.te_variant import parse_sharded_variant
from benchmarks.peers.torch_gpt import GPT, MuonAndAdamW, adamw, cross_entropy, init_parameters, to_float8
from benchmarks.peers.torch_run import Step, random_tokens, training_step as make_step, with_cudnn
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph_models.gpt import GPTConfig

# B batch of a rank, T sequence, S = T + 1, N tokens, V vocabulary


def build(context: RankContext, request: Row, config: TrainConfig) -> Step:
    """Builds the step of a request."""
    flags = {name: request[name] for name in ("te", "compile", "reshard", "float8", "graph", "whole", "experts", "muon")}
    step = training_step(config, context.rank, context.ranks, context.device, **flags)
    return with_cudnn(step) if request["cudnn"] else step


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
    """Builds the training step on a fixed batch. It returns the loss of the rows of this rank.

    `te` is a variant of Transformer Engine, or empty for the model of `torch_gpt`. `reshard` frees gathered parameters after
    the forward. `graph` replicates the model, so that the step can be captured, and `whole` then compiles all of it.
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
        optimizer: Any = adamw(model.parameters(), config.optimizer, capturable=graph and device.type == "cuda")
        if muon:
            optimizer = MuonAndAdamW(model, config.optimizer)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), config.optimizer.clip_norm)
    if graph:
        clip = make_replica_clip(model, config.optimizer.clip_norm, ranks)
    if experts:
        clip = make_expert_clip(model, optimizer, config.optimizer.clip_norm, ranks)
    tokens_BS = random_tokens(config, config.input.seq_len + 1, device, rank=rank, ranks=ranks)
    inputs_BT, labels_BT = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()
    loss_fn = torch.compile(cross_entropy) if compile else cross_entropy

    def forward() -> Tensor:
        if not config.model.moe.num_experts:
            return loss_fn(model(inputs_BT), labels_BT)
        logits_BTV, balance = model(inputs_BT)
        return loss_fn(logits_BTV, labels_BT) + config.model.moe.balance_loss * balance

    if te:
        forward = partial(model.loss, tokens_BS)
    elif whole:
        with torch.no_grad():
            model.loss(tokens_BS)  # creates the rotary table before compilation
        forward = partial(torch.compile(model.loss) if compile else model.loss, tokens_BS)

    if float8:
        optimizer.register_step_post_hook(lambda *_: precompute_scales(model))
    return make_step(forward, optimizer, clip)


def build_te_model(
    variant: str,
    config: TrainConfig,
    device: torch.device,
    shard: Callable[..., None],
    *,
    reshard: bool,
    capturable: bool,
) -> tuple[Any, torch.optim.Optimizer]:
    """Builds the model of Transformer Engine, with FSDP hooks around its method `loss`, and its optimizer."""
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


def build_model(
    config: GPTConfig,
    device: torch.device,
    *,
    compile: bool,
    float8: bool,
    shard: Callable[[nn.Module], object],
    expert_ranks: int = 1,
) -> GPT:
    """Builds the model block by block, with the same weights on every rank. Calls `shard` with each initialized block."""
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
    """Returns a function that shards a module as one FSDP group. `reshard` frees its parameters after the forward."""
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
    """Returns a function that clips by the global norm. Moves the experts to a parameter group of their own."""
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
    """Returns a function that averages the gradients of replicas and clips them. Uses one flat array, for few kernels."""
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


if __name__ == "__main__":
    time_ranks(build)
