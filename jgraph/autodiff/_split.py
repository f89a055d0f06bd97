"""`split_backward`: splits the backward pass of a stage into dgrad, and wgrad at any later time.

The stage is traced once for each set of shapes (`traced.py`), and its matmuls get taps (`linear.py`). dgrad is one `jax.vjp`
with respect to the input, the undelayed parameters and the taps. The cotangents of the taps are the operands of wgrad.
`_trace.py` decides which arrays are saved, and for how long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray, Tracer

from jgraph.autodiff import replay
from jgraph.autodiff._trace import Options, Recompute, StageTrace, make_trace, replaced, run_dgrad
from jgraph.autodiff.linear import OwnProducts
from jgraph.autodiff.traced import MISSING, Missing, Traced
from jgraph.errors import SplitError, check_choice, shown
from jgraph.scopes import scope
from jgraph.tree import leaf_names, path_name
from jgraph.types import Params, Tree

_Params = TypeVar("_Params")
"""Parameters or their gradients, with None for parameters without a gradient."""
_Sums = TypeVar("_Sums")
"""Sums of gradients."""


@partial(jax.tree_util.register_dataclass, data_fields=["dgrad", "wgrad"], meta_fields=["trace"])
@dataclass(frozen=True)
class Residuals:
    """The arrays that forward saves for dgrad and wgrad. A pytree, so it can be passed through `jax.jit`."""

    dgrad: tuple[Array, ...]  # the pool `forward_dgrad`, which only dgrad reads; empty after `after_dgrad`
    wgrad: tuple[Array, ...]  # the pool `forward_wgrad`, which wgrad reads, and dgrad may read
    trace: StageTrace  # static data

    def after_dgrad(self) -> "Residuals":
        """Returns the residuals without the arrays that only dgrad reads. Copies and deletes nothing."""
        return Residuals((), self.wgrad, self.trace)

    @property
    def by_index(self) -> dict[int, Array]:  # the index in `Candidates`
        lifetimes = self.trace.lifetimes
        kept = dict(zip(lifetimes.for_wgrad, self.wgrad, strict=True))
        return kept | (dict(zip(lifetimes.for_dgrad, self.dgrad, strict=True)) if self.dgrad else {})


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["trace"])
@dataclass(frozen=True)
class Stash:
    """The arrays that dgrad saves for wgrad: dy of matmuls, and x that is expensive to recompute. A pytree."""

    arrays: tuple[Array, ...]
    trace: StageTrace  # static data


@dataclass(frozen=True)
class Spec:
    """Shapes and dtypes of the arrays between forward, dgrad and wgrad, as trees of `jax.ShapeDtypeStruct`."""

    y: Any  # the structure is the stage's own
    residuals: Residuals
    stash: Stash
    delayed: tuple[str, ...]  # paths of the delayed parameters, such as `blocks/0/kernel`, in the order of the leaves
    aux: "Tree | None" = None

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes of one microbatch by pool."""
        pools = {"forward_dgrad": self.residuals.dgrad, "forward_wgrad": self.residuals.wgrad, "stash": self.stash.arrays}
        return {name: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for name, leaves in pools.items()}


