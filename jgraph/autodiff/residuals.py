"""What is kept of a stage's forward pass, and for whom.

A Plan is one trace of a stage with taps on its products (`find.py`), and every array that its vjp keeps sorted by life:

    forward -> dgrad   what only dgrad reads
    forward -> wgrad   what wgrad makes the products' data operands from (dgrad may read it too)
    dgrad -> wgrad     the stash: the products' output gradients; and data operands that would take a product to make again

What depends on parameters alone (the weights, their casts and slices) is in none of them: it is made again from `params`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from jgraph.autodiff import find, replay
from jgraph.autodiff.linear import Bound, DelayedProduct
from jgraph.errors import SplitError
from jgraph.kernels.quantize import CALLS

Tree = Any
Recompute = Literal["elementwise", "wide", "nothing"]


@dataclass(eq=False)
class Plan:
    """One trace of the stage and what was found in it. Compared by identity: arrays of different traces do not mix.

    Attributes:
        owner: the Split that it is for.
        jaxpr: of the stage; its inputs are what it closes over, params, x, extra.
        consts: arrays that the stage closes over; None in the place of a tracer, which counts as data.
        trees: structures of params, x, extra, y and aux.
        delayed: for each leaf of params, whether its gradient comes from wgrad.
        early: the same, whether it comes from dgrad.
        exact: whether a gradient must go through the casts between a parameter and its product.
        block: the products, and where they are.
        given: returns what each product takes besides its operands, from params.
        float_y: for each leaf of y, whether it has a gradient.
        recompute: whether elementwise work is done again instead of kept.
        again: products that are done again too, as `DelayedProduct.computed_as` has them.
        mesh: that the arrays are placed on, or an empty one.
        noisy: the stage with its callbacks, which `jaxpr` lacks; None where it has none.
        avals: of everything that forward could keep: the leaves of the vjp, then the products' extra operands.
        keep: for each leaf of the vjp, its place in `avals`, or None where it is made again from params.
        extras: places of the extra operands.
        for_dgrad, for_wgrad: places of what is kept, by who needs it last.
        taps_from: for each output of the taps, its place in the stash, or None where wgrad makes it again from the residuals.
        stashed: for each place in the stash, which output of the taps it is.
    """

    owner: object
    jaxpr: core.Jaxpr
    consts: list[Any]
    trees: tuple[Any, Any, Any, Any, Any]
    delayed: tuple[bool, ...]
    early: tuple[bool, ...]
    exact: bool
    block: find.Block
    given: Callable[[Tree], Sequence[Any]]
    float_y: list[bool]
    recompute: bool
    again: frozenset[Any]
    mesh: jax.sharding.AbstractMesh
    noisy: core.Jaxpr | None
    avals: list[Any] = field(default_factory=list)
    keep: list[int | None] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    for_dgrad: list[int] = field(default_factory=list)
    for_wgrad: list[int] = field(default_factory=list)
    taps_from: list[int | None] = field(default_factory=list)
    stashed: list[int] = field(default_factory=list)

    @property
    def y_avals(self) -> list[Any]:
        return [v.aval for v in self.jaxpr.outvars[: len(self.float_y)]]

    def closed_over(self, traced: Sequence[Any]) -> list[Any]:
        """Returns the arrays that the stage closes over, with these tracers."""
        given = iter(traced)
        return [next(given) if const is None else const for const in self.consts]

    def blanks(self) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """Zeros for tracers, params, x and extra, to trace with."""
        blank = [replay.zeros(v.aval) for v in self.jaxpr.invars]
        traced = [z for z, const in zip(blank, self.consts, strict=False) if const is None]
        params, rest = blank[len(self.consts) :][: len(self.delayed)], blank[len(self.consts) + len(self.delayed) :]
        num_x = self.trees[1].num_leaves
        return traced, params, rest[:num_x], rest[num_x:]


def make_plan(
    owner: object,
    closed: Any,
    trees: tuple[Any, Any, Any, Any, Any],
    paths: Sequence[str],
    *,
    bind: Callable[[Sequence[DelayedProduct]], Bound] | None,
    delay: Sequence[str] | None,
    recompute: Recompute,
) -> Plan:
    """Returns the plan of a traced stage. Raises SplitError.

    Args:
        owner, closed, trees: as in the plan.
        paths: of the leaves of params that may be delayed: the first ones.
        bind: of `OwnProducts`.
        delay, recompute: of `split_backward`.
    """
    jaxpr = closed.jaxpr
    consts = [None if isinstance(const, Tracer) else const for const in closed.consts]
    # Tracers that the stage closes over are inputs like any other.
    whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info)
    noisy, whole = whole, replay.without_callbacks(whole)
    _check_callbacks(whole)
    num_params, num_consts, num_y = trees[0].num_leaves, len(consts), trees[3].num_leaves
    wanted = [i < num_y for i in range(len(whole.outvars))]
    floating = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.in_avals[:num_params]]
    delayed = [
        f and (delay is None or any(fnmatchcase(path, p) for p in delay)) for path, f in zip(paths, floating, strict=False)
    ]
    delayed += [False] * (num_params - len(paths))
    if delay is not None:
        _check_patterns(delay, paths)
    while True:
        params = [None] * num_consts + [i if late else None for i, late in enumerate(delayed)]
        data = [const is None for const in consts] + [not late for late in delayed]
        rest = len(jaxpr.invars) - num_params
        found = find.find(whole, wanted, [*params, *[None] * rest], [*data, *[True] * rest])
        if not found.stray:
            break
        if delay is not None:
            i, by = next(iter(found.stray.items()))
            raise SplitError(
                f"parameter {paths[i]} reaches the output through {by}, not only as the weight of a product, so its gradient "
                f"cannot be delayed; leave it out of delay={list(delay)}, and it comes from dgrad",
                path=paths[i],
                field="delay",
            )
        for i in found.stray:
            delayed[i] = False
    delayed = tuple(i in found.weights for i in range(num_params))
    float_y = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.out_avals[:num_y]]
    # A stage that says with jax.checkpoint what to keep is taken at its word; and no policy of it can keep complex numbers.
    is_complex = any(jnp.issubdtype(getattr(aval, "dtype", jnp.float32), jnp.complexfloating) for aval in replay.values(whole))
    recomputes = recompute != "nothing" and not is_complex and not replay.holds(whole, replay.CHECKPOINTS)
    mesh, noisy = jax.sharding.get_abstract_mesh(), None if noisy is whole else noisy
    exact = not all(site.moved for site in found.block.all_sites())
    sites = found.block.all_sites()
    bound = bind(sites) if bind else Bound(sites, lambda _: [()] * len(sites), [True] * num_params)
    found.block.replace(dict(zip(sites, bound.sites, strict=True)))
    again = frozenset(site.computed_as() for site in bound.sites if recompute == "wide" and site.is_wide)
    early = tuple(f and d and not late for f, d, late in zip(floating, bound.differentiated, delayed, strict=True))
    plan = Plan(
        owner, whole, consts, trees, delayed, early, exact, found.block, bound.given, float_y, recomputes, again, mesh, noisy
    )
    costs = dict(zip(bound.sites, _sort_by_life(plan), strict=True))
    keeping = {site: site.keeping_x() if costs[site] else site for site in bound.sites}
    if any(keeping[site] is not site for site in keeping):
        found.block.replace(keeping)
        _sort_by_life(plan)
    return plan


def _check_patterns(delay: Sequence[str], paths: Sequence[str]) -> None:
    for pattern in delay:
        if not any(fnmatchcase(path, pattern) for path in paths):
            there = f"{', '.join(paths[:8])}{' ...' * (len(paths) > 8)}"
            raise SplitError(f"`delay` has {pattern!r}, which matches no parameter; there are {there}", field="delay")


def _check_callbacks(jaxpr: core.Jaxpr) -> None:
    """Raises SplitError where a callback would run again in dgrad or wgrad, on other values."""
    if replay.holds(jaxpr, replay.CALLBACKS):
        raise SplitError(
            "the stage reads what an io_callback returns, or calls back in a custom_jvp or custom_vjp function: to run in "
            "forward alone, a callback must return nothing and be outside of these; take jax.pure_callback for values"
        )


def run_callbacks(plan: Plan, params: Sequence[Any], x: Sequence[Any], extra: Sequence[Any], traced: Sequence[Any]) -> None:
    """Runs the stage again for its callbacks. What they do not need is dead; of the rest XLA merges a part with `vjp`."""
    if plan.noisy is not None:
        core.jaxpr_as_fun(core.ClosedJaxpr(plan.noisy, ()))(*plan.closed_over(traced), *params, *x, *extra)


def vjp(plan: Plan, params: Sequence[Any], x: Sequence[Any], extra: Sequence[Any], traced: Sequence[Any]):
    """Forward with taps, and its vjp with respect to (x, early parameters, taps); all arguments are leaves.

    Returns:
        y leaves, then those of aux; the products' extra operands; the leaves of the vjp; their structure.
    """
    early = [leaf for leaf, is_early in zip(params, plan.early, strict=True) if is_early]

    def run(x, early, taps):
        given = iter(early)
        whole = [next(given) if is_early else leaf for leaf, is_early in zip(params, plan.early, strict=True)]
        taps = list(zip(taps, plan.given(jax.tree.unflatten(plan.trees[0], whole)), strict=True))
        out, extras = find.run_forward(plan.block, (), [*plan.closed_over(traced), *whole, *x, *extra], taps, _multiply)
        return [v for v, f in zip(out, plan.float_y, strict=False) if f], (out, extras)

    if plan.recompute:
        run = jax.checkpoint(run, policy=partial(_keeps, plan.again), prevent_cse=False)
    _, vjp, (y, extras) = jax.vjp(run, list(x), early, [site.tap() for site in plan.block.all_sites()], has_aux=True)
    leaves, tree = jax.tree.flatten(vjp)
    return y, jax.tree.leaves(extras), leaves, tree


def _multiply(site: DelayedProduct, x: Any, w: Any, extra: Sequence[Any], tap: tuple[Any, Any]) -> jax.Array:
    return site.multiply(x, w, extra, *tap)


def _keeps(again: frozenset[Any], primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy for `jax.checkpoint`: keeps a value if making it again takes more than a pass over memory, or is asked for."""
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
"""Elementwise, of shape only, a random number from its key, or a cast to FP8."""


