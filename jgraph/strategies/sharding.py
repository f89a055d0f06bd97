"""Fully sharded data parallelism: choices of a strategy, and gradients of sharded parameters.

(Rajbhandari et al., "ZeRO", arXiv:1910.02054, stage 3): a device holds 1/N of the parameters, of main_grad and of the optimizer
state. It all-gathers parameters in their compute dtype, and reduce-scatters gradients. There is one collective per parameter,
which XLA's scheduler moves next to its use.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jgraph.errors import ConfigError, check_choice, require
from jgraph.layout import Description, Layout, MakeLayout, Param, Shard, described
from jgraph.mesh import PARTITIONED_AXES, Axis
from jgraph.precision.config import XLA_OPTIONS as FP8_XLA_OPTIONS, FP8Config
from jgraph.strategies._order import by_layer, vjp
from jgraph.strategies._overlap import reduce_in_buckets
from jgraph.strategies.checks import check_count, float_dtype, strings
from jgraph.tree import matching
from jgraph.types import Annotations, Arrays, Observed, Tree, TreeOf

Parts = TypeVar("Parts", bound=Tree)
Aux = TypeVar("Aux")
PullBack = TypeVar("PullBack", bound=Callable[..., tuple])
AXIS = Axis.FSDP.value
Sharded = Literal["everything", "experts"]
GatherPer = Literal["step", "pass"]

# Fastest on four H200s (GPT 1.3B: 275.3 -> 265.7 ms, notes/develop/measurements/sharding.md): few long collectives beside
# matmuls.
_XLA_OPTIONS = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
)
# Transfers between GPUs of one process by copy engines, which do not wait for multiprocessors as NCCL's kernels do. GPT 1.3B
# over two H200s: 285.7 -> 267.3 ms (notes/develop/measurements/sharding.md). Between processes, XLA uses NCCL.
_TENSOR_XLA_OPTIONS = ("xla_gpu_collective_permute_mode=COLLECTIVES_PEER_MEMORY",)


def hides_collectives(mesh: Mesh | None) -> bool:
    """True if XLA's latency-hiding scheduler orders the step, because collectives run within it."""
    return mesh is not None and max(mesh.shape.get(axis, 1) for axis in (AXIS, *PARTITIONED_AXES)) > 1


def xla_options(mesh: Mesh | None, fp8: FP8Config | None) -> tuple[str, ...]:
    """Returns XLA options, `name=value`, of a step with collectives (`fsdp`, `context`, `tensor`) or FP8 matmuls."""
    of_collectives = _XLA_OPTIONS if hides_collectives(mesh) else ()
    of_tensor = _TENSOR_XLA_OPTIONS if mesh is not None and mesh.shape.get(Axis.TENSOR, 1) > 1 else ()
    of_fp8 = FP8_XLA_OPTIONS if fp8 and not fp8.calibrates else ()
    return (*of_collectives, *of_tensor, *of_fp8)


@dataclass(frozen=True, eq=False, kw_only=True)
class FSDPChoices:
    """Choices of a strategy that shards parameters over the mesh axis `fsdp`. `FullySharded` documents them."""

    shard_rules: tuple[str, ...] = ()
    annotations: Annotations = field(default_factory=dict)
    compute_dtype: DTypeLike | None = None
    experts: int = 1  # devices that the experts of a layer are sharded over, not their number
    shards: Sharded = "everything"

    def __post_init__(self):
        check_count("experts", self.experts)
        if self.compute_dtype is not None:
            float_dtype("compute_dtype", self.compute_dtype)
        check_choice("shards", self.shards, get_args(Sharded))


