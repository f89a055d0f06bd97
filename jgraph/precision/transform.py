"""A function with its matrix products in FP8, found in its trace: `fp8(fn, config)`.

Whatever is multiplied with a parameter is found as the split backward finds it (`autodiff/find.py`), with a name: the
parameter's path. Weights are quantized by `quantize`, which a step calls once, however many microbatches read them.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.autodiff import find
from jgraph.autodiff.linear import GROUPED, BoundProducts, DelayedProduct, OwnProducts
from jgraph.errors import ConfigError, SplitError
from jgraph.kernels import amax, cast, cast_transpose
from jgraph.precision.config import KEPT, FP8Config
from jgraph.precision.fuse import fused
from jgraph.precision.grouped import multiplied
from jgraph.precision.late import LateProduct
from jgraph.precision.product import Tap, Weight, formats, shape_of, wgrad_of, why_not
from jgraph.precision.scaling import History, observe, scale_for, seen
from jgraph.scopes import scope
from jgraph.tree import is_router, leaf_names, matching

Tree = Any


class Product(NamedTuple):
    """A matrix product with a parameter.

    Attributes:
        name: path of the parameter, with `#2` where it is the parameter's second product.
        sizes: M, K and N.
        repeats: how often it runs in a call, in loops over layers.
        kept: why it is not in FP8; empty where it is.
        wgrad: of one in FP8, in what the gradient of its parameter is multiplied.
    """

    name: str
    sizes: tuple[int, int, int] | None
    repeats: int
    kept: str
    wgrad: Literal["fp8", "bf16"]


class Scale(NamedTuple):
    """Float32 scalars of a parameter.

    Attributes:
        scale: that it is multiplied by.
        amax: its amax; None where whoever quantizes it is to take it on the way.
    """

    scale: Array
    amax: Array | None


def fp8(fn: Callable[..., Tree], config: FP8Config = FP8Config()) -> "FP8Function":  # noqa: B008 - frozen
    """Computes the matmuls of a function with its parameters in FP8, forward and backward.

    Matmuls are found in the trace: those of Flax layers, `jnp.einsum` and `grouped_dot`, also in a scan over layers and in
    `jax.checkpoint`. Matmuls in functions with a custom gradient stay as they are, and so do matmuls that FP8 does not support.
    `plan(...).products` gives the reasons.

    Args:
        fn: A pure function `fn(params, *args)`.
        config: The recipe.

    Returns:
        The function in FP8. Its `init` makes the state, its `apply` computes.

    Raises:
        ConfigError: If `fn` is not a function or `config` not a recipe.

    Example:
        >>> import jax, jax.numpy as jnp, jgraph
        >>> params, x = {"w": jnp.ones((32, 16))}, jnp.ones((16, 32))
        >>> linear = jgraph.fp8(lambda params, x: x @ params["w"], jgraph.FP8Config(recipe="delayed"))
        >>> state = linear.init(params, x)
        >>> def loss(params, state):
        ...     return jnp.mean(linear.apply(params, state, x) ** 2)
        >>> grads, state = jax.grad(loss, argnums=(0, 1))(params, state)
        >>> float(state.window[0, 0, 0])
        1.0
    """
    if not callable(fn):
        raise ConfigError(f"`fn` is {fn!r}: must be a function fn(params, *args)", field="fn")
    if not isinstance(config, FP8Config):
        raise ConfigError(f"`config` is {config!r}: must be a jgraph.FP8Config", field="config")
    return FP8Function(fn, config)


@dataclass(frozen=True, eq=False)
class FP8Function(OwnProducts):
    """A function whose matmuls with parameters are in FP8, made by `fp8`. `jgraph.split_backward` takes it too.

    Attributes:
        fn: The function.
        config: The recipe.
        num_losses: Number of losses that are averaged into a batch's loss, as `observe` takes it.
    """

    fn: Callable[..., Tree]
    config: FP8Config
    num_losses: int = 1

    def plan(self, params: Tree, *args: Tree) -> "Plan":
        """Traces the function for arrays or shapes.

        Raises:
            ConfigError: no product can be in FP8, or the recipe's `keep` or `blocks` do not fit the parameters.
        """
        traced = self._jitted.trace(params, *args)
        closed, names = traced.jaxpr, leaf_names(params)
        others = len(closed.jaxpr.invars) - len(names)
        places = [*range(len(names)), *[None] * others]
        wanted = [True] * len(closed.jaxpr.outvars)
        found = find.find(closed.jaxpr, wanted, places, [p is None for p in places])
        sites = tuple(found.block.all_sites())
        products = _named(sites, names, self.config)
        if all(product.kept for product in products):
            some = "; ".join(f"{p.name}: {p.kept}" for p in products[:2]) or "no matrix is multiplied with a parameter"
            raise ConfigError(f"`fn` must have a product that can be in FP8, and has none ({some})", field="fn")
        structure = jax.tree.structure(traced.out_info)
        return Plan(self.config, closed, found.block, sites, products, tuple(names), structure, self.num_losses)

    @cached_property
    def _jitted(self) -> Any:
        return jax.jit(self.fn)  # which remembers its traces

    def init(self, params: Tree, *args: Tree) -> Tree:
        """Returns the state before the first step, for arrays or shapes: amax histories if scaling is delayed, else nothing."""
        return self.plan(params, *args).init()

    def quantize(self, params: Tree, state: Tree, *args: Tree) -> list[Weight | None]:
        """Returns the weights in FP8, in the order of the products, for all calls of `apply` in a step."""
        return self.plan(params, *args).quantize(params, state)

    def apply(self, params: Tree, state: Tree, *args: Tree, weights: Sequence[Weight | None] | None = None) -> Tree:
        """Returns `fn(params, *args)`.

        Args:
            params: in the dtypes that they are trained in. They get gradients.
            state: as `init` makes it. Its gradient is the state after this call: of several microbatches, take the maximum.
            args: of `fn`.
            weights: from `quantize`; None quantizes them here.
        """
        plan = self.plan(params, *args)
        return plan.apply(params, state, weights or plan.quantize(*jax.lax.stop_gradient((params, state))), *args)

    def params(self, given: Tree) -> Tree:
        """Returns the parameters from `(params, state, weights)`, the first argument of a split."""
        if not isinstance(given, tuple) or len(given) != 3:
            message = f"params is a {type(given).__name__}: must be the tuple (params, state, weights) for a function in FP8"
            raise SplitError(f"{message}; None as weights quantizes them each time", field="params")
        return given[0]

    def bind(
        self, sites: Sequence[DelayedProduct], names: Sequence[str], given: Tree, x: Tree, extra: Sequence[Tree]
    ) -> BoundProducts:
        """Returns the products of a split: those in FP8 as such, the others as they are."""
        plan, said = self.plan(given[0], x, *extra), _named(sites, names, self.config)
        inside, late = ([product.name for product in found if not product.kept] for found in (plan.products, said))
        if inside != late:
            name = next((name for name in inside if name not in late), inside[0])
            message = f"{name} is multiplied with in FP8, and its gradient cannot come late"
            raise SplitError(f"{message}: must be in `keep` of the recipe, or in `delay` if that is given", field="delay")

        def taps(given: Tree) -> list[Any]:
            params, state, weights = given
            taps = plan.taps(state, weights or plan.quantize(*jax.lax.stop_gradient((params, state))))
            inside = iter([tap for tap in taps if tap is not None])
            return [() if product.kept else next(inside) for product in said]

        products = [
            site if product.kept else LateProduct.of(site, self.config) for site, product in zip(sites, said, strict=True)
        ]
        params, state, weights = map(jax.tree.leaves, given)
        return BoundProducts(products, taps, [True] * len([*params, *state]) + [False] * len(weights))

    def traced(self, part: Callable[..., Tree]) -> Callable[..., Tree]:
        """Returns a part of a split that computes what it quantizes in the kernels that quantize it."""
        return fused(part)


@dataclass(frozen=True, eq=False)
class Plan:
    """A trace with its products, for arguments of given shapes.

    Attributes:
        config: the recipe.
        closed: the trace.
        block: with the products found.
        sites: the products in the order of the program.
        products: what is said of each.
        names: of all parameters.
        structure: of the result.
        num_losses: Number of losses that are averaged into a batch's loss.
    """

    config: FP8Config
    closed: Any
    block: find.Block
    sites: tuple[DelayedProduct, ...]
    products: tuple[Product, ...]
    names: tuple[str, ...]
    structure: Any
    num_losses: int

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that are multiplied with in FP8."""
        return tuple({self.weight_of(i): None for i, _, _ in self._in_fp8()})

    def init(self) -> Tree:
        """Returns the state before the first step."""
        if self.config.recipe == "current":
            return {}
        return History.zeros(sum(stop - start for _, start, stop in self._in_fp8()), self.config.history)

    def quantize(self, params: Tree, state: Tree) -> list[Weight | None]:
        """Returns the weights in FP8, in the order of the products."""
        named = dict(zip(self.names, jax.tree.leaves(params), strict=True))
        return self.views(named, self.scales(named, state))

    @scope("quantize")
    def scales(
        self, parts: Mapping[str, Array], state: Tree, over_devices: Callable[[str, Array], Array] | None = None
    ) -> dict[str, Scale]:
        """Returns the scales of the weights, by the names of their parameters.

        Args:
            parts: the parameters by name, or a device's parts of them.
            state: the state before the step.
            over_devices: returns the amax of a whole parameter from its name and this part's; None where parts are whole.
        """
        dtype, found = formats(self.config)[1], {}
        earlier = state.amax(self.config) if isinstance(state, History) else None
        for i, start, _ in self._in_fp8():
            if (name := self.weight_of(i)) in found:
                continue
            all_of_it = math.prod(self.sites[i].lead) * self.sites[i].w_aval.size == parts[name].size
            if earlier is not None and over_devices is None and all_of_it:
                largest = None
            else:
                largest = amax(parts[name]) if over_devices is None else over_devices(name, amax(parts[name]))
            known, margin = (largest, 0) if earlier is None else (earlier[start, 1], self.config.margin)
            assert known is not None
            found[name] = Scale(scale_for(known, dtype, margin), largest)
        return found

    @scope("quantize")
    def cast(self, parts: Mapping[str, Array], scales: Mapping[str, Scale]) -> dict[str, Array]:
        """Returns the parts of the weights in FP8, by name."""
        return {name: cast(parts[name], scale, formats(self.config)[1]) for name, (scale, _) in scales.items()}

    @scope("quantize")
    def views(self, arrays: Mapping[str, Array], scales: Mapping[str, Scale]) -> list[Weight | None]:
        """Returns every product's weight in FP8, with the lengths of the loops around it in front.

        Args:
            arrays: whole parameters by name, as they are trained or as `cast` gives them.
            scales: of them.
        """
        dtype = formats(self.config)[1]
        found = self._weights([arrays[name] if name in scales else find.MISSING for name in self.names])
        views: list[Weight | None] = [None] * len(found)
        known = {name: scale.amax for name, scale in scales.items()}
        for i, _, _ in self._in_fp8():
            name, lead, matrix = self.weight_of(i), self.sites[i].lead, shape_of(self.sites[i]).w_matrix

            def both(w: Array, scale=scales[name].scale, matrix=matrix, lead=lead) -> tuple[Any, Any, Array | None]:
                rows_KN = matrix(w)
                if rows_KN.dtype == dtype:
                    return rows_KN, rows_KN.T, None
                return cast_transpose(rows_KN, scale, dtype, implementation="xla" if lead else "auto")

            for _ in lead:
                both = jax.vmap(both)
            rows, columns, largest = both(found[i])
            if (of_all := known[name]) is None:
                assert largest is not None, "what is gathered in FP8 had its amax taken before"
                of_all = known[name] = jnp.max(largest)
            scalars = (jnp.broadcast_to(leaf, lead) for leaf in (seen(scales[name].scale, of_all), of_all))
            views[i] = Weight(rows, columns, *scalars)
        return views

    def taps(self, state: Tree, weights: Sequence[Weight | None]) -> list[Tap | None]:
        """Returns what each product takes besides its operands; None where it is not in FP8."""
        taps: list[Tap | None] = [None] * len(self.sites)
        scales: list[Array] = []
        observed: list[Array] = []
        if isinstance(state, History):
            scales, observed = observe(state, self.config, formats(self.config), self.num_losses)
        for i, start, stop in self._in_fp8():

            def over_loops(rows: list[Array], lead=self.sites[i].lead) -> Array | None:
                return jnp.stack(rows).reshape(*lead, 3) if rows else None

            weight, lead = weights[i], self.sites[i].lead
            assert weight is not None, "products in FP8 have weights in FP8"
            # Where devices share them as one array, no scalar can be.
            weight = weight._replace(scale=weight.scale.reshape(lead), amax=weight.amax.reshape(lead))
            taps[i] = Tap(weight, over_loops(scales[start:stop]), over_loops(observed[start:stop]))
        return taps

    def apply(self, params: Tree, state: Tree, weights: Sequence[Weight | None], *args: Tree, uncast: bool = False) -> Tree:
        """Returns the function's result, with weights as `views` gives them.

        Args:
            params: as the plan was made for, or in the dtypes in which their gradients are wanted.
            state, weights, args: as those of `FP8Function.apply`.
            uncast: whether a product's gradient goes to its parameter without the casts between the two.
        """
        leaves, avals = jax.tree.leaves((params, args)), self.closed.in_avals[: len(self.names)]
        whole = self._weights(leaves[: len(avals)]) if uncast else [None] * len(self.sites)
        taps: list[Any] = []
        for site, tap, w in zip(self.sites, self.taps(state, weights), whole, strict=True):
            # One that all turns of a loop read is there once for each turn: its gradients are summed turn by turn instead.
            alone = tap is not None and w is not None and w.size <= leaves[min(site.params)].size
            taps.append(tap and (tap, w if alone else None))

        def multiply(site: DelayedProduct, x: Array, w: Array, extra: Sequence[Any], given: Any) -> Array:
            if given is None:
                return site.run(x, w, extra)
            tap, own = given
            return multiplied(self.config, site, x, w if own is None else own, extra, tap)

        leaves[: len(avals)] = [leaf.astype(aval.dtype) for leaf, aval in zip(leaves, avals, strict=False)]
        out, _ = find.run_forward(self.block, self.closed.consts, leaves, taps, multiply)
        return jax.tree.unflatten(self.structure, out)

    def _weights(self, params: Sequence[Any]) -> list[Any]:
        """Returns every product's weight in the dtype of its parameter, with the lengths of the loops around it in front."""
        given = [*params, *[find.MISSING] * (len(self.closed.jaxpr.invars) - len(params))]
        return find.run_weights(self.block, [find.MISSING] * len(self.closed.consts), given, keep_dtype=True)[1]

    def _in_fp8(self) -> Iterator[tuple[int, int, int]]:
        """Yields the products in FP8: which, and the range of its entries in a history, one for each turn of a loop."""
        start = 0
        for i, said in enumerate(self.products):
            if not said.kept:
                yield i, start, start + said.repeats
                start += said.repeats

    def weight_of(self, i: int) -> str:
        """Returns the name of the parameter that a product multiplies with."""
        (place,) = self.sites[i].params
        return self.names[place]


