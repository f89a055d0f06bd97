"""The model of a run as pure functions, with everything that its strategy and its training step ask about it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx
from jax import Array

from jgraph.adapters import AdaptedModel, lora
from jgraph.errors import ConfigError, require
from jgraph.modules import FunctionalModel, functional
from jgraph.pipeline import PipelineModel
from jgraph.strategies import Loss, Split
from jgraph.train.config import InputConfig, TrainConfig
from jgraph.train.hooks import ModelHooks, model_hooks
from jgraph.train.model import find_model, model_errors
from jgraph.types import Tree

# Fields of the configuration that set an argument of the step or of the model.
_FIELDS = {"experts": "ep", "engine": "pp_engine", "tensor": "tp", "context": "cp", "targets": "lora.targets"}


@dataclass(frozen=True)
class BuiltModel:
    """A configured model. Strategies and the step read it in place of the settings and the hooks of its class."""

    name: str  # package.module:Class
    functions: FunctionalModel
    loss: PipelineModel | Callable[..., Array | Loss]  # for a pipeline, the functions of its stages
    compute_dtype: np.dtype | None  # of sharded matrices when they are used; None if nothing is sharded, or in the settings
    splits_sequences: bool
    tensor_rules: Mapping[str, Split | None]  # empty with `tp` 1
    frozen: tuple[str, ...]  # names of the weights beside adapters


def build_model(config: TrainConfig, functions: FunctionalModel | None = None) -> BuiltModel:
    """Imports the model class, resolves its hooks and makes its functions, unless given. Only traces its construction."""
    hooks = model_hooks(config.module)
    dtype = config.hooks.compute_dtype if config.is_pipeline or config.is_sharded else None
    with model_errors(config.module, "have the name of a dtype in its settings, compute_dtype"):
        compute_dtype = None if dtype is None else jnp.dtype(dtype)
    functions = functions or _functions(config, hooks, find_model(config.module))
    adapted = functions if isinstance(functions, AdaptedModel) else None
    loss = _pipeline_model(config, hooks, adapted) if config.is_pipeline else _mean_loss(functions)
    rules = hooks.tensor_rules(config.model) if config.parallel.tp > 1 else {}
    return BuiltModel(
        name=config.module,
        functions=functions,
        loss=loss,
        compute_dtype=compute_dtype,
        splits_sequences=hooks.splits_sequences,
        tensor_rules=adapted.tensor_rules(rules) if adapted else rules,
        frozen=adapted.frozen if adapted else (),
    )


def functional_model(config: TrainConfig) -> FunctionalModel:
    """Returns the configured model alone, for a program that does not train."""
    with errors_by_field(config):
        return _functions(config, model_hooks(config.module), find_model(config.module))


def _functions(config: TrainConfig, hooks: ModelHooks, found: Any) -> FunctionalModel:
    batch = batch_shapes(config.input, 1)
    settings: Any = config.hooks.in_fp8(config.model) if config.is_fp8 else config.model
    if config.dtypes.precision == "fp8" or config.lora.rank:
        settings = config.hooks.with_visible_matmuls(settings)
    args: list[Any] = [] if config.model is None else [settings]
    call: Callable[..., Any] = found
    is_linen = inspect.isclass(found) and issubclass(found, nn.Module)

    def make() -> Any:
        made = call(*args) if is_linen else call(*args, rngs=nnx.Rngs(config.seed))
        remat = config.compile.remat
        if remat != "nothing" and not config.is_pipeline:  # the stages of a pipeline recompute on their own
            has_remat = not isinstance(made, nn.Module) and isinstance(getattr(made, "remat", None), str)
            require(
                has_remat,
                "remat",
                remat,
                f"nothing for {config.module}, which has no attribute `remat`, except in a pipeline",
            )
            made.remat = remat
        return made

    with model_errors(config.module, f"be called as Class(config.model{'' if is_linen else ', rngs=nnx.Rngs(seed)'})"):
        model = functional(make, batch, key=config.seed)
    if not config.lora.rank:
        return model
    return lora(
        model,
        batch,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        targets=config.lora.targets,
        rules=hooks.tensor_rules(config.model),
        key=config.seed,
    )


def batch_shapes(batch: InputConfig, *lead: int) -> Tree:
    """Returns the shapes of a batch with the leading dimensions `lead`: the tokens, or with separate documents a dict."""
    T = batch.seq_len  # predicted tokens per row
    tokens = jax.ShapeDtypeStruct((*lead, T + 1), jnp.int32)
    if batch.data_documents == "joined":
        return tokens
    # `starts`: position in its row of the first token of the same document. `weights`: loss weight of each prediction.
    starts = jax.ShapeDtypeStruct((*lead, T), jnp.int32)
    return {"tokens": tokens, "starts": starts, "weights": jax.ShapeDtypeStruct((*lead, T), jnp.float32)}


@contextlib.contextmanager
def errors_by_field(config: TrainConfig) -> Iterator[None]:
    """Makes errors about arguments of the step or of the model errors about the fields that set them."""
    try:
        yield
    except ConfigError as e:
        if e.field == "loss" and config.dtypes.precision != "bf16":
            raise ConfigError(f"`precision` is fp8: must be bf16; the loss {e.problem}", field="precision") from None
        if field := _FIELDS.get(e.field):
            raise e.about(field) from None
        raise


def _mean_loss(model: FunctionalModel) -> Callable[..., Array | Loss]:
    def loss(params: Tree, batch: Tree, key: Array, carried: Tree = None) -> Array | Loss:
        value, after = model.loss(params, batch, key, carried)
        return Loss(value, carried=after) if after else value

    return loss


def _pipeline_model(config: TrainConfig, hooks: ModelHooks, adapted: AdaptedModel | None) -> PipelineModel:
    pp = config.parallel.pp
    if hooks.pipeline_model is None:
        message = f"must be 1 for {config.module}, which has no pipeline_model(config, ranks)"
        raise ConfigError(f"`pp` is {pp}: {message}", field="pp")
    pipeline = hooks.pipeline_model(config.model, pp)
    if config.input.data_documents == "separate" and pipeline.context is None:
        message = f"must be joined for {config.module}: its pipeline_model passes no context to the layers"
        raise ConfigError(f"`data_documents` is separate: {message}", field="data_documents")
    return adapted.pipeline(pipeline) if adapted else pipeline
