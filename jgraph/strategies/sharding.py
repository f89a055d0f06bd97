"""Arrays sharded over the mesh axis `fsdp`: choice of the sharded axis, all-gather, reduce-scatter.

Fully sharded data parallelism (Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3): a device holds 1/N of the parameters, of
main_grad and of the optimizer state. It all-gathers parameters in their compute dtype, and reduce-scatters gradients. There is
one collective per array, which XLA's scheduler moves next to its use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jgraph.errors import ConfigError, check_choice, require
from jgraph.mesh import PARTITIONED_AXES, Axis, per_shard
from jgraph.precision.config import XLA_OPTIONS as FP8_XLA_OPTIONS, FP8Config
from jgraph.strategies.checks import check_count, float_dtype, strings
from jgraph.strategies.objective import Tree
from jgraph.strategies.overlap import reduce_in_buckets
from jgraph.tree import expert_axis, leaf_names, matching

Aux = TypeVar("Aux")
AXIS = Axis.FSDP.value
Sharded = Literal["everything", "experts"]

# Fastest on four H200s (GPT 1.3B: 275.3 -> 265.7 ms, notes/develop/measurements/sharding.md): few long collectives beside
# matmuls.
_XLA_OPTIONS = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
)


def xla_options(mesh: Mesh | None, fp8: FP8Config | None) -> tuple[str, ...]:
    """Returns the XLA options of a step on a mesh, and those of FP8 matmuls.

    Args:
        mesh: The devices; None for one device.
        fp8: The FP8 recipe; None without FP8.

    Returns:
        Options as `name=value`. Empty if `fp8` is None or only calibrates, and the mesh has no axis `fsdp`, `context` or
        `tensor` with several devices.
    """
    sharded = (
        _XLA_OPTIONS if mesh is not None and max(mesh.shape.get(axis, 1) for axis in (AXIS, *PARTITIONED_AXES)) > 1 else ()
    )
    return (*sharded, *(FP8_XLA_OPTIONS if fp8 and not fp8.calibrates else ()))


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of an array over the N devices of the mesh axis `fsdp`.

    Each device has 1/N of the padded array, its *shard*.

    Attributes:
        axis: Index of the sharded axis. None if the array is replicated.
        length: Length of this axis without padding; 0 if the array is replicated.
        padded: Length of this axis with padding at its end, a multiple of N; 0 if the array is replicated.
        groups: Number of equal groups of consecutive devices. If 1, the group is all N devices, and `gather` returns the whole
            array. If larger, `gather` returns only the shards of the own group, for example the experts that its tokens are
            sent to, and there is no padding.
        split: Index of the axis that is split over the mesh axis `tensor`; None if there is none.
    """

    axis: int | None
    length: int = 0
    padded: int = 0
    groups: int = 1
    split: int | None = None

    def spec(self, *, lead: Sequence[str | None] = ()) -> PartitionSpec:
        """Returns the PartitionSpec of the padded array: `fsdp` for the sharded axis, None for the axes before it.

        Args:
            lead: Entries for additional axes in front of the array, one each: the name of a mesh axis, or None for an axis that
                is not sharded.
        """
        return PartitionSpec(*lead) if self.axis is None else PartitionSpec(*lead, *[None] * self.axis, AXIS)

    def pad(self, whole: Array) -> Array:
        """Pads the sharded axis of a whole array with zeros at its end. Returns `whole` itself if there is no padding."""
        if self.padded == self.length:
            return whole
        return jnp.pad(whole, [(0, self.padded - self.length) if i == self.axis else (0, 0) for i in range(whole.ndim)])

    def unpad(self, padded: Array) -> Array:
        """Inverts `pad`: removes the padding at the end of the sharded axis. Returns `padded` itself if there is none."""
        return padded if self.padded == self.length else lax.slice_in_dim(padded, 0, self.length, axis=self.axis or 0)

    # --- On one device, under `jax.shard_map` ---

    def gather(self, part: Array) -> Array:
        """All-gathers the array over the devices of the own group. Called under `jax.shard_map`.

        Args:
            part: The shard of this device, with padding; the whole array if it is replicated. FP8 is sent as bytes.

        Returns:
            If `groups` is 1, the whole array without padding. Otherwise, the shards of the own group, joined along the sharded
            axis. A replicated array is returned unchanged. The dtype is that of `part`.
        """
        if self.axis is None or self._is_own:
            return part
        options: dict[str, Any] = {"axis": self.axis, "tiled": True, "axis_index_groups": self._neighbors}
        # FP8 is sent as bytes, because not every collective library supports it.
        is_fp8 = part.dtype.itemsize == 1
        payload = lax.bitcast_convert_type(part, jnp.uint8) if is_fp8 else part
        whole = self.unpad(self._on_shards(lambda x: lax.all_gather(x, AXIS, **options), payload))
        return lax.bitcast_convert_type(whole, part.dtype) if is_fp8 else whole

    def scatter(self, whole: Array) -> Array:
        """Reduce-scatters the gradient of a gathered array over the own group of devices. Called under `jax.shard_map`.

        Args:
            whole: This device's gradient of the result of `gather`, with the same shape.

        Returns:
            This device's shard of the sum of the gradients over the group, with padding, in the dtype of `whole`. For a
            replicated array, the whole sum over the axis `fsdp`. If each device is a group of its own, `whole` itself.
        """
        if self.axis is None:
            return lax.psum(whole, AXIS)
        if self._is_own:
            return whole
        options: dict[str, Any] = {"scatter_dimension": self.axis, "tiled": True, "axis_index_groups": self._neighbors}
        return self._on_shards(lambda x: lax.psum_scatter(x, AXIS, **options), self.pad(whole))

    def _on_shards(self, collective: Callable[[Array], Array], x: Array) -> Array:
        """Runs a collective on the shards over `tensor`. XLA would gather the argument of the collective over `tensor`."""
        if self.split is None:
            return collective(x)
        spec = PartitionSpec(*[Axis.TENSOR.value if i == self.split else None for i in range(x.ndim)])
        return per_shard(collective, (spec,), spec)(x)

    @property
    def _is_own(self) -> bool:
        """True if each device is a group of its own, so nothing is gathered."""
        return self.groups > 1 and self.groups == lax.axis_size(AXIS)

    @property
    def _neighbors(self) -> list[list[int]] | None:
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
    split: Mapping[str, int] = MappingProxyType({}),
    pads: bool = True,
    experts: Mapping[str, int] = MappingProxyType({}),
    shards: Sharded = "everything",
) -> dict[str, ShardSpec]:
    """Chooses the sharded axis of each array: the requested axis, else the first divisible axis, else the longest axis.

    An axis is divisible if `ranks` divides its length. Other axes are padded.

    Args:
        shapes: Arrays or shapes by name.
        ranks: Size of the mesh axis `fsdp`.
        axes: Requested axes by the name of an array. Arrays without a requested axis have no entry.
        taken: Axes that are sharded over another mesh axis, by the name of an array. They do not count as divisible axes.
        split: Axes that are split over the mesh axis `tensor`, by the name of an array. They are not sharded over `fsdp`.
        pads: Whether the longest axis may be padded. If not, an array without a divisible or requested axis is replicated.
        experts: For the name of each expert weight, the number of groups of devices (`ShardSpec.groups`). A group together
            holds all experts that it computes. The expert axis must be the entry of this name in `axes`.
        shards: Shard `everything`, or only `experts` and replicate other arrays.

    Returns:
        A dict with the sharding of every array by name. Scalars are replicated.

    Raises:
        ConfigError: If an array does not have the requested axis, or the axis is in `split`.
    """
    specs = {}
    for name, leaf in shapes.items():
        if shards == "experts" and name not in experts:
            specs[name] = ShardSpec(None)
            continue
        others = taken.get(name), split.get(name)
        if name in axes and (axes[name] >= leaf.ndim or axes[name] == split.get(name)):
            must = f"below {leaf.ndim}, its shape is {leaf.shape}"
            must = "another axis, because this one is split over another mesh axis" if axes[name] < leaf.ndim else must
            raise ConfigError(f"`shard_rules` shards {name} along axis {axes[name]}: must be {must}", field="shard_rules")
        divisible = [i for i, length in enumerate(leaf.shape) if length % ranks == 0 and i not in others]
        free = [i for i in range(leaf.ndim) if i not in others]
        longest = max(free, key=lambda i, leaf=leaf: leaf.shape[i], default=None) if pads else None
        axis = axes.get(name, divisible[0] if divisible else longest)
        length = 0 if axis is None else leaf.shape[axis]
        specs[name] = ShardSpec(axis, length, -(-length // ranks) * ranks, experts.get(name, 1), split.get(name))
    return specs


@dataclass(frozen=True, eq=False, kw_only=True)
class FSDPChoices:
    """Choices of a strategy that shards parameters over the mesh axis `fsdp`, a base class of strategies.

    Attributes:
        shard_rules: Rules `PATTERN=AXIS`. A parameter whose name matches the shell pattern is sharded along the axis with this
            index.
        annotations: For each parameter name, the PartitionSpec of the model; None for no annotation. The axis at the place of
            `fsdp` is sharded. Rules override annotations.
        compute_dtype: Matrices other than those of routers are cast to this floating dtype before they are gathered. None does
            not cast.
        experts: Number of devices that the experts of a mixture-of-experts layer are sharded over for the computation.
        shards: Shard `everything`, or only `experts` and replicate other parameters.

    Raises:
        ConfigError: If `experts` is not a positive integer, `compute_dtype` is not floating, or `shards` is unknown.
    """

    shard_rules: tuple[str, ...] = ()
    annotations: Mapping[str, Any] = field(default_factory=dict)
    compute_dtype: DTypeLike | None = None
    experts: int = 1
    shards: Sharded = "everything"

    def __post_init__(self):
        check_count("experts", self.experts)
        if self.compute_dtype is not None:
            float_dtype("compute_dtype", self.compute_dtype)
        check_choice("shards", self.shards, get_args(Sharded))


def chosen_axes(tree: Tree, ranks: int, choices: FSDPChoices) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the sharded axes that the choices determine, by rules, by annotations of the model, or as axes of experts.

    Args:
        tree: Arrays or shapes of the parameters.
        ranks: Size of the axis `fsdp`.
        choices: The choices of the strategy.

    Returns:
        (asked, experts), two dicts from the name of a parameter to the index of an axis. `asked` has the axes from rules and
        annotations, and no entry for other parameters. `experts` has the axis over experts of each expert weight; it is empty
        if `choices.experts` is 1 and `choices.shards` is `everything`.

    Raises:
        ConfigError: If a rule or an annotation does not fit the parameters; if `experts` does not divide `ranks`; if `ranks`
            does not divide the number of experts; if the model has no experts; or if a rule requests another axis for experts.
    """
    names, devices = leaf_names(tree), choices.experts
    axes = asked_axes(names, choices.shard_rules, choices.annotations)
    if devices == 1 and choices.shards == "everything":
        return axes, {}
    if ranks % devices:
        raise ConfigError(f"`experts` is {devices}: must divide the {ranks} devices of `fsdp`", field="experts")
    found: dict[str, int] = {}
    for name, leaf in zip(names, jax.tree.leaves(tree), strict=True):
        if (axis := expert_axis(name, leaf.ndim)) is None:
            continue
        if leaf.shape[axis] % ranks:
            message = f"the {ranks} devices of `fsdp` must divide the {leaf.shape[axis]} experts of {name}"
            raise ConfigError(f"`experts` is {devices}: {message}", field="experts")
        if axes.get(name, axis) != axis:
            message = f"must be {axis}, the axis of experts"
            raise ConfigError(f"`shard_rules` shards {name} along axis {axes[name]}: {message}", field="shard_rules")
        found[name] = axis
    require(bool(found), "experts", devices, "1 for a model without experts")
    return axes, found


def asked_axes(names: Sequence[str], rules: Sequence[str], specs: Mapping[str, Any]) -> dict[str, int]:
    """Returns the axis to shard of each parameter with a rule or an annotation of the model.

    Args:
        names: Names of all parameters.
        rules: `PATTERN=AXIS`, with a shell pattern of names and the index of an axis. Rules override the model's annotations.
        specs: The model's annotations: a PartitionSpec or None by the name of a parameter.

    Returns:
        A dict from the name of a parameter to the index of its axis. Parameters without rule and annotation have no entry.

    Raises:
        ConfigError: If a rule has another form or matches nothing, two rules match a parameter with different axes, or a
            PartitionSpec has a name other than `fsdp`, `context` and `tensor`, or has `fsdp` twice.
    """
    axes: dict[str, int] = {}
    for name, spec in specs.items():
        named = [(i, part) for i, part in enumerate(spec or ()) if part is not None]
        named = [(i, part) for i, part in named if part not in PARTITIONED_AXES]
        if any(part != AXIS for _, part in named) or len(named) > 1:
            must = f"must be {AXIS!r} or {Axis.TENSOR.value!r}, each at most once"
            raise ConfigError(f"{name} has the partition names {tuple(spec)}: {must}", field="fsdp")
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
    trained: Mapping[str, bool],
    shards: Mapping[str, ShardSpec],
    dtypes: Mapping[str, Any],
    observed: Tree,
    *,
    grads_dtype: Any,
    reshard_after_forward: bool,
    reduce: Literal["in buckets", "scheduled"],
) -> tuple[Aux, dict[str, Array | None], Tree]:
    """Differentiates a loss with respect to sharded parameters on one device, under `jax.shard_map`.

    Args:
        loss: `loss(whole, observed) -> (scalar, aux)`. `whole` is the dict of gathered parameters by name. The scalar is
            floating; aux is not differentiated. Traced once.
        parts: The shards of this device, by parameter name.
        trained: For each parameter name, False if the parameter is frozen.
        shards: The sharding of each parameter.
        dtypes: Dtype by parameter name, to which the parameter is cast before it is gathered.
        observed: Observed state (amax histories of FP8) before the microbatch. The loss is also differentiated with respect to
            this state.
        grads_dtype: Dtype to which gradients are cast before they are summed over devices.
        reshard_after_forward: Whether parameters are gathered a second time for the backward pass, instead of staying gathered.
        reduce: `in buckets` sums groups of gradients over devices during the backward pass, in a fixed order. `scheduled` lets
            XLA schedule the sum of each gradient.

    Returns:
        (aux, gradients, observed): the auxiliary output of `loss`; a dict by parameter name with this device's shards of the
        gradients, summed over the device group of the parameter (`ShardSpec.scatter`), in `grads_dtype`, and None for frozen
        parameters; and the gradient of
        `observed` on this device. FP8 matmuls make this gradient the observed state after the microbatch.
    """
    whole = gathered(parts, shards, dtypes)

    def of_trained(arrays: dict[str, Array], observed: Tree) -> tuple[Array, Aux]:
        return loss(whole | arrays, observed)

    arrays = {name: array for name, array in whole.items() if trained[name]}
    value, pull_back, aux = jax.vjp(of_trained, arrays, observed, has_aux=True)
    if reshard_after_forward:
        # The barrier orders the second all-gather after the forward pass. Without it, XLA would merge the two.
        regathered = gathered(lax.optimization_barrier((parts, value))[0], shards, dtypes)
        pull_back = _replaced(pull_back, {id(array): regathered[name] for name, array in whole.items()})

    def add(name: str, whole: Array) -> Array:
        return shards[name].scatter(whole)

    if reduce == "in buckets":
        grads, after = reduce_in_buckets(lambda vjp, seed: vjp(seed), (pull_back, jnp.ones_like(value)), add, grads_dtype)
    else:
        grads, after = pull_back(jnp.ones_like(value))
        grads = {name: add(name, gradient.astype(grads_dtype)) for name, gradient in grads.items()}
    return aux, {name: grads.get(name) for name in parts}, after


def gathered(parts: Mapping[str, Array], shards: Mapping[str, ShardSpec], dtypes: Mapping[str, Any]) -> dict[str, Array]:
    """Casts and all-gathers parameters on one device, under `jax.shard_map`.

    Args:
        parts: The shards of this device, by parameter name.
        shards: The sharding of each parameter.
        dtypes: Dtype by parameter name, to which the parameter is cast before it is gathered.

    Returns:
        The gathered parameters by name, in `dtypes`, without padding. A parameter with several groups (`ShardSpec.groups`) has
        only the shards of this device's group.
    """
    return {name: shards[name].gather(part.astype(dtypes[name])) for name, part in parts.items()}


def _replaced(pull_back: Any, arrays: Mapping[int, Array]) -> Any:
    """Returns a vjp function with some residuals replaced, by the id of the array.

    A parameter that is saved as a residual is the same array object.
    """
    leaves, structure = jax.tree.flatten(pull_back)
    return structure.unflatten([arrays.get(id(leaf), leaf) for leaf in leaves])
