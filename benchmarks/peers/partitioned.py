"""PyTorch peer: a training step of GPT with tensor or context parallelism, one process per GPU. Rank 0 prints the row.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.peers.partitioned '{"config": {...}, "compile": true, ...}'

`tp` and `cp` of the config select the axis. Tensor parallelism is `parallelize_module` with split norms and a split residual
stream. The loss of the split vocabulary is `SplitCrossEntropy`: `loss_parallel` takes more kernels, and its compiled form
returned a wrong loss (torch 2.13 on the CPU). Context parallelism is `context_parallel` with its load balancing. Its parameters
are sharded over the same ranks by `fully_shard`, or replicated. Model and step are those of `benchmarks/peers/fsdp.py`.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.fsdp import build_model, make_sharder
from benchmarks.peers.ranks import RankContext, time_ranks
from benchmarks.peers.torch_gpt import Block, adamw, cross_entropy, linear, rotary
from benchmarks.peers.torch_run import Step, random_tokens, training_step, with_cudnn
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph_models.gpt import GPTConfig

# B batch, T sequence, D model, H query heads, G key/value heads, K head size, N tokens, R gathered tokens, V vocabulary


def build(context: RankContext, request: Row, config: TrainConfig, stack: contextlib.ExitStack) -> Step:
    """Builds the step of a request."""
    mesh = init_device_mesh(context.device.type, (context.ranks,))
    if config.parallel.tp > 1:
        flags = {name: request[name] for name in ("compile", "split", "pipelined")}
        step = tensor_step(config, mesh, context.device, **flags)
    else:
        flags = {name: request[name] for name in ("compile", "params", "rotate")}
        step = context_step(config, mesh, context.device, stack, **flags)
    return with_cudnn(step) if request["cudnn"] else step


def make_step(model: nn.Module, config: TrainConfig, forward: Step) -> Step:
    """Returns the training step: forward, backward, clipping by the global norm, and AdamW."""
    parameters = list(model.parameters())
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, config.optimizer.clip_norm)
    return training_step(forward, adamw(parameters, config.optimizer), clip)


def batch(config: TrainConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the inputs and the labels of the fixed batch, both of shape (B, T)."""
    tokens_BS = random_tokens(config, config.input.seq_len + 1, device)
    return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()


# --- Tensor parallelism ---


