"""Implements a strategy with a new mesh axis `toy` in one file. Parameters are sharded; XLA partitions the computation.

The library does not know the axis. Use this file as a template for a new parallelism.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax import Array
from jax.sharding import Mesh

from jgraph.layout import Layout, Param, described
from jgraph.mesh import checked
from jgraph.strategies._accumulate import accumulate
from jgraph.strategies.base import GradientProgram, Options, Reports
from jgraph.strategies.batches import BatchLayout
from jgraph.strategies.objective import Carry, Loss, Objective, finished, summed
from jgraph.types import Arrays

Tree = Any
AXIS = "toy"


@dataclass(frozen=True, eq=False)
class Partitioned:
    """Shards every parameter over the axis `toy`, along its last axis if the devices divide it."""

    mesh: Mesh
    shapes: Tree

    def bind(self, objective: Objective) -> "BoundPartitioned":
        mesh = checked(self.mesh, needs=(AXIS,), allows=())

        def place(name: str, param: Param) -> Param:
            divides = bool(param.shape) and param.shape[-1] % mesh.shape[AXIS] == 0
            return param.placed(len(param.shape) - 1, AXIS) if divides else param

        batches = BatchLayout(mesh, objective.num_microbatches)
        return BoundPartitioned(objective, batches, objective.layout.then(described(place)))


@dataclass(frozen=True, eq=False)
class BoundPartitioned:
    objective: Objective
    batches: BatchLayout
    layout: Layout
    observed: Tree = None
    xla_options: tuple[str, ...] = ()
    reports: Reports = Reports()  # noqa: RUF009

    def on(self, mesh: Mesh) -> Self:
        return replace(self, batches=replace(self.batches, mesh=mesh))

    def loss_and_grads(self, params: Arrays, batch: Tree, key: Array, carry: Carry) -> tuple[Loss, Arrays]:
        def of_microbatch(params: Arrays, batch: Tree, key: Array) -> tuple[Loss, Arrays]:
            def loss(params: Arrays) -> tuple[Array, Loss]:
                return summed(self.objective.loss)(self.objective.tree(params), batch, key)

            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
            return replace(sums, carried=Carry(sums.carried, None)), grads

        reductions, count = self.objective.reductions_with(None), self.objective.num_microbatches
        run = accumulate(of_microbatch, count, dtype=self.objective.grads_dtype, reductions=reductions)
        sums, grads = run(params, batch, key)
        sums = finished(reductions, sums, count)
        return sums, jax.tree.map(lambda g: g / sums.weight, grads)

    def compile_gradients(self, params: Arrays, carry: Carry, batch: Tree, key: Array, options: Options) -> GradientProgram:
        return GradientProgram(self, batch)
