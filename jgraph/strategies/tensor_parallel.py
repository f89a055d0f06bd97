"""Tensor parallelism: matrices are split over the mesh axis `tensor`, around any other strategy.

Column- and row-parallel layers (Shoeybi et al., "Megatron-LM", arXiv:1909.08053). The model splits the residual stream and the
norms over the same devices, by rows of the batch or along the sequence (`jgraph.mesh.token_axes`; Korthikanti et al., "Reducing
activation recomputation", arXiv:2205.05198). This strategy only places parameters. XLA partitions the matmuls, and inserts all-
gathers in front of column-parallel layers and reduce-scatters after row-parallel layers. With `in_turns`, matmuls hide them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jgraph.errors import ConfigError, shown
from jgraph.layout import Change, Param, each
from jgraph.mesh import Axis, axis_names, is_bound
from jgraph.strategies.base import BoundStrategy, Strategy
from jgraph.strategies.objective import Objective
from jgraph.tree import leaf_names, path_name
from jgraph.types import Annotations, Leaf, Params, Specs

AXIS = Axis.TENSOR.value


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a parameter is split over the devices of the mesh axis `tensor`.

    Attributes:
        axis: Index of the split axis: -1 for the columns of a matrix, -2 for its rows. Count from the end, so that the rule
            also fits scanned layers, which have an additional first axis.
        parts: The axis is a concatenation of parts, for example queries, keys and values. Number of units of each part, such as
            heads: (32, 8, 8). Every device gets an equal share of the units of each part. () for one part, the whole axis.
        uneven: What to do if the devices cannot share the units equally: `refuse`, or `replicate` the parameter.
    """

    axis: int
    parts: tuple[int, ...] = ()
    uneven: Literal["refuse", "replicate"] = "refuse"

    def check(self, name: str, length: int, devices: int) -> bool:
        """Checks that the devices can share a parameter.

        Args:
            name: Name of the parameter, for the error.
            length: Length of its split axis.
            devices: Number of devices of the mesh axis `tensor`.

        Returns:
            True if the parameter is split, False if it is replicated.

        Raises:
            ConfigError: If the devices cannot share the units of a part, and `uneven` is `refuse`; or the units of all parts do
                not divide the axis.
        """
        if self.parts and length % sum(self.parts):
            must = f"their sum must divide the length {length} of {name}, axis {self.axis}"
            raise ConfigError(f"`parts` of a split is {self.parts}: {must}", field="tensor")
        uneven = [count for count in self.parts or (length,) if count % devices]
        if uneven and self.uneven == "refuse":
            what = f"{uneven[0]} heads or units" if self.parts else f"length {length}"
            raise ConfigError(f"`tensor` is {devices}: must divide the {what} of {name}, axis {self.axis}", field="tensor")
        return not uneven

    def by_device(self, whole: Array, devices: int) -> Array:
        """Orders the split axis by device: the shares of device 0 of all parts, then those of device 1.

        Args:
            whole: A parameter with the axis in the order of its parts.
            devices: Number of devices of the mesh axis `tensor`, which divides the units of each part.

        Returns:
            A new array with the same shape; `whole` itself for a single part.
        """
        return self._ordered(whole, devices, inverse=False)

    def by_part(self, ordered: Array, devices: int) -> Array:
        """Inverts `by_device`.

        Args:
            ordered: The result of `by_device`.
            devices: The same number of devices.

        Returns:
            The parameter in the order of its parts.
        """
        return self._ordered(ordered, devices, inverse=True)

    def _ordered(self, array: Array, devices: int, *, inverse: bool) -> Array:
        if len(self.parts) < 2:
            return array
        axis = self.axis % array.ndim
        unit = array.shape[axis] // sum(self.parts)
        shares = [count * unit // devices for count in self.parts]
        ends = [sum(shares[: i + 1]) for i in range(len(shares) - 1)]
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        if inverse:
            by_device = jnp.split(array.reshape(*before, devices, -1, *after), ends, axis=axis + 1)
            return jnp.concatenate([part.reshape(*before, -1, *after) for part in by_device], axis)
        parts = jnp.split(array, [end * devices for end in ends], axis=axis)
        by_part = [part.reshape(*before, devices, -1, *after) for part in parts]
        return jnp.concatenate(by_part, axis + 1).reshape(array.shape)


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Splits matrices over the mesh axis `tensor`, and leaves everything else to another strategy. For `train_step`.

    The mesh of the other strategy must have the axis `tensor`. A model of Flax layers needs no change: XLA partitions its
    matmuls along the split axes. A function that splits a concatenated axis, such as queries, keys and values of one
    projection, must run on the shards (`jgraph.mesh.per_shard`), because the axis is ordered by device.

    Attributes:
        strategy: The strategy to wrap: `Replicated`, `FullySharded` or `Pipelined`.
        rules: A `Split` by the shell pattern of parameter names, None to replicate. The first matching pattern counts. The
            parameters of `jgraph.MoE` need no rules: their hidden units are split. Other parameters are replicated over
            `tensor`.
        annotations: PartitionSpecs by the name of a parameter, None for no annotation: Flax's partition names, from
            `functional(...).annotations`. An axis with the name `tensor` is split, if no rule matches the parameter.

    Raises:
        ConfigError: If the mesh has no axis `tensor`.

    Examples:
        >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"))
        >>> shapes = {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
        >>> rules = {"up": jgraph.Split(axis=-1), "down": jgraph.Split(axis=-2)}
        >>> jgraph.TensorParallel(jgraph.Replicated(mesh, shapes), rules)
        TensorParallel(Replicated(data=1, tensor=1, 512 parameters), 2 rules)
    """

    strategy: Strategy
    rules: Mapping[str, Split | None] = field(default_factory=dict)
    annotations: Annotations = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"TensorParallel({self.strategy!r}, {len(self.rules)} rules)"

    def __post_init__(self):
        mesh: Any = getattr(self.strategy, "mesh", None)
        if mesh is None or AXIS not in mesh.axis_names:
            must = f'its mesh must have the axis {AXIS}, e.g. jax.make_mesh((1, n), ("data", "tensor"))'
            raise ConfigError(f"`strategy` is {shown(self.strategy)}: {must}", field="strategy")

    @property
    def shapes(self) -> Params:
        """The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree. Only shapes and dtypes are read."""
        return self.strategy.shapes

    def bind(self, objective: Objective) -> BoundStrategy:
        """Binds the wrapped strategy to a loss that gets split parameters.

        Raises:
            ConfigError: If the devices cannot share a parameter, or the wrapped strategy raises it.
        """
        mesh: Any = getattr(self.strategy, "mesh", None)
        splits = self.splits(mesh.shape[AXIS])
        # Without devices, so that the layout is also one for other devices (`BoundStrategy.on`).
        abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))

        def change(name: str, param: Param) -> Change | None:
            return _split(splits[name], param, abstract) if name in splits else None

        return self.strategy.bind(replace(objective, layout=objective.layout.then(each(change))))

    def splits(self, devices: int) -> dict[str, Split]:
        """Returns the `Split` of each split parameter by name.

        Args:
            devices: Number of devices of the mesh axis `tensor`.

        Raises:
            ConfigError: If the devices cannot share a parameter.
        """
        found: dict[str, Split] = {}
        for name, leaf in zip(leaf_names(self.shapes), jax.tree.leaves(self.shapes), strict=True):
            split = _split_of(self.rules, name, leaf.shape, self.annotations.get(name))
            if split and split.check(name, leaf.shape[split.axis], devices):
                found[name] = split
        return found


def _split(split: Split, param: Param, mesh: AbstractMesh) -> Change:
    """Orders a concatenated axis by device, and places it on the devices."""
    devices = mesh.shape[AXIS]
    axis = split.axis % len(param.shape)
    placed = param.placed(axis, AXIS)
    # Otherwise XLA replicates the array while it stacks or slices the layers of a pipeline.
    spec = PartitionSpec(*[AXIS if i == axis else PartitionSpec.UNCONSTRAINED for i in range(len(param.shape))])

    def on_axis(array: Array) -> Array:
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def pack(array: Array) -> Array:
        return on_axis(split.by_device(array, devices))

    def unpack(array: Array) -> Array:
        return split.by_part(on_axis(array), devices)

    return Change(placed, pack, unpack)


def in_turns(own: Array, first: Callable[[Array], Array], rest: Callable[[Array, Array | int], Array]) -> Array:
    """Applies a column- and a row-parallel layer to the rows of one device after the other, under `jgraph.mesh.per_shard`.

    Elsewhere, applies them to all rows at once, and XLA may partition them.
    """
    # Replaces the all-gather and the reduce-scatter of XLA, which no matmul hides. `first` begins with the column-parallel
    # matmul: on the own rows, it hides the transfer of the other rows. `rest` takes its result and the index of the device that
    # has the rows, and ends with the row-parallel matmul: on the own rows, it hides the transfer of the results. Barriers order
    # the operations, in the backward pass too.
    if not is_bound(AXIS) or (devices := lax.axis_size(AXIS)) == 1:
        return rest(first(own), 0)
    index = lax.axis_index(AXIS)  # all devices have the same number of rows
    # Without this barrier, XLA adds both gradients of `own` in the matmul that should hide the transfer of one of them.
    own, sent = lax.optimization_barrier((own, own))
    others = [_from(sent, shift) for shift in range(1, devices)]
    hidden, others[0] = lax.optimization_barrier((first(own), others[0]))
    parts = [rest(first(other), (index + shift) % devices) for shift, other in enumerate(others, 1)]
    parts[-1], hidden = lax.optimization_barrier((parts[-1], hidden))
    parts = [rest(hidden, index), *(_from(part, -shift) for shift, part in enumerate(parts, 1))]
    return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(own.dtype)


def _from(x: Array, shift: int) -> Array:
    """Returns the array of the device of the axis `tensor` with the index of this device plus `shift`."""
    devices = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [((i + shift) % devices, i) for i in range(devices)])


def specs_of(rules: Mapping[str, Split | None], params: Params) -> Specs:
    """Returns a PartitionSpec for each array of a step, for a function on their shards (`jgraph.mesh.per_shard`)."""

    def place(path: KeyPath, leaf: Leaf) -> PartitionSpec:
        split = _split_of(rules, path_name(path), leaf.shape)  # not checked: the devices share the axis equally
        return PartitionSpec(*[AXIS if split and i == split.axis % leaf.ndim else None for i in range(leaf.ndim)])

    return jax.tree_util.tree_map_with_path(place, params)


def _split_of(
    rules: Mapping[str, Split | None], name: str, shape: Sequence[int], annotation: PartitionSpec | None = None
) -> Split | None:
    """Returns the `Split` of a parameter, by the first pattern that matches its name; None if it is replicated.

    Without a pattern, experts are split as `jgraph.MoE` computes them, and other parameters as their annotation says.
    """
    for pattern, split in rules.items():
        if fnmatchcase(name, pattern):
            return split
    # `jgraph.MoE` computes its experts on the shards. Its first matrices are concatenations of gate and up.
    match name.rpartition("/")[2]:
        case "up_EDF2" | "shared_up_DF2":
            return Split(axis=-1, parts=(shape[-1] // 2,) * 2)
        case "down_EFD" | "shared_down_FD":
            return Split(axis=-2)
    return _annotated(annotation, len(shape))


def _annotated(spec: PartitionSpec | None, ndim: int) -> Split | None:
    """Returns the `Split` of an annotation; None if it does not name the axis `tensor`."""
    axes = [i for i, names in enumerate(spec or ()) if AXIS in axis_names(names)]
    return Split(axis=axes[0] - ndim) if axes else None