def split_backward(
    stage_fn: Callable[..., Tree] | OwnProducts,
    *,
    delay: Sequence[str] | None = None,
    recompute: Recompute = "elementwise",
    has_aux: bool = False,
) -> "Split":
    """Splits the backward pass of a function into dgrad (gradients of inputs) and wgrad (gradients of weights).

    Computes the same gradients as `jax.vjp` with the same number of FLOPs, besides recomputed operations. wgrad can run at any
    time after dgrad. Does not trace or run the function: the methods of the result trace it once per set of shapes.

    Args:
        stage_fn: A pure function `stage_fn(params, x, *extra) -> y` of trees of real arrays. x must be floating. `extra`
            (tokens, masks, a dropout key) is not differentiated. Callbacks that return nothing, such as `jax.debug.print`, run
            once per microbatch, in forward. Arrays may be sharded over automatic mesh axes, but not over explicit ones.
            `jgraph.fp8(stage_fn)` is also accepted: params is then `(params, state, weights)`, the gradient of state is the
            state after the call, and weights have no gradient.
        delay: Patterns (`fnmatch`) of parameter paths such as `blocks/*/kernel`; one string is one pattern. wgrad must compute
            the gradients of matching parameters. None delays every parameter that is only used as the weight of matmuls,
            `ragged_dot` or convolutions. dgrad computes the gradients of other parameters (norm scales, biases, embeddings).
        recompute: `elementwise` recomputes elementwise operations in the backward pass, and saves inputs and the results of
            matmuls, attention and reductions. `wide` also recomputes matmuls with at least four times as many output elements
            as data elements, such as the first matmul of an MLP. `nothing` saves the same arrays as `jax.vjp`: five for a GELU
            instead of one. If the stage uses `jax.checkpoint`, this argument has no effect.
        has_aux: If True, `stage_fn` returns `(y, aux)`, as with `jax.vjp`, and `forward` returns aux as its third result. aux
            is not differentiated, and no arrays are saved for it.

    Returns:
        A `Split`. Its methods `forward`, `dgrad`, `wgrad` and `accumulate` are pure functions that can be jitted.

    Raises:
        ConfigError: If `recompute` is unknown.
        SplitError: If `stage_fn` or `delay` has the wrong type. The methods of the split raise it if a pattern of `delay`
            matches no parameter, a parameter in `delay` is used other than as the weight of a matmul, an array is complex or
            sharded over explicit axes, x is not floating, the result of a callback is read, a function with a custom derivative
            has a callback, or the stage does not return a pair with `has_aux`.

    Examples:
        >>> split = jgraph.split_backward(lambda params, x: x @ params["w"] + params["b"])
        >>> params, x = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, jnp.ones((4, 2))
        >>> y, residuals = split.forward(params, x)
        >>> dx, early, stash = split.dgrad(params, residuals, jnp.ones_like(y))
        >>> late = split.wgrad(params, residuals, stash)  # any time later
        >>> jax.tree.map(jnp.shape, split.merge(early, late))
        {'b': (3,), 'w': (2, 3)}
    """
    check_choice("recompute", recompute, get_args(Recompute))
    if not callable(stage_fn) and not isinstance(stage_fn, OwnProducts):
        must = "must be a function stage_fn(params, x, *extra) -> y"
        raise SplitError(f"`stage_fn` is {shown(stage_fn)}: {must}", field="stage_fn")
    patterns = (delay,) if isinstance(delay, str) else delay
    if patterns is not None:
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SplitError(f"`delay` is {shown(delay)}: must be patterns of parameter paths, or None", field="delay")
        patterns = tuple(patterns)
    stage = stage_fn if isinstance(stage_fn, OwnProducts) else OwnProducts(stage_fn)
    return Split(Options(stage, has_aux, patterns, recompute))


