"""Decides which arrays of the forward pass of a stage are saved.

A `TappedStage` is a trace of a stage with taps on its matmuls. A `StageTrace` sorts the residuals of its vjp by lifetime:

    forward -> dgrad   arrays that only dgrad reads
    forward -> wgrad   arrays from which wgrad computes the data operands of the matmuls; dgrad may read them too
    dgrad -> wgrad     the stash: output gradients of the matmuls, and data operands that are expensive to recompute

Arrays that depend only on parameters (weights, their casts and slices) are not saved, because dgrad and wgrad recompute them
from `params`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import compress
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.linear import DelayedProduct, Operands, OwnProducts, Wide
from jgraph.autodiff.replay import Aval, aval_of
from jgraph.autodiff.traced import MISSING, Missing, Site, Traced
from jgraph.errors import SplitError
from jgraph.kernels.quantize import CALLS
from jgraph.tree import leaf_names
from jgraph.types import Params, Tree

Recompute = Literal["elementwise", "wide", "nothing"]
_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


@dataclass(frozen=True, eq=False)
class Options:
    """The checked arguments of `split_backward`. Compared by identity."""

    stage: OwnProducts
    has_aux: bool
    delay: tuple[str, ...] | None
    recompute: Recompute

    def y_and_aux(self, out: Tree) -> tuple[Tree, Sequence[Tree]]:
        """Splits the result of the stage into y, and [aux] with `has_aux`."""
        if not self.has_aux:
            return out, ()
        assert isinstance(out, tuple)
        return out[0], out[1:]


@dataclass(frozen=True, eq=False)
class TappedStage:
    """A traced stage with taps on its matmuls.

    A *tap* is an unused argument of a matmul. Its cotangent contains the operands of wgrad: x and dy.
    """

    owner: Options
    traced: Traced  # of params, x and extra, without callbacks; wgrad computes the gradients of its weights
    callbacks: core.Jaxpr | None  # the stage with its callbacks; None if it has none
    products: Sequence[DelayedProduct]  # the matmul of each site
    given: Callable[[Params], Sequence[Any]]  # maps params to the additional arguments of each matmul
    early: Sequence[bool]  # for each leaf of params, True if dgrad computes its gradient
    policy: Callable[..., bool] | None  # of `jax.checkpoint`; None if nothing is recomputed
    mesh: jax.sharding.AbstractMesh  # may be empty

    @property
    def exact(self) -> bool:
        # A gradient must pass through the casts between a parameter and its matmul.
        return not all(site.moved for site in self.traced.sites)

    @property
    def y(self) -> Tree:
        return self.owner.y_and_aux(self.traced.out)[0]

    @cached_property
    def float_y(self) -> list[bool]:
        # Other leaves of y have no gradient.
        return [jnp.issubdtype(aval.dtype, jnp.floating) for aval in jax.tree.leaves(self.y)]

    def taps(self) -> list[Operands]:
        return [product.tap() for product in self.products]

    def blanks(self) -> tuple[list[Array], tuple[Tree, ...]]:
        """Returns the closed-over arrays, with zeros in place of tracers, and zeros for (params, x, *extra)."""
        pairs = zip(self.traced.consts, self.traced.jaxpr.constvars, strict=True)
        consts = [replay.zeros(aval_of(v)) if isinstance(const, Missing) else const for const, v in pairs]
        return consts, jax.tree.map(replay.zeros, self.traced.args)

    def vjp(self, consts: Sequence[Array], params: Params, *args: Tree):
        """Runs the stage with taps, and takes its vjp with respect to x, early parameters and taps. Does not run callbacks."""
        products = dict(zip(self.traced.sites, self.products, strict=True))
        leaves, structure = jax.tree.flatten(params)

        def multiply(site: Site, x: Array, w: Array, extra: Sequence[Array], given: tuple[Operands, Any]) -> Array:
            return products[site].multiply(x, w, extra, *given)

        def run(x: Tree, early: list[Array], taps: list[Operands]) -> tuple[list[Array], tuple[Tree, list[tuple[Array, ...]]]]:
            whole = jax.tree.unflatten(structure, replaced(leaves, self.early, early))
            given = list(zip(taps, self.given(whole), strict=True))
            out, extras = self.traced.run(multiply, given, whole, x, *args[1:], consts=consts)
            y = jax.tree.leaves(self.owner.y_and_aux(out)[0])
            return list(compress(y, self.float_y)), (out, extras)

        if self.policy:
            run = jax.checkpoint(run, policy=self.policy, prevent_cse=False)
        # The leaves of the vjp function are its residuals.
        _, vjp, (out, extras) = jax.vjp(run, args[0], list(compress(leaves, self.early)), self.taps(), has_aux=True)
        return out, jax.tree.leaves(extras), *jax.tree.flatten(vjp)

    def run_callbacks(self, consts: Sequence[Array], *args: Tree) -> None:
        """Runs the stage again with its callbacks, and drops its results."""
        # Called while forward is traced: XLA removes the other operations, or merges them with the operations of `vjp`.
        if self.callbacks is not None:
            core.jaxpr_as_fun(core.ClosedJaxpr(self.callbacks, consts))(*jax.tree.leaves(args))


@dataclass(frozen=True)
class Candidates:
    """Arrays that forward may save: the leaves of the vjp, then the other operands of the matmuls, such as group sizes."""

    avals: Sequence[Aval]
    keep: Sequence[int | None]  # for each leaf of the vjp, the index of its first occurrence; None if params give it
    extras: Sequence[int]  # the indices of the other operands


@dataclass(frozen=True)
class Lifetimes:
    """The saved arrays. Candidates are named by their index, taps by the index of a leaf of their cotangents."""

    for_dgrad: Sequence[int]  # candidates that only dgrad reads
    for_wgrad: Sequence[int]
    stashed: Sequence[int]  # the tap of each array of the stash
    taps_from: Sequence[int | None]  # for each tap, its index in the stash, or None if wgrad recomputes it


@dataclass(frozen=True, eq=False)
class StageTrace:
    """A traced stage and its saved arrays. Compared by identity, because arrays of different traces cannot be mixed."""

    stage: TappedStage
    candidates: Candidates
    lifetimes: Lifetimes


def replaced(values: Iterable[_Value], flags: Sequence[bool], others: Iterable[_Other]) -> list[_Value | _Other]:
    """Returns `values`, with `others` in the places with a flag."""
    others = iter(others)
    return [next(others) if flag else value for value, flag in zip(values, flags, strict=True)]


def make_trace(owner: Options, traced: Traced, args: tuple[Tree, ...]) -> StageTrace:
    """Finds the matmuls of a traced stage and decides which arrays are saved. Traces dgrad, and runs nothing."""
    # `args` are (params, x, *extra). Only the gradients of the first leaves, `owner.stage.params(params)`, can be delayed.
    paths = leaf_names(owner.stage.params(args[0]))
    with_callbacks = traced.jaxpr
    jaxpr = replay.without_callbacks(with_callbacks)
    _check_callbacks(jaxpr)
    # The trace is used by later calls, with other tracers.
    consts = [MISSING if isinstance(const, Tracer) else const for const in traced.consts]
    traced = _delayable(owner, replace(traced, jaxpr=jaxpr, consts=consts), paths)
    bound = owner.stage.bind(traced.sites, paths, *args)
    pairs = zip(jax.tree.leaves(traced.args[0]), bound.differentiated, traced.is_weight, strict=True)
    # A jax.checkpoint in the stage decides which arrays are saved. A policy cannot save complex numbers.
    is_complex = any(jnp.issubdtype(getattr(aval, "dtype", jnp.float32), jnp.complexfloating) for aval in replay.avals(jaxpr))
    recomputes = owner.recompute != "nothing" and not is_complex and not replay.holds(jaxpr, replay.CHECKPOINTS)
    again = frozenset(product.computed_as() for product in bound.products if owner.recompute == "wide" and product.is_wide)
    stage = TappedStage(
        owner,
        traced,
        callbacks=None if with_callbacks is jaxpr else with_callbacks,
        products=bound.products,
        given=bound.given,
        early=[jnp.issubdtype(aval.dtype, jnp.floating) and d and not is_late for aval, d, is_late in pairs],
        policy=partial(_keeps, again) if recomputes else None,
        mesh=jax.sharding.get_abstract_mesh(),
    )
    trace, costs = _with_lifetimes(stage)
    keeping = [product.keeping_x() if is_larger else product for product, is_larger in zip(bound.products, costs, strict=True)]
    return trace if keeping == [*bound.products] else _with_lifetimes(replace(stage, products=keeping))[0]


def _delayable(owner: Options, traced: Traced, paths: Sequence[str]) -> Traced:
    """Finds the parameters with gradients that wgrad can compute, and ignores auxiliary outputs."""
    delay = owner.delay
    leaves = jax.tree.leaves(traced.args[0])
    for pattern in delay or ():
        if not any(fnmatchcase(path, pattern) for path in paths):
            names = ", ".join(paths[:8]) + (" ..." if len(paths) > 8 else "")
            raise SplitError(f"`delay` has {pattern!r}, which matches no parameter: must match one of {names}", field="delay")
    selected = [delay is None or any(fnmatchcase(path, p) for p in delay) for path in paths]
    selected += [False] * (len(leaves) - len(paths))
    floating = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in leaves]
    num_y = len(jax.tree.leaves(owner.y_and_aux(traced.out)[0]))
    wanted = [i < num_y for i in range(len(traced.wanted))]
    traced = replace(traced, replaceable=[s and f for s, f in zip(selected, floating, strict=True)], wanted=wanted)
    while stray := traced.stray:
        if delay is not None:
            i, by = next(iter(stray.items()))
            raise SplitError(
                f"parameter {paths[i]} reaches the output through {by}, not only as the weight of a matmul, so its gradient "
                f"cannot be delayed; remove it from delay={list(delay)} to compute its gradient in dgrad",
                path=paths[i],
                field="delay",
            )
        traced = replace(traced, replaceable=[can and i not in stray for i, can in enumerate(traced.replaceable)])
    return traced


def _check_callbacks(jaxpr: core.Jaxpr) -> None:
    """Raises SplitError if dgrad or wgrad would run a callback again, on other values."""
    if replay.holds(jaxpr, replay.CALLBACKS):
        raise SplitError(
            "the stage reads the result of an io_callback, or has a callback in a custom_jvp or custom_vjp function: a "
            "callback must return nothing and be outside of such functions; use jax.pure_callback to compute values"
        )


def _keeps(again: frozenset[Wide], primitive: core.Primitive, *avals: Aval, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: saves the results of primitives that are not in `_CHEAP`, except matmuls in `again`."""
    if primitive.name == "dot_general" and (*(aval.shape for aval in avals), params["dimension_numbers"]) in again:
        return False
    return not replay.primitives(primitive.name, params) <= _CHEAP


