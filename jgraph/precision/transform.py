"""The transform `fp8(fn, config)`, which computes the matmuls of a function in FP8.

It replaces the matmuls with parameters in the trace of the function (`autodiff/traced.py`). A matmul is named after its
parameter. `quantize` computes the FP8 weights once per step, for all microbatches.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.autodiff.linear import BoundProducts, DelayedProduct, OwnProducts, Result
from jgraph.autodiff.traced import GROUPED, MISSING, Missing, Site, Traced
from jgraph.errors import ConfigError, SplitError, shown
from jgraph.kernels import amax, cast, cast_transpose
from jgraph.kernels.blocks import Blocks
from jgraph.precision._fuse import fused
from jgraph.precision._matmul import (
    CalibratedProduct,
    DelayedFP8Product,
    Tap,
    block_scaled,
    calibrated,
    formats,
    fp8_matmul,
    layout_of,
    unsupported,
    wgrad_precision,
)
from jgraph.precision.config import DEFAULT_KEEP, FP8Config
from jgraph.precision.scaling import AmaxHistory, FP8Array, observe, scale_for
from jgraph.scopes import scope
from jgraph.tree import is_adapter, is_router, matching
from jgraph.types import Params, Tree

# The weight of each matmul of a function, with leading axes for the enclosing scans; None for a matmul that is not in FP8.
Weights: TypeAlias = Sequence[FP8Array | None]
# The FP8 rows and columns of a weight, and its amax.
_Views: TypeAlias = tuple[Array | Blocks | None, Array | Blocks | None, Array | None]


class Product(NamedTuple):
    """A matmul of data and a parameter, the weight."""

    # Name of the parameter, with the suffix `#2` for a second matmul with it. Names of several parameters that the weight is
    # computed from are joined by `+`.
    name: str
    # M, K, N of data [M, K] and a weight [K, N]. M counts the rows of all groups of a grouped matmul. None for a convolution
    # and other operations that cannot be in FP8.
    sizes: tuple[int, int, int] | None
    repeats: int  # executions per call: the product of the lengths of the enclosing scans
    kept: str  # why the matmul is not in FP8, a phrase such as "kept by `fp8.keep`"; empty if it is in FP8
    wgrad: Literal["fp8", "bf16"]  # precision of the operands of the weight gradient of a matmul in FP8


class Scale(NamedTuple):
    """The scale of a parameter."""

    scale: Array  # float32 scalar, a power of two. Quantization multiplies the parameter by it
    amax: Array | None  # float32 scalar, of the whole parameter. None if the quantization kernel computes it later


def fp8(fn: Callable[..., Tree], config: FP8Config = FP8Config()) -> "FP8Function":  # noqa: B008 - frozen
    """Computes in FP8 each matmul of data and a parameter in a function, forward and backward.

    Finds the matmuls in the trace of the function, including matmuls of Flax layers, `jnp.einsum` and `grouped_dot`, in a scan
    over layers and in `jax.checkpoint`. Matmuls in functions with a custom gradient and unsupported matmuls are unchanged.
    To list the matmuls, call the method `plan(params, *args)` of the result. It returns a trace. The field `products` of the
    trace lists each matmul, with the reason if it is not in FP8.

    Delayed scaling has a state, the amax history. The backward pass computes the next state: the gradient with respect to the
    state is not a derivative, but the state after the step. Differentiate with respect to parameters and state, and use the
    gradient of the state as the state of the next step. Current scaling has the state {}.

    Args:
        fn: A pure function `fn(params, *args)` of trees of arrays. `params` has the weights.
        config: The recipe; by default, current scaling with E4M3 for activations and weights and E5M2 for gradients.

    Returns:
        An `FP8Function`. Its method `init(params, *args)` returns the state before the first step. Its method
        `apply(params, state, *args)` returns the result of `fn`. Nothing is traced or run before a method is called.

    Raises:
        ConfigError: If `fn` is not callable or `config` is not an `FP8Config`. The methods raise it if no matmul can be in FP8.

    Examples:
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
        raise ConfigError(f"`fn` is {shown(fn)}: must be a function fn(params, *args)", field="fn")
    if not isinstance(config, FP8Config):
        raise ConfigError(f"`config` is {shown(config)}: must be a jgraph.FP8Config", field="config")
    return FP8Function(fn, config)


