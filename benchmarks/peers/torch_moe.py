"""Mixtures of experts in PyTorch: rows are sorted by expert, multiplied with `torch._grouped_mm`, and gathered back.

The host never reads a tensor, so the step can be compiled as a whole and captured in a CUDA graph. Forward and backward permute
rows by gathers. The default gradient of an index uses atomic additions.
"""

# B batch, T sequence, N tokens, k experts a token, M = N * k rows, E experts, D model, F hidden

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import (
    Tensor,
    _grouped_mm,  # pyright: ignore[reportPrivateImportUsage]
    nn,
)
from torch.nn import functional as F

from benchmarks.peers import torch_gpt
from benchmarks.peers.torch_gpt import cross_entropy, init_parameters
from jgraph.moe.config import MoEConfig
from jgraph_models.gpt_config import GPTConfig

Rotary = tuple[Tensor, Tensor]


class GPT(torch_gpt.GPT):
    """A GPT with a mixture of experts in every block. With `ranks > 1` it uses expert parallelism."""

    def __init__(self, config: GPTConfig, ranks: int = 1):
        super().__init__(config)
        self.blocks = nn.ModuleList([Block(config, ranks) for _ in range(config.num_layers)])
        init_parameters(self.blocks.parameters())

    def forward(self, tokens_BT: Tensor) -> Any:
        """Returns logits and the sum of the layers' balance losses."""
        x_BTD, rotary_TK = self.embed(tokens_BT)
        x_BTD, balance = apply_blocks(self.blocks, x_BTD, rotary_TK)
        return self.logits(x_BTD), balance

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """Returns the next-token loss plus the weighted balance loss."""
        logits_BTV, balance = self(tokens_BS[:, :-1])
        return cross_entropy(logits_BTV, tokens_BS[:, 1:]) + self.config.moe.balance_loss * balance