class Split:
    """The forward pass, dgrad and wgrad of a stage, as pure functions. Made by `split_backward`.

    The methods donate no argument. They are jitted, and can also be called inside `jax.jit`. Parameters are *delayed* if wgrad
    computes their gradients, and *early* if dgrad does.
    """

    def __init__(self, options: Options):
        self._options = options
        traced = options.stage.traced
        self._traces: dict[Any, StageTrace] = {}
        # Jitted, so that unneeded results are not computed even if the caller does not jit.
        self._forward = jax.jit(traced(replay.exact_products(self._run_forward)))
        self._dgrad = jax.jit(traced(_run_dgrad))
        self._wgrad = jax.jit(traced(_run_wgrad))
        self._accumulate = jax.jit(traced(_run_accumulate))

    def __repr__(self) -> str:
        options = self._options
        which = "every product" if options.delay is None else f"every product of {', '.join(options.delay)}"
        fn = options.stage.fn
        return f"Split({getattr(fn, '__name__', fn)}: {which} delayed, recompute={options.recompute!r})"

    def forward(self, params: Params, x: Tree, *extra: Tree) -> tuple[Any, ...]:
        """Runs the stage, and its callbacks.

        Args:
            params: Parameters of the stage, a tree of real arrays.
            x: Input of the stage, a tree of floating arrays.
            *extra: Arguments that are not differentiated, trees of arrays.

        Returns:
            (y, residuals), or (y, residuals, aux) with `has_aux`. The residuals are the arrays that dgrad and wgrad read.

        Raises:
            SplitError: If an array is complex or sharded over explicit mesh axes, x is not floating, the stage does not return
                a pair with `has_aux`, a gradient in `delay` cannot be delayed, a pattern of `delay` matches no parameter, or
                the stage reads the result of a callback.
        """
        return self._forward(params, x, *extra)

    def dgrad(self, params: _Params, residuals: Residuals, dy: Tree) -> tuple[Any, _Params, Stash]:
        """Computes the gradient of the input and the gradients of the parameters that are not delayed.

        Args:
            params: The parameters that `forward` was called with.
            residuals: Second result of `forward`, with the arrays of both pools.
            dy: Gradient of y, with the structure and shapes of y. Leaves for integers in y are ignored.

        Returns:
            (dx, early, stash). dx has the structure of x. early has the structure of params, with None for delayed parameters
            and for FP8 weights, and zeros of dtype float0 for integers. The stash holds the arrays that wgrad reads.

        Raises:
            SplitError: If dy does not match y in structure or shapes, or the residuals are deleted or come from another split.
        """
        stage = self._trace_of(residuals, "residuals").stage
        (leaves, tree), (avals, structure) = jax.tree.flatten(dy), jax.tree.flatten(stage.y)
        if tree != structure:
            raise SplitError(f"dy has the structure {tree}, but y has {structure}; pass one gradient for each leaf of y")
        for leaf, aval, floating in zip(leaves, avals, stage.float_y, strict=True):
            if floating and jnp.shape(leaf) != aval.shape:
                raise SplitError(f"dy has a leaf of shape {jnp.shape(leaf)}, but y has {aval.shape}; the shapes must agree")
        return self._dgrad(params, residuals, dy)

    def wgrad(self, params: _Params, residuals: Residuals, stash: Stash) -> _Params:
        """Computes the gradients of the delayed parameters.

        Args:
            params: The parameters that `forward` was called with.
            residuals: Second result of `forward`. Only `residuals.wgrad` is read, so `residuals.after_dgrad()` works too.
            stash: Third result of `dgrad` for these residuals.

        Returns:
            The gradients in the dtypes and structure of params, with None for parameters that are not delayed.

        Raises:
            SplitError: If residuals and stash belong to different shapes, are deleted, or come from another split.
        """
        self._match(residuals, stash)
        return self._wgrad(params, residuals.after_dgrad(), stash)

    def accumulate(self, main_grad: _Sums, params: Params, residuals: Residuals, stash: Stash) -> _Sums:
        """Computes the gradients of `wgrad` and adds them to float32 sums. Grouped matmuls add them inside their kernel.

        Args:
            main_grad: Sums in the structure of params. Leaves of delayed parameters are float32. Other leaves are returned
                unchanged. None may replace any subtree: no gradient is computed for its parameters. Updated in place if the
                caller's `jax.jit` donates it.
            params: The parameters that `forward` was called with.
            residuals: Second result of `forward`. Only `residuals.wgrad` is read.
            stash: Third result of `dgrad` for these residuals.

        Returns:
            The new sums, in the structure of `main_grad`.

        Raises:
            SplitError: If residuals and stash belong to different shapes, are deleted, or come from another split.
        """
        self._match(residuals, stash)
        return self._accumulate(main_grad, params, residuals.after_dgrad(), stash)

    @staticmethod
    def merge(early: _Params, late: _Params) -> _Params:
        """Combines the gradients of `dgrad` and `wgrad`.

        Args:
            early: Gradients from `dgrad`, a tree like params with None for delayed parameters.
            late: Gradients from `wgrad`, a tree like params with None for the other parameters.

        Returns:
            A tree like params with the leaf of `early`, or of `late` if that is None. FP8 weights stay None. Arrays are not
            copied.
        """
        return jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=lambda leaf: leaf is None)

    def spec(self, params: Params, x: Tree, *extra: Tree) -> Spec:
        """Computes the shapes of the arrays between forward, dgrad and wgrad. Traces the stage, but does not run it.

        Args:
            params: Parameters of the stage, arrays or `jax.ShapeDtypeStruct`s.
            x: Input of the stage, arrays or `jax.ShapeDtypeStruct`s.
            *extra: Arguments that are not differentiated, arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            The shapes and dtypes for these arguments, and the paths of the delayed parameters.

        Raises:
            SplitError: If `forward` raises it for these arguments.
        """
        y, residuals, *aux = jax.eval_shape(self.forward, params, x, *extra)
        _, _, stash = jax.eval_shape(self.dgrad, params, residuals, y)
        delayed = compress(leaf_names(self._options.stage.params(params)), residuals.trace.stage.traced.is_weight)
        return Spec(y, residuals, stash, tuple(delayed), *aux)

    def _trace_of(self, saved: Residuals | Stash, name: str) -> StageTrace:
        if saved.trace.stage.owner is not self._options:
            raise SplitError(f"`{name}` comes from another split_backward: must be passed to the split that made it")
        for leaf in jax.tree.leaves(saved):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
                raise SplitError(f"`{name}` is deleted, because an earlier call donated it; use it once, or do not donate it")
        return saved.trace

    def _match(self, residuals: Residuals, stash: Stash) -> None:
        if self._trace_of(residuals.after_dgrad(), "residuals") is not self._trace_of(stash, "stash"):
            raise SplitError("`stash` belongs to residuals of other shapes: pass the residuals that dgrad was called with")

    @scope("forward")
    def _run_forward(self, params: Params, x: Tree, *extra: Tree) -> tuple[Any, ...]:
        # dgrad traces the stage again, with zeros. They must have the same types, including the mesh.
        with jax.sharding.use_abstract_mesh(replay.mesh_of(jax.tree.leaves((params, x, extra)))):
            trace, consts = self._trace(params, x, *extra)
            out, extras, leaves, _ = trace.stage.vjp(consts, params, x, *extra)
            trace.stage.run_callbacks(consts, params, x, *extra)
        candidates = [*leaves, *extras]
        for_dgrad = tuple(candidates[i] for i in trace.lifetimes.for_dgrad)
        for_wgrad = tuple(candidates[i] for i in trace.lifetimes.for_wgrad)
        y, aux = self._options.y_and_aux(out)
        return (y, Residuals(for_dgrad, for_wgrad, trace), *aux)

    def _trace(self, *args: Tree) -> tuple[StageTrace, Sequence[Array]]:
        """Returns the trace for the shapes of the arguments, and the arrays that the stage closes over in this call."""
        leaves, tree = jax.tree.flatten(args)
        key = (tree, jax.sharding.get_abstract_mesh(), *map(jax.typeof, leaves))
        trace = self._traces.get(key)
        if trace is not None and len(consts := trace.stage.traced.known) == len(trace.stage.traced.consts):
            return trace, consts
        _check_leaves("params", args[0])
        _check_leaves("x", args[1])

        def stage(params: Params, *args: Tree) -> Tree:
            return self._options.stage.fn(self._options.stage.params(params), *args)

        traced = Traced.from_function(stage, *args)
        y = traced.out
        if self._options.has_aux and not (isinstance(y, tuple) and len(y) == 2):
            raise SplitError(f"`stage_fn` returns {type(y).__name__}: must return (y, aux) with `has_aux`", field="has_aux")
        _check_leaves("y", self._options.y_and_aux(y)[0])
        if any(map(replay.explicit_axes, replay.avals(traced.jaxpr))):
            raise SplitError(f"the stage computes with arrays sharded over explicit mesh axes: {_AUTO}")
        if trace is None:
            trace = self._traces[key] = make_trace(self._options, traced, args)
        return trace, traced.known


