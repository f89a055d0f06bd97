"""Mixtures of experts: a layer for anybody's model, and the functions that it is made of."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jgraph.moe.config import MoEConfig as MoEConfig
    from jgraph.moe.layer import MoE as MoE

# Settings are read before jax is there.
_MODULE_OF = {"MoE": "layer", "MoEConfig": "config"}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"jgraph.moe.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'jgraph.moe' has no attribute {name!r}")