@dataclass(frozen=True, eq=False)
class FP8Function(OwnProducts):
    """A function with FP8 matmuls, from `fp8`. `jgraph.split_backward` accepts it in place of a function.

    With `split_backward`, the first argument of the function is the tuple (params, state, weights) in place of the parameters.
    `weights` is the result of `quantize`, or None to quantize the weights in each call.

    Attributes:
        fn: The original function `fn(params, *args)`.
        config: The recipe.
        num_losses: Number of losses that are averaged into a batch's loss. Each is differentiated separately, so its gradients
            are `num_losses` times as large as those of the batch's loss. Delayed scaling divides the amax of gradients by it.
        argument: Name of `fn` in error messages.
    """

    fn: Callable[..., Tree]
    config: FP8Config
    num_losses: int = 1
    argument: str = "fn"

    def plan(self, params: Params, *args: Tree) -> "FP8Trace":
        """Traces the function and selects its FP8 matmuls. Does not run the function.

        `jax.jit` caches the trace by shapes and dtypes.

        Args:
            params: Parameters, a tree of arrays or `jax.ShapeDtypeStruct`.
            *args: The other arguments of the function, trees of arrays or `jax.ShapeDtypeStruct`.

        Returns:
            The trace. Its field `products` lists the matmuls in the order of the trace.

        Raises:
            ConfigError: If no matmul can be in FP8, if a pattern of `config.keep` that is not a default matches no parameter,
                or if `config.blocks` is `inner` and no parameter name has a number.
        """
        traced = Traced.from_function(self.fn, params, *args)
        products = _products(traced.sites, traced.names, self.config)
        if all(product.kept for product in products):
            reasons = (
                "; ".join(f"{p.name}: {p.kept}" for p in products[:2])
                or "no matrix is multiplied by a parameter outside `jax.shard_map`"
            )
            message = f"`{self.argument}` has no matmul that can be in FP8 ({reasons}): must have at least one"
            raise ConfigError(message, field=self.argument)
        return FP8Trace(self.config, traced, products, self.num_losses)

    def init(self, params: Params, *args: Tree) -> AmaxHistory | dict[str, Array]:
        """Creates the state before the first step. Traces the function, but does not run it.

        Args:
            params: Parameters, a tree of arrays or `jax.ShapeDtypeStruct`.
            *args: The other arguments of the function, trees of arrays or `jax.ShapeDtypeStruct`.

        Returns:
            An `AmaxHistory` of zeros for delayed scaling, with a window [config.history, S, 3] for S executions of FP8 matmuls
            per call. {} for current scaling.

        Raises:
            ConfigError: If no matmul can be in FP8, if a pattern of `config.keep` that is not a default matches no parameter,
                or if `config.blocks` is `inner` and no parameter name has a number.
        """
        return self.plan(params, *args).init()

    def quantize(self, params: Params, state: Tree, *args: Tree) -> Weights:
        """Quantizes the weights once, for all calls of `apply` in a step. Does not run the function.

        Args:
            params: Parameters in the dtypes they are trained in, unsharded.
            state: The state that `init` returned, or the gradient of the state of the previous step: an `AmaxHistory` for
                delayed scaling, {} for current scaling.
            *args: The other arguments of the function, trees of arrays or `jax.ShapeDtypeStruct`; only their structure, shapes
                and dtypes are read.

        Returns:
            A list with an entry for each matmul, in the order of `plan(params, *args).products`: the weight in FP8 with its
            transpose, scale and amax (`FP8Array`); None for a matmul that is not in FP8. For a matmul in scans, all arrays of
            the entry have one leading axis per scan, with the length of the scan.

        Raises:
            ConfigError: If no matmul can be in FP8, if a pattern of `config.keep` that is not a default matches no parameter,
                or if `config.blocks` is `inner` and no parameter name has a number.
        """
        return self.plan(params, *args).quantize(params, state)

    def apply(self, params: Params, state: Tree, *args: Tree, weights: Weights | None = None) -> Any:
        """Computes `fn(params, *args)` with FP8 matmuls. Can be jitted; donates nothing.

        Args:
            params: Parameters in the dtypes they are trained in. Differentiable.
            state: State from `init`, or the gradient of the state of the previous step. Its gradient is not a derivative: it is
                the state after this call. If a step has several microbatches, pass the same state to each. The state after the
                step is then the elementwise maximum of the gradients with respect to the state.
            *args: The other arguments of the function. Differentiable.
            weights: Quantized weights of the same parameters and state, from `quantize`; not differentiated. None quantizes the
                weights in this call.

        Returns:
            The result of the function.

        Raises:
            ConfigError: If no matmul can be in FP8, if a pattern of `config.keep` that is not a default matches no parameter,
                or if `config.blocks` is `inner` and no parameter name has a number.
        """
        return self.plan(params, *args).apply(params, state, weights, *args)

    def params(self, given: Tree) -> Params:
        """Returns the first entry of the tuple (params, state, weights). Called by `split_backward`.

        Args:
            given: The first argument of the function that `split_backward` differentiates: a tuple of the parameters, the state
                and the quantized weights (None quantizes them in each call).

        Returns:
            The tree of parameters.

        Raises:
            SplitError: If `given` is not a tuple of three.
        """
        if not isinstance(given, tuple) or len(given) != 3:
            message = f"params is a {type(given).__name__}: must be the tuple (params, state, weights) for a function in FP8"
            raise SplitError(f"{message}; None as weights quantizes them in each call", field="params")
        return given[0]

    def bind(self, sites: Sequence[Site], names: Sequence[str], given: Any, x: Tree, *extra: Tree) -> BoundProducts:
        """Replaces matmuls of `fn` by FP8 matmuls. Called by `split_backward` once per trace.

        Args:
            sites: The matmuls of `fn` with a weight gradient that wgrad computes, in the order of the trace.
            names: Names of the parameters, in the order of their leaves.
            given: The tuple (params, state, weights) of trees of arrays, tracers or shapes. `weights` may be None.
            x: The argument of `fn` after the parameters.
            *extra: The arguments of `fn` after `x`.

        Returns:
            The matmul of each site, in FP8 if the recipe selects it; a function from (params, state, weights) to their
            additional arguments; and True for each leaf of params and state, False for each leaf of weights. dgrad thus returns
            the next state as the gradient of the state.

        Raises:
            SplitError: If the weight gradient of an FP8 matmul is not delayed, because the matmul is not in `sites`.
            ConfigError: If no matmul can be in FP8, or the recipe does not fit the parameters, as in `plan`.
        """
        trace = self.plan(given[0], x, *extra)
        products = _products(sites, names, self.config)
        quantized, delayed = ([p.name for p in found if not p.kept] for found in (trace.products, products))
        if quantized != delayed:
            name = next((name for name in quantized if name not in delayed), quantized[0])
            message = f"the weight gradient of the FP8 matmul with {name} is not delayed"
            raise SplitError(f"{message}: add {name} to `keep` of the recipe, or to `delay` if you pass it", field="delay")

        def taps(given: Any) -> list[Tap | tuple[()]]:
            quantized = iter([tap for tap in trace.taps(*given) if tap is not None])
            return [() if product.kept else next(quantized) for product in products]

        to_fp8 = CalibratedProduct if self.config.calibrates else partial(DelayedFP8Product, config=self.config)
        pairs = zip(sites, products, strict=True)
        bound = [DelayedProduct(site) if product.kept else to_fp8(site) for site, product in pairs]
        params, state, weights = map(jax.tree.leaves, given)
        return BoundProducts(bound, taps, [True] * len([*params, *state]) + [False] * len(weights))

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Fuses elementwise functions, such as GELU, into the kernels that quantize their results. Called by `split_backward`.

        Args:
            part: A function of trees of arrays that is not jitted: the forward pass, dgrad (gradients of data) or wgrad
                (delayed weight gradients) that `split_backward` made from `fn`.

        Returns:
            `fused(part)`: a function with the same arguments, and results that differ by rounding. On a device without the
            quantization kernel, it calls `part` unchanged.
        """
        return fused(part)


@dataclass(frozen=True, eq=False)
class FP8Trace:
    """The trace of an `FP8Function` for arguments of given shapes, with its matmuls. Made by `FP8Function.plan`.

    Attributes:
        config: The recipe.
        traced: The trace of the function. Its `sites` are the matmuls of data and a parameter; also those that are not in FP8.
        products: The description of each matmul, in the order of the equations.
        num_losses: Number of losses that are averaged into a batch's loss. Each is differentiated separately. Delayed scaling
            divides the amax of gradients by this number.
    """

    config: FP8Config
    traced: Traced
    products: tuple[Product, ...]
    num_losses: int

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters that are weights of FP8 matmuls, each once, in the order of their first use."""
        return tuple({self.weight_of(i): None for i, _, _ in self._entries()})

    def init(self) -> AmaxHistory | dict[str, Array]:
        """Creates the state before the first step.

        Returns:
            An `AmaxHistory` of zeros for delayed scaling, with a window [config.history, S, 3] for S executions of FP8 matmuls
            per call. {} for current scaling.
        """
        if not self._is_delayed:
            return {}
        return AmaxHistory.zeros(sum(stop - start for _, start, stop in self._entries()), self.config.history)

    def quantize(self, params: Params, state: Tree) -> Weights:
        """Quantizes the weights of all FP8 matmuls.

        Args:
            params: The tree of parameters, unsharded, in the dtypes they are trained in.
            state: The state that `init` returned, or the gradient of the state of the previous step: an `AmaxHistory` for
                delayed scaling, {} for current scaling.

        Returns:
            A list with an entry for each matmul, in the order of `sites`: the weight in FP8 with its transpose, scale and amax
            (`FP8Array`), with leading axes for the enclosing scans; None for a matmul that is not in FP8.
        """
        named = dict(zip(self.traced.names, jax.tree.leaves(params), strict=True))
        return self.views(named, self.scales(named, state))

    @scope("quantize")
    def scales(
        self, parts: Mapping[str, Array], state: Tree, over_devices: Callable[[str, Array], Array] | None = None
    ) -> dict[str, Scale]:
        """Computes the scales of the weights of FP8 matmuls.

        Current scaling computes a scale from the amax (largest magnitude) of the parameter. Delayed scaling computes it from
        the amax history of the first matmul with the parameter.

        Args:
            parts: The parameters by name, or this device's shards of them.
            state: The state that `init` returned, or the gradient of the state of the previous step: an `AmaxHistory` for
                delayed scaling, {} for current scaling.
            over_devices: `over_devices(name, amax)` is called with a parameter name and the amax of this device's shard, a
                float32 scalar. It returns the maximum over the devices. None if `parts` are not sharded.

        Returns:
            A dict from each name in the attribute `weights` to its `Scale`. The field `amax` is always computed if
            `over_devices` is given and for calibration. Otherwise, it is None for delayed scaling if matmuls read the whole
            parameter, because `views` then computes it.
        """
        if self.config.recipe == "mxfp8":
            return dict.fromkeys(self.weights, Scale(jnp.float32(1), jnp.float32(0)))
        _, dtype, _ = formats(self.config)
        scales = {}
        earlier: list[Array] | None = None
        if self._is_delayed:
            earlier = list(scale_for(self._history(state).amax(self.config)[:, 1], dtype, self.config.margin))
        for i, start, _ in self._entries():
            if (name := self.weight_of(i)) in scales:
                continue
            reads_all = math.prod(self.traced.sites[i].lead) * self.traced.sites[i].w_aval.size == parts[name].size
            largest: Any = None
            if earlier is None or over_devices is not None or not reads_all or self.config.calibrates:
                largest = amax(parts[name]) if over_devices is None else over_devices(name, amax(parts[name]))
            scales[name] = Scale(scale_for(largest, dtype) if earlier is None else earlier[start], largest)
        return scales

    @scope("quantize")
    def cast(self, parts: Mapping[str, Array], scales: Mapping[str, Scale]) -> dict[str, Array]:
        """Casts the weights of FP8 matmuls to FP8.

        Args:
            parts: The parameters by name, or this device's shards of them.
            scales: The result of the method `scales` for the same parameters.

        Returns:
            A dict from each name in `scales` to a float8_e4m3fn array with the shape of the entry in `parts`: the entry times
            its scale, clipped and rounded. bfloat16 arrays for the recipe `mxfp8`, because the blocks of a shard may differ
            from the blocks of the whole parameter. Empty for calibration.
        """
        if self.config.calibrates:
            return {}
        if self.config.recipe == "mxfp8":
            return {name: parts[name].astype(jnp.bfloat16) for name in scales}
        return {name: cast(parts[name], scale, formats(self.config)[1]) for name, (scale, _) in scales.items()}

    @scope("quantize")
    def views(self, arrays: Mapping[str, Array], scales: Mapping[str, Scale]) -> Weights:
        """Computes the quantized weight of every matmul from its parameter: a matrix in FP8, and its transpose.

        Args:
            arrays: The parameters with the names in `weights`, unsharded; in their own dtype, or in FP8 from `cast`. Other
                names are not read.
            scales: The result of the method `scales`. For arrays in FP8, no field `amax` may be None.

        Returns:
            A list with an entry for each matmul, in the order of `sites`: an `FP8Array`, with leading axes for the enclosing
            scans; None for a matmul that is not in FP8. Elements that are not finite are NaN. For calibration, the matrices are
            None.
        """
        _, dtype, _ = formats(self.config)
        matrices = dict[int, Array]()
        if not self.config.calibrates:
            given = [arrays[name] if name in scales else MISSING for name in self.traced.names]
            found = self.traced.weights(given, keep_dtype=True)
            matrices = {i: w for i, w in enumerate(found) if not isinstance(w, Missing)}
        views: list[FP8Array | None] = [None] * len(self.traced.sites)
        known = {name: scale.amax for name, scale in scales.items()}
        for i, _, _ in self._entries():
            name = self.weight_of(i)
            lead = self.traced.sites[i].lead
            matrix = layout_of(self.traced.sites[i]).w_matrix
            view = partial(_view, matrix, scales[name].scale, dtype, "xla" if lead else "auto")
            if self.config.recipe == "mxfp8":
                view = partial(_block_view, matrix)
            for _ in lead:
                view = jax.vmap(view)
            rows, columns, largest = view(matrices[i]) if matrices else (None, None, known[name])
            if (amax_of_all := known[name]) is None:
                amax_of_all = known[name] = jnp.max(largest) if lead else largest  # pyright: ignore[reportArgumentType]
            scalars: Any = scales[name].scale, amax_of_all
            if lead:
                scalars = [jnp.broadcast_to(scalar, lead) for scalar in scalars]
            views[i] = FP8Array(rows, columns, *scalars)  # pyright: ignore[reportArgumentType]
        return views

    def taps(self, params: Params, state: Tree, weights: Weights | None) -> list[Tap | None]:
        """Builds the additional arguments of the FP8 matmuls.

        Args:
            params: The tree of parameters, unsharded; only read if `weights` is None. Not differentiated.
            state: The state that `init` returned, or the gradient of the state of the previous step. Its cotangent is not a
                derivative: for delayed scaling, it is the state after the step.
            weights: Quantized weights from `quantize` or `views`; None quantizes `params`.

        Returns:
            A list with an entry for each matmul, in the order of `sites`; None for a matmul that is not in FP8. An entry is a
            `Tap`. Its field `weight` is the quantized weight. For delayed scaling, its field `scales` has the scales of data,
            weight and output gradient, float32 [3], and its field `amax` is three float32 zeros. The matmul must return the
            amax of these three arrays as the cotangents of the zeros. For current scaling, `scales` and `amax` are None. Arrays
            have one leading axis per enclosing scan.
        """
        weights = weights or self.quantize(*jax.lax.stop_gradient((params, state)))
        taps: list[Tap | None] = [None] * len(self.traced.sites)
        observed = (
            observe(self._history(state), self.config, formats(self.config), self.num_losses) if self._is_delayed else ((), ())
        )
        entries = list(zip(*observed, strict=True))
        for i, start, stop in self._entries():
            lead = self.traced.sites[i].lead
            weight = weights[i]
            assert weight is not None, "FP8 matmuls have FP8 weights"
            # A pipeline packs the weights of its devices into one array, which changes the shape of the scalars.
            weight = weight._replace(scale=weight.scale.reshape(lead), amax=weight.amax.reshape(lead))
            scaling = jax.tree.map(partial(_stacked, lead), *entries[start:stop]) if entries else (None, None)
            taps[i] = Tap(weight, *scaling)
        return taps

    def apply(self, params: Params, state: Tree, weights: Weights | None, *args: Tree, uncast: bool = False) -> Any:
        """Computes the function with FP8 matmuls. Differentiable in `params` and `args`.

        Args:
            params: Parameters with the traced shapes. Their dtypes may differ from the traced ones; gradients have the dtypes
                of `params`.
            state: The state that `init` returned, or the gradient of the state of the previous step. Its gradient is not a
                derivative: it is the state after this call.
            weights: Quantized weights from `quantize` or `views`, not differentiated; None quantizes `params`.
            *args: The other arguments of the function, with the traced shapes.
            uncast: Dtype of the gradient of a parameter that the function casts before an FP8 matmul, for example from float32
                to bfloat16. True: the matmul returns it in the parameter's dtype. False: it is first rounded to the cast's
                dtype.

        Returns:
            The result of the function.
        """
        leaves = jax.tree.leaves(params)
        taps = self.taps(params, state, weights)
        # Calibration computes the matmuls and their gradients as without FP8.
        is_uncast = uncast and not self.config.calibrates
        whole = self.traced.weights(leaves, keep_dtype=True) if is_uncast else [MISSING] * len(taps)
        # A weight that every iteration of a scan reads would be stacked once per iteration. Its gradient is accumulated in the
        # scan instead.
        given = [
            None if tap is None else (tap, None if isinstance(w, Missing) or w.size > leaves[min(site.params)].size else w)
            for site, tap, w in zip(self.traced.sites, taps, whole, strict=True)
        ]

        def multiply(site: Site, x: Array, w: Array, extra: Sequence[Array], given: tuple[Tap, Array | None]) -> Array:
            tap, uncast_w = given
            if self.config.calibrates:
                return calibrated(site.run(x, w, extra), x, tap)
            return fp8_matmul(self.config, site, x, w if uncast_w is None else uncast_w, extra, tap)

        avals = jax.tree.leaves(self.traced.args[0])
        cast = [leaf.astype(aval.dtype) for leaf, aval in zip(leaves, avals, strict=True)]
        return self.traced.run(multiply, given, cast, *args)[0]

    def weight_of(self, i: int) -> str:
        """Returns the name of a matmul's parameter.

        Args:
            i: Index of a matmul in `sites`. Its weight must be computed from exactly one parameter, as in every FP8 matmul.

        Returns:
            The name, such as `blocks/0/mlp/up/kernel`.

        Raises:
            ValueError: If the weight is computed from several parameters.
        """
        (index,) = self.traced.sites[i].params
        return self.traced.names[index]

    @property
    def _is_delayed(self) -> bool:
        return self.config.recipe == "delayed"

    def _history(self, state: Tree) -> AmaxHistory:
        assert isinstance(state, AmaxHistory), "the state of delayed scaling is a history"
        return state

    def _entries(self) -> Iterator[tuple[int, int, int]]:
        """Yields (index, start, stop) for each FP8 matmul: its range of entries in an amax history, one per scan iteration."""
        start = 0
        for i, product in enumerate(self.products):
            if not product.kept:
                yield i, start, start + product.repeats
                start += product.repeats


