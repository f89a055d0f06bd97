"""The memory that a pipeline takes on a rank during a step, predicted from shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgraph.pipeline._placement import without_ranks
from jgraph.pipeline.partition import AXIS, Tree
from jgraph.pipeline.program import Pipeline
from jgraph.strategies import sharding as fsdp
from jgraph.tree import leaf_names


def bytes_per_rank(pipeline: Pipeline, params: Tree, inputs: Tree) -> dict[str, int]:
    """Predicts the memory of a rank during a step, besides parameters and optimizer state.

    Args:
        pipeline: The pipeline.
        params: Shapes of the parameters, as `Pipeline.step` takes them.
        inputs: Shapes of the microbatches, [M, B, ...].

    Returns:
        The bytes of each pool of the schedule and of `in flight` (results of an action that are not in a pool yet),
        `main_grad`, `cast` (parameters in `compute_dtype`, parameters that padding computes with, and weights in FP8 by rows
        and by columns) and `gathered` (other parameters that are gathered over `fsdp`).
    """
    slots, sizes = pipeline.tables().slots, slot_bytes(pipeline, params, inputs)
    pools = {pool: slots[pool] * size for pool, size in sizes.items()}
    pools["in flight"] = sum(sizes[pool] for pool in ("forward_dgrad", "forward_wgrad", "stash"))
    ranks = pipeline.mesh.shape[AXIS]

    def own_part(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((leaf.size // (1 if pipeline.pipe_axis(path) is None else ranks),), leaf.dtype)

    layers = without_ranks(params["layers"])
    outer = jax.tree_util.tree_map_with_path(own_part, params["outer"])
    weights = pipeline.precision.weights
    quantized, rest = _by_precision([layer for chunk in layers for layer in chunk], weights)
    is_cast = pipeline.compute_dtype not in (None, jnp.float32)
    if is_cast:
        cast = _nbytes([outer, *(leaf for leaf in rest if leaf.ndim > 1)], pipeline.compute_dtype)
    else:
        last = [] if pipeline.layout.is_even else [chunk[-1] for chunk in layers]
        cast = _nbytes(_by_precision(last, weights)[1])
    cast += 2 * _nbytes(quantized, jnp.int8)
    is_sharded = pipeline.mesh.shape.get(fsdp.AXIS, 1) > 1
    gathered = _nbytes(outer if is_cast else [rest, outer]) if is_sharded else 0
    return pools | {"main_grad": _nbytes([layers, outer], jnp.float32), "cast": cast, "gathered": gathered}


def slot_bytes(pipeline: Pipeline, params: Tree, inputs: Tree, *, layers: int | None = None) -> dict[str, int]:
    """Returns the bytes of a slot of each pool.

    Args:
        pipeline: The pipeline.
        params: Shapes of the parameters, as `Pipeline.step` takes them.
        inputs: Shapes of the microbatches, [M, B, ...].
        layers: Number of layers of a stage; None for those of the longest stage.
    """
    x, *context = pipeline.inputs(params, inputs)
    stage = without_ranks(params["layers"][0])
    stage = [stage[0]] * layers if layers else stage
    spec = pipeline.split(None, len(stage)).spec(pipeline.stage_shapes(stage), x, *context)
    size = x.size * x.dtype.itemsize
    return spec.nbytes() | {"activation": size, "gradient": size, "loss": size}


def _nbytes(tree: Tree, dtype: DTypeLike | None = None) -> int:
    """Returns the bytes of arrays in a dtype; None for their own."""
    return sum(leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _by_precision(layers: Sequence[Tree], weights: frozenset[str]) -> tuple[list[Any], list[Any]]:
    """Returns the parameters of layers that are quantized once per step, and the other parameters."""
    named = [pair for layer in layers for pair in zip(leaf_names(layer), jax.tree.leaves(layer), strict=True)]
    return [leaf for name, leaf in named if name in weights], [leaf for name, leaf in named if name not in weights]