def is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def dgrad_leaves(plan: Plan, params: Sequence[Any], kept: Mapping[int, Any], dy: Sequence[Any]):
    """dx leaves, gradients of the early parameters, and the leaves of what comes out of the taps.

    The forward pass is run on zeros for the structure of the vjp and for what comes from parameters alone. All else in it is
    dead: nothing reads it, and the compiler removes it. What `kept` lacks is not read either.
    """
    traced, _, x, extra = plan.blanks()
    _, _, fresh, tree = vjp(plan, params, x, extra, traced)
    leaves = [
        leaf if i is None else kept[i] if i in kept else replay.zeros(plan.avals[i])
        for leaf, i in zip(fresh, plan.keep, strict=True)
    ]
    dx, early, taps = jax.tree.unflatten(tree, leaves)([leaf for leaf, f in zip(dy, plan.float_y, strict=True) if f])
    return dx, early, jax.tree.leaves(taps)


def _sort_by_life(plan: Plan) -> list[bool]:
    """Fills in what of the vjp's leaves and the products' operands is kept, and for whom.

    Returns:
        For each product, whether wgrad makes the first leaf of its tap from more bytes than it has that dgrad does not read.
    """
    plan.taps_from, plan.stashed = [], []
    traced, params, x, extra = plan.blanks()

    def forward(params, x, extra, traced):
        _, extras, leaves, _ = vjp(plan, params, x, extra, traced)
        return leaves, extras

    closed, (leaves, extras) = jax.make_jaxpr(forward, return_shape=True)(params, x, extra, traced)
    _check_callbacks(closed.jaxpr)  # of a custom_vjp's forward, which the stage's own trace does not show
    outs = closed.jaxpr.outvars
    varies = replay.depends(closed.jaxpr, [False] * len(params) + [True] * (len(x) + len(extra) + len(traced)))
    # The same array may be there twice, e.g. as the input of three projections.
    first = {v: i for i, v in reversed(list(enumerate(outs))) if not replay.is_literal(v)}
    same = [i if replay.is_literal(v) else first[v] for i, v in enumerate(outs)]
    plan.avals = [v.aval for v in outs]
    plan.keep = [same[i] if varies[i] else None for i in range(len(leaves))]
    plan.extras = same[len(leaves) :]
    assert len(plan.extras) == len(extras)

    places = sorted({i for i in plan.keep if i is not None})

    def dgrad(kept, dy, params):
        return dgrad_leaves(plan, params, dict(zip(places, kept, strict=True)), dy)

    kept, dy = [replay.zeros(plan.avals[i]) for i in places], [replay.zeros(aval) for aval in plan.y_avals]
    closed, (dx, early, taps) = jax.make_jaxpr(dgrad, return_shape=True)(kept, dy, params)
    _check_callbacks(closed.jaxpr)
    jaxpr, num_gradients = closed.jaxpr, len(dx) + len(early)

    def sources(outputs: Sequence[int]) -> tuple[set[int], bool]:
        """Returns the residuals that these outputs are made from, and whether from them alone and by elementwise work."""
        wanted = [i in outputs for i in range(len(jaxpr.outvars))]
        given, primitives = replay.needs(jaxpr, wanted, [i < len(places) + len(dy) for i in range(len(jaxpr.invars))])
        from_dy = any(given[len(places) : len(places) + len(dy)])
        return {place for place, flag in zip(places, given, strict=False) if flag}, primitives <= _CHEAP and not from_dy

    stash: dict[Any, int] = {}

    def put(tap: int) -> int:
        v = jaxpr.outvars[num_gradients + tap]
        key = tap if replay.is_literal(v) else v
        if key not in stash:
            stash[key] = len(stash)
            plan.stashed.append(tap)
        return stash[key]

    for_wgrad, by_tap = set(plan.extras), list[set[int]]()
    for tap in range(len(taps)):
        made_from, is_cheap = sources([num_gradients + tap])
        plan.taps_from.append(None if is_cheap else put(tap))
        by_tap.append(made_from if is_cheap else set())
    for_wgrad = for_wgrad.union(*by_tap)
    for_dgrad, _ = sources([*range(num_gradients), *(num_gradients + tap for tap in plan.stashed)])
    plan.for_wgrad, plan.for_dgrad = sorted(for_wgrad), sorted(for_dgrad - for_wgrad)
    firsts = np.cumsum([0, *(len(jax.tree.leaves(site.tap())) for site in plan.block.all_sites())])[:-1]

    def nbytes(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize

    return [sum(nbytes(plan.avals[i]) for i in by_tap[tap] - for_dgrad) > nbytes(taps[tap]) for tap in firsts]
