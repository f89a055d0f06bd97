"""Arrays sharded over the axis `fsdp` of a mesh: along which of their axes, how they are gathered, how gradients come back.

Fully sharded data parallelism (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3): a device keeps 1/N of the parameters, of
main_grad and of the optimizer's state, gathers a parameter in the dtype it is used in, and gets of each gradient the sum over
devices of its part. Both happen parameter by parameter; XLA's scheduler moves them next to their use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from jgraph.errors import ConfigError
from jgraph.mesh import Axis
from jgraph.strategies.checks import strings
from jgraph.strategies.overlap import summed_in_turn
from jgraph.tree import expert_axis, leaf_names, matching

Tree = Any
Aux = TypeVar("Aux")
AXIS = Axis.FSDP.value
Sharded = Literal["everything", "experts"]

# Fastest on four H200s (GPT 1.3B: 275.3 -> 265.7 ms, notes/develop/measurements.md): collectives beside products, few and long.
XLA_OPTIONS = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
)


def xla_options(mesh: Mesh | None) -> tuple[str, ...]:
    """Returns the XLA options of a step whose parameters are sharded over several devices of a mesh; empty for other steps."""
    return XLA_OPTIONS if mesh is not None and mesh.shape.get(AXIS, 1) > 1 else ()


@dataclass(frozen=True)
class ShardSpec:
    """How an array is spread over N devices.

    Attributes:
        axis: is sharded into N equal parts; None where every device has the whole.
        length: of this axis.
        padded: the same with the zeros that make N divide it.
        groups: into so many groups of neighbours are the devices divided, each of which gathers its own part of the array only:
            of experts, those to which tokens are sent. No padding where there are several.
    """

    axis: int | None
    length: int = 0
    padded: int = 0
    groups: int = 1

    def spec(self, *, lead: Sequence[str | None] = ()) -> PartitionSpec:
        """Returns the PartitionSpec of the padded array; `lead` are mesh axes of the axes in front of those counted."""
        return PartitionSpec(*lead) if self.axis is None else PartitionSpec(*lead, *[None] * self.axis, AXIS)

    def pad(self, whole: Array) -> Array:
        """Returns the array with its padding."""
        if self.padded == self.length:
            return whole
        return jnp.pad(whole, [(0, self.padded - self.length) if i == self.axis else (0, 0) for i in range(whole.ndim)])

    def unpad(self, padded: Array) -> Array:
        """Inverts `pad`."""
        return padded if self.padded == self.length else lax.slice_in_dim(padded, 0, self.length, axis=self.axis or 0)

    # On one device, under `jax.shard_map`.

    def gather(self, part: Array) -> Array:
        """Returns the array that this device's group has, from the parts of its devices: the whole where there is one group."""
        if self.axis is None or self._is_own:
            return part
        how: dict[str, Any] = {"axis": self.axis, "tiled": True, "axis_index_groups": self._neighbours}
        if part.dtype.itemsize == 1:
            # FP8 goes as bytes: not every collective library knows it.
            sent = lax.bitcast_convert_type(part, jnp.uint8)
            return lax.bitcast_convert_type(self.unpad(lax.all_gather(sent, AXIS, **how)), part.dtype)
        return self.unpad(lax.all_gather(part, AXIS, **how))

    def scatter(self, whole: Array) -> Array:
        """Returns this device's part of the sum over its group's devices, from what each has for what `gather` returned."""
        if self.axis is None:
            return lax.psum(whole, AXIS)
        if self._is_own:
            return whole
        how: dict[str, Any] = {"scatter_dimension": self.axis, "tiled": True, "axis_index_groups": self._neighbours}
        return lax.psum_scatter(self.pad(whole), AXIS, **how)

    @property
    def _is_own(self) -> bool:
        """Whether every device is a group, and its part is its own."""
        return self.groups > 1 and self.groups == lax.axis_size(AXIS)

    @property
    def _neighbours(self) -> list[list[int]] | None:
        if self.groups == 1:
            return None
        size = lax.axis_size(AXIS) // self.groups
        return [list(range(first, first + size)) for first in range(0, self.groups * size, size)]


