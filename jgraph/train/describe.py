"""Facts about a compiled step: memory by use, FP8 matmuls, pipeline schedule."""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jgraph.pipeline import Pipeline
from jgraph.pipeline.strategy import BoundPipeline
from jgraph.precision.report import about
from jgraph.schedule import Costs, simulate
from jgraph.step.compiled import CompiledStep, DispatchedStep
from jgraph.train.setup import TrainSetup, batch_shapes
from jgraph.xla.explain import FP8Products

Tree: TypeAlias = Any


def pipeline_of(setup: TrainSetup) -> Pipeline | None:
    """Returns the pipeline of a step; None without one."""
    return setup.step.bound.pipeline if isinstance(setup.step.bound, BoundPipeline) else None


def memory(setup: TrainSetup, compiled: CompiledStep) -> dict[str, Any]:
    """Returns the bytes per device: `pools` by use, `predicted_peak` of a pipeline or None, `compiled_peak` or None.

    Args:
        setup: The setup of the run.
        compiled: The compiled step. Its other temporary arrays are the pool `temporaries`.
    """
    state = setup.step.state

    def own(tree: Tree) -> int:
        def shape(leaf: Any) -> tuple[int, ...]:
            return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)

        return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    held, predicted = {"parameters": own(state.params), "optimizer": own(state.opt_state)}, None
    if pipeline_of(setup) is not None:
        pools = {name.replace("forward_", "residuals to "): size for name, size in _pipeline_bytes(setup).items()}
        predicted = sum((*held.values(), *pools.values()))
    else:
        dtypes = setup.config.dtypes
        itemsize, of_sum = (jnp.dtype(t).itemsize for t in (dtypes.main_params_dtype, dtypes.main_grads_dtype))
        pools = {"main_grad": held["parameters"] // itemsize * of_sum}
    if (found := compiled.memory) is not None:
        pools["temporaries"] = max(0, found.temporaries - sum(pools.values()))
    pools = {name: size for name, size in (held | pools).items() if size}
    return {"pools": pools, "predicted_peak": predicted, "compiled_peak": found.total if found else None}


def about_fp8(setup: TrainSetup, compiled: CompiledStep) -> str:
    """Describes the FP8 matmuls of the trace and of the compiled step in one line. Empty without any."""
    binding = setup.step.binding
    if binding.fp8 is None:
        return ""
    products = binding.fp8.plan(setup.model.shapes, *binding.microbatch).products
    on_gpu = jax.default_backend() == "gpu"
    distinct = {id(one): one for one in compiled.executables} if on_gpu else {}
    each = {name: FP8Products.of(one) for name, one in distinct.items()}
    found = [each[id(one)] for one in compiled.executables] if on_gpu else []
    compiled_products = FP8Products(sum(p.products for p in found), sum(p.transposes for p in found)) if found else None
    line = about(products, binding.fp8.config, compiled_products, in_loops=pipeline_of(setup) is not None)
    reshards = setup.config.parallel.reshard_after_forward
    return f"{line}; weights in FP8 stay gathered for the backward" if reshards else line


def about_pipeline(setup: TrainSetup, compiled: CompiledStep) -> str:
    """Describes the schedule and its predicted and compiled memory in one line. Empty without a pipeline."""
    if (pipeline := pipeline_of(setup)) is None:
        return ""
    schedule, chunks = pipeline.schedule, pipeline.layout.num_chunks
    player = str(compiled.gradients) if isinstance(compiled, DispatchedStep) else f"{pipeline.runtime} runtime"
    idle = simulate(schedule, Costs(), execution="lockstep").bubble
    text = (
        f"pipeline: {schedule.name} ({player}), {schedule.num_ranks} ranks x "
        f"{chunks} chunks, {schedule.num_ticks} ticks, {idle:.1%} idle if all actions take the same"
    )
    if compiled.memory is None:
        return text
    predicted = sum(_pipeline_bytes(setup).values())
    return f"{text}; a step takes {predicted / 2**30:.2f} GiB predicted, {compiled.memory.temporaries / 2**30:.2f} compiled"


def _pipeline_bytes(setup: TrainSetup) -> dict[str, int]:
    bound, batch = setup.step.bound, setup.config.input
    assert isinstance(bound, BoundPipeline)
    return bound.pipeline.bytes_per_rank(bound.shapes, batch_shapes(batch, batch.num_microbatches, batch.microbatch_size))
