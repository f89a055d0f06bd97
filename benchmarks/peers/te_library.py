"""Imports Transformer Engine with the cuDNN of PyTorch. Other modules import names of Transformer Engine from here only.

Transformer Engine first searches a system CUDA toolkit for cuDNN. If its version differs from the package that PyTorch uses,
attention runs on the version of the toolkit, and PyTorch refuses to use cuDNN. Calling `torch.backends.cudnn.version()` before
the import is not sufficient: cuDNN loads its libraries by name and on demand, so they may come from the toolkit, too.
"""

# Transformer Engine is installed on GPU machines only.
# pyright: reportMissingImports=false
# ruff: noqa: E402

import ctypes
import os
from pathlib import Path

import torch

# A library comes after the libraries that it needs.
_CUDNN = ("_graph", "_engines_runtime_compiled", "_engines_precompiled", "_heuristic", "_ops", "_cnn", "_adv", "")


def _load_cudnn() -> None:
    """Loads all libraries of the cuDNN package beside PyTorch. Does nothing if there is no such package."""
    folder = Path(torch.__file__).parents[1] / "nvidia/cudnn/lib"
    paths = [folder / f"libcudnn{name}.so.9" for name in _CUDNN]
    if all(path.exists() for path in paths):
        for path in paths:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        os.environ["CUDNN_HOME"] = str(folder.parent)  # the first place where Transformer Engine searches


_load_cudnn()

from transformer_engine import pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.module.grouped_linear import is_module_grouped_tensor_path_supported
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.quantization import get_align_size_for_quantization
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

__all__ = [
    "FusedAdam",
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "get_align_size_for_quantization",
    "is_module_grouped_tensor_path_supported",
    "recipes",
    "te",
]
