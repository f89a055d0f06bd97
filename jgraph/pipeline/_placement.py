"""Places the parameters of a pipeline: assigns layers to ranks, and shards every array."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import ConfigError
from jgraph.pipeline.partition import AXIS, PipelineModel, StageAssignment, Tree
from jgraph.strategies import sharding as fsdp
from jgraph.strategies.sharding import ShardSpec
from jgraph.tree import depends, expert_axis, leaf_names, path_name, unless_named


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Places the parameters of a pipeline on a mesh.

    `stack` returns the tree of parameters for a step: `outer` has the parameters of embedding and head, and `layers` is a list
    of chunks, each a list of layers. Arrays in `layers` have a leading axis of ranks. The name of a parameter in this tree is
    `outer/PATH` or `layers/CHUNK/PLACE/PATH`.

    Attributes:
        model: The model, as embedding, layers and head.
        layout: The assignment of layers to ranks.
        mesh: A mesh with the axis `pipe`, and optionally `data`, `fsdp`, `context` and `tensor`.
        axes: Requested `fsdp` axes of parameters, by their names in the tree of `stack`; the axis of ranks does not count. Set
            by `shard_as`. The axis of other parameters follows from their shapes.
        tensor_axes: Axes that are split over the mesh axis `tensor`, by the names of parameters in the tree of `stack`. Set by
            `split_as`.
        frozen: Names of the parameters that are not trained, in the tree of `stack`. Set by `freeze`.
        experts: Number of `fsdp` devices that experts are sharded over.
        shards: `everything` if `fsdp` shards all parameters, `experts` if it shards only experts.
    """

    model: PipelineModel
    layout: StageAssignment
    mesh: Mesh
    axes: Mapping[str, int] = field(default_factory=dict)
    tensor_axes: Mapping[str, int] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    experts: int = 1
    shards: fsdp.Sharded = "everything"

    def shard_as(self, tree: Tree, axes: Mapping[str, int]) -> Self:
        """Returns a copy that shards parameters over `fsdp` along requested axes.

        Args:
            tree: Shapes of the parameters, in the model's own tree.
            axes: The requested axis by parameter name in `tree`, with `/` between keys. The attribute `axes` is replaced.

        Returns:
            The copy; `self` if the mesh has no axis `fsdp` longer than 1.

        Raises:
            ConfigError: If a pipeline cannot shard a parameter along its axis: the axis is sharded over `pipe`, is the axis of
                layers, is not divisible, or layers that share an array request different axes.
        """
        ranks = self.mesh.shape.get(fsdp.AXIS, 1)
        if ranks == 1:
            return self
        found: dict[str, tuple[int, str]] = {}
        for name, axis in axes.items():
            for path, i, length in _axes_after_split(self.model, tree, name, axis):
                place = _name_in_stack(self.layout, path)
                if place.startswith("outer/") and self.model.sharded.get(place.removeprefix("outer/")) == i:
                    raise _cannot(name, axis, "must be a different axis, because `pp` shards this one")
                if length % ranks:
                    raise _cannot(name, axis, f"its length {length} must be a multiple of `fsdp` {ranks} in a pipeline")
                other, before = found.setdefault(place, (i, name))
                if other != i:
                    raise _cannot(name, axis, f"must be the axis of {before}, which shares an array with it in a pipeline")
        return replace(self, axes={place: axis for place, (axis, _) in found.items()})

    def split_as(self, tree: Tree, axes: Mapping[str, int]) -> Self:
        """Returns a copy with the axes that are split over the mesh axis `tensor`.

        Args:
            tree: Shapes of the parameters, in the model's own tree.
            axes: The split axis by parameter name in `tree`.
        """
        if not axes:
            return self
        found = _changed_axes(self.model, tree, axes)
        return replace(self, tensor_axes={_name_in_stack(self.layout, path): axis for path, axis, _ in found})

    def freeze(self, tree: Tree, names: Container[str]) -> Self:
        """Returns a copy with frozen parameters. A stacked array is frozen if all its parameters are.

        Args:
            tree: Shapes of the parameters, in the model's own tree.
            names: Names of the frozen parameters in `tree`.
        """
        found = depends(lambda tree: self.stack(*self.model.split(tree)), unless_named(names, tree), tree)
        pairs = zip(leaf_names(found), jax.tree.leaves(found), strict=True)
        return replace(self, frozen=frozenset(name for name, is_trained in pairs if not is_trained))

    def trained(self, params: Tree) -> Tree:
        """Returns a tree like `params`, the tree of `stack`, with False for each frozen array and True for the others."""
        return unless_named(self.frozen, params)

    def stack(self, outer: Tree, layers: list[Tree]) -> Tree:
        """Stacks the result of `PipelineModel.split` into the tree of parameters for a step.

        Args:
            outer: Parameters of embedding and head.
            layers: Parameters of each layer, from the first to the last.

        Returns:
            {"outer": outer, "layers": nested lists [chunk][place] of trees like a layer}. Leaves of the layers are [P, ...] for
            P ranks, with zeros for padding. `outer` is not copied.
        """
        return {"outer": outer, "layers": self.layout.stack(layers)}

    def stacked_shapes(self, tree: Tree) -> Tree:
        """Returns the shapes of the tree of `stack`.

        Args:
            tree: Arrays or shapes in the model's own tree.

        Returns:
            {"outer": tree, "layers": nested lists [chunk][place] of trees} of `jax.ShapeDtypeStruct`, without shardings.
        """
        return jax.eval_shape(lambda tree: self.stack(*self.model.split(tree)), tree)

    def unstack(self, params: Tree) -> tuple[Tree, list[Tree]]:
        """Inverts `stack`.

        Args:
            params: The tree of `stack`.

        Returns:
            The parameters of embedding and head, and a list with the parameters of each layer, from the first to the last.
        """
        return params["outer"], self.layout.unstack(params["layers"])

    def specs(self, params: Tree) -> Tree:
        """Returns the PartitionSpec of every parameter, over the axes `pipe` and `fsdp`.

        Args:
            params: Arrays or shapes in the tree of `stack`.

        Returns:
            A tree like `params`. The first axis of layers is sharded over `pipe`.

        Raises:
            ConfigError: If `PipelineModel.sharded` names no parameter of embedding and head, or the number of ranks does not
                divide the length of the axis.
        """
        names, ranks = leaf_names(params["outer"]), self.mesh.shape[AXIS]
        for name in self.model.sharded:
            if name not in names:
                raise ConfigError(f"PipelineModel.sharded has {name!r}: must be one of {', '.join(names)}", field="pp")

        def of_outer(path: Any, leaf: Any, shard: ShardSpec) -> PartitionSpec:
            axis = self.pipe_axis(path)
            if axis is not None and leaf.shape[axis] % ranks:
                raise ConfigError(
                    f"PipelineModel.sharded shards {path_name(path)} along axis {axis} of length {leaf.shape[axis]}: must be a "
                    f"multiple of `pp` {ranks}",
                    field="pp",
                )
            names = {axis: AXIS, shard.axis: fsdp.AXIS}
            return PartitionSpec(*[names.get(i) for i in range(1 + max((i for i in names if i is not None), default=-1))])

        shards = self.fsdp_shards(params)
        return {
            "outer": jax.tree_util.tree_map_with_path(of_outer, params["outer"], shards["outer"]),
            "layers": jax.tree.map(lambda shard: shard.spec(lead=(AXIS,)), shards["layers"]),
        }

    def shardings(self, params: Tree) -> Tree:
        """Returns the NamedSharding of every parameter on the mesh of the pipeline.

        Args:
            params: Arrays or shapes in the tree of `stack`.

        Returns:
            A tree like `params`. Layers are sharded over `pipe` on their first axis.

        Raises:
            ConfigError: If `PipelineModel.sharded` names no parameter of embedding and head, or the number of ranks does not
                divide the length of the axis.
        """
        return jax.tree.map(lambda _, spec: NamedSharding(self.mesh, spec), params, self.specs(params))

    def fsdp_shards(self, params: Tree) -> Tree:
        """Returns the sharding of every parameter over `fsdp`, as a `ShardSpec`.

        Args:
            params: Arrays or shapes in the tree of `stack`.

        Returns:
            A tree like `params`. The axes of a spec do not count the leading axis of ranks. The axis is None for a replicated
            parameter, and for all parameters if the mesh has no axis `fsdp` longer than 1.
        """
        ranks = self.mesh.shape.get(fsdp.AXIS, 1)
        if ranks == 1:
            return jax.tree.map(lambda _: ShardSpec(None), params)
        leaves, structure = jax.tree.flatten(params | {"layers": without_ranks(params["layers"])})
        shapes = dict(zip(leaf_names(params), leaves, strict=True))
        taken = {f"outer/{name}": axis for name, axis in self.model.sharded.items()}
        experts = {name: self.experts for name, leaf in shapes.items() if expert_axis(name, leaf.ndim) is not None}
        specs = fsdp.shard_specs(
            shapes, ranks, self.axes, taken=taken, split=self.tensor_axes, pads=False, experts=experts, shards=self.shards
        )
        return structure.unflatten(specs.values())

    def pipe_axis(self, path: Sequence[Any]) -> int | None:
        """Returns the axis of a leaf of `outer` that is sharded over the ranks; None if every rank holds the whole leaf.

        Args:
            path: Path of the leaf in `outer`, from `jax.tree_util.tree_map_with_path`.
        """
        return self.model.sharded.get(path_name(path))


