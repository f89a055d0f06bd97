"""Names of mesh axes, the axes that a batch is sharded over, and the axes over which XLA partitions the computation."""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

from jgraph.errors import ConfigError, JgraphError, shown
from jgraph.types import JaxDevice, Specs, Tree

_T = TypeVar("_T")


class Axis(StrEnum):
    """The name of a mesh axis. Each member is a string and can be used as an axis name of `jax.make_mesh`."""

    DATA = "data"
    """Data parallelism: replicated parameters, sharded batch."""
    FSDP = "fsdp"
    """Fully sharded data parallelism: sharded parameters, sharded batch."""
    PIPE = "pipe"
    """Pipeline parallelism: different layers on each rank, the same part of the batch."""
    CONTEXT = "context"
    """Context parallelism: different tokens of the same sequences, replicated parameters."""
    TENSOR = "tensor"
    """Tensor parallelism: different columns or rows of the same matrices, the same part of the batch."""


# Without a type: Flax annotates `axis_name` as a string although it takes a tuple.
BATCH_AXES: Any = (Axis.DATA.value, Axis.FSDP.value)
"""The mesh axes that a batch is sharded over, as an `axis_name` for reductions over all rows of a microbatch.

Every layout binds both axes inside a loss: `nnx.BatchNorm(64, axis_name=jgraph.BATCH_AXES, rngs=rngs)`.
"""


PARTITIONED_AXES: tuple[str, ...] = (Axis.CONTEXT.value, Axis.TENSOR.value)
"""Axes over which XLA partitions the computation. On the others, each device runs its rank's function by `jax.shard_map`."""


def on_ranks(fn: Callable[..., _T], mesh: Mesh, in_specs: Specs, out_specs: Specs) -> Callable[..., _T]:
    """Runs a function on each rank by `jax.shard_map` over all axes of a mesh except `PARTITIONED_AXES`."""
    axes = set(mesh.axis_names) - set(PARTITIONED_AXES)
    if mesh.size > 1 and all(mesh.shape[axis] == 1 for axis in axes):
        # XLA rejects collectives over axes of size one in a program that it partitions over other axes.
        return _under(mesh, functools.reduce(_over_one, sorted(axes), fn))
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _under(mesh: Mesh, fn: Callable[..., _T]) -> Callable[..., _T]:
    """Sets the mesh of the function while it is traced."""

    def traced(*args: Tree) -> _T:
        with traced_on(mesh):
            return fn(*args)

    return traced


def traced_on(mesh: Mesh | None) -> contextlib.AbstractContextManager[object]:
    """Sets the mesh of what is traced in a `with` block, so that `jax.sharding.get_abstract_mesh` returns it."""
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def partitioned(axis: str) -> int:
    """Returns the size of a mesh axis over which XLA partitions the function that is being traced; 1 if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if kinds.get(axis) == AxisType.Auto else 1


def is_whole() -> bool:
    """True if XLA partitions the function that is being traced over no mesh axis."""
    return all(partitioned(axis) == 1 for axis in PARTITIONED_AXES)


def target_device() -> JaxDevice:
    """Returns the abstract device of the current mesh, or JAX's first device if there is none."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def with_target(device_kind: str) -> AbstractMesh:
    """Returns the current mesh with the abstract device of a GPU that is not present, which selects the Pallas kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    device = AbstractDevice(device_kind, None, "cuda")
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device)


def on_cpu() -> bool:
    """True if the target device is a CPU."""
    return target_device().platform == "cpu"


def axis_names(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a PartitionSpec: a name, a tuple of names, or None."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Shards an array over `PARTITIONED_AXES` of the current mesh, like `jax.lax.with_sharding_constraint`."""
    # Mesh axes that XLA does not partition over, and mesh axes that do not divide the length, are left out.
    kept: list[tuple[str, ...]] = []
    for names, length in zip(spec, x.shape, strict=False):
        kept.append(())
        for name in axis_names(names):
            if partitioned(name) > 1 and length % math.prod(map(partitioned, (*kept[-1], name))) == 0:
                kept[-1] = (*kept[-1], name)
    return lax.with_sharding_constraint(x, PartitionSpec(*kept)) if any(kept) else x


def token_axes(shape: Sequence[int]) -> PartitionSpec:
    """Returns the mesh axes that share the tokens of activations [..., T, D] between matmuls, for each axis."""
    # Devices of the axis `context` have parts of each sequence. Devices of the axis `tensor` share the first axis, because the
    # rows of a device are contiguous in the gathered array, so that all-gathers and reduce-scatters need no copies. If they
    # cannot share it equally, they share the tokens of each sequence (Korthikanti et al., arXiv:2205.05198), or none.
    *lead, T, _ = shape
    none = [None] * len(lead)
    tensor = partitioned(Axis.TENSOR)
    if lead and lead[0] % tensor == 0:
        return PartitionSpec(Axis.TENSOR.value, *none[1:], Axis.CONTEXT.value)
    is_even = T % (partitioned(Axis.CONTEXT) * tensor) == 0
    return PartitionSpec(*none, PARTITIONED_AXES if is_even else Axis.CONTEXT.value)


