"""Trains the peer of `benchmarks/peers/fsdp.py` on the CPU with a fake Transformer Engine. `test_te_fsdp.py` runs the ranks.

    OMP_NUM_THREADS=1 python -m tests.parity.torch_te_fsdp RANK RANKS RENDEZVOUS CONFIGS.json LOSSES.json VARIANT...

RENDEZVOUS is the path of a file that does not exist yet. A VARIANT is `eager` or a variant of Transformer Engine, optionally
with `:reshard` or `:graph`. CONFIGS.json has configurations by name. The script writes the losses of three steps by this name
and variant to LOSSES.json. The fake layers have the arguments of `te.TransformerLayer`, compute like `torch_gpt.Block` and
ignore FP8.
"""

import contextlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.torch_gpt import Block, init_parameters
from jgraph.train.config import TrainConfig
from jgraph_models.gpt_config import GPTConfig

STEPS = 3


class TransformerLayer(nn.Module):
    """A block with the arguments of `te.TransformerLayer`."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int,
        kv_channels: int,
        layernorm_epsilon: float,
        activation: str,
        normalization: str,
        params_dtype: torch.dtype,
        self_attn_mask_type: str,
        attn_input_format: str,
        bias: bool,
        qk_norm_type: str | None,
        **_: Any,
    ):
        super().__init__()
        assert (normalization, self_attn_mask_type, attn_input_format) == ("RMSNorm", "causal", "bshd")
        assert not bias
        assert qk_norm_type is None
        config = GPTConfig(
            d_model=hidden_size,
            d_ff=ffn_hidden_size,
            num_heads=num_attention_heads,
            num_kv_heads=num_gqa_groups,
            head_dim=kv_channels,
            norm_eps=layernorm_epsilon,
            mlp="swiglu" if activation == "swiglu" else "gelu",
        )
        with torch.device("meta"):
            self.block = Block(config).to(params_dtype)
        self.block.to_empty(device="cpu")
        init_parameters(self.block.parameters())

    def forward(self, x_BTD: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        """Applies the block. `rotary_pos_emb` has the shape (length, 1, 1, head size), with equal halves."""
        first, second = rotary_pos_emb.flatten(0, 2).chunk(2, dim=-1)
        assert torch.equal(first, second)
        return self.block(x_BTD, (first.cos(), first.sin()))


class FusedAdam(torch.optim.AdamW):
    """AdamW with the arguments of FusedAdam."""

    def __init__(self, params: Any, *, adam_w_mode: bool, capturable: bool, master_weights: bool, **options: Any):
        assert (adam_w_mode, capturable, master_weights) == (True, False, True)
        super().__init__(params, **options)


def install() -> None:
    """Installs the fake package."""

    def module(name: str, **content: object) -> None:
        sys.modules[f"transformer_engine{name}"] = made = ModuleType(f"transformer_engine{name}")
        vars(made).update(content)

    def context(**_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    recipes = {name: lambda **_: object() for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}
    names = "compute_score_for_moe_aux_loss", "moe_aux_loss", "topk_with_score_function"
    pytorch = {"TransformerLayer": TransformerLayer, "autocast": context, "quantized_model_init": context, "Float8Tensor": str}
    module("")
    module(".pytorch", **pytorch)
    module(".pytorch.module")
    module(".pytorch.module.grouped_linear", is_module_grouped_tensor_path_supported=None)
    module(".pytorch.optimizers", FusedAdam=FusedAdam)
    module(".pytorch.quantization", get_align_size_for_quantization=None)
    module(".pytorch.router", **{f"fused_{name}": None for name in names})
    module(".common")
    module(".common.recipe", **recipes)
    sys.modules["transformer_engine.common"].recipe = sys.modules["transformer_engine.common.recipe"]  # type: ignore[attr-defined]
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]


def train(config: TrainConfig, variant: str, rank: int, ranks: int) -> list[float]:
    """Returns the losses of a variant on the rows of all ranks."""
    from benchmarks.peers import fsdp

    mode, _, suffix = variant.partition(":")
    te = mode if mode != "eager" else ""
    flags = {name: name == suffix for name in ("compile", "reshard", "float8", "graph", "whole", "experts", "muon")}
    step = fsdp.training_step(config, rank, ranks, torch.device("cpu"), te=te, **flags)
    losses = []
    for _ in range(STEPS):
        loss = step()
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    return losses


def main(rank: int, ranks: int, rendezvous: Path, configs: Path, out: Path, variants: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    install()
    torch.compiler.set_stance("force_eager")  # compilation takes half a minute on a CPU
    losses = {}
    for name, fields in json.loads(configs.read_text()).items():
        config = TrainConfig.from_dict(fields)
        losses[name] = {variant: train(config, variant, rank, ranks) for variant in variants}
    if rank == 0:
        out.write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, rendezvous, configs, out, *variants = sys.argv[1:]
    main(int(rank), int(ranks), Path(rendezvous), Path(configs), Path(out), variants)
