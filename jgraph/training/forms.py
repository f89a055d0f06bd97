"""How a model's parameters lie on the devices, and how the gradients of a batch are made: whole, cut, or stage by stage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.mesh import batch_axes
from jgraph.packing import Packing, leaf_names
from jgraph.parallel import fsdp
from jgraph.parallel.pipeline import Pipeline
from jgraph.training.step import accumulate, by_microbatch

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
        """Mean loss of a batch, float32, and mean gradients in the dtype of their sums."""
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
        mesh = self.mesh
        if mesh is None:
            return self._local(params, tokens_BS)
        # Not left to XLA's partitioner: that sums the products' bfloat16 results, some of them for every microbatch.
        run = jax.shard_map(
            lambda params, tokens_BS: jax.lax.pmean(self._local(params, tokens_BS), batch_axes(mesh)),
            mesh=mesh,
            in_specs=(PartitionSpec(), PartitionSpec(batch_axes(mesh))),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return run(params, tokens_BS)

    def _local(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        """Mean loss and gradients of a device's rows, float32 as the parameters are."""

        def loss(params: Tree, tokens_BS: Array) -> Array:
            return self.loss(self.unpack(params), tokens_BS)

        return accumulate(jax.value_and_grad(loss), self.num_microbatches)(params, tokens_BS)


@dataclass(frozen=True)
class Sharded:
    """Every device has its part of each parameter; full sharding, as `jgraph.parallel.fsdp` says it.

    A microbatch gathers parameters and sums gradients over the devices, so no device ever has a whole main_grad.

    Attributes:
        packing: of the model's parameters; what is packed is then cut.
        cuts: of each packed array.
        loss: `loss(tree, tokens_BS)`, the mean over a microbatch.
        num_microbatches: of a batch.
        mesh: with the axes `data` and `fsdp`.
        grads_dtype: of the sums of gradients.
        compute_dtype: matrices are gathered in it, other parameters in their own.
        backward: whether it has the parameters `kept` or gathers them `again`.
    """

    packing: Packing
    cuts: dict[str, fsdp.ShardSpec]
    loss: Callable[[Tree, Array], Array]
    num_microbatches: int
    mesh: Mesh
    grads_dtype: Any
    compute_dtype: Any
    backward: Literal["kept", "again"]

    @property
    def decay_mask(self) -> Tree:
        return self.packing.decay_mask()

    def pack(self, tree: Tree) -> Tree:
        return {name: self.cuts[name].pad(leaf) for name, leaf in self.packing.pack(tree).items()}

    def unpack(self, params: Tree) -> Tree:
        return self.packing.unpack({name: self.cuts[name].unpad(leaf) for name, leaf in params.items()})

    def specs(self) -> dict[str, PartitionSpec]:
        return {name: cut.spec() for name, cut in self.cuts.items()}

    def shardings(self, params: Tree) -> Tree:
        return {name: NamedSharding(self.mesh, self.specs()[name]) for name in params}

    def loss_and_grads(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        run = jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(self.specs(), PartitionSpec(batch_axes(self.mesh))),
            out_specs=(PartitionSpec(), self.specs()),
            check_vma=False,
        )
        return run(params, tokens_BS)

    def _local(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        """On one device."""
        matrices = self.packing.decay_mask()
        dtypes = {name: self.compute_dtype if matrices[name] else part.dtype for name, part in params.items()}
        choices: dict[str, Any] = {"grads_dtype": self.grads_dtype, "reshard_after_forward": self.backward == "again"}

        def value_and_grads(params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
            def loss(whole: Tree) -> tuple[Array, Array]:
                # A share of the mean, so that sums over devices are all that is left to do.
                share = self.loss(self.packing.unpack(whole), tokens_BS) / self.mesh.size
                return share, share

            return fsdp.value_and_grads(loss, params, self.cuts, dtypes, **choices)

        loss, grads = accumulate(value_and_grads, self.num_microbatches, dtype=self.grads_dtype)(params, tokens_BS)
        return jax.lax.psum(loss, batch_axes(self.mesh)), jax.lax.psum(grads, "data")


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
        # What is cut is not packed: a pack of cut parameters would be gathered to be taken apart.
        alone = leaf_names(own) if fsdp.AXIS in pipeline.mesh.axis_names else ()
        return cls(pipeline, Packing.of(own, alone=alone), params)

    @property
    def decay_mask(self) -> Tree:
        return {"ends": jax.tree.map(lambda leaf: leaf.ndim > 1, self.shapes["ends"]), "layers": self.packing.decay_mask()}

    def pack(self, tree: Tree) -> Tree:
        return self._packed(self.pipeline.stack(*self.pipeline.parts.split(tree)))

    def unpack(self, params: Tree) -> Tree:
        return self.pipeline.parts.join(*self.pipeline.unstack(self._unpacked(params)))

    def shardings(self, params: Tree) -> Tree:
        if fsdp.AXIS not in self.pipeline.mesh.axis_names:
            return self.pipeline.shardings(params)
        shardings = self.pipeline.shardings(self.shapes)
        leaves = jax.tree.leaves(shardings["layers"])
        return shardings | {"layers": dict(zip(params["layers"], leaves, strict=True))}

    def loss_and_grads(self, params: Tree, tokens_BS: Array) -> tuple[Array, Tree]:
        pipeline = self.pipeline
        tokens_MBS = by_microbatch(tokens_BS, pipeline.schedule.num_microbatches, pipeline.mesh)
        loss, grads = pipeline.loss_and_grads(self._unpacked(params), tokens_MBS)
        return loss, self._packed(grads)

    def _packed(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.pack)(params["layers"])}

    def _unpacked(self, params: Tree) -> Tree:
        return params | {"layers": jax.vmap(self.packing.unpack)(params["layers"])}
