"""Mixtures of experts: a layer for any Flax NNX model, its settings, and its statistics."""

from typing import TYPE_CHECKING

from jgraph.moe.config import MoEConfig as MoEConfig

if TYPE_CHECKING:
    from jgraph.moe._layer import MoE as MoE


def __getattr__(name: str) -> object:
    # Imported on first use, because settings are read before jax is imported.
    if name == "MoE":
        from jgraph.moe._layer import MoE

        return MoE
    raise AttributeError(f"module 'jgraph.moe' has no attribute {name!r}")