_AUTO = "must be automatic axes, jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...)), or under jax.shard_map"


def _check_leaves(side: str, tree: Tree) -> None:
    """Raises SplitError if a leaf of params, x or y (`side`) cannot be differentiated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        aval: Any = leaf if isinstance(leaf, jax.ShapeDtypeStruct | ShapedArray) else jax.typeof(leaf)
        name = path_name(path)
        label = f"{side}/{name}" if name else side
        if axes := replay.explicit_axes(aval):
            raise SplitError(f"{label} is sharded over the explicit mesh axes {axes}: {_AUTO}", path=name)
        if side == "x" and not jnp.issubdtype(aval.dtype, jnp.inexact):
            raise SplitError(f"{label} is {aval.dtype}: must be floating; pass it as an extra argument after x", path=name)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            message = f"{label} is {aval.dtype}; params, x and y must be real: pass its real and imaginary parts"
            raise SplitError(message, path=name)


@scope("dgrad")
def _run_dgrad(params: Params, residuals: Residuals, dy: Tree) -> tuple[Tree, Params, Stash]:
    trace = residuals.trace
    leaves, structure = jax.tree.flatten(params)
    with jax.sharding.use_abstract_mesh(trace.stage.mesh):
        dx, early, taps = run_dgrad(trace.stage, trace.candidates, params, residuals.by_index, jax.tree.leaves(dy))
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves]
    zeros = [None if f else np.zeros(jnp.shape(leaf), jax.dtypes.float0) for leaf, f in zip(leaves, is_float, strict=True)]
    gradients = jax.tree.unflatten(structure, replaced(zeros, trace.stage.early, early))
    return dx, gradients, Stash(tuple(taps[i] for i in trace.lifetimes.stashed), trace)


@scope("wgrad")
def _run_wgrad(params: Params, residuals: Residuals, stash: Stash) -> Params:
    return _late(params, residuals, stash, adding=False)


@scope("wgrad")
def _run_accumulate(main_grad: _Sums, params: Params, residuals: Residuals, stash: Stash) -> _Sums:
    late = _late(params, residuals, stash, adding=True)

    def added(total: Array | None, late: Array | Callable[[Array], Array] | None) -> Array | None:
        if total is None or late is None:
            return total
        return late(total) if callable(late) else total + late.astype(total.dtype)

    return jax.tree.map(added, main_grad, late, is_leaf=lambda leaf: leaf is None)


def _late(params: Params, residuals: Residuals, stash: Stash, *, adding: bool) -> Params:
    """Computes the gradients of the delayed parameters, in the structure of params with None for other parameters."""
    # If `adding`, gradients are float32 unless they pass through a cast, and a gradient that a kernel can add to a sum is
    # replaced by a function from the sum to the new sum.
    trace = residuals.trace
    stage = trace.stage
    kept = residuals.by_index
    leaves, structure = jax.tree.flatten(params)
    again = list[Array]()
    if None in trace.lifetimes.taps_from:
        # Run dgrad with zeros for dy, because only cotangents that do not depend on dy are read from it.
        dy = jax.tree.leaves(jax.tree.map(replay.zeros, stage.y))
        with jax.sharding.use_abstract_mesh(stage.mesh):
            again = run_dgrad(stage, trace.candidates, params, kept, dy)[2]
    # A gradient that passes through a cast has the dtype of the parameter, and is converted to float32 afterwards.
    is_wide = adding and not stage.exact
    delayed = [leaf.astype(jnp.float32 if is_wide else leaf.dtype) for leaf in compress(leaves, stage.traced.is_weight)]

    def weights(delayed: list[Array]) -> list[Array]:
        params = replaced([MISSING] * len(leaves), stage.traced.is_weight, delayed)
        found = stage.traced.weights(params, stage.traced.consts, keep_dtype=not stage.exact)
        return [w for w in found if not isinstance(w, Missing)]

    products, pull_back = jax.vjp(weights, delayed)
    cotangents = []
    extras = iter(kept[i] for i in trace.candidates.extras)
    operands = [again[i] if place is None else stash.arrays[place] for i, place in enumerate(trace.lifetimes.taps_from)]
    taps = jax.tree.unflatten(jax.tree.structure(stage.taps()), operands)
    # Functions that add a gradient, by the index of a parameter that is the unchanged weight of exactly one matmul.
    adders: dict[int, Callable[[Array], Array]] = {}
    unchanged = weights(delayed) if adding else [None] * len(taps)
    for product, w, tap, weight in zip(stage.products, products, taps, unchanged, strict=True):
        site = product.site
        extra = [next(extras) for _ in site.eqn.invars[2:]]
        place = next((i for i, leaf in enumerate(delayed) if leaf is weight), None)
        if place is not None and product.adds and sum(bool(site.params & other.params) for other in stage.traced.sites) == 1:
            adders[place] = partial(product.add_weight_gradient, tap, extra)
            cotangents.append(replay.zeros(jax.typeof(w)))
        else:
            cotangents.append(product.weight_gradient(tap, extra, w.dtype))
    late = [adders.get(i, gradient) for i, gradient in enumerate(pull_back(cotangents)[0])]
    return jax.tree.unflatten(structure, replaced([None] * len(leaves), stage.traced.is_weight, late))