class Block(torch_gpt.Block):
    """A transformer block with a mixture of experts."""

    def __init__(self, config: GPTConfig, ranks: int = 1):
        super().__init__(config)
        del self.up, self.down
        self.moe = MoE(config.d_model, config.d_ff, config.moe) if ranks == 1 else ExpertParallelMoE(config, ranks)

    def forward(self, x_BTD: Tensor, rotary_TK: Rotary) -> Any:
        """Returns the new residual stream and the balance loss."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary_TK)
        y_BTD, balance = self.moe(self.mlp_norm(x_BTD))
        return x_BTD + y_BTD, balance


class MoE(nn.Module):
    """A mixture of experts with softmax top-k routing and SwiGLU experts."""

    def __init__(self, d_model: int, d_ff: int, config: MoEConfig):
        super().__init__()
        assert (config.router, config.shared_experts, config.z_loss) == ("softmax-topk", 0, 0)
        self.config = config
        E, F_ = config.num_experts, config.d_ff or d_ff
        self.router = nn.Parameter(torch.empty(d_model, E))
        self.up = nn.Parameter(torch.empty(E, d_model, 2 * F_))
        self.down = nn.Parameter(torch.empty(E, F_, d_model))

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output and the balance loss of Switch Transformer (arXiv:2101.03961).

        The loss is E times the sum over experts of token fraction times mean probability. The token fractions sum to k.
        """
        x_ND, k, E = x_BTD.flatten(0, 1), self.config.experts_per_token, self.config.num_experts
        exact = torch.promote_types(x_ND.dtype, torch.float32)
        probabilities_NE = F.softmax(x_ND.to(exact) @ self.router.to(exact), dim=-1)
        weights_Nk, experts_Nk = probabilities_NE.topk(k, dim=-1)
        if self.config.weights == "normalized":
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        weights_Nk = weights_Nk * self.config.weights_scale
        sorted_M, order_M = (
            experts_Nk.flatten().short().sort(stable=True)
        )  # int16 keys need a quarter of the radix sort passes of int64
        inverse_M = inverse_of(order_M)
        # End offset of the rows of each expert. torch.bincount would synchronize with the host.
        ends_E = torch.searchsorted(sorted_M, torch.arange(E, device=sorted_M.device).short(), right=True, out_int32=True)
        fractions_E = ends_E.diff(prepend=ends_E.new_zeros(1)) / len(x_ND)
        balance = E * (fractions_E * probabilities_NE.mean(0)).sum()

        rows_MD = self.experts(GatherRows.apply(x_ND, order_M, inverse_M, k), ends_E)
        copies_NkD = PermuteRows.apply(rows_MD, order_M, inverse_M).unflatten(0, (-1, k))
        y_ND = (copies_NkD * weights_Nk[..., None]).sum(1).to(x_ND.dtype)
        return y_ND.view_as(x_BTD), balance

    def experts(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Applies the experts to rows that are sorted by expert, with the end offset of each expert."""
        gate_MF, up_MF = _grouped_mm(rows_MD, self.up.to(rows_MD.dtype), offs=ends_E).chunk(2, dim=-1)
        return _grouped_mm(F.silu(gate_MF) * up_MF, self.down.to(rows_MD.dtype), offs=ends_E)


class ExpertParallelMoE(MoE):
    """A mixture with expert parallelism: each rank owns the same number of experts, and rows travel by all-to-all.

    The host waits for the row counts of the all-to-all, as in torchtitan and Megatron-LM.
    """

    def __init__(self, config: GPTConfig, ranks: int):
        super().__init__(config.d_model, config.d_ff, config.moe)
        self.ranks, self.here = ranks, config.moe.num_experts // ranks
        self.up, self.down = (nn.Parameter(p[: self.here].clone()) for p in (self.up, self.down))

    def experts(self, rows_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Sends rows to the ranks of their experts, applies the local experts, and sends the results back."""
        sent_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        got_E = torch.empty_like(sent_E)  # by rank, then by expert
        dist.all_to_all_single(got_E, sent_E)
        sent, got = (counts_E.view(self.ranks, -1).sum(1).tolist() for counts_E in (sent_E, got_E))
        rows_RD = all_to_all_rows(rows_MD, got, sent)
        expert_R = (
            torch.arange(len(got_E), device=got_E.device).remainder(self.here).repeat_interleave(got_E, output_size=sum(got))
        )
        order_R = expert_R.short().argsort(stable=True)
        inverse_R = inverse_of(order_R)
        ends = got_E.view(self.ranks, -1).sum(0).cumsum(0, dtype=torch.int32)
        rows_RD = super().experts(PermuteRows.apply(rows_RD, inverse_R, order_R), ends)
        return all_to_all_rows(PermuteRows.apply(rows_RD, order_R, inverse_R), sent, got)


def inverse_of(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def all_to_all_rows(rows: Tensor, got: list[int], sent: list[int]) -> Tensor:
    """Exchanges rows between all ranks, with the number of rows for each. Differentiable."""
    world: Any = dist.group.WORLD
    return functional_collectives.all_to_all_single_autograd(rows, got, sent, world)


class GatherRows(torch.autograd.Function):
    """Copies each row of x for its k experts, sorted by expert. The backward gathers the copies and sums them in float32."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, inverse_M: Tensor, k: int) -> Tensor:
        """Gathers the rows. `order_M` sorts the N * k copies by expert."""
        ctx.save_for_backward(inverse_M)
        ctx.k = k
        return x_ND[order_M // k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Sums the gradients of the copies of each token."""
        ((inverse_M,), (dy_MD,)) = ctx.saved_tensors, grads
        copies_NkD = dy_MD[inverse_M].unflatten(0, (-1, ctx.k))
        return copies_NkD.sum(1), None, None, None  # torch sums bfloat16 in float32


class PermuteRows(torch.autograd.Function):
    """Restores the order of the tokens. The backward applies the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        """Returns the rows in the order of the tokens. `order_M` has sorted them."""
        ctx.save_for_backward(order_M)
        return rows_MD[inverse_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Permutes the gradient."""
        ((order_M,), (dy_MD,)) = ctx.saved_tensors, grads
        return dy_MD[order_M], None, None


def apply_blocks(blocks: Any, x_BTD: Tensor, rotary: Any) -> tuple[Tensor, Tensor]:
    """Returns the residual stream after all blocks and the sum of their balance losses."""
    total = x_BTD.new_zeros((), dtype=torch.promote_types(x_BTD.dtype, torch.float32))
    for block in blocks:
        x_BTD, balance = block(x_BTD, rotary)
        total = total + balance
    return x_BTD, total