# fmt: off
_CHEAP = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bitcast_convert_type",
    "broadcast_in_dim", "cbrt", "ceil", "clamp", "concatenate", "convert_element_type", "copy", "copy_p", "cos", "cosh",
    "div", "dynamic_slice", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt",
    "imag", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "one_minus_square", "optimization_barrier", "or", "pad", "pcast", "pow", "pvary", "random_bits",
    "random_fold_in", "random_split", "random_unwrap", "random_wrap", "real", "reduce_precision", "rem", "reshape", "rev",
    "round", "rsqrt", "select_n", "sharding_constraint", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh",
    "threefry2x32", "transpose", "xor", *CALLS,
})
# fmt: on
"""Primitives that are cheap to recompute: elementwise operations, reshapes, random numbers from a key, and casts to FP8."""


def run_dgrad(stage: TappedStage, candidates: Candidates, params: Params, kept: Mapping[int, Array], dy: Sequence[Array]):
    """Returns dx, the gradients of the early parameters, and the leaves of the cotangents of the taps."""
    # Runs the forward pass on zeros, to get the structure of the vjp function and the arrays that depend only on parameters.
    # The compiler removes the rest of the forward pass. Residuals that are not in `kept` are zeros: results that depend on them
    # are wrong.
    consts, (_, *args) = stage.blanks()
    _, _, fresh, tree = stage.vjp(consts, params, *args)
    leaves = [
        leaf if i is None else kept[i] if i in kept else replay.zeros(candidates.avals[i])
        for leaf, i in zip(fresh, candidates.keep, strict=True)
    ]
    dx, early, taps = jax.tree.unflatten(tree, leaves)(list(compress(dy, stage.float_y)))
    return dx, early, jax.tree.leaves(taps)


