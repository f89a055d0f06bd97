"""Low-rank adapters (LoRA): two small trained matrices beside each frozen weight.

Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv:2106.09685). A matmul y = x W becomes
y = x W + (alpha / rank) (x A) B, with A [K, rank] and B [rank, N]. The matmuls are found in the trace of the model, like those
of FP8, so a Flax model needs no change.

The adapters of a parameter `PATH` are the parameters `PATH_lora_a` and `PATH_lora_b` of the same tree. A weight that is a
concatenation of P parts, such as queries, keys and values, has an adapter for each part: A is [K, P * rank], and part i of the
columns of B belongs to part i of the columns of A.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial, reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.autodiff.traced import Site, Traced
from jgraph.autodiff.view import View, axis_of, of_slice, view_of
from jgraph.errors import ConfigError, require, shown
from jgraph.mesh import partitioned, with_batch_axes
from jgraph.modules import FunctionalModel, Mode
from jgraph.pipeline import PipelineModel
from jgraph.strategies import Split
from jgraph.strategies.tensor_parallel import AXIS
from jgraph.tree import ADAPTER_A as A, ADAPTER_B as B, leaf_names, matching, path_name
from jgraph.types import Batch, Carried, Key, Params, Tree

_T = TypeVar("_T", bound=Tree)

TARGETS = ("*/kernel",)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of a parameter, without arrays."""

    name: str  # of the parameter
    # Place of the elements of the weight [*lead, K, N] in the parameter. K is the contracted length, N the other one.
    # `lead` has an axis for each scan over layers.
    view: View
    split: Split | None  # how tensor parallelism splits the parameter; a split of the columns has the parts

    @property
    def lead(self) -> tuple[int, ...]:
        return self._lengths[:-2]

    @property
    def rows(self) -> int:
        return self._lengths[-2]

    @property
    def columns(self) -> int:
        return self._lengths[-1]

    @property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(math.prod(length for length, _ in axis) for axis in self.view)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of columns of each part."""
        parts = self.split.parts if self.split is not None and self.split.axis == -1 else ()
        units = sum(parts)
        return tuple(self.columns * part // units for part in parts) if len(parts) > 1 else (self.columns,)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.lead, self.rows, len(self.widths) * rank), (*self.lead, rank, self.columns)

    def whole(self, b: Array, devices: int = 1) -> Array:
        """Returns B [rank, N] as a matrix [P * rank, N], zero where the parts of the row and of the column differ."""
        widths = self.widths
        if len(widths) == 1:
            return b
        parts: Any = np.repeat(np.arange(len(widths)), widths)
        # With several devices of the axis `tensor`, the columns are ordered by device.
        if devices > 1 and self.split is not None and self.split.check(self.name, self.columns, devices):
            parts = self.split.by_device(parts, devices)
        mask_PN = jnp.asarray(parts == np.arange(len(widths))[:, None], b.dtype)
        return (mask_PN[:, None] * b).reshape(-1, self.columns)

    def change(self, a: Array, b: Array) -> Array:
        """Returns A B, with the elements in the order of the parameter."""

        def product(a: Array, b: Array) -> Array:
            return a @ self.whole(b)

        for _ in self.lead:
            product = jax.vmap(product)
        factors = [factor for axis in self.view for factor in axis]
        order = sorted(range(len(factors)), key=lambda i: -factors[i][1])
        return jnp.transpose(product(a, b).reshape([length for length, _ in factors]), order)

    def is_transposed(self, view: View) -> bool | None:
        """Returns whether a weight with this view is the transpose of A B. None if it is neither A B nor its transpose."""
        # The parameter may be that of one of the stacked layers.
        own = of_slice(self.view[-len(view) :])
        if view == own:
            return False
        return True if _transposed(view) == own else None


@dataclass(frozen=True, eq=False)
class AdaptedModel(FunctionalModel):
    """A Flax model with adapters, as pure functions of its parameters. Made by `lora`.

    Has the attributes and methods of the model that `jgraph.functional` returns. Its parameters are those of the base model and
    the adapters.

    Attributes:
        base: The model without adapters.
        adapters: The adapters, by the name of their parameter.
        rank: Rank of the adapters.
        scale: Factor of the adapters, alpha / rank.
        seed: Seed of new matrices A.
    """

    base: FunctionalModel = field(kw_only=True)
    adapters: Mapping[str, Adapter] = field(kw_only=True)
    rank: int = field(kw_only=True)
    scale: float = field(kw_only=True)
    seed: int = field(kw_only=True)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters of the base model, for the argument `freeze` of `train_step`."""
        return tuple(leaf_names(self.base.shapes))

    def tensor_rules(self, rules: Mapping[str, Split | None]) -> dict[str, Split | None]:
        """Returns rules for `jgraph.TensorParallel`: those of the base model, and those of the adapters before them."""
        found: dict[str, Split | None] = {}
        for pattern, split in rules.items():
            axis = None if split is None else split.axis
            found |= {pattern + A: split if axis == -2 else None, pattern + B: split if axis == -1 else None}
        return found | dict(rules)

    def with_adapters(self, base: Params) -> Params:
        """Adds new adapters to parameters of the base model. Can be jitted.

        Args:
            base: Parameters of the base model. If the function is jitted, they may be donated.

        Returns:
            The same arrays and new adapters, a tree like `shapes`. The matrices B are zero.
        """
        keys = jax.random.split(jax.random.key(self.seed), len(self.adapters))
        pairs = enumerate(self.adapters.values())
        return joined(base, {adapter.name: _initial(adapter, self.rank, keys[i]) for i, adapter in pairs})

    def merge(self, params: Params) -> Params:
        """Adds the adapters to their weights: W + (alpha / rank) A B. Can be jitted.

        Args:
            params: Parameters with adapters, a tree like `shapes`. Not donated.

        Returns:
            The parameters of the base model, in their dtypes. The sums are computed in float32.
        """
        base, low = separated(params)
        pairs = zip(leaf_names(base), jax.tree.leaves(base), strict=True)
        merged = [self.merged(name, leaf, *low[name]) if name in low else leaf for name, leaf in pairs]
        return jax.tree.unflatten(jax.tree.structure(base), merged)

    def merged(self, name: str, weight: Array, a: Array, b: Array) -> Array:
        """Adds one adapter to its weight.

        Args:
            name: Name of the parameter.
            weight: The parameter.
            a: The matrix A of its adapter.
            b: The matrix B of its adapter.

        Returns:
            The sum, in the dtype of `weight`.
        """
        delta = self.adapters[name].change(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32) * self.scale)
        return (jnp.asarray(weight, jnp.float32) + delta.reshape(weight.shape)).astype(weight.dtype)

    def pipeline(self, model: PipelineModel) -> PipelineModel:
        """Adds the adapters to the layers of a pipeline.

        Args:
            model: The base model as a `PipelineModel`.

        Returns:
            The model with adapters. Its parameters have the same tree as `shapes`.

        Raises:
            ConfigError: If embedding or head have an adapter.
        """
        outer = leaf_names(jax.eval_shape(model.split, self.shapes)[0])
        if found := next((name for name in outer if name.endswith(B)), None):
            message = f"`targets` selects {found.removesuffix(B)}: must select only parameters of layers in a pipeline"
            raise ConfigError(message, field="targets")
        return replace(model, layer=partial(_run, model.layer, self.adapters, self.scale))


