"""Implements a strategy with a new mesh axis `toy` in one file. Parameters are sharded; XLA partitions the computation.

The library does not know the axis. Use this file as a template for a new parallelism.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.mesh import checked
from jgraph.packing import Packing
from jgraph.strategies.accumulate import accumulate
from jgraph.strategies.base import GradientProgram, Options, Pools
from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.objective import Carry, Loss, Objective, finished, summed
from jgraph.tree import leaf_names

Tree = Any
AXIS = "toy"


@dataclass(frozen=True, eq=False)
class Partitioned:
    """Shards every parameter over the axis `toy`, along its last axis if the devices divide it."""

    mesh: Mesh
    shapes: Tree

    def bind(self, objective: Objective) -> "BoundPartitioned":
        packing = Packing.of(self.shapes, alone=leaf_names(self.shapes))
        return BoundPartitioned(checked(self.mesh, needs=(AXIS,), allows=()), objective, packing)


@dataclass(frozen=True, eq=False)
class BoundPartitioned:
    mesh: Mesh
    objective: Objective
    packing: Packing
    observed: Tree = None
    xla_options: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> Tree:
        return self.packing.decay_mask()

    @property
    def trained(self) -> Tree:
        return dict.fromkeys(self.is_matrix, True)

    @property
    def batches(self) -> BatchLayout:
        return BatchLayout(self.mesh, self.objective.num_microbatches)

    def on(self, mesh: Mesh) -> Self:
        return replace(self, mesh=mesh)

    def pack(self, tree: Tree) -> Tree:
        return self.packing.pack(tree)

    def unpack(self, params: Tree) -> Tree:
        return self.packing.unpack(params)

    def shardings(self, params: Tree) -> Tree:
        def of(leaf: Any) -> NamedSharding:
            divides = leaf.ndim > 0 and leaf.shape[-1] % self.mesh.shape[AXIS] == 0
            return NamedSharding(self.mesh, PartitionSpec(*[None] * (leaf.ndim - 1), AXIS) if divides else PartitionSpec())

        return jax.tree.map(of, params)

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Tree]:
        def of_microbatch(params: Tree, batch: Tree, key: Array) -> tuple[Loss, Tree]:
            def loss(params: Tree) -> tuple[Array, Loss]:
                return summed(self.objective.loss)(self.unpack(params), batch, key)

            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return replace(sums, carried=Carry(sums.carried, None)), grads

        reductions, count = self.objective.reductions_with(None), self.objective.num_microbatches
        run = accumulate(of_microbatch, count, dtype=self.objective.grads_dtype, reductions=reductions)
        sums, grads = run(params, batch, key)
        sums = finished(reductions, sums, count)
        return sums, jax.tree.map(lambda g: g / sums.weight, grads)

    def compile_gradients(self, params: Tree, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        return GradientProgram(self, batch)

    def predict_memory(self, batch: Tree) -> Pools:
        return Pools({}, "some")

    def describe(self, batch: Tree, gradients: GradientProgram, executables: Sequence[Any], memory: Any) -> list[str]:
        return []

    def profile_facts(self) -> dict[str, Any]:
        return {}
