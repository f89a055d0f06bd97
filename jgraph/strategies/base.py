"""How parameters lie on the devices, and how the gradients of a batch are made: replicated or fully sharded.

A strategy is what a user says: a mesh, the shapes of the parameters, rules. `bind` gives it a loss, and makes of it the
functions that a step is built from. `Pipelined` is the third strategy (`jgraph.pipeline.strategy`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import check_choice
from jgraph.mesh import Axis, batch_axes, checked, with_batch_axes
from jgraph.packing import Packing
from jgraph.precision.fuse import fused
from jgraph.precision.transform import FP8Function
from jgraph.strategies import sharding as fsdp
from jgraph.strategies.accumulate import accumulate
from jgraph.strategies.checks import check_count, check_function, float_dtype
from jgraph.strategies.objective import Loss, LossFunction, Sums, WithHistory, finished, summed
from jgraph.tree import is_router, leaf_names

Tree = Any
PackingChoice = Literal["small", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Holds the choices of a step that its strategy must know.

    Attributes:
        num_microbatches: slices of the batch.
        grads_dtype: of sums of gradients, over microbatches and devices.
        packing: whether `small` parameters lie side by side in one array, or `nothing` does.
        carried: shapes of the carried state.
        reductions: of the carried state, a tree of names.
        fp8: the loss with products in FP8, if it has any.
        microbatch: shapes of a device's microbatch, of key and carried state, as the loss with FP8 takes them.
    """

    num_microbatches: int = 1
    grads_dtype: Any = jnp.float32
    packing: PackingChoice = "small"
    carried: Tree = field(default_factory=dict)
    reductions: Tree = field(default_factory=dict)
    fp8: FP8Function | None = None
    microbatch: tuple[Tree, ...] = ()

    def weights(self, shapes: Tree) -> tuple[str, ...]:
        """Returns the names of the parameters that are multiplied with in FP8."""
        return self.fp8.plan(shapes, *self.microbatch).weights if self.fp8 else ()


class Bound(Protocol):
    """A strategy with a loss: between a model's own tree of parameters and the arrays that a step updates.

    Attributes:
        mesh: the devices; None for one.
        is_matrix: tree of the arrays, True where they hold matrices, to which weight decay applies.
    """

    @property
    def mesh(self) -> Mesh | None: ...
    @property
    def is_matrix(self) -> Tree: ...
    def on(self, mesh: Mesh) -> "Bound":
        """Returns the same over other devices."""
        ...

    def pack(self, tree: Tree) -> Tree:
        """Returns the arrays of a model's tree."""
        ...

    def unpack(self, params: Tree) -> Tree:
        """Inverts `pack`, bit for bit."""
        ...

    def shardings(self, params: Tree) -> Tree:
        """Returns the NamedSharding of every array; None on one device."""
        ...

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carried: Tree) -> tuple[Sums, Tree]:
        """Returns the sums over a batch and the gradient of their mean.

        Args:
            params: The arrays, as `pack` returns them.
            batch: Leaves [M, B/M, ...], microbatch by microbatch. On a mesh the second axis is sharded over the data ranks.
            key: Random key of the step.
            carried: Carried state as the step begins.

        Returns:
            The sums; the gradient in `grads_dtype`, shaped as `params`.
        """
        ...

    def dispatched(self, params: Tree, carried: Tree, batch: Tree, key: Array, options: Mapping[str, Any]) -> Any:
        """Compiles the same as many executables, from shapes; None where it is part of one program."""
        ...

    def collected(self, gradients: Any, results: Tree, carried: Tree) -> tuple[Sums, Tree]:
        """Returns what `loss_and_grads` does, from the traced results of these and the carried state before."""
        ...


class Strategy(Protocol):
    """Says where parameters lie, and which device computes what: `Replicated`, `FullySharded` or `Pipelined`.

    Attributes:
        shapes: of the parameters, in the model's own tree.
    """

    @property
    def shapes(self) -> Tree: ...
    def bind(self, loss: Any, binding: Binding) -> Bound:
        """Returns the strategy with a loss: a function, or a `PipelineModel` for a pipeline."""
        ...