def lora(
    model: FunctionalModel,
    batch: Batch,
    *,
    rank: int,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    rules: Mapping[str, Split | None] | None = None,
    key: int = 0,
) -> AdaptedModel:
    """Adds low-rank adapters (LoRA) to the linear layers of a model. Traces the model and computes nothing.

    Pass `frozen` of the result as `freeze` to `train_step`: the adapters alone then have gradients and optimizer state. B is
    initialized with zeros, so the model with new adapters computes the same outputs as the model without.

    Args:
        model: The model, from `jgraph.functional`.
        batch: Arrays or shapes of a batch, the argument of the module's `loss`. Only shapes and dtypes are read.
        rank: Number of columns of A and of rows of B, for each part of a weight.
        alpha: The adapters are multiplied by `alpha / rank`.
        targets: Shell patterns of the names of weights. The default selects the kernels of Flax's linear layers.
        rules: A `Split` by the shell pattern of parameter names, as in `jgraph.TensorParallel`. Weights with several `parts` of
            columns get an adapter for each part.
        key: Integer seed of A.

    Returns:
        The model with adapters. Its `init` returns the parameters of the model and new adapters.

    Raises:
        ConfigError: If `model` is not from `jgraph.functional`, `rank` or `alpha` is not positive, a pattern matches no
            parameter, or a matching parameter has another use than as the whole weight of matmuls, or its transpose, outside
            `jgraph.mesh.per_shard`.

    Examples:
        >>> import optax
        >>> from flax import nnx
        >>> class Line(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.linear = nnx.Linear(8, 4, rngs=rngs)
        ...     def loss(self, x):
        ...         return jnp.mean(self.linear(x) ** 2)
        >>> x = jnp.ones((2, 8))
        >>> adapted = jgraph.lora(jgraph.functional(lambda: Line(nnx.Rngs(0))), x, rank=2)
        >>> jax.tree.map(jnp.shape, adapted.shapes)
        {'linear': {'bias': (4,), 'kernel': (8, 4), 'kernel_lora_a': (8, 2), 'kernel_lora_b': (2, 4)}}
        >>> step = jgraph.train_step(
        ...     lambda params, x, key: adapted.loss(params, x, key)[0],
        ...     optax.adamw(1e-4),
        ...     jgraph.Replicated(None, adapted.shapes),
        ...     freeze=adapted.frozen,
        ... )
    """
    require(isinstance(model, FunctionalModel), "model", shown(model), "a model from jgraph.functional")
    require(isinstance(rank, int) and rank > 0, "rank", rank, "a positive integer")
    require(alpha > 0, "alpha", alpha, "positive")
    names = leaf_names(model.shapes)
    wanted = {name for pattern in targets for name in matching(pattern, names, field="targets")}
    random = jax.eval_shape(lambda: jax.random.key(0))
    traced = Traced.from_function(
        with_batch_axes(partial(model.call, "loss", "train")), model.shapes, model.carried, random, batch
    )
    pairs = zip(names, jax.tree.leaves(model.shapes), strict=True)
    adapters = {name: _adapter(traced, name, leaf.shape, rules or {}) for name, leaf in pairs if name in wanted}
    scale = alpha / rank

    def init() -> tuple[Params, Carried]:
        params, carried = model.init()
        return made.with_adapters(params), carried

    def call(name: str, mode: Mode, params: Params, *args: Tree) -> tuple[Any, Carried]:
        return _run(partial(model.call, name, mode), adapters, scale, params, *args)

    made = AdaptedModel(
        shapes=model.shapes,
        carried=model.carried,
        init=init,
        call=call,
        annotations=model.annotations,
        reductions=model.reductions,
        base=model,
        adapters=adapters,
        rank=rank,
        scale=scale,
        seed=key,
    )
    shapes = jax.eval_shape(made.with_adapters, model.shapes)
    made = replace(made, shapes=shapes, annotations={**dict.fromkeys(leaf_names(shapes)), **model.annotations})
    if (decoder := model.decoder) is None:
        return made
    # Text is generated with merged weights.
    return replace(
        made,
        decoder=replace(decoder, prepare=lambda params, carried: decoder.prepare(made.merge(params), carried)),
    )


