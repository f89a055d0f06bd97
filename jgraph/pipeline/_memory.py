"""Predicts the memory of a pipeline rank during a step from shapes."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgraph.layout import Param
from jgraph.pipeline._partition import AXIS
from jgraph.pipeline._placement import without_ranks
from jgraph.pipeline._program import Pipeline
from jgraph.strategies import sharding as fsdp
from jgraph.tree import leaf_names
from jgraph.types import Batch, Params, Tree


def bytes_per_rank(pipeline: Pipeline, inputs: Batch) -> dict[str, int]:
    """Predicts the bytes of each rank by name in a step of the SPMD engine, besides parameters and optimizer state."""
    slots = pipeline.tables().slots
    sizes = slot_bytes(pipeline, inputs)
    pools = {pool: slots[pool] * size for pool, size in sizes.items()}
    # `in flight`: results of an action before they are written to a pool
    pools["in flight"] = sum(sizes[pool] for pool in ("forward_dgrad", "forward_wgrad", "stash"))
    layers = without_ranks(pipeline.shapes.layers)
    outer = pipeline.each(lambda param: _of_rank(param, pipeline.mesh.shape[AXIS])).outer
    weights = pipeline.precision.weights
    quantized, rest = _by_precision([layer for chunk in layers for layer in chunk], weights)
    matrices = [leaf for name, leaf in rest if Param.describe(name, leaf).is_cast]
    # `cast`: parameters in `compute_dtype` or parameters of padding layers, and two copies of FP8 weights
    is_cast = pipeline.compute_dtype not in (None, jnp.float32)
    if is_cast:
        cast = _nbytes([outer, matrices], pipeline.compute_dtype)
    else:
        last = [] if pipeline.assignment.is_even else [chunk[-1] for chunk in layers]
        cast = _nbytes([leaf for _, leaf in _by_precision(last, weights)[1]])
    cast += 2 * _nbytes(quantized, jnp.int8)
    # `gathered`: parameters that are gathered over `fsdp` and not counted in `cast`
    is_sharded = pipeline.mesh.shape.get(fsdp.AXIS, 1) > 1
    gathered = _nbytes(outer if is_cast else [outer, *(leaf for _, leaf in rest)]) if is_sharded else 0
    return pools | {"main_grad": _nbytes([layers, outer], jnp.float32), "cast": cast, "gathered": gathered}


def slot_bytes(pipeline: Pipeline, inputs: Batch, *, layers: int | None = None) -> dict[str, int]:
    """Computes the bytes of a slot of each pool: the arrays of one stage and one microbatch on one device."""
    x, *rest = pipeline.stage_args(inputs)
    stage = without_ranks(pipeline.shapes.layers[0])
    stage = [stage[0]] * layers if layers else stage
    spec = pipeline.split(None, len(stage)).spec(pipeline.stage_shapes(stage), x, *rest)
    size = x.size * x.dtype.itemsize
    return spec.nbytes() | {"activation": size, "gradient": size, "loss": size}


def _of_rank(param: Param, ranks: int) -> jax.ShapeDtypeStruct:
    """Returns a shape with as many elements as a rank holds."""
    shares = 1 if param.axis_of(AXIS) is None else ranks
    return jax.ShapeDtypeStruct((math.prod(param.shape) // shares,), param.dtype)


def _nbytes(tree: Tree, dtype: DTypeLike | None = None) -> int:
    """Returns the bytes of the arrays of a tree in `dtype`, or in their own dtypes if it is None."""
    return sum(leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _by_precision(
    layers: Sequence[Params], weights: frozenset[str]
) -> tuple[list[jax.ShapeDtypeStruct], list[tuple[str, jax.ShapeDtypeStruct]]]:
    """Splits the parameters of layers into those that are quantized once per step, and the others with their names."""
    named = [pair for layer in layers for pair in zip(leaf_names(layer), jax.tree.leaves(layer), strict=True)]
    return [leaf for name, leaf in named if name in weights], [(name, leaf) for name, leaf in named if name not in weights]
