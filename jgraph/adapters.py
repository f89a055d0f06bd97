"""Low-rank adapters (LoRA): two small trained matrices beside each frozen weight.

Hu et al., "LoRA: Low-rank adaptation of large language models" (arXiv:2106.09685). A matmul y = x W becomes
y = x W + (alpha / rank) (x A) B, with A [K, rank] and B [rank, N]. The matmuls are found in the trace of the model, like those
of FP8, so a Flax model needs no change.

The adapters of a parameter `PATH` are the parameters `PATH_lora_a` and `PATH_lora_b` of the same tree. A weight that is a
concatenation of P parts, such as queries, keys and values, has an adapter for each part: A is [K, P * rank], and part i of the
columns of B belongs to part i of the columns of A.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.autodiff import find
from jgraph.autodiff.linear import DelayedProduct
from jgraph.errors import ConfigError, require
from jgraph.mesh import partitioned, with_batch_axes
from jgraph.modules import FunctionalModel
from jgraph.pipeline import PipelineModel
from jgraph.strategies import Split
from jgraph.strategies.tensor_parallel import AXIS
from jgraph.tree import ADAPTER_A as A, ADAPTER_B as B, leaf_names, matching

Tree = Any

TARGETS = ("*/kernel",)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of a parameter, without arrays.

    Attributes:
        name: Name of the parameter.
        lead: Lengths of the leading axes of a parameter of stacked layers; () for a matrix.
        rows: K, the contracted length of the weight.
        columns: N, the other length of the weight.
        split: How tensor parallelism splits the parameter; None if it does not. A split of the columns has the parts.
    """

    name: str
    lead: tuple[int, ...]
    rows: int
    columns: int
    split: Split | None

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of columns of each part."""
        parts = self.split.parts if self.split is not None and self.split.axis == -1 else ()
        units = sum(parts)
        return tuple(self.columns * part // units for part in parts) if len(parts) > 1 else (self.columns,)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of A and B."""
        return (*self.lead, self.rows, len(self.widths) * rank), (*self.lead, rank, self.columns)

    def whole(self, b: Array, devices: int = 1) -> Array:
        """Returns B as a matrix [P * rank, N], zero where the parts of the row and of the column differ.

        Args:
            b: B without leading axes, [rank, N]. With several devices, its columns are ordered by device.
            devices: Number of devices of the mesh axis `tensor`.
        """
        widths = self.widths
        if len(widths) == 1:
            return b
        parts: Any = np.repeat(np.arange(len(widths)), widths)
        if devices > 1 and self.split is not None and self.split.check(self.name, self.columns, devices):
            parts = self.split.by_device(parts, devices)
        mask_PN = jnp.asarray(parts == np.arange(len(widths))[:, None], b.dtype)
        return (mask_PN[:, None] * b).reshape(-1, self.columns)


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
        trace: The matmuls of the loss function of the model.
    """

    base: FunctionalModel = field(kw_only=True)
    adapters: Mapping[str, Adapter] = field(kw_only=True)
    rank: int = field(kw_only=True)
    scale: float = field(kw_only=True)
    seed: int = field(kw_only=True)
    trace: "_Trace" = field(kw_only=True, repr=False)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters of the base model, for the argument `freeze` of `train_step`."""
        return tuple(leaf_names(self.base.shapes))

    def tensor_rules(self, rules: Mapping[str, Split]) -> dict[str, Split | None]:
        """Returns rules for `jgraph.TensorParallel`: those of the base model, and those of the adapters before them."""
        found: dict[str, Split | None] = {}
        for pattern, split in rules.items():
            is_column = split.axis == -1
            found |= {pattern + A: None if is_column else split, pattern + B: split if is_column else None}
        return found | dict(rules)

    def with_adapters(self, base: Tree) -> Tree:
        """Adds new adapters to parameters of the base model. Can be jitted.

        Args:
            base: Parameters of the base model. If the function is jitted, they may be donated.

        Returns:
            The same arrays and new adapters, a tree like `shapes`. The matrices B are zero.
        """
        keys = jax.random.split(jax.random.key(self.seed), len(self.adapters))
        pairs = enumerate(self.adapters.values())
        return joined(base, {adapter.name: _initial(adapter, self.rank, keys[i]) for i, adapter in pairs})

    def merge(self, params: Tree) -> Tree:
        """Adds the adapters to their weights: W + (alpha / rank) A B. Can be jitted.

        Args:
            params: Parameters with adapters, a tree like `shapes`. Not donated.

        Returns:
            The parameters of the base model, in their dtypes. The sums are computed in float32.
        """
        base, low = separated(params)
        names, leaves, structure = leaf_names(base), *jax.tree.flatten(base)
        pairs = zip(names, leaves, strict=True)
        return structure.unflatten([self.merged(name, leaf, *low[name]) if name in low else leaf for name, leaf in pairs])

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
        delta = self.trace.change(self.adapters[name], jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32) * self.scale)
        return (jnp.asarray(weight, jnp.float32) + delta).astype(weight.dtype)

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
    batch: Tree,
    *,
    rank: int,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    rules: Mapping[str, Split] | None = None,
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
        ConfigError: If `rank` or `alpha` is not positive, a pattern matches no parameter, or a matching parameter has another
            use than as the whole weight of matmuls outside `jgraph.mesh.per_shard`.

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
    require(isinstance(rank, int) and rank > 0, "rank", rank, "a positive integer")
    require(alpha > 0, "alpha", alpha, "positive")
    names = leaf_names(model.shapes)
    wanted = {name for pattern in targets for name in matching(pattern, names, field="targets")}
    trace = _Trace.of(model, batch)
    adapters = {name: trace.adapter(name, rules or {}) for name in names if name in wanted}
    scale = alpha / rank

    def init() -> tuple[Tree, Tree]:
        params, carried = model.init()
        return made.with_adapters(params), carried

    def call(name: str, mode: Any, params: Tree, *args: Any) -> tuple[Any, Tree]:
        return _run(partial(model.call, name, mode), adapters, scale, params, *args)

    made = AdaptedModel(
        *(model.shapes, model.carried, init, call, model.annotations, None, model.reductions),
        base=model,
        adapters=adapters,
        rank=rank,
        scale=scale,
        seed=key,
        trace=trace,
    )
    shapes = jax.eval_shape(made.with_adapters, model.shapes)
    made = replace(made, shapes=shapes, annotations=dict.fromkeys(leaf_names(shapes)) | model.annotations)
    if (decoder := model.decoder) is None:
        return made
    # Text is generated with merged weights.
    return replace(
        made,
        decoder=replace(decoder, prepare=lambda params, carried: decoder.prepare(made.merge(params), carried)),
    )


