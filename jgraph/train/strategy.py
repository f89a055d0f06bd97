"""From a configuration to its strategy: the mesh, the recipe, and of a pipeline the model's pieces and the schedule."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jgraph.device import find as device_info
from jgraph.errors import ConfigError
from jgraph.mesh import Axis
from jgraph.modules import FunctionalModel
from jgraph.pipeline import Pipelined, PipelineModel, choose, find_schedule, measure
from jgraph.precision.config import FP8Config
from jgraph.processes import all_gather_scalar, devices_of_ranks
from jgraph.schedule import Choice, generate
from jgraph.strategies import FullySharded, Loss, Replicated, Strategy
from jgraph.strategies.objective import Objective
from jgraph.train.config import TrainConfig
from jgraph.train.functional import batch_shapes, functional_model, microbatch_shapes
from jgraph.train.model import find_model

Tree = Any


def loss_and_strategy(config: TrainConfig, model: FunctionalModel, *, layers: int | None = None) -> tuple[Any, Strategy]:
    """Returns the loss, or the pieces of a pipeline, and the strategy. Raises as `TrainSetup.of`, which has `layers` too."""

    def mean_loss(params: Tree, batch: Tree, key: Array, carried: Tree = None) -> Array | Loss:
        found, after = model.loss(params, batch, key, carried)
        return Loss(found, carried=after) if after else found

    mesh = _mesh(config)
    if config.is_pipeline:
        assert mesh is not None, "a pipeline has a mesh"
        pieces = _pipeline_model(config)
        if layers is not None:
            pieces = _shortened(pieces, layers, len(jax.eval_shape(pieces.split, model.shapes)[1]))
        return pieces, _pipelined(config, mesh, model, pieces)
    if not config.is_sharded:
        return mean_loss, Replicated(mesh, model.shapes)
    assert mesh is not None, "what is sharded has a mesh"
    return mean_loss, FullySharded(
        mesh,
        model.shapes,
        shard_rules=config.shard_rules,
        annotations=model.annotations,
        compute_dtype=_compute_dtype(config),
        reshard_after_forward=config.reshard_after_forward,
        **_spread(config),
    )


@contextlib.contextmanager
def named_by_fields(config: TrainConfig) -> Iterator[None]:
    """Names the fields of a run in errors about `loss`, `experts` and `engine`, which are arguments of a step."""
    try:
        yield
    except ConfigError as e:
        if e.field == "loss" and config.precision != "bf16":
            told = str(e).replace("`loss`", "the loss")
            raise ConfigError(f"`precision` is fp8: must be bf16; {told}", field="precision") from None
        if e.field == "experts":
            raise ConfigError(str(e).replace("`experts`", "`ep`"), field="ep") from None
        if e.field == "engine":
            raise ConfigError(str(e).replace("`engine`", "`pp_engine`"), field="pp_engine") from None
        raise


def _spread(config: TrainConfig) -> dict[str, Any]:
    """Returns what a strategy takes for experts over devices."""
    return {"experts": config.ep, "shards": "experts" if config.ep > config.fsdp else "everything"}


def recipe_of(config: TrainConfig) -> FP8Config | None:
    """Returns the recipe, if products are in FP8. Raises ConfigError for a GPU that has none."""
    if config.precision == "bf16":
        return None
    name = jax.devices()[0].device_kind
    device = device_info(name)
    if jax.default_backend() == "gpu" and not (device and device.has_fp8) and not config.fp8.emulate:
        raise ConfigError(
            f"`precision` is fp8: must be bf16 on {name}, which is not known to have FP8; `fp8.emulate` gives the same numbers",
            field="precision",
        )
    return config.fp8


def _compute_dtype(config: TrainConfig) -> Any:
    """Returns the dtype of the matrices' copies that a step computes with; None where the model does not say."""
    dtype = getattr(config.model, "compute_dtype", None)
    return None if dtype is None else jnp.dtype(dtype)


def _mesh(config: TrainConfig) -> Mesh | None:
    counts = {"dp": config.dp, "pp": config.pp, "fsdp": config.fsdp}
    ranks, needs_mesh = math.prod(counts.values()), config.is_pipeline or config.is_sharded
    # Asked in this order: alone and on one device, nothing here starts a backend, which may be for a target that is not here.
    if ranks == 1 and not needs_mesh and not jax.distributed.is_initialized():
        return None
    fields = " ".join(f"`{name}` {count}" for name, count in counts.items() if count > 1)
    devices = devices_of_ranks(ranks, flags=fields or "a pipeline")
    if len(devices) == 1 and not needs_mesh:
        return None
    # Neighbours share parameters: that is the most traffic.
    axes = {Axis.DATA.value: config.replicas}
    if config.is_pipeline:
        axes[Axis.PIPE.value] = config.pp
    if config.is_sharded or config.shards > 1:
        axes[Axis.FSDP.value] = config.shards
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _pipeline_model(config: TrainConfig) -> PipelineModel:
    """Returns the model in the pieces of a pipeline. Raises ConfigError where its module has none."""
    make = getattr(find_model(config.module), "pipeline_model", None)
    if make is None:
        raise ConfigError(
            f"`pp` is {config.pp}: must be 1 for {config.module}, which has no pipeline_model(config, ranks)", field="pp"
        )
    model = make(config.model, config.pp)
    if config.data_documents == "separate" and model.context is None:
        message = f"must be joined for {config.module}, whose pipeline_model has no context for its layers"
        raise ConfigError(f"`data_documents` is separate: {message}", field="data_documents")
    return model


