"""How a model's parameters lie on the devices, and how the gradients of a batch are made: whole on each, or stage by stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.packing import Packing
from jgraph.pipeline import Pipeline
from jgraph.step import accumulate, by_microbatch

Tree = Any


class Form(Protocol):
    """Between a model's own tree of parameters and the arrays that a step updates.

    Attributes:
        decay_mask: tree of the arrays, True where weight decay applies.
    """

    @property
    def decay_mask(self) -> Tree: ...
    def pack(self, tree: Tree) -> Tree:
        """The arrays, from a model's tree."""
        ...

    def unpack(self, params: Tree) -> Tree:
        """The inverse."""
        ...

    def shardings(self, params: Tree) -> Tree:
        """Where the arrays are: a tree of NamedSharding, or None on one device."""
        ...

    def loss_and_grads(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        """Mean loss and mean gradients of a batch, float32."""
        ...


@dataclass(frozen=True)
class Whole:
    """Every device has all parameters.

    Attributes:
        packing: of the model's parameters.
        loss: `loss(tree, tokens_BS)`, the mean over a microbatch.
        num_microbatches: of a batch.
        mesh: devices that share the batch; None for one device.
    """

    packing: Packing
    loss: Callable[[Tree, Array], Array]
    num_microbatches: int
    mesh: Mesh | None

    @property
    def decay_mask(self) -> Tree:
        return self.packing.decay_mask()

    def pack(self, tree: Tree) -> Tree:
        return self.packing.pack(tree)

    def unpack(self, params: Tree) -> Tree:
        return self.packing.unpack(params)

    def shardings(self, params: Tree) -> Tree:
        return jax.tree.map(lambda _: None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec()), params)

    def loss_and_grads(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        def loss(params: Tree, tokens_BS: Array) -> Array:
            return self.loss(self.unpack(params), tokens_BS)

        return accumulate(loss, self.num_microbatches, self.mesh)(params, tokens_BS)


@dataclass(frozen=True)
class Staged:
    """Every rank has the layers of its stages, and its part of embedding and head.

    Attributes:
        pipeline: what runs when, and which layer is where.
        packing: of a rank's layers.
        shapes: of the parameters as the pipeline takes them.
    """

    pipeline: Pipeline
    packing: Packing
    shapes: Tree

    @classmethod
    def of(cls, pipeline: Pipeline, tree: Tree) -> "Staged":
        """From the model's parameters as shapes."""
        params = jax.eval_shape(lambda tree: pipeline.stack(*pipeline.parts.split(tree)), tree)
        own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])
        return cls(pipeline, Packing.of(own), params)

    @property
    def decay_mask(self) -> Tree:
        return {"ends": jax.tree.map(lambda leaf: leaf.ndim > 1, self.shapes["ends"]), "layers": self.packing.decay_mask()}

    def pack(self, tree: Tree) -> Tree:
        return self._packed(self.pipeline.stack(*self.pipeline.parts.split(tree)))

    def unpack(self, params: Tree) -> Tree:
        return self.pipeline.parts.join(*self.pipeline.unstack(self._unpacked(params)))

    def shardings(self, params: Tree) -> Tree:
        return self.pipeline.shardings(params)

    def loss_and_grads(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        pipeline = self.pipeline
        tokens_MBS = by_microbatch(tokens_BS, pipeline.schedule.num_microbatches, pipeline.mesh)
        loss, grads = pipeline.loss_and_grads(self._unpacked(params), tokens_MBS)
        return loss, self._packed(grads)

    def _packed(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.pack)(params["layers"])}

    def _unpacked(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.unpack)(params["layers"])}