def separated(params: Tree) -> tuple[Tree, dict[str, tuple[Array, Array]]]:
    """Separates adapters from the other parameters.

    Args:
        params: Parameters with adapters, nested dicts, lists and tuples of arrays.

    Returns:
        The parameters without adapters, and the pair (A, B) of each adapter by the name of its parameter.
    """
    low: dict[str, tuple[Array, Array]] = {}

    def of(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if isinstance(tree, list | tuple):
            return type(tree)(of(child, (*path, i)) for i, child in enumerate(tree))
        if not isinstance(tree, Mapping):
            return tree
        for key in tree:
            if isinstance(key, str) and key.endswith(B):
                name = key.removesuffix(B)
                low["/".join(map(str, (*path, name)))] = tree[name + A], tree[key]
        return {key: of(child, (*path, key)) for key, child in tree.items() if not str(key).endswith((A, B))}

    return of(params, ()), low


def joined(params: Tree, low: Mapping[str, tuple[Array, Array]]) -> Tree:
    """Inverts `separated`, for nested dicts.

    Args:
        params: Parameters without adapters, nested dicts of arrays.
        low: The pair (A, B) of each adapter by the name of its parameter.

    Returns:
        New dicts with the arrays of both arguments.
    """

    def of(tree: Tree, path: tuple[Any, ...]) -> Tree:
        if not isinstance(tree, Mapping):
            return tree
        found = {}
        for key, child in tree.items():
            found[key] = of(child, (*path, key))
            if (name := "/".join(map(str, (*path, key)))) in low:
                found |= dict(zip((f"{key}{A}", f"{key}{B}"), low[name], strict=True))
        return found

    return of(params, ())


def _initial(adapter: Adapter, rank: int, key: Array) -> tuple[Array, Array]:
    a, b = adapter.shapes(rank)
    # The distribution of PyTorch's linear layers, as in PEFT.
    limit = 1 / math.sqrt(adapter.rows)
    return jax.random.uniform(key, a, jnp.float32, -limit, limit), jnp.zeros(b, jnp.float32)


def _run(function: Callable[..., Tree], adapters: Mapping[str, Adapter], scale: float, params: Tree, *args: Tree) -> Tree:
    """Calls `function(params, *args)` with adapters beside its matmuls. `params` may be those of a layer."""
    base, low = separated(params)
    if not low:
        return function(base, *args)
    traced = _traced(function, base, *args)
    local = {name: next(a for full, a in adapters.items() if f"/{full}".endswith(f"/{name}")) for name in low}
    found = [traced.name_of(site) for site in traced.sites]
    # The adapter would be missing in these uses.
    if missing := [name for i, name in enumerate(traced.names) if name in low and i in traced.others]:
        must = "must be used only as the weight of matmuls outside `jax.shard_map`"
        hint = "; for `jgraph_models.gpt.GPT`, pass `config.with_visible_matmuls()`"
        raise ConfigError(f"`params` has an adapter of {missing[0]}: {must}{hint}", field="params")
    given: list[Any] = [low.get(name) if name is not None else None for name in found]

    def multiply(site: DelayedProduct, x: Array, w: Array, extra: Sequence[Array], given: Any) -> Array:
        y = site.run(x, w, extra)
        if given is None:
            return y
        a, b = given
        name: Any = traced.name_of(site)
        return y + _low(local[name], site, x, a, b, scale).astype(y.dtype)

    out, _ = find.run_forward(traced.block, traced.closed.consts, jax.tree.leaves((base, args)), given, multiply)
    return jax.tree.unflatten(traced.structure, out)


def _low(adapter: Adapter, site: DelayedProduct, x: Array, a: Array, b: Array, scale: float) -> Array:
    """Returns scale * (x A) B in the shape of the matmul's result."""
    contract = site.eqn.params["dimension_numbers"][0]
    x_last, w_first = contract[site.data], contract[site.weight]
    free = [n for i, n in enumerate(site.w_aval.shape) if i not in w_first]
    a = a.astype(x.dtype).reshape(*(x.shape[i] for i in x_last), -1)
    low = lax.dot_general(x, a, ((x_last, tuple(range(len(x_last)))), ((), ())))
    b = adapter.whole((b * scale).astype(x.dtype), partitioned(AXIS))
    out = jnp.matmul(low, b).reshape(*low.shape[:-1], *free)
    return out if site.data == 0 else jnp.moveaxis(out, tuple(range(low.ndim - 1)), tuple(range(1 - low.ndim, 0)))


@dataclass(frozen=True, eq=False)
class _Traced:
    """A function and its matmuls with parameters. `others` has the indices of parameters with uses other than matmuls."""

    closed: Any
    block: find.Block
    others: Container[int]
    names: Sequence[str]
    structure: Any

    @property
    def sites(self) -> list[DelayedProduct]:
        return self.block.all_sites()

    def name_of(self, site: DelayedProduct) -> str | None:
        """Returns the name of the parameter that is the whole weight of a matmul; None if there is none."""
        index, is_plain = min(site.params), site.name == "dot_general" and not any(site.eqn.params["dimension_numbers"][1])
        is_whole = math.prod(site.lead) * site.w_aval.size == self.closed.in_avals[index].size
        return self.names[index] if is_plain and is_whole and site.moved and len(site.params) == 1 else None


def _traced(function: Callable[..., Tree], params: Tree, *args: Tree) -> _Traced:
    traced = jax.jit(function).trace(params, *args)
    closed, names = traced.jaxpr, leaf_names(params)
    found = find.find_all(closed.jaxpr, len(names))
    return _Traced(closed, found.block, found.stray, names, jax.tree.structure(traced.out_info))


@dataclass(frozen=True, eq=False)
class _Trace:
    """The loss of a model, traced once to find the weights of its matmuls."""

    traced: _Traced
    shapes: Sequence[jax.ShapeDtypeStruct]

    @classmethod
    def of(cls, model: FunctionalModel, batch: Tree) -> "_Trace":
        key = jax.eval_shape(lambda: jax.random.key(0))
        loss = with_batch_axes(partial(model.call, "loss", "train"))
        return cls(_traced(loss, model.shapes, model.carried, key, batch), jax.tree.leaves(model.shapes))

    def site_of(self, name: str) -> DelayedProduct:
        """Returns the first matmul with a parameter as its weight."""
        index = self.traced.names.index(name)
        sites = [site for site in self.traced.sites if index in site.params]
        # An adapter would be missing in other uses, so the merged weights would compute other outputs.
        if not sites or index in self.traced.others or any(self.traced.name_of(site) != name for site in sites):
            must = "must select parameters with no other use than as the whole weight of matmuls"
            raise ConfigError(f"`targets` selects {name}: {must}", field="targets")
        return sites[0]

    def adapter(self, name: str, rules: Mapping[str, Split]) -> Adapter:
        site = self.site_of(name)
        w_first = site.eqn.params["dimension_numbers"][0][site.weight]
        rows = math.prod(site.w_aval.shape[i] for i in w_first)
        split = next((split for pattern, split in rules.items() if fnmatchcase(name, pattern)), None)
        return Adapter(name, site.lead, rows, site.w_aval.size // rows, split)

    def change(self, adapter: Adapter, a: Array, b: Array) -> Array:
        """Returns A B in the layout of the parameter."""
        site, index = self.site_of(adapter.name), self.traced.names.index(adapter.name)
        w_first = site.eqn.params["dimension_numbers"][0][site.weight]
        order = (*w_first, *(i for i in range(site.w_aval.ndim) if i not in w_first))

        def product(a: Array, b: Array) -> Array:
            matrix = a @ adapter.whole(b)
            return jnp.transpose(matrix.reshape([site.w_aval.shape[i] for i in order]), np.argsort(order).tolist())

        for _ in adapter.lead:
            product = jax.vmap(product)

        def weight(param: Array) -> Array:
            # The other parameters are not read.
            given: list[Any] = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.shapes]
            given[index] = param
            given += [find.MISSING] * (len(self.traced.closed.jaxpr.invars) - len(given))
            consts = [find.MISSING] * len(self.traced.closed.consts)
            weights = find.run_weights(self.traced.block, consts, given, keep_dtype=True)[1]
            return weights[self.traced.sites.index(site)]

        # The weight is the parameter with moved axes, and the transpose of this function moves them back.
        shape = jax.ShapeDtypeStruct(self.shapes[index].shape, jnp.float32)
        return jax.jit(lambda a, b: jax.linear_transpose(weight, shape)(product(a, b))[0])(a, b)