def _named(sites: Sequence[DelayedProduct], names: Sequence[str], config: FP8Config) -> tuple[Product, ...]:
    """Returns what is said of each product, and decides which stay as they are."""
    kept = {name for pattern in config.keep for name in _matching(pattern, names)}
    numbers = [_block_number(names[p]) for site in sites for p in site.params]
    ends = {number for number in numbers if number is not None}
    ends = {min(ends), max(ends)} if ends and config.blocks == "inner" else set()
    if config.blocks == "inner" and not ends:
        raise ConfigError("`fp8.blocks` is inner: must be all where parameters have no numbered blocks", field="fp8.blocks")
    times: Counter[str] = Counter()
    found = []
    for site in sites:
        name = "+".join(names[p] for p in sorted(site.params))
        times[name] += 1
        reason = why_not(site, config)
        if any(names[p] in kept for p in site.params):
            reason = "kept by `fp8.keep`"
        elif is_router(name):
            reason = "a router"
        elif any(_block_number(names[p]) in ends for p in site.params):
            reason = "kept by `fp8.blocks`"
        label = name if times[name] == 1 else f"{name}#{times[name]}"
        sizes = shape_of(site).sizes if site.name in (GROUPED, "dot_general") else None
        found.append(Product(label, sizes, math.prod(site.lead), reason, wgrad_of(site, config)))
    return tuple(found)


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the names that a pattern of `keep` matches; those of the default need not be there."""
    return fnmatch.filter(names, pattern) if pattern in KEPT else matching(pattern, names, field="fp8.keep")


def _block_number(name: str) -> int | None:
    """Returns the first number in a parameter's path, which is its block's."""
    return next((int(part) for part in name.split("/") if part.isdigit()), None)