def _stacked(lead: tuple[int, ...], *rows: Array) -> Array:
    return jnp.stack(rows).reshape(*lead, *rows[0].shape) if lead else rows[0]


def _view(matrix: Callable[[Array], Array], scale: Array, dtype: DTypeLike, implementation: str, w: Array) -> _Views:
    """Returns the FP8 rows and columns of a weight, and its amax. The amax is None if `w` already is in FP8."""
    rows_KN = matrix(w)
    if rows_KN.dtype == dtype:
        return rows_KN, rows_KN.T, None
    return cast_transpose(rows_KN, scale, dtype, implementation=implementation)


def _block_view(matrix: Callable[[Array], Array], w: Array) -> _Views:
    """Returns the MXFP8 rows and columns of a weight, and no amax."""
    # Rounded to bfloat16 first, so that the values equal those of a weight that was gathered in bfloat16.
    quantized = block_scaled(matrix(w).astype(jnp.bfloat16), "both")
    return quantized.rows, quantized.columns, None


def _products(sites: Sequence[Site], names: Sequence[str], config: FP8Config) -> tuple[Product, ...]:
    """Describes the matmuls and selects those in FP8."""
    kept = {name for pattern in config.keep for name in _matching(pattern, names)}
    numbers = {number for site in sites for p in site.params if (number := _block_number(names[p])) is not None}
    if config.blocks == "inner" and not numbers:
        raise ConfigError("`fp8.blocks` is inner: must be all for a model without numbered blocks", field="fp8.blocks")
    blocks = sorted(numbers) if config.blocks == "inner" else []
    ends = {*blocks[: config.first], *blocks[max(len(blocks) - config.last, 0) :]}
    uses: Counter[str] = Counter()
    products = []
    for site in sites:
        weights = [names[p] for p in sorted(site.params)]
        name = "+".join(weights)
        uses[name] += 1
        if not kept.isdisjoint(weights):
            reason = "kept by `fp8.keep`"
        elif is_router(name):
            reason = "a router"
        elif any(map(is_adapter, weights)):
            reason = "an adapter"
        elif any(_block_number(path) in ends for path in weights):
            reason = "kept by `fp8.blocks`"
        else:
            reason = unsupported(site, config)
        label = name if uses[name] == 1 else f"{name}#{uses[name]}"
        sizes = layout_of(site).sizes if site.name in (GROUPED, "dot_general") else None
        products.append(Product(label, sizes, math.prod(site.lead), reason, wgrad_precision(site, config)))
    return tuple(products)


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns the parameter names that a pattern of `keep` matches. Only a default pattern may match none."""
    return fnmatch.filter(names, pattern) if pattern in DEFAULT_KEEP else matching(pattern, names, field="fp8.keep")


def _block_number(name: str) -> int | None:
    """Returns the first number in a parameter's path, the index of its block; None if there is no number."""
    return next((int(part) for part in name.split("/") if part.isdigit()), None)