def separated(params: Params) -> tuple[Params, dict[str, tuple[Array, Array]]]:
    """Returns the parameters without adapters, and the pair (A, B) of each adapter by the name of its parameter."""
    named = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    names = [name.removesuffix(B) for name in named if name.endswith(B)]

    def base(tree: Params) -> Params:
        if isinstance(tree, list | tuple):
            return type(tree)(map(base, tree))
        if not isinstance(tree, Mapping):
            return tree
        return {key: base(child) for key, child in tree.items() if not str(key).endswith((A, B))}

    return base(params), {name: (named[name + A], named[name + B]) for name in names}


def joined(params: Params, low: Mapping[str, tuple[Array, Array]]) -> Params:
    """Inverts `separated`, for nested dicts."""
    found = jax.tree.map(lambda leaf: leaf, params)
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if pair := low.get(path_name(path)):
            *above, last = (key.key for key in path)
            reduce(lambda tree, key: tree[key], above, found).update({last + A: pair[0], last + B: pair[1]})
    return found


def _initial(adapter: Adapter, rank: int, key: Key) -> tuple[Array, Array]:
    a, b = adapter.shapes(rank)
    # The distribution of PyTorch's linear layers, as in PEFT.
    limit = 1 / math.sqrt(adapter.rows)
    return jax.random.uniform(key, a, jnp.float32, -limit, limit), jnp.zeros(b, jnp.float32)