def _shortened(model: PipelineModel, layers: int, of: int) -> PipelineModel:
    """Returns the model with the first of its layers; the others are as the last of these where they are asked for."""

    def split(tree: Tree) -> tuple[Tree, list[Tree]]:
        outer, own = model.split(tree)
        return outer, own[:layers]

    def whole(own: list[Tree]) -> list[Tree]:
        return [*own, *own[-1:] * (of - layers)]

    return replace(
        model,
        split=split,
        join=lambda outer, own: model.join(outer, whole(own)),
        split_carried=lambda carried: model.split_carried(carried)[:layers],
        join_carried=lambda own: model.join_carried(whole(own)),
    )


def _pipelined(config: TrainConfig, mesh: Mesh, found: FunctionalModel, model: PipelineModel) -> Pipelined:
    """Returns the strategy with the schedule that is asked for; `auto` measures."""
    pipelined, sizes = (
        _with_any_schedule(config, mesh, found, model),
        {"pp": config.pp, "microbatches": config.num_microbatches},
    )
    if config.schedule != "auto":
        # Engines that are to be timed are given one by one.
        schedule = find_schedule(config.schedule, chunks=config.chunks, **sizes)
        return replace(pipelined, schedule=schedule, engine=config.pp_engines[0])
    choice = _predictor(config, pipelined, found, model)(None)
    return replace(pipelined, schedule=choice.schedule, engine=choice.candidates[0].engine)


def predictor(config: TrainConfig) -> Callable[[int | None], Choice]:
    """Measures. Returns the choice that `schedule` auto has, of the model with so many layers. Raises as `TrainSetup.of`."""
    mesh, found, model = _mesh(config), functional_model(config), _pipeline_model(config)
    assert mesh is not None, "a pipeline has a mesh"
    return _predictor(config, _with_any_schedule(config, mesh, found, model), found, model)


def _with_any_schedule(config: TrainConfig, mesh: Mesh, found: FunctionalModel, model: PipelineModel) -> Pipelined:
    """Returns the strategy with a schedule that is always possible. Raises ConfigError where there are too few layers."""
    shapes, choices = found.shapes, {"compute_dtype": _compute_dtype(config), "remat": config.remat}
    if config.shards > 1:
        choices |= {"shard_rules": config.shard_rules, "annotations": found.annotations, **_spread(config)}
    num_layers = len(jax.eval_shape(model.split, shapes)[1])
    if num_layers < config.pp * config.chunks:
        raise ConfigError(
            f"`pp` is {config.pp}: must be such that `pp` x `chunks` {config.chunks} is at most the {num_layers} layers",
            field="pp",
        )
    return Pipelined(mesh, shapes, generate("gpipe", pp=config.pp, microbatches=config.num_microbatches), **choices)


def _predictor(
    config: TrainConfig, pipelined: Pipelined, found: FunctionalModel, model: PipelineModel
) -> Callable[[int | None], Choice]:
    """Measures. Returns a function to the fastest schedule that fits, and all others, of the model with so many layers.

    `pipelined` is with any schedule. None are all layers; fewer fit in any case.
    """
    objective = Objective(
        loss=model,
        num_microbatches=config.num_microbatches,
        carried=found.carried,
        reductions=found.reductions,
        fp8=recipe_of(config),
        batch=batch_shapes(config, config.batch_size),
    )
    with named_by_fields(config):
        pipeline, _ = pipelined.pipeline(objective)
    params = jax.eval_shape(lambda tree: pipeline.stack(*model.split(tree)), found.shapes)
    given = (pipeline, params, microbatch_shapes(config))
    parts = measure(
        *given,
        engines=config.pp_engines,
        share=lambda seconds: all_gather_scalar(round(seconds * 1e7))[0] / 1e7,  # an int32 is 214 s of these
    )

    def predict(layers: int | None) -> Choice:
        limit = None if layers else config.memory_limit * 2**30 or None
        return choose(*given, parts=parts, memory_limit=limit, layers=layers, engines=config.pp_engines)

    return predict
