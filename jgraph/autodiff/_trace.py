"""Traces a stage and decides which arrays of its forward pass are saved.

A `StageTrace` is one trace of a stage with taps on its matmuls (`find.py`). It sorts the residuals of the vjp by lifetime:

    forward -> dgrad   arrays that only dgrad reads
    forward -> wgrad   arrays from which wgrad computes the data operands of the matmuls; dgrad may read them too
    dgrad -> wgrad     the stash: output gradients of the matmuls, and data operands that are expensive to recompute

Arrays that depend only on parameters (weights, their casts and slices) are not saved, because dgrad and wgrad recompute them
from `params`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import core

from jgraph.autodiff import find, replay
from jgraph.autodiff.linear import DelayedProduct, OwnProducts
from jgraph.autodiff.replay import Aval, aval_of
from jgraph.errors import SplitError
from jgraph.kernels.quantize import CALLS
from jgraph.tree import PyTree, leaf_names

_TreeDef = Any  # Type checkers do not accept `jax.tree_util.PyTreeDef`.
Recompute = Literal["elementwise", "wide", "nothing"]


class Trees(NamedTuple):
    """Structures of the arguments and results of a stage, as `jax.tree.structure` returns them.

    Attributes:
        params: Structure of the parameters.
        x: Structure of the input.
        extra: Structure of the tuple of further arguments.
        y: Structure of the output.
        aux: Structure of the auxiliary output; that of () without `has_aux`.
    """

    params: _TreeDef
    x: _TreeDef
    extra: _TreeDef
    y: _TreeDef
    aux: _TreeDef


@dataclass(frozen=True, eq=False)
class Options:
    """The checked arguments of `split_backward`. Compared by identity.

    Attributes:
        stage: The stage and its replaced matmuls.
        has_aux: True if the stage returns `(y, aux)`.
        delay: Patterns (`fnmatch`) of the paths of delayed parameters; None delays each parameter that is only used as the
            weight of matmuls.
        recompute: Operations that the backward pass recomputes: `elementwise`, `wide` (also matmuls with at least four times as
            many output elements as data elements) or `nothing`.
    """

    stage: OwnProducts
    has_aux: bool
    delay: tuple[str, ...] | None
    recompute: Recompute


@dataclass(eq=False)
class StageTrace:
    """One trace of a stage. Compared by identity, because arrays of different traces cannot be mixed.

    A *tap* is an unused argument of a matmul. Its cotangent contains the operands of wgrad: x and dy.

    Attributes:
        owner: The options of the `Split` that made the trace.
        jaxpr: Jaxpr of the stage. Its inputs are the arrays that the stage closes over, params, x and extra.
        consts: Arrays that the stage closes over. A tracer is replaced by None and counts as data.
        trees: Structures of the arguments and results.
        delayed: For each leaf of params, True if wgrad computes its gradient.
        early: For each leaf of params, True if dgrad computes its gradient.
        exact: True if a gradient must pass through the casts between a parameter and its matmul.
        block: The jaxpr with its delayed matmuls.
        given: Maps params to the additional arguments of each matmul.
        y_avals: Shape and dtype of each leaf of y.
        float_y: For each leaf of y, True if it has a gradient.
        policy: Policy of `jax.checkpoint` that selects the recomputed operations; None if nothing is recomputed.
        mesh: Mesh of the arrays; may be empty.
        noisy: The stage with its callbacks, which are removed from `jaxpr`; None if it has no callbacks.
        avals: Candidates for residuals: the leaves of the vjp, then the other operands of the matmuls, such as group sizes.
        keep: For each leaf of the vjp, its index in `avals`, or None if it is recomputed from params.
        extras: Indices in `avals` of the other operands of the matmuls.
        for_dgrad: Indices in `avals` of the residuals that only dgrad reads.
        for_wgrad: Indices in `avals` of the residuals that wgrad reads.
        taps_from: For each leaf of the taps' cotangents, its index in the stash, or None if wgrad recomputes it.
        stashed: For each array of the stash, its index among the leaves of the taps' cotangents.
    """

    owner: Options
    jaxpr: core.Jaxpr
    consts: list[Any]
    trees: Trees
    delayed: tuple[bool, ...]
    early: tuple[bool, ...]
    exact: bool
    block: find.Block
    given: Callable[[PyTree], Sequence[Any]]
    y_avals: list[Aval]
    float_y: list[bool]
    policy: Callable[..., bool] | None
    mesh: jax.sharding.AbstractMesh
    noisy: core.Jaxpr | None
    avals: list[Aval] = field(default_factory=list)
    keep: list[int | None] = field(default_factory=list)
    extras: list[int] = field(default_factory=list)
    for_dgrad: list[int] = field(default_factory=list)
    for_wgrad: list[int] = field(default_factory=list)
    taps_from: list[int | None] = field(default_factory=list)
    stashed: list[int] = field(default_factory=list)

    def parts(self, inputs: Sequence[Any]) -> tuple[list[Any], ...]:
        """Splits the inputs of `jaxpr` by their origin.

        Args:
            inputs: One value per input of `jaxpr`.

        Returns:
            Four lists: the arrays that the stage closes over, the leaves of params, of x and of extra.
        """
        ends = np.cumsum([0, len(self.consts), len(self.delayed), self.trees.x.num_leaves, self.trees.extra.num_leaves])
        return tuple(list(inputs[start:end]) for start, end in pairwise(ends))

    def blanks(self) -> list[Array]:
        """Returns a value for each input of `jaxpr`: its array if the stage closes over it, otherwise new zeros."""
        consts = [*self.consts, *[None] * (len(self.jaxpr.invars) - len(self.consts))]
        return [replay.zeros(aval_of(v)) if c is None else c for v, c in zip(self.jaxpr.invars, consts, strict=True)]


def make_trace(owner: Options, closed: core.ClosedJaxpr, trees: Trees, args: tuple[PyTree, PyTree, PyTree]) -> StageTrace:
    """Finds the matmuls of a traced stage and decides which arrays are saved. Traces dgrad, and runs nothing.

    Args:
        owner: The stage and the arguments of `split_backward`.
        closed: Jaxpr of the stage. Its inputs are the leaves of params, x and extra.
        trees: Structures of the arguments and results.
        args: (params, x, extra). Only gradients of `owner.stage.params(params)`, the first leaves of params, can be delayed.

    Returns:
        The trace, with all fields.

    Raises:
        SplitError: If a pattern of `delay` matches no parameter, a parameter in `delay` is used other than as the weight of a
            matmul, the stage reads the result of a callback, or a function with a custom derivative has a callback.
    """
    jaxpr, delay, paths = closed.jaxpr, owner.delay, leaf_names(owner.stage.params(args[0]))
    consts = [None if isinstance(const, Tracer) else const for const in closed.consts]
    # Tracers that the stage closes over become inputs.
    noisy = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info)
    whole = replay.without_callbacks(noisy)
    _check_callbacks(whole)
    num_params, num_y, num_others = trees.params.num_leaves, trees.y.num_leaves, len(jaxpr.invars) - trees.params.num_leaves
    wanted = [i < num_y for i in range(len(whole.outvars))]
    floating = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.in_avals[:num_params]]
    delayed = [
        f and (delay is None or any(fnmatchcase(path, p) for p in delay)) for path, f in zip(paths, floating, strict=False)
    ]
    delayed += [False] * (num_params - len(paths))
    for pattern in delay or ():
        if not any(fnmatchcase(path, pattern) for path in paths):
            names = f"{', '.join(paths[:8])}{' ...' * (len(paths) > 8)}"
            raise SplitError(f"`delay` has {pattern!r}, which matches no parameter: must match one of {names}", field="delay")
    while True:
        params = [None] * len(consts) + [i if late else None for i, late in enumerate(delayed)] + [None] * num_others
        data = [const is None for const in consts] + [not late for late in delayed] + [True] * num_others
        found = find.find(whole, wanted, params, data)
        if not found.stray:
            break
        if delay is not None:
            i, by = next(iter(found.stray.items()))
            raise SplitError(
                f"parameter {paths[i]} reaches the output through {by}, not only as the weight of a matmul, so its gradient "
                f"cannot be delayed; remove it from delay={list(delay)} to compute its gradient in dgrad",
                path=paths[i],
                field="delay",
            )
        for i in found.stray:
            delayed[i] = False
    sites = found.block.all_sites()
    weights = frozenset[int]().union(*(site.params for site in sites))
    late = tuple(i in weights for i in range(num_params))
    # A jax.checkpoint in the stage decides which arrays are saved. A policy cannot save complex numbers.
    is_complex = any(jnp.issubdtype(getattr(aval, "dtype", jnp.float32), jnp.complexfloating) for aval in replay.avals(whole))
    recomputes = owner.recompute != "nothing" and not is_complex and not replay.holds(whole, replay.CHECKPOINTS)
    bound = owner.stage.bind(sites, paths, *args)
    found.block.replace(dict(zip(sites, bound.sites, strict=True)))
    again = frozenset(site.computed_as() for site in bound.sites if owner.recompute == "wide" and site.is_wide)
    trace = StageTrace(
        owner,
        whole,
        consts,
        trees,
        delayed=late,
        early=tuple(f and d and not is_late for f, d, is_late in zip(floating, bound.differentiated, late, strict=True)),
        exact=not all(site.moved for site in sites),
        block=found.block,
        given=bound.given,
        y_avals=list(closed.out_avals[:num_y]),
        float_y=[jnp.issubdtype(aval.dtype, jnp.floating) for aval in closed.out_avals[:num_y]],
        policy=partial(_keeps, again) if recomputes else None,
        mesh=jax.sharding.get_abstract_mesh(),
        noisy=None if noisy is whole else noisy,
    )
    costs = zip(bound.sites, _sort_by_lifetime(trace), strict=True)
    keeping = {site: site.keeping_x() for site, is_larger in costs if is_larger}
    if any(kept is not site for site, kept in keeping.items()):
        found.block.replace(keeping)
        _sort_by_lifetime(trace)
    return trace


def _check_callbacks(jaxpr: core.Jaxpr) -> None:
    """Raises SplitError if dgrad or wgrad would run a callback again, on other values."""
    if replay.holds(jaxpr, replay.CALLBACKS):
        raise SplitError(
            "the stage reads the result of an io_callback, or has a callback in a custom_jvp or custom_vjp function: a "
            "callback must return nothing and be outside of such functions; use jax.pure_callback to compute values"
        )


def run_callbacks(trace: StageTrace, inputs: Sequence[Array]) -> None:
    """Runs the stage again with its callbacks, and drops its results. Does nothing if it has no callbacks.

    Called while forward is traced: XLA removes the other operations, or merges them with the operations of `vjp`.

    Args:
        trace: The trace.
        inputs: Inputs of `trace.jaxpr`.
    """
    if trace.noisy is not None:
        core.jaxpr_as_fun(core.ClosedJaxpr(trace.noisy, ()))(*inputs)


def vjp(trace: StageTrace, inputs: Sequence[Array]):
    """Runs the stage with taps, and takes its vjp with respect to x, early parameters and taps. Does not run callbacks.

    Args:
        trace: The trace.
        inputs: Inputs of `trace.jaxpr`.

    Returns:
        Four values: the leaves of y and aux; the operands of the matmuls other than data and weight; the leaves of the vjp
        function, which are its residuals; and the tree structure of the vjp function.
    """
    closed_over, params, x, extra = trace.parts(inputs)
    early = [leaf for leaf, is_early in zip(params, trace.early, strict=True) if is_early]

    def run(x, early, taps):
        given = iter(early)
        whole = [next(given) if is_early else leaf for leaf, is_early in zip(params, trace.early, strict=True)]
        taps = list(zip(taps, trace.given(jax.tree.unflatten(trace.trees.params, whole)), strict=True))
        out, extras = find.run_forward(trace.block, (), [*closed_over, *whole, *x, *extra], taps, _multiply)
        return [v for v, f in zip(out, trace.float_y, strict=False) if f], (out, extras)

    if trace.policy:
        run = jax.checkpoint(run, policy=trace.policy, prevent_cse=False)
    _, vjp, (y, extras) = jax.vjp(run, x, early, [site.tap() for site in trace.block.all_sites()], has_aux=True)
    leaves, tree = jax.tree.flatten(vjp)
    return y, jax.tree.leaves(extras), leaves, tree


def _multiply(site: DelayedProduct, x: Array, w: Array, extra: Sequence[Array], tap: tuple[Any, Any]) -> Array:
    return site.multiply(x, w, extra, *tap)


def _keeps(again: frozenset[Any], primitive: core.Primitive, *avals: Aval, **params: Any) -> bool:
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


def dgrad_leaves(trace: StageTrace, params: Sequence[Array], kept: Mapping[int, Array], dy: Sequence[Array]):
    """Runs the backward pass of `vjp`.

    Runs the forward pass on zeros, to get the structure of the vjp function and the arrays that depend only on parameters. The
    compiler removes the rest of the forward pass.

    Args:
        trace: The trace.
        params: Leaves of the parameters.
        kept: Residuals by their index in `trace.avals`. Missing residuals are replaced by zeros: the results that depend on
            them are wrong.
        dy: Leaves of dy, also for leaves of y without a gradient, which are ignored.

    Returns:
        Three lists: the leaves of dx, the gradients of the early parameters in the order of params, and the leaves of the
        cotangents of the taps, in the order of the matmuls.
    """
    closed_over, _, x, extra = trace.parts(trace.blanks())
    _, _, fresh, tree = vjp(trace, [*closed_over, *params, *x, *extra])
    leaves = [
        leaf if i is None else kept[i] if i in kept else replay.zeros(trace.avals[i])
        for leaf, i in zip(fresh, trace.keep, strict=True)
    ]
    dx, early, taps = jax.tree.unflatten(tree, leaves)([leaf for leaf, f in zip(dy, trace.float_y, strict=True) if f])
    return dx, early, jax.tree.leaves(taps)


def _sort_by_lifetime(trace: StageTrace) -> list[bool]:
    """Fills in the fields of a trace that describe the saved arrays.

    Returns:
        For each matmul, True if wgrad recomputes the first leaf of its tap from residuals that dgrad does not read and that are
        larger than the leaf.
    """
    trace.taps_from = []
    inputs = trace.blanks()
    _, params, x, extra = trace.parts(inputs)

    def forward(*inputs):
        _, extras, leaves, _ = vjp(trace, inputs)
        return leaves, extras

    closed, (leaves, _) = jax.make_jaxpr(forward, return_shape=True)(*inputs)
    _check_callbacks(closed.jaxpr)  # Includes the forward rules of custom_vjp functions, unlike the trace of the stage.
    outs = closed.jaxpr.outvars
    is_data = [const is None for const in trace.consts] + [False] * len(params) + [True] * (len(x) + len(extra))
    varies = replay.depends(closed.jaxpr, is_data)
    # The same array can occur several times, e.g. as the input of three projections.
    first = {v: i for i, v in reversed(list(enumerate(outs))) if not replay.is_literal(v)}
    same = [i if replay.is_literal(v) else first[v] for i, v in enumerate(outs)]
    trace.avals = [aval_of(v) for v in outs]
    trace.keep = [same[i] if varies[i] else None for i in range(len(leaves))]
    trace.extras = same[len(leaves) :]

    places = sorted({i for i in trace.keep if i is not None})

    def dgrad(kept, dy, params):
        return dgrad_leaves(trace, params, dict(zip(places, kept, strict=True)), dy)

    kept, dy = [replay.zeros(trace.avals[i]) for i in places], [replay.zeros(aval) for aval in trace.y_avals]
    closed, (dx, early, taps) = jax.make_jaxpr(dgrad, return_shape=True)(kept, dy, params)
    _check_callbacks(closed.jaxpr)
    jaxpr, num_gradients = closed.jaxpr, len(dx) + len(early)

    def sources(outputs: Sequence[int]) -> tuple[set[int], bool]:
        """Returns the residuals that `outputs` depend on, and True if only cheap primitives compute them, without dy."""
        wanted = [i in outputs for i in range(len(jaxpr.outvars))]
        given, primitives = replay.needs(jaxpr, wanted, [i < len(places) + len(dy) for i in range(len(jaxpr.invars))])
        from_dy = any(given[len(places) : len(places) + len(dy)])
        return {place for place, flag in zip(places, given, strict=False) if flag}, primitives <= _CHEAP and not from_dy

    stash: dict[Any, int] = {}  # Index of the first tap of each stashed array.
    by_tap: list[set[int]] = []
    for tap, v in enumerate(jaxpr.outvars[num_gradients:]):
        needed, is_cheap = sources([num_gradients + tap])
        by_tap.append(needed if is_cheap else set())
        key = tap if replay.is_literal(v) else v
        if not is_cheap:
            stash.setdefault(key, tap)
        trace.taps_from.append(None if is_cheap else list(stash).index(key))
    trace.stashed = list(stash.values())
    for_wgrad = set(trace.extras).union(*by_tap)
    for_dgrad, _ = sources([*range(num_gradients), *(num_gradients + tap for tap in trace.stashed)])
    trace.for_wgrad, trace.for_dgrad = sorted(for_wgrad), sorted(for_dgrad - for_wgrad)
    firsts = np.cumsum([0, *(len(jax.tree.leaves(site.tap())) for site in trace.block.all_sites())])[:-1]

    def nbytes(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize

    return [sum(nbytes(trace.avals[i]) for i in by_tap[tap] - for_dgrad) > nbytes(taps[tap]) for tap in firsts]