def _find_candidates(stage: TappedStage, consts: Sequence[Array], params: Params, *args: Tree) -> Candidates:
    def forward(consts: Sequence[Array], params: Params, *args: Tree) -> tuple[list[Array], list[Array]]:
        _, extras, leaves, _ = stage.vjp(consts, params, *args)
        return leaves, extras

    closed, (leaves, _) = jax.make_jaxpr(forward, return_shape=True)(consts, params, *args)
    _check_callbacks(closed.jaxpr)  # Includes the forward rules of custom_vjp functions, unlike the trace of the stage.
    outs = closed.jaxpr.outvars
    is_data = [const is MISSING for const in stage.traced.consts]
    is_data += [False] * len(jax.tree.leaves(params)) + [True] * len(jax.tree.leaves(args))
    varies = replay.depends(closed.jaxpr, is_data)
    # The same array can occur several times, e.g. as the input of three projections.
    first = {v: i for i, v in reversed(list(enumerate(outs))) if not replay.is_literal(v)}
    same = [i if replay.is_literal(v) else first[v] for i, v in enumerate(outs)]
    keep = [same[i] if varies[i] else None for i in range(len(leaves))]
    return Candidates([aval_of(v) for v in outs], keep, same[len(leaves) :])


def _with_lifetimes(stage: TappedStage) -> tuple[StageTrace, list[bool]]:
    """Sorts the candidates by lifetime. Returns the trace, and a flag for each matmul that should save its data."""
    consts, (params, *args) = stage.blanks()
    candidates = _find_candidates(stage, consts, params, *args)
    avals = candidates.avals
    places = sorted({i for i in candidates.keep if i is not None})

    def dgrad(kept: list[Array], dy: list[Array], params: Params) -> tuple[Tree, list[Array], list[Array]]:
        return run_dgrad(stage, candidates, params, dict(zip(places, kept, strict=True)), dy)

    kept = [replay.zeros(avals[i]) for i in places]
    dy = jax.tree.leaves(jax.tree.map(replay.zeros, stage.y))
    closed, (dx, early, taps) = jax.make_jaxpr(dgrad, return_shape=True)(kept, dy, params)
    _check_callbacks(closed.jaxpr)
    jaxpr = closed.jaxpr
    num_gradients = len(jax.tree.leaves((dx, early)))

    def sources(outputs: Sequence[int]) -> tuple[set[int], bool]:
        """Returns the residuals that `outputs` depend on, and True if only cheap primitives compute them, without dy."""
        wanted = [i in outputs for i in range(len(jaxpr.outvars))]
        given, primitives = replay.needs(jaxpr, wanted, [i < len(places) + len(dy) for i in range(len(jaxpr.invars))])
        from_dy = any(given[len(places) : len(places) + len(dy)])
        return {place for place, flag in zip(places, given, strict=False) if flag}, primitives <= _CHEAP and not from_dy

    stash: dict[Any, int] = {}  # The first tap of each stashed array.
    recomputed_from: list[set[int]] = []  # Residuals, for each tap.
    taps_from: list[int | None] = []
    for tap, v in enumerate(jaxpr.outvars[num_gradients:]):
        needed, is_cheap = sources([num_gradients + tap])
        recomputed_from.append(needed if is_cheap else set())
        key = tap if replay.is_literal(v) else v
        if not is_cheap:
            stash.setdefault(key, tap)
        taps_from.append(None if is_cheap else list(stash).index(key))
    for_wgrad = set(candidates.extras).union(*recomputed_from)
    for_dgrad, _ = sources([*range(num_gradients), *(num_gradients + tap for tap in stash.values())])
    lifetimes = Lifetimes(sorted(for_dgrad - for_wgrad), sorted(for_wgrad), [*stash.values()], taps_from)
    firsts = np.cumsum([0, *(len(jax.tree.leaves(tap)) for tap in stage.taps())])[:-1]

    def nbytes(aval: Aval) -> int:
        return aval.size * aval.dtype.itemsize

    # For each matmul, True if wgrad recomputes the first leaf of its tap from residuals that dgrad does not read and that are
    # larger than the leaf.
    is_larger = [sum(nbytes(avals[i]) for i in recomputed_from[tap] - for_dgrad) > nbytes(taps[tap]) for tap in firsts]
    return StageTrace(stage, candidates, lifetimes), is_larger
