"""Along which axis a pipeline's parameters are sharded over `fsdp`: as it is asked for by the model's own names."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jgraph.errors import ConfigError
from jgraph.pipeline.partition import PipelineModel, StageAssignment
from jgraph.tree import leaf_names, path_name

Tree = Any


def by_place(model: PipelineModel, layout: StageAssignment, tree: Tree, axes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the axis to shard of some leaves of `Pipeline.stack`, by name; of layers, without the axis of ranks.

    Args:
        model, layout: of the pipeline.
        tree: the model's parameters, as shapes.
        axes: the axis asked for, by the model's names, as `fsdp.asked_axes` gives it.
        ranks: devices of the axis `fsdp`.

    Raises:
        ConfigError: an axis is sharded over `pipe` already, counts the layers, is not divisible, or layers that share an array
            ask for different ones.
    """
    found: dict[str, tuple[int, str]] = {}
    for name, axis in axes.items():
        for path, i, length in _after_split(model, tree, name, axis):
            place = _place(layout, path)
            if place.startswith("outer/") and model.sharded.get(place.removeprefix("outer/")) == i:
                raise _cannot(name, axis, "must be another one, `pp` shards this one")
            if length % ranks:
                raise _cannot(name, axis, f"its length {length} must be a multiple of `fsdp` {ranks} in a pipeline")
            other, before = found.setdefault(place, (i, name))
            if other != i:
                raise _cannot(name, axis, f"must be as for {before}, which is of the same array in a pipeline")
    return {place: axis for place, (axis, _) in found.items()}


def _after_split(model: PipelineModel, tree: Tree, name: str, axis: int) -> list[tuple[Any, int, int]]:
    """Returns where `PipelineModel.split` leaves an axis: path in (outer, layers), axis, length. Found by making it longer."""
    leaves, structure = jax.tree.flatten(tree)
    index = leaf_names(tree).index(name)
    shape = leaves[index].shape
    if axis >= len(shape):
        raise _cannot(name, axis, f"must be less than {len(shape)}, its shape is {shape}")
    leaves[index] = jax.ShapeDtypeStruct((*shape[:axis], 2 * shape[axis], *shape[axis + 1 :]), leaves[index].dtype)
    try:
        after = jax.tree.leaves(jax.eval_shape(model.split, structure.unflatten(leaves)))
    except (TypeError, ValueError):
        raise _cannot(name, axis, "must be an axis that PipelineModel.split keeps as it is") from None
    found = []
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.split, tree)), after, strict=True):
        changed = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
        found += [(path, i, old.shape[i]) for i in changed]
    if not found:
        raise _cannot(
            name, axis, "must be an axis of every layer; in a pipeline, the ranks share the layers that this one counts"
        )
    return found


def _place(layout: StageAssignment, path: Sequence[Any]) -> str:
    """Returns the name of a leaf of `Pipeline.stack`, `layers/CHUNK/PLACE/up`, from its path in (outer, layers)."""
    if path[0].idx == 0:
        return f"outer/{path_name(path[1:])}"
    chunk, place = layout.place_of(path[1].idx)
    return f"layers/{chunk}/{place}/{path_name(path[2:])}"


def _cannot(name: str, axis: int, why: str) -> ConfigError:
    return ConfigError(f"`shard_rules` shards {name} along axis {axis}: {why}", field="shard_rules")