def shard_specs(
    shapes: Mapping[str, Any],
    ranks: int,
    axes: Mapping[str, int],
    *,
    taken: Mapping[str, int] = MappingProxyType({}),
    pads: bool = True,
    experts: Mapping[str, int] = MappingProxyType({}),
    shards: Sharded = "everything",
) -> dict[str, ShardSpec]:
    """Returns how arrays are sharded: along the axis asked for, else the first that `ranks` divides, else the longest, padded.

    Args:
        shapes: arrays or shapes by name.
        ranks: devices of the axis `fsdp`.
        axes: the axis of some of them, as `asked_axes` gives it.
        taken: the axis of some of them that is sharded over another axis of the mesh.
        pads: whether there may be padding; if not, what no axis divides is whole everywhere.
        experts: devices that experts are spread over, by the name of an array of experts; their axis is asked for.
        shards: `everything`, or arrays of `experts` alone, and the others are whole everywhere.

    Raises:
        ConfigError: an array does not have the axis asked for.
    """
    specs = {}
    for name, leaf in shapes.items():
        if shards == "experts" and name not in experts:
            specs[name] = ShardSpec(None)
            continue
        if name in axes and axes[name] >= leaf.ndim:
            raise ConfigError(
                f"`shard_rules` shards {name} along axis {axes[name]}: must be below {leaf.ndim}, its shape is {leaf.shape}",
                field="shard_rules",
            )
        divisible = [i for i, length in enumerate(leaf.shape) if length % ranks == 0 and i != taken.get(name)]
        longest = max(range(leaf.ndim), key=lambda i, leaf=leaf: leaf.shape[i], default=None) if pads else None
        axis = axes.get(name, divisible[0] if divisible else longest)
        length = 0 if axis is None else leaf.shape[axis]
        specs[name] = ShardSpec(axis, length, -(-length // ranks) * ranks, experts.get(name, 1))
    return specs


class Sharding(Protocol):
    """The choices of a strategy with the axis `fsdp`, as `FullySharded` documents them."""

    @property
    def shard_rules(self) -> tuple[str, ...]: ...
    @property
    def annotations(self) -> Mapping[str, Any]: ...
    @property
    def experts(self) -> int: ...
    @property
    def shards(self) -> Sharded: ...


def chosen_axes(tree: Tree, ranks: int, choices: Sharding) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the axes to shard that the user, the model or the experts determine, by the names of parameters.

    Args:
        tree: Shapes of the parameters.
        ranks: Size of the axis `fsdp`.
        choices: The choices of the strategy.

    Returns:
        The axes from rules and annotations, and the axes of arrays of experts if experts are spread over devices.

    Raises:
        ConfigError: If a rule, an annotation or `experts` does not fit the parameters.
    """
    names = leaf_names(tree)
    axes = asked_axes(names, choices.shard_rules, choices.annotations)
    if choices.experts == 1 and choices.shards == "everything":
        return axes, {}
    shapes = dict(zip(names, jax.tree.leaves(tree), strict=True))
    return axes, expert_axes(shapes, axes, ranks, choices.experts)


def expert_axes(shapes: Mapping[str, Any], axes: Mapping[str, int], ranks: int, devices: int) -> dict[str, int]:
    """Returns the axis of experts of every array that has one, by name.

    Args:
        shapes: of all parameters, by name.
        axes: the axis asked for of some, as `asked_axes` gives it.
        ranks: devices of the axis `fsdp`.
        devices: that experts are spread over.

    Raises:
        ConfigError: `devices` does not divide `ranks`, there are no experts, `ranks` does not divide them, or another axis of
            theirs is asked for.
    """
    if devices < 1 or ranks % devices:
        raise ConfigError(f"`experts` is {devices}: must divide the {ranks} devices of `fsdp`", field="experts")
    found: dict[str, int] = {}
    for name, leaf in shapes.items():
        if (axis := expert_axis(name, leaf.ndim)) is None:
            continue
        if leaf.shape[axis] % ranks:
            message = f"must be such that the {ranks} devices of `fsdp` divide the {leaf.shape[axis]} experts of {name}"
            raise ConfigError(f"`experts` is {devices}: {message}", field="experts")
        if axes.get(name, axis) != axis:
            message = f"must be {axis}, along which its experts are spread over devices"
            raise ConfigError(f"`shard_rules` shards {name} along axis {axes[name]}: {message}", field="shard_rules")
        found[name] = axis
    if not found:
        raise ConfigError(f"`experts` is {devices}: must be 1 for a model without experts", field="experts")
    return found


def asked_axes(names: Sequence[str], rules: Sequence[str], specs: Mapping[str, Any]) -> dict[str, int]:
    """Returns the axis to shard of each parameter that a rule or an annotation of the model names.

    Args:
        names: Names of all parameters.
        rules: `PATTERN=AXIS` with shell patterns. Rules override the model's annotations.
        specs: The model's annotations: a PartitionSpec or None by the name of a parameter.

    Raises:
        ConfigError: If a rule has another form or matches nothing, two rules match a parameter with different axes, or a
            partition name is not `fsdp`.
    """
    axes: dict[str, int] = {}
    for name, spec in specs.items():
        named = [(i, part) for i, part in enumerate(spec or ()) if part is not None]
        if any(part != AXIS for _, part in named) or len(named) > 1:
            raise ConfigError(f"{name} has the partition names {tuple(spec)}: must be {AXIS!r}, at most once", field="fsdp")
        for i, _ in named:
            axes[name] = i
    by_rule: dict[str, tuple[str, int]] = {}
    for rule in strings("shard_rules", rules, example="embed*=0"):
        pattern, _, axis = rule.rpartition("=")
        if not pattern or not axis.isdecimal():
            raise ConfigError(f"`shard_rules` has {rule!r}: must be PATTERN=AXIS with an axis from 0", field="shard_rules")
        for name in matching(pattern, names, field="shard_rules"):
            other, before = by_rule.get(name, (rule, int(axis)))
            if before != int(axis):
                raise ConfigError(f"`shard_rules` {other} and {rule} both match {name}: must agree", field="shard_rules")
            by_rule[name] = rule, int(axis)
    return axes | {name: axis for name, (_, axis) in by_rule.items()}


def value_and_grads(
    loss: Callable[[dict[str, Array], Tree], tuple[Array, Aux]],
    parts: dict[str, Array],
    shards: Mapping[str, ShardSpec],
    dtypes: Mapping[str, Any],
    history: Tree,
    *,
    grads_dtype: Any,
    reshard_after_forward: bool,
    sums: Literal["in turn", "scheduled"],
) -> tuple[Aux, dict[str, Array], Tree]:
    """Returns what a loss gives besides its value, this device's part of the sum of its gradients, and those of `history`.

    To be called on one device, under `jax.shard_map`.

    Args:
        loss: of the whole parameters and of `history`, a scalar and anything besides.
        parts: of this device.
        shards, dtypes: of each parameter; it is cast to its dtype before it is gathered.
        history: what else the loss is differentiated by; its gradients are this device's own.
        grads_dtype: in which gradients are summed.
        reshard_after_forward: gather the parameters a second time for the backward, instead of keeping them.
        sums: whether sums over devices begin `in turn`, each when its gradient is there, or as XLA has `scheduled` them.
    """

    whole = gathered(parts, shards, dtypes)
    value, pull_back, aux = jax.vjp(loss, whole, history, has_aux=True)
    if reshard_after_forward:
        # The barrier keeps the second gathering behind the forward, and apart from the first: equal, they would be merged.
        again = gathered(lax.optimization_barrier((parts, value))[0], shards, dtypes)
        pull_back = _replaced(pull_back, {id(array): again[name] for name, array in whole.items()})

    def add(name: str, whole: Array) -> Array:
        return shards[name].scatter(whole)

    if sums == "in turn":
        grads, after = summed_in_turn(lambda back, one: back(one), (pull_back, jnp.ones_like(value)), add, grads_dtype)
    else:
        grads, after = pull_back(jnp.ones_like(value))
        grads = {name: add(name, gradient.astype(grads_dtype)) for name, gradient in grads.items()}
    return aux, grads, after


def gathered(parts: Mapping[str, Array], shards: Mapping[str, ShardSpec], dtypes: Mapping[str, Any]) -> dict[str, Array]:
    """Returns whole parameters, each cast to its dtype before it is gathered; on one device, under `jax.shard_map`."""
    return {name: shards[name].gather(part.astype(dtypes[name])) for name, part in parts.items()}


def _replaced(pull_back: Any, arrays: Mapping[int, Array]) -> Any:
    """Returns a vjp function that reads other arrays than it kept.

    A parameter that its forward only passed on is among the arrays that it kept, under its own id.
    """
    leaves, structure = jax.tree.flatten(pull_back)
    return structure.unflatten([arrays.get(id(leaf), leaf) for leaf in leaves])