def per_shard(fn: Callable[..., _T], in_specs: Specs, out_specs: Specs) -> Callable[..., _T]:
    """Runs a function on the shards of its arguments over `PARTITIONED_AXES` of the mesh of the current trace."""
    # XLA cannot partition Pallas kernels, and functions that split an axis in parts need whole parts on each device. Mesh axes
    # in the specs that XLA does not partition over are left out. `fn` may use collectives over the others.
    axes = {axis for axis in PARTITIONED_AXES if partitioned(axis) > 1}
    if not axes:
        return fn
    in_specs, out_specs = (_with_axes(specs, axes) for specs in (in_specs, out_specs))
    mesh = jax.sharding.get_abstract_mesh()
    # With axes of size one, so that no axis remains: cuDNN's attention needs that.
    manual = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}

    def run(*args: Tree) -> _T:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(args)]

        def on_shard(*args: Tree) -> _T:
            leaves, structure = jax.tree.flatten(args)
            return fn(*structure.unflatten([leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]))

        # The gradient of a replicated argument is summed over devices.
        args = jax.tree.map(summable, args)
        return jax.shard_map(on_shard, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)(*args)

    return run


def summable(x: Array) -> Array:
    """Casts bfloat16 to float32 on CPUs whose mesh has `PARTITIONED_AXES`, and returns other arrays unchanged."""
    # For arguments of collectives that sum, or that have a gradient that sums: XLA's CPU compiler aborts on bfloat16 sums of
    # `jax.shard_map` in a program that it partitions.
    mesh = jax.sharding.get_abstract_mesh()
    is_partitioned = any(mesh.shape.get(axis, 1) > 1 for axis in PARTITIONED_AXES)
    if x.dtype != "bfloat16" or not is_partitioned:
        return x
    return x.astype("float32") if on_cpu() else x


def _with_axes(specs: Specs, axes: set[str]) -> Specs:
    """Leaves other mesh axes than `axes` out of PartitionSpecs."""

    def filtered(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*[tuple(name for name in axis_names(names) if name in axes) for names in spec])

    return jax.tree.map(filtered, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that shard a batch: `data` and `fsdp`, in this order, each only if the mesh has it."""
    return tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)


def num_data_ranks(mesh: Mesh | None) -> int:
    """Returns the number of shards of a batch."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def with_batch_axes(fn: Callable[..., _T]) -> Callable[..., _T]:
    """Lets a function reduce over the mesh axes `data` and `fsdp` (`BATCH_AXES`) on meshes that lack one of them."""

    # JAX raises a NameError if `fn` uses a collective over a mesh axis that is not bound, for example outside `jax.shard_map`.
    # `fn` is then called again with the missing axes bound, each with size one. The operations of the first trace are dead
    # code.
    def not_a_batch_axis(axis: str) -> ConfigError:
        allowed = f"{' or '.join(map(repr, BATCH_AXES))}, or jgraph.BATCH_AXES for both"
        return ConfigError(f"`axis_name` is {axis!r}: must be {allowed}", field="axis_name")

    @functools.wraps(fn)
    def bound(*args: Tree) -> _T:
        try:
            return fn(*args)
        except NameError as e:
            if not _unbound_axis(e):
                raise
        missing = [axis for axis in BATCH_AXES if not is_bound(axis)]
        with refused_axes(not_a_batch_axis):
            return functools.reduce(_over_one, missing, fn)(*args)

    return bound


@contextlib.contextmanager
def refused_axes(error: Callable[[str], JgraphError]) -> Iterator[None]:
    """Replaces JAX's NameError about a mesh axis that is not bound by `error(axis)`. For `with`."""
    try:
        yield
    except NameError as e:
        if axis := _unbound_axis(e):
            raise error(axis) from None
        raise


def _unbound_axis(error: NameError) -> str:
    """Returns the mesh axis in a NameError of JAX. Empty for NameErrors of Python."""
    found = re.search(r"unbound axis name: (\w+)", str(error))  # the error has no attribute for the axis
    return found[1] if found else ""


def is_bound(axis: str) -> bool:
    """True if collectives can use a mesh axis in the current trace."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def _over_one(fn: Callable[..., _T], axis: str) -> Callable[..., _T]:
    """Binds a mesh axis with size one. No argument is mapped, so the operations of `fn` keep their shapes."""
    mapped = jax.vmap(fn, in_axes=None, axis_name=axis, axis_size=1)
    return lambda *args: jax.tree.map(lambda leaf: leaf[0], mapped(*args))


def checked(mesh: Mesh, *, needs: tuple[Axis, ...], allows: tuple[Axis, ...]) -> Mesh:
    """Checks the axis names of a mesh, and returns the mesh with axes of type `jax.sharding.AxisType.Auto`."""
    allowed = (*needs, *allows)
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) - set(allowed) or set(needs) - set(mesh.axis_names):
        is_mesh = isinstance(mesh, Mesh)
        found = f"has axes {mesh.axis_names}" if is_mesh else f"is {shown(mesh)}"
        optional = f", and may have {', '.join(allows)}" if allows else ""
        example = f'e.g. jax.make_mesh((n,), ("{needs[0] if needs else Axis.DATA}",))'
        order = "" if is_mesh else "; the mesh comes before the shapes"
        must = f"must be a jax.sharding.Mesh with the axes {', '.join(needs) or 'data'}{optional}, {example}{order}"
        raise ConfigError(f"`mesh` {found}: {must}", field="mesh")
    # `jax.make_mesh` creates axes of type `AxisType.Explicit` by default. With those, the caller would have to place every
    # argument.
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names)
