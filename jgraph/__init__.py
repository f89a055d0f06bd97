"""Train Flax models on NVIDIA GPUs as one captured program per step."""

import importlib
from typing import TYPE_CHECKING

from jgraph.config import ModelConfig as ModelConfig
from jgraph.config import OptimizerConfig as OptimizerConfig
from jgraph.config import TrainConfig as TrainConfig
from jgraph.errors import CallableError as CallableError
from jgraph.errors import OrderError as OrderError
from jgraph.errors import OwnershipError as OwnershipError
from jgraph.presets import preset as preset

if TYPE_CHECKING:
    from jgraph.backward import dot_general as dot_general
    from jgraph.backward import split_backward as split_backward
    from jgraph.callables import Borrowed as Borrowed
    from jgraph.callables import fold_key as fold_key
    from jgraph.callables import make_graphed_callables as make_graphed_callables
    from jgraph.graph.explain import explain as explain
    from jgraph.loss import cross_entropy as cross_entropy
    from jgraph.schedule.order import Order as Order
    from jgraph.scopes import scope as scope

# What needs jax is imported when it is first asked for, so that --help and a wrong flag do not wait for jax.
_LAZY = {
    "Borrowed": "jgraph.callables",
    "Order": "jgraph.schedule.order",
    "cross_entropy": "jgraph.loss",
    "dot_general": "jgraph.backward",
    "explain": "jgraph.graph.explain",
    "fold_key": "jgraph.callables",
    "make_graphed_callables": "jgraph.callables",
    "scope": "jgraph.scopes",
    "split_backward": "jgraph.backward",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jgraph' has no attribute {name!r}")
