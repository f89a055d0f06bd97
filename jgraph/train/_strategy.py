"""Mesh and strategy of a run: data parallel or a pipeline, with matrices split over `tp` devices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from jgraph.errors import require
from jgraph.layout import named
from jgraph.mesh import Axis
from jgraph.pipeline import Pipelined, PipelineModel, choose, find_schedule, measure
from jgraph.precision.config import FP8Config
from jgraph.processes import all_gather_scalar, devices_of_ranks
from jgraph.schedule import Schedule
from jgraph.strategies import FullySharded, Replicated, Strategy, TensorParallel
from jgraph.strategies.batches import by_microbatch
from jgraph.strategies.objective import Objective
from jgraph.train._functional import BuiltModel
from jgraph.train._setup_config import ParallelConfig, PipelineConfig
from jgraph.types import JaxDevice, Tree


def make_mesh(
    parallel: ParallelConfig,
    *,
    is_pipeline: bool,
    is_sharded: bool,
    is_offloaded: bool = False,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh | None:
    """Returns the mesh of the run; None on one device without a pipeline, sharding or arrays in host memory."""
    assert not parallel.auto, "a mesh has sizes"
    ranks = parallel.num_devices
    needs_mesh = is_pipeline or is_sharded or is_offloaded
    # On one device, no backend is started: the step may be compiled for a GPU that is not present.
    if ranks == 1 and not needs_mesh and not jax.distributed.is_initialized():
        return None
    flags = " ".join(f"`{name}` {count}" for name, count in parallel.sizes.items() if count > 1)
    devices = devices or devices_of_ranks(ranks, flags=flags or "a pipeline")
    if len(devices) == 1 and not needs_mesh:
        return None
    # The last mesh axis has the most traffic, so its devices are neighbors.
    axes = [
        (Axis.DATA, parallel.data_ranks // parallel.shards, True),
        (Axis.PIPE, parallel.pp, is_pipeline),
        (Axis.FSDP, parallel.shards, is_sharded or parallel.shards > 1),
        (Axis.CONTEXT, parallel.cp, parallel.cp > 1),
        (Axis.TENSOR, parallel.tp, parallel.tp > 1),
    ]
    sizes = {axis.value: size for axis, size, is_used in axes if is_used}
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def data_parallel(parallel: ParallelConfig, mesh: Mesh | None, model: BuiltModel, *, is_sharded: bool) -> Strategy:
    """Returns a strategy that trains on another part of the rows on each device."""
    if not is_sharded:
        return Replicated(mesh, model.functions.shapes)
    assert mesh is not None, "a sharded state has a mesh"
    return FullySharded(
        mesh,
        model.functions.shapes,
        compute_dtype=model.compute_dtype,
        gather_per=parallel.gather_per,
        **_sharding(parallel, model),
    )


def pipelined(
    parallel: ParallelConfig,
    pipeline: PipelineConfig,
    mesh: Mesh | None,
    model: BuiltModel,
    *,
    batch: Tree,
    num_microbatches: int,
    remat: Literal["nothing", "wide", "layer"],
    fp8: FP8Config | None,
) -> Pipelined:
    """Returns a strategy that divides the layers between the ranks. The schedule auto measures a layer on the devices."""
    assert mesh is not None, "a pipeline has a mesh"
    assert isinstance(model.loss, PipelineModel), "a pipeline has stages"
    num_layers = len(jax.eval_shape(model.loss.split, model.functions.shapes)[1])
    fitting = f"such that `pp` x `chunks` {pipeline.chunks} is at most the {num_layers} layers"
    require(parallel.pp * pipeline.chunks <= num_layers, "pp", parallel.pp, fitting)
    is_auto = pipeline.schedule == "auto"
    schedule = find_schedule(
        "gpipe" if is_auto else pipeline.schedule,  # gpipe is a placeholder
        pp=parallel.pp,
        chunks=pipeline.chunks,
        microbatches=num_microbatches,
    )
    strategy = Pipelined(
        mesh,
        model.functions.shapes,
        schedule,
        engine=pipeline.pp_engine,
        compute_dtype=model.compute_dtype,
        remat=remat,
        **(_sharding(parallel, model) if parallel.shards > 1 else {}),
    )
    if not is_auto:
        return strategy
    objective = Objective(
        loss=model.loss,
        layout=named(model.functions.shapes),
        num_microbatches=num_microbatches,
        carried=model.functions.carried,
        reductions=model.functions.reductions,
        fp8=fp8,
        batch=batch,
    )
    return replace(strategy, schedule=_fastest(strategy, objective, pipeline.memory_limit))


def _fastest(strategy: Pipelined, objective: Objective, memory_limit: float) -> Schedule:
    """Returns the fastest schedule for the engine of the strategy, predicted from measured times of a layer."""
    pipeline, _ = strategy.pipeline(objective)
    batch_M = jax.eval_shape(lambda batch: by_microbatch(batch, objective.num_microbatches), objective.batch)
    # Process 0's times count. int32 holds up to 214 s.
    share = lambda seconds: all_gather_scalar(round(seconds * 1e7))[0] / 1e7  # noqa: E731
    parts = measure(pipeline, batch_M, engine=strategy.engine, share=share)
    chosen = choose(pipeline, batch_M, parts=parts, memory_limit=memory_limit * 2**30 or None, engine=strategy.engine)
    return chosen.schedule


def tensor_parallel(parallel: ParallelConfig, strategy: Strategy, model: BuiltModel) -> Strategy:
    """Returns the strategy with its matrices split over `tp` devices. Checks that the model supports `cp` and `tp`."""
    require(
        parallel.cp == 1 or model.splits_sequences,
        "cp",
        parallel.cp,
        f"1 for {model.name}, which has no attribute `splits_sequences`",
    )
    tp = parallel.tp
    if tp == 1:
        return strategy
    rules = model.tensor_rules
    lacks = f"for {model.name}, which has no tensor_rules(config)"
    require(not isinstance(strategy, Pipelined) or len(rules) > 0, "tp", tp, f"1 in a pipeline {lacks}")
    split = TensorParallel(strategy, rules, model.functions.annotations)
    require(len(split.splits(tp)) > 0, "tp", tp, f"1 {lacks} and no partition name `{Axis.TENSOR}`")
    return split


def _sharding(parallel: ParallelConfig, model: BuiltModel) -> dict[str, Any]:
    """Returns the arguments of a strategy for sharded parameters and experts."""
    return {
        "shard_rules": parallel.shard_rules,
        "annotations": model.functions.annotations,
        "experts": parallel.ep,
        "shards": "experts" if parallel.ep > parallel.sizes["fsdp"] else "everything",
    }