def _run(function: Callable[..., _T], adapters: Mapping[str, Adapter], scale: float, params: Params, *args: Tree) -> _T:
    """Calls `function(params, *args)` with adapters beside its matmuls. `params` may be those of a layer."""
    base, low = separated(params)
    if not low:
        return function(base, *args)
    traced = Traced.from_function(function, base, *args)
    sites: dict[Site, tuple[str, Adapter, bool]] = {}
    for name in low:
        # The parameters of a layer have the ends of the names.
        found = (adapter for full, adapter in adapters.items() if f"/{full}".endswith(f"/{name}"))
        adapter = min(found, key=lambda adapter: len(adapter.name))
        uses = _uses(traced, name)
        flips = {site: adapter.is_transposed(view) for site, view in (uses or {}).items()}
        # The adapter would be missing in other uses.
        if uses is None or None in flips.values():
            must = "must be used only as the weight of matmuls outside `jax.shard_map`"
            hint = "; for `jgraph_models.gpt.GPT`, pass `config.with_visible_matmuls()`"
            raise ConfigError(f"`params` has an adapter of {name}: {must}{hint}", field="params")
        sites |= {site: (name, adapter, bool(flip)) for site, flip in flips.items()}

    def multiply(site: Site, x: Array, w: Array, extra: Sequence[Array], given: tuple[Array, Array]) -> Array:
        _, adapter, is_transposed = sites[site]
        y = site.run(x, w, extra)
        a, b = given[0].astype(x.dtype), adapter.whole((given[1] * scale).astype(x.dtype), partitioned(AXIS))
        return y + _low(site, x, *((b.T, a.T) if is_transposed else (a, b))).astype(y.dtype)

    given = [low[sites[site][0]] if site in sites else None for site in traced.sites]
    result: Any = traced.run(multiply, given, base, *args)[0]  # a tree like the result of `function`
    return result


def _low(site: Site, x: Array, a: Array, b: Array) -> Array:
    """Returns (x A) B in the shape of the matmul's result, for A [K, P] and B [P, N]."""
    contract = site.eqn.params["dimension_numbers"][0]
    x_last, w_first = contract[site.data], contract[site.weight]
    free = [n for i, n in enumerate(site.w_aval.shape) if i not in w_first]
    a = a.reshape(*(x.shape[i] for i in x_last), -1)
    low = lax.dot_general(x, a, ((x_last, tuple(range(len(x_last)))), ((), ())))
    out = jnp.matmul(low, b).reshape(*low.shape[:-1], *free)
    return out if site.data == 0 else jnp.moveaxis(out, tuple(range(low.ndim - 1)), tuple(range(1 - low.ndim, 0)))


def _uses(traced: Traced, name: str) -> dict[Site, View] | None:
    """Returns the places of the weights [*lead, K, N] in a parameter. None if it has another use than as a whole weight."""
    index = traced.names.index(name)
    found = {site: _matrix(site) for site in traced.sites if index in site.params}
    whole = {site: view for site, view in found.items() if view is not None}
    return None if index in traced.stray or len(whole) < len(found) else whole


def _matrix(site: Site) -> View | None:
    """Returns the view [*lead, K, N] of the weight of a matmul, None if it is not the whole parameter."""
    if site.view is None or len(site.params) > 1 or site.name != "dot_general" or any(site.eqn.params["dimension_numbers"][1]):
        return None
    lead, own = site.view[: len(site.lead)], site.view[len(site.lead) :]
    first = site.eqn.params["dimension_numbers"][0][site.weight]
    axes = first, [i for i in range(len(own)) if i not in first]
    return (*lead, *(axis_of(factor for i in group for factor in own[i]) for group in axes))


def _transposed(view: View) -> View:
    return (*view[:-2], view[-1], view[-2])


def _adapter(traced: Traced, name: str, shape: Sequence[int], rules: Mapping[str, Split | None]) -> Adapter:
    """Makes the adapter of a parameter. Checks all its uses, because merged weights would compute other outputs otherwise."""
    views = list((_uses(traced, name) or {}).values())
    if not views or any(view not in (views[0], _transposed(views[0])) for view in views):
        must = "must select parameters with no other use than as the whole weight of matmuls, or its transpose"
        raise ConfigError(f"`targets` selects {name}: {must}; leave it out of the patterns", field="targets")
    split = next((split for pattern, split in rules.items() if fnmatchcase(name, pattern)), None)
    if split is None or split.axis not in (-1, -2):
        return Adapter(name, views[0], split)
    # A has the rows of the parameter and B its columns, so that they are split like it.
    fitting = [view for view in (views[0], _transposed(views[0])) if view[split.axis] == view_of(shape)[split.axis]]
    if not fitting and len(split.parts) > 1:
        must = f"must be a matrix if `rules` has parts of its axis {split.axis}"
        raise ConfigError(f"`targets` selects {name}: {must}; leave it out of the patterns", field="targets")
    return Adapter(name, fitting[0] if fitting else views[0], split)