@dataclass(frozen=True, eq=False)
class Replicated:
    """Gives every device all parameters and its part of the batch, as PyTorch's DDP does. A `strategy` of `train_step`.

    Attributes:
        mesh: with the axis `data`; None for one device.
        shapes: of the parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
    """

    mesh: Mesh | None
    shapes: Tree

    def __repr__(self) -> str:
        return f"Replicated({summary(self.mesh, self.shapes)})"

    def __post_init__(self):
        if self.mesh is not None:
            object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.DATA,), allows=()))

    def bind(self, loss: LossFunction, binding: Binding) -> "DataParallel":
        check_function(loss)
        packing = _packing(self.shapes, binding.packing)
        return DataParallel(self.mesh, with_batch_axes(loss), binding, packing, {})


@dataclass(frozen=True, eq=False)
class FullySharded:
    """Gives every device its part of each parameter and of the batch, as PyTorch's `fully_shard` does (ZeRO stage 3).

    >>> mesh, shapes = jax.make_mesh((1,), ("fsdp",)), {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    >>> jgraph.FullySharded(mesh, shapes, shard_rules=("w=1",))
    FullySharded(fsdp=1, 32 parameters)

    Attributes:
        mesh: with the axis `fsdp`, and perhaps `data`.
        shapes: of the parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
        shard_rules: `PATTERN=AXIS`, the axis along which parameters that match are sharded; without one, an annotation or the
            shape decides.
        annotations: PartitionSpecs by the name of a parameter: Flax's partition names, from `functional(...).annotations`.
        compute_dtype: dtype in which matrices are gathered, but for those of routers; None gathers them as they are kept.
        reshard_after_forward: whether parameters are gathered a second time for the backward, instead of being kept. Weights in
            FP8 are kept.
        experts: devices that the experts of `jgraph.MoE` are spread over, a divisor of the size of `fsdp`. Tokens are sent to
            them; a device gathers only the experts of its neighbours.
        shards: `everything`, or `experts` alone, and all else is on every device.
    """

    mesh: Mesh
    shapes: Tree
    shard_rules: tuple[str, ...] = ()
    annotations: Mapping[str, Any] = field(default_factory=dict)
    compute_dtype: Any = None
    reshard_after_forward: bool = False
    experts: int = 1
    shards: fsdp.Sharded = "everything"

    def __repr__(self) -> str:
        how = ", resharded after forward" * self.reshard_after_forward + f", experts={self.experts}" * (self.experts > 1)
        return f"FullySharded({summary(self.mesh, self.shapes)}{how})"

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.FSDP,), allows=(Axis.DATA,)))
        check_count("experts", self.experts)
        if self.compute_dtype is not None:
            float_dtype("compute_dtype", self.compute_dtype)
        check_choice("shards", self.shards, get_args(fsdp.Sharded))

    def bind(self, loss: LossFunction, binding: Binding) -> "DataParallel":
        check_function(loss)
        names, ranks = leaf_names(self.shapes), self.mesh.shape[Axis.FSDP]
        axes, experts = fsdp.asked_axes(names, self.shard_rules, self.annotations), {}
        if self.experts > 1 or self.shards == "experts":
            shapes = dict(zip(names, jax.tree.leaves(self.shapes), strict=True))
            experts = fsdp.expert_axes(shapes, axes, ranks, self.experts)
        packing = _packing(self.shapes, binding.packing, alone={*axes, *experts, *binding.weights(self.shapes)})
        shards = fsdp.shard_specs(
            jax.eval_shape(packing.pack, self.shapes),
            ranks,
            axes | experts,
            experts=dict.fromkeys(experts, self.experts),
            shards=self.shards,
        )
        reducing = with_batch_axes(loss)
        return DataParallel(self.mesh, reducing, binding, packing, shards, self.compute_dtype, self.reshard_after_forward)


def summary(mesh: Mesh | None, shapes: Tree) -> str:
    """Returns a mesh and the size of a tree of parameters in a few words."""
    devices = "one device" if mesh is None else ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{devices}, {sum(leaf.size for leaf in jax.tree.leaves(shapes)):,} parameters"


