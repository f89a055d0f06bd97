"""Train JAX models on NVIDIA GPUs as one captured program per step.

- A step for your loop: `train_step`, its strategies `Replicated`, `FullySharded` and `Pipelined`; `elementwise`, `Loss`.
- A model for it: `functional` for a Flax module, `PipelineModel`, `split_embedding`, `cross_entropy`, `rms_norm`, `scope`,
  `BATCH_AXES`; with experts: `MoE`, `MoEConfig`, `grouped_dot`.
- State of a run: `Checkpoints`.
- Text from a model: `generate`, `stream`, `Decoder`; `load` for the model of a run or of a Hugging Face folder.
- A backward in two parts: `split_backward`; as CUDA graphs: `make_graphed_callables`, `Borrowed`, `fold_key`.
- What a pipeline runs when: `Order`, `Schedule`. What XLA made of a program: `explain`. Base of all errors: `JgraphError`.

The application, `python -m jgraph.train`, is in `jgraph.train`; its configuration is `jgraph.train.config.TrainConfig`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jgraph.autodiff import split_backward as split_backward
    from jgraph.callables import Borrowed as Borrowed, fold_key as fold_key, make_graphed_callables as make_graphed_callables
    from jgraph.checkpoint import Checkpoints as Checkpoints
    from jgraph.errors import (
        CallableError as CallableError,
        CheckpointError as CheckpointError,
        CompilerOptionError as CompilerOptionError,
        ConfigError as ConfigError,
        DataError as DataError,
        DonationError as DonationError,
        JgraphError as JgraphError,
        NonFiniteError as NonFiniteError,
        OrderError as OrderError,
        OwnershipError as OwnershipError,
        ShapeError as ShapeError,
        SplitError as SplitError,
        TargetError as TargetError,
    )
    from jgraph.inference.generate import generate as generate, stream as stream
    from jgraph.kernels.grouped import grouped_dot as grouped_dot
    from jgraph.kernels.norm import rms_norm as rms_norm
    from jgraph.loss import cross_entropy as cross_entropy
    from jgraph.mesh import BATCH_AXES as BATCH_AXES
    from jgraph.modules import Decoder as Decoder, functional as functional
    from jgraph.moe import MoEConfig as MoEConfig
    from jgraph.moe._layer import MoE as MoE
    from jgraph.pipeline import Pipelined as Pipelined, PipelineModel as PipelineModel, split_embedding as split_embedding
    from jgraph.precision.config import FP8Config as FP8Config
    from jgraph.precision.transform import fp8 as fp8
    from jgraph.schedule import Order as Order, Schedule as Schedule
    from jgraph.scopes import scope as scope
    from jgraph.step import elementwise as elementwise, train_step as train_step
    from jgraph.strategies import FullySharded as FullySharded, Loss as Loss, Replicated as Replicated
    from jgraph.train.loaded import load as load
    from jgraph.xla.explain import explain as explain

# The module of every public name. What needs jax is imported when it is first asked for: --help and a wrong flag do not wait.
_MODULES = {
    "autodiff": "split_backward",
    "checkpoint": "Checkpoints",
    "errors": "CallableError CheckpointError CompilerOptionError ConfigError DataError DonationError JgraphError "
    "NonFiniteError OrderError OwnershipError ShapeError SplitError TargetError",
    "callables": "Borrowed fold_key make_graphed_callables",
    "kernels.grouped": "grouped_dot",
    "kernels.norm": "rms_norm",
    "loss": "cross_entropy",
    "mesh": "BATCH_AXES",
    "inference.generate": "generate stream",
    "modules": "Decoder functional",
    "moe.config": "MoEConfig",
    "moe._layer": "MoE",
    "pipeline": "PipelineModel Pipelined split_embedding",
    "step": "elementwise train_step",
    "strategies": "FullySharded Loss Replicated",
    "precision.transform": "fp8",
    "precision.config": "FP8Config",
    "schedule": "Order Schedule",
    "scopes": "scope",
    "train.loaded": "load",
    "xla.explain": "explain",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib import metadata  # takes as long to import as the rest of this module

        return metadata.version("jgraph")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"jgraph.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'jgraph' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