def wanted(choices: FSDPChoices, ranks: int) -> MakeLayout:
    """A layout that moves nothing: adds to the descriptions which axes rules, annotations and experts ask to shard.

    `ranks` is the size of the mesh axis `fsdp`.
    """

    def make(params: Description) -> Layout[Arrays]:
        axes = asked_axes(list(params), choices.shard_rules, choices.annotations)
        devices = choices.experts
        if devices == 1 and choices.shards == "everything":
            return described(lambda name, param: replace(param, wanted=axes.get(name, "any")))(params)
        if ranks % devices:
            raise ConfigError(f"`experts` is {devices}: must divide the {ranks} devices of `fsdp`", field="experts")
        experts = {name: param.expert_axis for name, param in params.items() if param.expert_axis is not None}
        require(bool(experts), "experts", devices, "1 for a model without experts")
        for name, axis in experts.items():
            if (count := params[name].shape[axis]) % ranks:
                message = f"the {ranks} devices of `fsdp` must divide the {count} experts of {name}"
                raise ConfigError(f"`experts` is {devices}: {message}", field="experts")
            if axes.get(name, axis) != axis:
                message = f"must be {axis}, the axis of experts"
                raise ConfigError(f"`shard_rules` shards {name} along axis {axes[name]}: {message}", field="shard_rules")

        def change(name: str, param: Param) -> Param:
            if name in experts:
                return replace(param, wanted=experts[name], groups=devices)
            return replace(param, wanted=axes.get(name, "any") if choices.shards == "everything" else "none")

        return described(change)(params)

    return make


def asked_axes(names: Sequence[str], rules: Sequence[str], specs: Annotations) -> dict[str, int]:
    """Returns the axis to shard of each parameter with a rule or an annotation. Rules override annotations."""
    axes: dict[str, int] = {}
    for name, spec in specs.items():
        if spec is None:
            continue
        named = [(i, part) for i, part in enumerate(spec) if part is not None and part not in PARTITIONED_AXES]
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
    loss: Callable[[Arrays, Observed], tuple[Array, Aux]],
    parts: Arrays,  # the shards of this device
    trained: Collection[str],
    shards: Mapping[str, Shard],
    observed: Observed,
    *,
    grads_dtype: DTypeLike,  # before gradients are summed over devices
    gather_per: GatherPer,
    reduce: Literal["in buckets", "scheduled"],
) -> tuple[Aux, Arrays, Observed]:
    """Differentiates `loss(whole, observed) -> (scalar, aux)` by the shards of a device, under `jax.shard_map`.

    Returns aux, the shards of the gradients of trained parameters, summed by `Shard.scatter`, and the gradient of `observed` on
    this device, which is the observed state after the microbatch.
    """
    whole = gathered(shards, parts)

    def of_trained(arrays: Arrays, observed: Observed) -> tuple[Array, Aux]:
        return loss(whole | arrays, observed)

    arrays = {name: whole[name] for name in trained}
    value, pull_back, aux = vjp(of_trained, arrays, observed)
    if gather_per == "pass":
        # The barrier orders the second all-gather after the forward pass. Without it, XLA would merge the two.
        regathered = gathered(shards, lax.optimization_barrier((parts, value))[0])
        pull_back = _replaced(pull_back, {id(array): regathered[name] for name, array in whole.items()})

    def add(name: str, whole: Array) -> Array:
        return shards[name].scatter(whole)

    # Buckets are summed during the backward pass, in a fixed order. Otherwise, XLA schedules the sum of each gradient.
    if reduce == "in buckets":
        grads, after = reduce_in_buckets(by_layer, (pull_back, jnp.ones_like(value)), add, grads_dtype)
    else:
        grads, after = by_layer(pull_back, jnp.ones_like(value))
        grads = {name: add(name, gradient.astype(grads_dtype)) for name, gradient in grads.items()}
    return aux, grads, after


def gathered(shards: TreeOf[Shard], parts: Parts) -> Parts:
    """Makes the working copy of a tree of parameters on one device, under `jax.shard_map`."""
    return jax.tree.map(lambda shard, part: shard.working_copy(part), shards, parts)


def _replaced(pull_back: PullBack, arrays: Mapping[int, Array]) -> PullBack:
    """Returns a vjp function with some residuals replaced, by the id of the array.

    A parameter that is saved as a residual is the same array object. An array that is computed from it, such as a cast, is not
    replaced, and stays in memory.
    """
    leaves, structure = jax.tree.flatten(pull_back)
    return structure.unflatten([arrays.get(id(leaf), leaf) for leaf in leaves])
