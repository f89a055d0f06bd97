"""Places the parameters of a pipeline: the layers on the ranks, and every array on the mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.layout import Layout, Param, Stacked, StackedTree, sharded
from jgraph.mesh import Axis
from jgraph.pipeline._partition import PipelineModel, StageAssignment
from jgraph.schedule import Schedule
from jgraph.strategies.sharding import FSDPChoices, wanted
from jgraph.tree import leaf_names
from jgraph.types import Arrays, Leaf, Params, Registered, Tree

_T = TypeVar("_T")
Layers = TypeVar("Layers", bound=Tree)


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """The layers of a model on the ranks of a pipeline, and its parameters on the mesh."""

    assignment: StageAssignment
    mesh: Mesh  # has the axis `pipe`, and optionally `data`, `fsdp`, `context` and `tensor`
    layout: Layout[Params]  # of the arrays: stacked over the ranks, and sharded over `fsdp`
    named: Layout[StackedTree[Leaf | Registered]]  # of the tree: its leaves by name, which are the arrays of `layout`

    def tree(self, arrays: Arrays) -> StackedTree[Leaf | Registered]:
        """Returns arrays by name as a tree, with None for missing arrays."""
        return self.named.unpack(arrays)

    def arrays(self, tree: StackedTree[Leaf | Registered]) -> Arrays:
        return self.named.pack(tree)

    @property
    def shapes(self) -> StackedTree[Leaf | Registered]:
        return self.named.tree_shapes()

    def each(self, fact: Callable[[Param], _T]) -> StackedTree[_T]:
        """Returns a tree like the parameters with a fact of each array."""
        shapes = self.shapes
        facts = [fact(self.layout.params[name]) for name in leaf_names(shapes)]
        return jax.tree.unflatten(jax.tree.structure(shapes), facts)

    @property
    def specs(self) -> StackedTree[PartitionSpec]:
        return self.each(lambda param: param.rank_spec)

    @property
    def shardings(self) -> StackedTree[NamedSharding]:
        return self.each(lambda param: NamedSharding(self.mesh, param.spec))


def place(model: PipelineModel, schedule: Schedule, mesh: Mesh, given: Layout[Params], choices: FSDPChoices) -> Placement:
    """Stacks the layers over the ranks, and shards the arrays over `fsdp`. `given` is the layout of the model's parameters."""
    own = given.own
    assignment = StageAssignment.from_schedule(schedule, len(jax.eval_shape(model.split, own.tree_shapes())[1]))
    stacked = Stacked(own, model.split, model.join, assignment.places(), model.sharded, mesh.shape)
    ranks = mesh.shape.get(Axis.FSDP, 1)
    layout = given
    if ranks > 1:
        layout = layout.then(wanted(choices, ranks))
    layout = layout.then(stacked)
    if ranks > 1:
        layout = layout.then(sharded(ranks, uneven="replicate"))
    return Placement(assignment=assignment, mesh=mesh, layout=layout, named=stacked.tree)


def without_ranks(layers: Layers) -> Layers:
    """Returns the shapes of layers without their first axis, the axis of ranks."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)