def without_ranks(layers: Tree) -> Tree:
    """Returns a tree of `jax.ShapeDtypeStruct`: the shapes of the leaves without their first axis, the axis of ranks."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _axes_after_split(model: PipelineModel, tree: Tree, name: str, axis: int) -> list[tuple[Any, int, int]]:
    """Follows an axis of a parameter through `PipelineModel.split`.

    Traces `split` a second time with the axis twice as long, and compares the shapes.

    Returns:
        The path in (outer, layers), axis and length of each axis that changed.
    """
    shape = dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))[name].shape
    if axis >= len(shape):
        raise _cannot(name, axis, f"must be less than {len(shape)}, because its shape is {shape}")
    try:
        found = _changed_axes(model, tree, {name: axis})
    except (TypeError, ValueError):
        raise _cannot(name, axis, "must be an axis that PipelineModel.split leaves unchanged") from None
    if not found:
        raise _cannot(
            name, axis, "must be an axis of each layer, because this axis of layers is divided among the ranks of a pipeline"
        )
    return found


def _changed_axes(model: PipelineModel, tree: Tree, axes: Mapping[str, int]) -> list[tuple[Any, int, int]]:
    """Follows axes of parameters, by name, through `PipelineModel.split`: traces it with these axes twice as long.

    Returns:
        The path in (outer, layers), axis and length of each axis that changed.
    """

    def doubled(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        axis = axes.get(path_name(path))
        return jax.ShapeDtypeStruct([n * (1 + (i == axis)) for i, n in enumerate(leaf.shape)], leaf.dtype)

    after = jax.tree.leaves(jax.eval_shape(model.split, jax.tree_util.tree_map_with_path(doubled, tree)))
    found = []
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.split, tree)), after, strict=True):
        changed = [i for i, (a, b) in enumerate(zip(old.shape, new.shape, strict=True)) if a != b]
        found += [(path, i, old.shape[i]) for i in changed]
    return found


def _name_in_stack(layout: StageAssignment, path: Sequence[Any]) -> str:
    """Returns the name of a leaf in the tree of `stack`, e.g. `layers/CHUNK/PLACE/up`, from its path in (outer, layers)."""
    if path[0].idx == 0:
        return f"outer/{path_name(path[1:])}"
    _, chunk, place = layout.places()[path[1].idx]
    return f"layers/{chunk}/{place}/{path_name(path[2:])}"


def _cannot(name: str, axis: int, reason: str) -> ConfigError:
    return ConfigError(f"`shard_rules` shards {name} along axis {axis}: {reason}", field="shard_rules")
