"""Computes the loss and the gradients of a GPT with PyTorch's tensor or context parallelism on the CPU.

    OMP_NUM_THREADS=1 python -m tests.parity.torch_partitioned RANK RANKS RENDEZVOUS RUN.npz...

`tests.parity.processes` runs one process per rank. Each RUN.npz is an input from `write`; the results replace it.

Tensor parallelism is `parallelize_module` with sequence parallelism, and the loss of a split vocabulary is `loss_parallel`.
Context parallelism shards tokens by PyTorch's `context_parallel`. Its attention has no kernel for the CPU, so this script
all-gathers keys, values and positions, and masks by position.
"""

# B batch, T sequence, S = T + 1, D model, H query heads, G key/value heads, K head size, R gathered tokens

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from benchmarks.peers.torch_gpt import rotary, rotate
from jgraph.train.model import settings_from
from jgraph_models.gpt_config import GPTConfig
from tests.parity.torch_fsdp import Arrays, save

Kind = Literal["tensor", "context"]

# The arrays of a batch of separate documents.
BATCH = {"tokens": torch.int64, "starts": torch.int64, "weights": torch.float32}


def write(path: Path, kind: Kind, model: GPTConfig, arrays: Arrays) -> None:
    """Writes the input of a run.

    Args:
        path: Path of the file.
        kind: `tensor` for tensor parallelism, or `context` for context parallelism.
        model: Model configuration.
        arrays: The batch `tokens` [B, S], `starts` [B, T] and `weights` [B, T], as `GPT.loss` takes it, and the weights of the
            model with the names of `tests.parity.weights`.
    """
    save(path, {"settings": np.array(json.dumps({"kind": kind, "model": dataclasses.asdict(model)}))} | arrays)