def tensor_step(
    config: TrainConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    compile: bool,
    split: Literal["batch", "sequence"],
    pipelined: bool,
) -> Step:
    """Builds the step with tensor parallelism. All ranks have the whole batch, and return the same loss.

    `split` is the axis of the residual stream; the all-gather of the leading axis needs no copy. `pipelined` interleaves the
    collectives of a block with parts of its matmuls (asynchronous tensor parallelism), and needs symmetric memory.
    """
    if pipelined:
        assert compile, "pipelined matmuls are a pass of the compiler"
        pipeline_matmuls(mesh)
    axis = ("batch", "sequence").index(split)
    assert config.model.vocab_size % mesh.size() == 0, "the vocabulary is split evenly"
    model = build_model(
        config.model, device, compile=compile, float8=False, shard=lambda block: split_block(block, config.model, mesh, axis)
    )
    parallelize_module(model.norm, mesh, SequenceParallel(sequence_dim=axis))
    for name in ("embedding", "head") if config.model.head == "untied" else ("embedding",):
        setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh, [Shard(0)])))
    head_VD = model.embedding if config.model.head == "tied" else model.head
    inputs_BT, labels_BT = batch(config, device)
    tokens_BT = DTensor.from_local(inputs_BT, mesh, [Replicate()])
    rotary_TK = rotary(config.model, config.input.seq_len, torch.zeros((), device=device))
    first = mesh.get_local_rank() * (config.model.vocab_size // mesh.size())
    sums_fn: Callable[..., Any] = torch.compile(log_sums) if compile else log_sums
    gradient_fn: Callable[..., Any] = torch.compile(gradient) if compile else gradient
    with torch.no_grad():  # compiles the gradient in this thread instead of the thread of the backward
        zeros_N = torch.zeros(labels_BT.numel(), device=device)
        like_NV = zeros_N.new_zeros(len(zeros_N), config.model.vocab_size // mesh.size(), dtype=model.compute_dtype)
        gradient_fn(like_NV, labels_BT.flatten(), zeros_N, zeros_N.sum())

    def forward() -> Tensor:
        x_BTD: Any = F.embedding(tokens_BT, model.embedding)
        x_BTD = x_BTD.redistribute(placements=[Shard(axis)]).to_local().to(model.compute_dtype)
        for block in model.blocks:
            x_BTD = block(x_BTD, rotary_TK)
        x_BTD = model.norm(x_BTD).redistribute(placements=[Replicate()])
        logits_NV: Any = linear(x_BTD.flatten(0, 1), head_VD)
        return SplitCrossEntropy.apply(logits_NV.to_local(), labels_BT.flatten() - first, sums_fn, gradient_fn)

    return make_step(model, config, forward)


def split_block(block: Any, config: GPTConfig, mesh: DeviceMesh, axis: int) -> None:
    """Splits the projections of a block by heads and hidden units, and its tokens along `axis`, in place."""
    assert config.qk_norm == "none", "norms of heads are not split"
    H, G, K = config.num_heads, config.num_kv_heads, config.head_size
    sizes = {block.qkv: [H * K, G * K, G * K]} | ({block.up: [config.d_ff] * 2} if config.mlp == "swiglu" else {})
    with torch.no_grad():
        for projection, parts in sizes.items():
            projection.weight.copy_(in_rank_order(projection.weight, parts, mesh.size()))
    block.config = replace(config, num_heads=H // mesh.size(), num_kv_heads=G // mesh.size(), head_dim=K)
    tokens = Shard(axis)
    plan = {
        "*_norm": SequenceParallel(sequence_dim=axis),
        **dict.fromkeys(("qkv", "up"), ColwiseParallel(input_layouts=tokens)),
        **dict.fromkeys(("out", "down"), RowwiseParallel(output_layouts=tokens)),
    }
    parallelize_module(block, mesh, plan)


def in_rank_order(weight: Tensor, sizes: Sequence[int], ranks: int) -> Tensor:
    """Reorders the rows of a concatenated weight: those of rank 0 of all parts first, then those of rank 1, and so on."""
    parts = [part.chunk(ranks) for part in weight.split([*sizes])]
    return torch.cat([shares[rank] for rank in range(ranks) for shares in parts])


class SplitCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of logits that are split along the vocabulary. Reads them once in each direction."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, log_sums: Any, gradient: Any) -> Tensor:
        """Computes the loss, the same on every rank. Labels are relative to the first token of this rank."""
        log_sums_N, chosen_N = log_sums(logits_NV, labels_N)
        parts = log_sums_N.new_empty(dist.get_world_size() * len(log_sums_N))
        dist.all_gather_into_tensor(parts, log_sums_N)
        dist.all_reduce(chosen_N)
        log_sums_N = parts.view(-1, len(log_sums_N)).logsumexp(0)
        ctx.save_for_backward(logits_NV, labels_N, log_sums_N)
        ctx.gradient = gradient
        return (log_sums_N - chosen_N).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns the gradient of the logits of this rank."""
        logits_NV, labels_N, log_sums_N = ctx.saved_tensors
        return ctx.gradient(logits_NV.detach(), labels_N, log_sums_N, gradients[0]), None, None, None


def log_sums(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the float32 log-sum-exp of each row, and its logit at the label, 0 if the label is on another rank."""
    is_here_N = (labels_N >= 0) & (labels_N < logits_NV.shape[1])
    chosen_N = logits_NV.gather(1, torch.where(is_here_N, labels_N, 0)[:, None])[:, 0].float()
    return logits_NV.float().logsumexp(1), torch.where(is_here_N, chosen_N, 0.0)


def gradient(logits_NV: Tensor, labels_N: Tensor, log_sums_N: Tensor, scale: Tensor) -> Tensor:
    """Returns the gradient of the mean loss with respect to the logits, times `scale`."""
    is_label_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == labels_N[:, None]
    softmax_NV = (logits_NV.float() - log_sums_N[:, None]).exp()
    return ((softmax_NV - is_label_NV.float()) * (scale / len(labels_N))).to(logits_NV.dtype)


def pipeline_matmuls(mesh: DeviceMesh) -> None:
    """Lets the compiler replace an all-gather or a reduce-scatter next to a matmul by a pipelined matmul."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)


# --- Context parallelism ---


def context_step(
    config: TrainConfig,
    mesh: DeviceMesh,
    device: torch.device,
    stack: contextlib.ExitStack,
    *,
    compile: bool,
    params: Literal["sharded", "replicated"],
    rotate: Literal["allgather", "alltoall"],
) -> Step:
    """Builds the step with context parallelism. It returns the loss of the tokens of this rank, two chunks of each sequence.

    `stack` keeps the context of the split attention open. `params` selects `fully_shard` without resharding after the forward,
    or `DistributedDataParallel`. `rotate` is how keys and values reach the other ranks. Attention is never compiled.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    inputs_BT, labels_BT = batch(config, device)
    rotary_TK = rotary(config.model, config.input.seq_len, torch.zeros((), device=device))
    positions_T = torch.arange(config.input.seq_len, device=device)
    axes = dict.fromkeys((positions_T, *rotary_TK), 0) | dict.fromkeys((inputs_BT, labels_BT), 1)
    split = context_parallel(mesh, buffers=[*axes], buffer_seq_dims=[*axes.values()], no_restore_buffers={*axes})
    if device.type == "cuda":
        stack.enter_context(split)  # also replaces F.scaled_dot_product_attention
        attend = ring_attention
    else:
        with split:
            pass  # the buffers stay split
        attend = partial(gathered_attention, mesh, positions_T)
    shard_fully = make_sharder(config.model, device, mesh.size())

    def shard(part: nn.Module) -> None:
        if params == "sharded":
            shard_fully(part, reshard=False)

    forward = around_attention(attend, compile=compile)

    def shard_block(block: nn.Module) -> None:
        block.forward = partial(forward, block)
        shard(block)

    model = build_model(config.model, device, compile=False, float8=False, shard=shard_block)
    shard(model)
    model.rotary = rotary_TK
    whole: nn.Module = model
    if params == "replicated":
        torch._dynamo.config.optimize_ddp = False  # would split the compiled blocks at the buckets
        whole = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loss_fn = torch.compile(cross_entropy) if compile else cross_entropy
    return make_step(model, config, lambda: loss_fn(whole(inputs_BT), labels_BT))


def around_attention(attend: Callable[..., Tensor], *, compile: bool) -> Callable[..., Tensor]:
    """Returns the forward function of a block with an attention that is never compiled."""

    def before(block: Block, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return block.heads(block.attention_norm(x_BTD), rotary_TK)

    def after(block: Block, x_BTD: Tensor, y_BHTK: Tensor) -> Tensor:
        x_BTD = x_BTD + block.out(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + block.mlp(block.mlp_norm(x_BTD))

    if compile:
        before, after = torch.compile(before), torch.compile(after)
    return lambda block, x_BTD, rotary_TK: after(block, x_BTD, attend(*before(block, x_BTD, rotary_TK)))


def ring_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Computes causal attention to the tokens of all ranks. Requires an open `context_parallel`."""
    is_grouped = k_BGTK.shape[1] != q_BHTK.shape[1]
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=is_grouped)


def gathered_attention(mesh: DeviceMesh, positions_T: Tensor, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Computes causal attention to the tokens of all ranks on the CPU. The ring attention of PyTorch needs a GPU."""
    k_BGRK, v_BGRK, positions_R = (
        DTensor.from_local(a, mesh, [Shard(axis)]).full_tensor(grad_placements=[Partial()])
        for a, axis in ((k_BGTK, 2), (v_BGTK, 2), (positions_T, 0))
    )
    mask_TR = positions_R <= positions_T[:, None]
    return F.scaled_dot_product_attention(q_BHTK, k_BGRK, v_BGRK, mask_TR, enable_gqa=True)


if __name__ == "__main__":
    with contextlib.ExitStack() as stack:
        time_ranks(partial(build, stack=stack))
