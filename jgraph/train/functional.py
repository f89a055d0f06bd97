"""A run's model as pure functions, and the shapes of its batches."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jgraph.errors import ConfigError
from jgraph.modules import FunctionalModel, functional
from jgraph.train.config import TrainConfig
from jgraph.train.model import find_model, model_errors

Tree = Any


def functional_model(config: TrainConfig) -> FunctionalModel:
    """Returns the model that the configuration names, as pure functions."""
    found = find_model(config.module)
    call: Callable[..., Any] = found
    settings: list[Any] = [] if config.model is None else [config.model]
    if config.precision == "fp8" and (in_fp8 := getattr(config.model, "in_fp8", None)):
        settings = [in_fp8()]
    is_linen = inspect.isclass(found) and issubclass(found, nn.Module)
    remats = config.remat != "nothing" and not config.is_pipeline  # whose stages see to it

    def make() -> Any:
        made = call(*settings) if is_linen else call(*settings, rngs=nnx.Rngs(config.seed))
        if remats and (is_linen or not hasattr(made, "remat")):
            message = f"must be nothing for {config.module}, which has no attribute `remat`, except in a pipeline"
            raise ConfigError(f"`remat` is {config.remat}: {message}", field="remat")
        if remats:
            made.remat = config.remat
        return made

    with model_errors(config.module, f"be called as Class(config.model{'' if is_linen else ', rngs=nnx.Rngs(seed)'})"):
        return functional(make, batch_shapes(config, 1), key=config.seed)


def batch_shapes(config: TrainConfig, *lead: int) -> Tree:
    """Returns the shapes of rows of data, which are the last of the `lead` dimensions."""
    T = config.seq_len
    kinds = {"tokens": (T + 1, jnp.int32), "starts": (T, jnp.int32), "weights": (T, jnp.float32)}
    shapes = {name: jax.ShapeDtypeStruct((*lead, n), dtype) for name, (n, dtype) in kinds.items()}
    return shapes if config.data_documents == "separate" else shapes["tokens"]


def microbatch_shapes(config: TrainConfig) -> Tree:
    """Returns the shapes of a batch, microbatch by microbatch."""
    return batch_shapes(config, config.num_microbatches, config.batch_size // config.num_microbatches)