def main(rank: int, ranks: int, rendezvous: Path, paths: list[Path]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for path in paths:
        with np.load(path) as run:
            settings, arrays = json.loads(str(run["settings"])), {k: run[k] for k in run if k != "settings"}
        config = settings_from(GPTConfig, settings["model"])
        batch = [torch.tensor(arrays.pop(name), dtype=dtype) for name, dtype in BATCH.items()]
        model, compute = with_weights(GPT(config), arrays), tensor_parallel if settings["kind"] == "tensor" else token_parallel
        result = compute(init_device_mesh("cpu", (ranks,)), model, *batch) | gradients(model, arrays)
        dist.barrier()  # rank 0 replaces the file only after all ranks have read it
        if rank == 0:
            save(path, result)
    dist.destroy_process_group()


# --- Model ---


class GPT(nn.Module):
    """A GPT with a separate projection for queries, keys, values, gate and up, so that each can be split."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, *attention: Any) -> Tensor:
        """Returns the logits. `attention` are further arguments of `Attention`."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = x_BTD + block.attention(block.attention_norm(x_BTD), *attention)
            x_BTD = x_BTD + block.mlp(block.mlp_norm(x_BTD))
        return self.head(self.norm(x_BTD))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.d_model, config.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(config), MLP(config)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        D, K, self.K = config.d_model, config.head_size, config.head_size
        bias = config.attention_bias == "qkv"
        self.q = nn.Linear(D, config.num_heads * K, bias)
        self.k, self.v = (nn.Linear(D, config.num_kv_heads * K, bias) for _ in range(2))
        self.out = nn.Linear(config.num_heads * K, D, bias=False)
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = (nn.RMSNorm(K, config.norm_eps) for _ in range(2))

    def forward(self, x_BTD: Tensor, rotary_TK: tuple[Tensor, Tensor], mask_BTR: Tensor, gather: Any = lambda x: x) -> Tensor:
        """Computes attention to the tokens that `gather` collects."""
        q_BTHK, k_BTGK, v_BTGK = (project(x_BTD).unflatten(-1, (-1, self.K)) for project in (self.q, self.k, self.v))
        if hasattr(self, "q_norm"):
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BTHK, k_BTGK = rotate(q_BTHK, rotary_TK), rotate(k_BTGK, rotary_TK)
        q, k, v = (a.transpose(1, 2) for a in (q_BTHK, gather(k_BTGK), gather(v_BTGK)))
        y = F.scaled_dot_product_attention(q, k, v, mask_BTR[:, None], enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        D, F_ = config.d_model, config.d_ff
        self.up, self.down = nn.Linear(D, F_, bias=False), nn.Linear(F_, D, bias=False)
        self.gate = nn.Linear(D, F_, bias=False) if config.mlp == "swiglu" else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = self.up(x_BTD)
        return self.down(F.gelu(h_BTF, approximate="tanh") if self.gate is None else F.silu(self.gate(x_BTD)) * h_BTF)


def parts(config: GPTConfig, name: str) -> list[str]:
    """Returns the parameters of this GPT that are concatenated in a parameter of `tests.parity.weights`."""
    *layer, module, leaf = (name if "." in name else f"{name}.weight").replace("scale", "weight").split(".")
    inside = {
        "qkv": ["attention.q", "attention.k", "attention.v"],
        "q_norm": ["attention.q_norm"],
        "k_norm": ["attention.k_norm"],
        "out": ["attention.out"],
        "up": ["mlp.gate", "mlp.up"] if config.mlp == "swiglu" else ["mlp.up"],
        "down": ["mlp.down"],
    }
    return [".".join([*layer, part, leaf]) for part in inside.get(module, [module])]


def with_weights(model: GPT, weights: Arrays) -> GPT:
    """Sets all parameters. Strict loading checks that every parameter is set."""
    state, shapes = {}, model.state_dict()
    for name, array in weights.items():
        names = parts(model.config, name)
        state |= zip(names, torch.tensor(array).split([len(shapes[part]) for part in names]), strict=True)
    if model.config.head == "tied":
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state)
    tie(model)
    return model


def tie(model: GPT) -> None:
    if model.config.head == "tied":
        model.head.weight = model.embedding.weight


def gradients(model: GPT, names: Iterable[str]) -> Arrays:
    """Returns the whole gradients with the names of `tests.parity.weights`."""
    by_part = {name: whole(p.grad).numpy() for name, p in model.named_parameters()}
    return {f"gradient of {name}": np.concatenate([by_part[part] for part in parts(model.config, name)]) for name in names}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_axes(shard: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Returns the axes along which a shard is shorter than its array."""
    return [i for i, (part, length) in enumerate(zip(shard, shape, strict=True)) if part < length]


def mean_loss(logits_BTV: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
    losses = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none")
    return (whole(losses) * weights_BT.flatten()).mean()


def mask(queries_T: Tensor, keys_R: Tensor, starts_BT: Tensor) -> Tensor:
    """Returns a mask [B, T, R] of the keys that are in the document of a query, and not after the query."""
    return (keys_R <= queries_T[:, None]) & (keys_R >= starts_BT[..., None])


# --- Parallelism ---


def tensor_parallel(mesh: DeviceMesh, model: GPT, tokens_BS: Tensor, starts_BT: Tensor, weights_BT: Tensor) -> Arrays:
    """Runs forward and backward with split matrices. Returns the loss and the split axes of every parameter."""
    sequence = Shard(1)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=sequence)
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "blocks.*.*_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "blocks.*.attention.[qkv]": columns,
        "blocks.*.attention.[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
        "blocks.*.attention.out": rows,
        "blocks.*.mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        "blocks.*.mlp.up": columns,
        "blocks.*.mlp.gate": columns,
        "blocks.*.mlp.down": rows,
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model may have no gate and no head norms
        parallelize_module(model, mesh, plan)
    tie(model)  # both are split along the vocabulary
    positions_T = torch.arange(starts_BT.shape[1])
    rotary_TK = rotary(model.config, len(positions_T), weights_BT)
    with loss_parallel():
        logits_BTV = model(tokens_BS[:, :-1], rotary_TK, mask(positions_T, positions_T, starts_BT))
        loss = mean_loss(logits_BTV, tokens_BS[:, 1:], weights_BT)
        loss.backward()
    tensors = dict(model.named_parameters()) | {"logits": logits_BTV}
    axes = {name: split_axes(tensor.to_local().shape, tensor.shape) for name, tensor in tensors.items()}
    return {"loss": loss.detach().numpy(), "split axes": np.array(json.dumps(axes))}


def token_parallel(mesh: DeviceMesh, model: GPT, tokens_BS: Tensor, starts_BT: Tensor, weights_BT: Tensor) -> Arrays:
    """Runs forward and backward with split sequences. Returns the loss and the positions of all ranks."""
    positions_T = torch.arange(starts_BT.shape[1])
    rotary_TK = rotary(model.config, len(positions_T), weights_BT)
    inputs_BT, labels_BT = (part.clone() for part in (tokens_BS[:, :-1], tokens_BS[:, 1:]))
    axes = {positions_T: 0} | dict.fromkeys(rotary_TK, 0) | dict.fromkeys((inputs_BT, labels_BT, starts_BT, weights_BT), 1)
    with context_parallel(mesh, buffers=[*axes], buffer_seq_dims=[*axes.values()], no_restore_buffers={*axes}):
        pass  # the buffers stay sharded
    positions_R = torch.cat(all_gather(positions_T))
    logits_BTV = model(inputs_BT, rotary_TK, mask(positions_T, positions_R, starts_BT), lambda x: torch.cat(all_gather(x), 1))
    loss = mean_loss(logits_BTV, labels_BT, weights_BT) / mesh.size()
    loss.backward()
    loss = loss.detach()
    for tensor in (loss, *(p.grad for p in model.parameters())):
        dist.all_reduce(tensor)
    return {"loss": loss.numpy(), "positions": positions_R.numpy()}


if __name__ == "__main__":
    rank, ranks, rendezvous, *paths = sys.argv[1:]
    main(int(rank), int(ranks), Path(rendezvous), [Path(path) for path in paths])