def _packing(shapes: Tree, choice: PackingChoice, alone: Any = ()) -> Packing:
    return Packing.of(shapes, alone=leaf_names(shapes) if choice == "nothing" else alone)


@dataclass(frozen=True, eq=False)
class DataParallel:
    """`Replicated` and `FullySharded` with a loss: devices with different parts of the batch.

    On several devices a microbatch of `FullySharded` gathers parameters and sums gradients over the axis `fsdp`, so that no
    device ever has a whole main_grad; over the axis `data`, gradients are summed once a step. Both sums are in `grads_dtype`.

    Attributes:
        mesh: the devices; None for one.
        loss: of the model's tree.
        binding: what the step asks for.
        packing: of the model's parameters; what is packed is then sharded.
        shards: how each array lies on the axis `fsdp`; empty where there is none.
        compute_dtype, reshard_after_forward: as `FullySharded` has them.
    """

    mesh: Mesh | None
    loss: LossFunction
    binding: Binding
    packing: Packing
    shards: dict[str, fsdp.ShardSpec]
    compute_dtype: Any = None
    reshard_after_forward: bool = False

    @property
    def is_matrix(self) -> Tree:
        return self.packing.decay_mask()

    def on(self, mesh: Mesh) -> "DataParallel":
        return replace(self, mesh=mesh)

    def pack(self, tree: Tree) -> Tree:
        packed = self.packing.pack(tree)
        return {name: self.shards[name].pad(leaf) for name, leaf in packed.items()} if self.shards else packed

    def unpack(self, params: Tree) -> Tree:
        whole = {name: self.shards[name].unpad(leaf) for name, leaf in params.items()} if self.shards else params
        return self.packing.unpack(whole)

    def shardings(self, params: Tree) -> Tree:
        if self.mesh is None:
            return jax.tree.map(lambda _: None, params)
        return {name: NamedSharding(self.mesh, spec) for name, spec in self._specs.items()}

    def loss_and_grads(self, params: Tree, batch: Tree, key: Array, carried: Tree) -> tuple[Sums, Tree]:
        if self.mesh is None:
            return self._local(params, batch, key, carried)
        run = jax.shard_map(
            self._on_device,
            mesh=self.mesh,
            in_specs=(self._specs, PartitionSpec(None, batch_axes(self.mesh)), PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(), self._specs),
            check_vma=False,
        )
        return run(params, batch, key, carried)

    def dispatched(self, params: Tree, carried: Tree, batch: Tree, key: Array, options: Mapping[str, Any]) -> None:
        return None

    def collected(self, gradients: Any, results: Tree, carried: Tree) -> tuple[Sums, Tree]:
        raise AssertionError("the step is one program")

    @cached_property
    def _specs(self) -> dict[str, PartitionSpec]:
        if not self.shards:
            return {name: PartitionSpec() for name, _ in self.packing.groups}
        return {name: shard.spec() for name, shard in self.shards.items()}

    def _on_device(self, params: Tree, batch: Tree, key: Array, carried: Tree) -> tuple[Sums, Tree]:
        assert self.mesh is not None
        axes = batch_axes(self.mesh)
        return self._local(params, batch, jax.random.fold_in(key, jax.lax.axis_index(axes)), carried, axes)

    def _local(self, params: Tree, batch: Tree, key: Array, carried: Tree, axes: tuple[str, ...] = ()) -> tuple[Sums, Tree]:
        """Computes one device's part, and with `axes` sums over the devices."""
        binding = self.binding
        sums_and_grads = self._sums_and_grads(params, batch, key, carried)
        sums, grads = accumulate(
            sums_and_grads, binding.num_microbatches, dtype=binding.grads_dtype, reductions=binding.reductions
        )(params, batch, key)
        sums = finished(binding.reductions, sums, binding.num_microbatches, axes, self.mesh.size if self.mesh else 1)
        if axes:
            # Over `fsdp` they are summed already, microbatch by microbatch.
            grads = jax.tree.map(lambda g: g.astype(binding.grads_dtype), grads)
            grads = jax.lax.psum(grads, tuple(a for a in axes if a != Axis.FSDP or not self.shards))
        return sums, jax.tree.map(lambda g: (g / sums.weight).astype(g.dtype), grads)

    def _sums_and_grads(
        self, params: Tree, batch: Tree, key: Array, carried: Tree
    ) -> Callable[[Tree, Tree, Array], tuple[Sums, Tree]]:
        """Returns the function of a microbatch; makes what all microbatches share, which is weights in FP8."""
        model, history = carried if isinstance(carried, WithHistory) else (carried, {})
        state = (model,) if jax.tree.leaves(model) else ()
        if self.binding.fp8 is None:
            return self._differentiated(lambda whole, history, *args: self.loss(whole, *args, *state), history)
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        plan = self.binding.fp8.plan(jax.eval_shape(self._whole, params), first, key, *state)
        if not self.shards:
            weights = plan.quantize(self.packing.unpack(params), history)
            # Elsewhere a kernel that computes more reads them, and casts them: bfloat16 has half the bytes.
            sent = self.mesh is not None and self.binding.num_microbatches == 1 and self.binding.grads_dtype == jnp.float32
            return self._differentiated(
                lambda whole, history, *args: plan.apply(whole, history, weights, *args, *state, uncast=sent), history
            )
        scales = plan.scales(params, history, lambda _, amax: jax.lax.pmax(amax, fsdp.AXIS))
        parts = plan.cast(params, scales)

        def loss(whole: Tree, history: Tree, *args: Tree) -> Array | Loss:
            gathered = {name: self.shards[name].gather(part) for name, part in parts.items()}
            return plan.apply(whole, history, plan.views(gathered, scales), *args, *state, uncast=True)

        return self._differentiated(loss, history, in_fp8=parts)

    def _differentiated(
        self, loss: Callable[..., Array | Loss], history: Tree, in_fp8: Collection[str] = ()
    ) -> Callable[[Tree, Tree, Array], tuple[Sums, Tree]]:
        """Returns the sums and gradients of a microbatch, from `loss(params, history, batch, key)`.

        Parameters `in_fp8` are gathered by the loss; from here they only get gradients, in the dtype of the sums.
        """
        sums_dtype = self.binding.grads_dtype

        def differentiate(params: Tree, history: Tree, batch: Tree, key: Array) -> tuple[Sums, Tree, Tree]:
            def of(arrays: Tree, history: Tree) -> tuple[Array, Sums]:
                return summed(loss)(self.packing.unpack(arrays), history, batch, key)

            if self.shards:
                dtypes = self._gathered_dtypes(params)
                return fsdp.value_and_grads(
                    of,
                    params,
                    self.shards,
                    dtypes | {name: jnp.promote_types(dtypes[name], sums_dtype) for name in in_fp8},
                    history,
                    grads_dtype=sums_dtype,
                    reshard_after_forward=self.reshard_after_forward,
                    # Products in FP8 are too short to hide sums beside wgrads alone. Those in bfloat16 do, and lose 2 to 4% by
                    # barriers (notes/develop/measurements.md).
                    sums="in turn" if in_fp8 else "scheduled",
                )
            (_, sums), (grads, after) = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(params, history)
            return sums, grads, after

        def sums_and_grads(params: Tree, batch: Tree, key: Array) -> tuple[Sums, Tree]:
            run = fused(differentiate) if self.binding.fp8 else differentiate
            sums, grads, after = run(params, history, batch, key)
            return replace(sums, carried=WithHistory(sums.carried, after)) if jax.tree.leaves(after) else sums, grads

        return sums_and_grads

    def _gathered_dtypes(self, params: Tree) -> dict[str, Any]:
        """Returns the dtypes in which arrays are gathered."""
        cast, matrices = self.compute_dtype, self.is_matrix
        return {name: cast if cast and matrices[name] and not is_router(name) else part.dtype for name, part in params.items()}

    def _whole(self, params: Tree) -> Tree:
        """Returns the model's tree as the loss sees it, for its shapes."""
        if not self.shards:
            return self.packing.unpack(params)
        return self.packing.unpack(fsdp.gathered(params, self.shards, self._gathered_dtypes(params)))
