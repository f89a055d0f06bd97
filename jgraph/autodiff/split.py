"""`split_backward`: a stage's backward pass as dgrad now and wgrad later.

The stage is traced once for each set of shapes, its products get taps (`linear.py`), and one `jax.vjp` with respect to input,
undelayed parameters and taps is both: what it makes from the residuals and dy is dgrad, what comes out of the taps is for
wgrad. `residuals.py` says what is kept how long.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jgraph.autodiff import find, replay
from jgraph.autodiff.linear import OwnProducts
from jgraph.autodiff.residuals import Plan, Recompute, dgrad_leaves, is_float, make_plan, run_callbacks, vjp
from jgraph.errors import SplitError, check_choice
from jgraph.scopes import scope
from jgraph.tree import leaf_names, path_name

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["dgrad", "wgrad"], meta_fields=["plan"])
@dataclass(frozen=True)
class Residuals:
    """The arrays that forward keeps for dgrad and wgrad.

    Attributes:
        dgrad: the pool forward -> dgrad.
        wgrad: the pool forward -> wgrad.
        plan: the trace that they belong to.
    """

    dgrad: tuple[Any, ...]
    wgrad: tuple[Any, ...]
    plan: Plan

    def after_dgrad(self) -> "Residuals":
        """Returns the residuals that wgrad still needs: the pool forward -> dgrad is given up."""
        return Residuals((), self.wgrad, self.plan)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["plan"])
@dataclass(frozen=True)
class Stash:
    """The arrays that dgrad keeps for wgrad: the pool dgrad -> wgrad."""

    arrays: tuple[Any, ...]
    plan: Plan


@dataclass(frozen=True)
class Spec:
    """Shapes of everything that passes between forward, dgrad and wgrad, as trees of `jax.ShapeDtypeStruct`.

    Attributes:
        y: the stage's output.
        residuals: `.dgrad` live from forward to dgrad, `.wgrad` from forward to wgrad.
        stash: live from dgrad to wgrad.
        delayed: paths of the parameters whose gradients come from wgrad.
        aux: what the stage returns besides y, with `has_aux`.
    """

    y: Tree
    residuals: Residuals
    stash: Stash
    delayed: tuple[str, ...]
    aux: Tree = None

    def nbytes(self) -> dict[str, int]:
        """Returns the bytes of each pool for one microbatch, by the names in `jgraph.schedule.POOLS`."""
        pools = {
            "forward_dgrad": self.residuals.dgrad,
            "forward_wgrad": self.residuals.wgrad,
            "stash": self.stash.arrays,
        }
        return {name: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for name, leaves in pools.items()}


def split_backward(
    stage_fn: Callable[..., Tree] | OwnProducts,
    *,
    delay: Sequence[str] | None = None,
    recompute: Recompute = "elementwise",
    has_aux: bool = False,
) -> "Split":
    """Splits a function's backward pass into dgrad (gradients of inputs, now) and wgrad (of weights, any time later).

    As `jax.vjp`, but in two calls, and no FLOP is done twice.

    >>> split = jgraph.split_backward(lambda params, x: x @ params["w"] + params["b"])
    >>> params, x = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, jnp.ones((4, 2))
    >>> y, residuals = split.forward(params, x)
    >>> dx, early, stash = split.dgrad(params, residuals, jnp.ones_like(y))
    >>> late = split.wgrad(params, residuals, stash)  # any time later
    >>> jax.tree.map(jnp.shape, split.merge(early, late))
    {'b': (3,), 'w': (2, 3)}

    Args:
        stage_fn: a pure `stage_fn(params, x, *extra) -> y` of trees of real arrays; x is floating. `extra` (tokens, masks, a
            dropout key) is not differentiated. Callbacks that return nothing, as `jax.debug.print`, run once a microbatch, in
            forward. Arrays may be spread over automatic axes of a mesh, not over explicit ones. Or `jgraph.fp8(stage_fn)`, in
            which params is `(params, state, weights)`; the gradient of state is the state after the call, weights have none.
        delay: patterns (`fnmatch`) of parameter paths such as `blocks/*/kernel`, whose gradients must come from wgrad. None
            delays every parameter that acts only as the weight of matrix products, `ragged_dot` or convolutions; the gradients
            of the others (norm scales, biases, embeddings) come from dgrad.
        recompute: `elementwise` does elementwise work again in the backward, and keeps inputs, products, attention and
            reductions. `wide` also does products again that give at least four times as many numbers as the data has, as
            an MLP's first. `nothing` keeps what `jax.vjp` keeps: five arrays for a GELU instead of one. In a stage that uses
            `jax.checkpoint`, that alone decides.
        has_aux: whether `stage_fn` returns `(y, aux)`, as with `jax.vjp`. `forward` then gives aux as its third result. It is
            not differentiated: dgrad and wgrad cost no more, and nothing is kept for it.

    Returns:
        Split: `forward`, `dgrad`, `wgrad` and `accumulate`, pure and jittable.

    Raises:
        ConfigError: `recompute` is not one of its choices.
        SplitError: an argument has another type; or, when it is used: a parameter in `delay` reaches the output by another way
            than as the weight of a product; an array is complex or spread over explicit axes; a callback's result is read;
            `has_aux`, and no pair.
    """
    check_choice("recompute", recompute, get_args(Recompute))
    if not callable(stage_fn) and not isinstance(stage_fn, OwnProducts):
        raise SplitError(f"`stage_fn` is {stage_fn!r}: must be a function stage_fn(params, x, *extra) -> y", field="stage_fn")
    patterns = (delay,) if isinstance(delay, str) else delay
    if patterns is not None:
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise SplitError(f"`delay` is {delay!r}: must be patterns of parameter paths, or None", field="delay")
        patterns = tuple(patterns)
    return Split(stage_fn, has_aux, delay=patterns, recompute=recompute)


class Split:
    """A stage's forward and the two parts of its backward, as pure functions. Made by `split_backward`."""

    def __init__(self, stage_fn: Callable[..., Tree] | OwnProducts, has_aux: bool, **options: Any):
        self._own_products = stage_fn if isinstance(stage_fn, OwnProducts) else None
        self._stage: Callable[..., Tree] = stage_fn.fn if isinstance(stage_fn, OwnProducts) else stage_fn
        self._has_aux, self._options = has_aux, options
        self._plans: dict[Any, Plan] = {}
        traced = self._own_products.traced if self._own_products else lambda part: part
        # Jitted, so that outside of a jit too what is not needed is not computed.
        self._forward = jax.jit(traced(replay.exact_products(self._run_forward)))
        self._dgrad = jax.jit(traced(_run_dgrad))
        self._wgrad = jax.jit(traced(_run_wgrad))
        self._accumulate = jax.jit(traced(_run_accumulate))

    def __repr__(self) -> str:
        options = self._options
        which = "every product" + (f" of {', '.join(options['delay'])}" if options["delay"] is not None else "")
        return f"Split({getattr(self._stage, '__name__', self._stage)}: {which} delayed, recompute={options['recompute']!r})"

    def forward(self, params: Tree, x: Tree, *extra: Tree) -> tuple[Any, ...]:
        """Returns y, the residuals (the arrays that this microbatch's backward reads), and with `has_aux` the stage's aux."""
        return self._forward(params, x, *extra)

    def dgrad(self, params: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Tree, Stash]:
        """Returns the gradient of the input, the gradients of parameters that are not delayed, and the stash for wgrad.

        Args:
            params, residuals: those of this microbatch's `forward`.
            dy: gradient of y, a tree as y.

        Returns:
            (dx, early, stash): dx is a tree as x; early is a tree as params, None for the delayed ones and for weights in FP8.
        """
        plan = self._own(residuals, "residuals")
        leaves, tree = jax.tree.flatten(dy)
        if tree != plan.trees[3]:
            raise SplitError(f"dy has the structure {tree}, but y has {plan.trees[3]}; give one gradient for each leaf of y")
        for leaf, aval, floating in zip(leaves, plan.y_avals, plan.float_y, strict=True):
            if floating and jnp.shape(leaf) != aval.shape:
                raise SplitError(f"dy has a leaf of shape {jnp.shape(leaf)} where y has {aval.shape}; the shapes must agree")
        return self._dgrad(params, residuals, dy)

    def wgrad(self, params: Tree, residuals: Residuals, stash: Stash) -> Tree:
        """Returns the gradients of the delayed parameters in their dtypes: a tree as params, None for the others.

        Reads only the residuals that `Residuals.after_dgrad` keeps.
        """
        self._match(residuals, stash)
        return self._wgrad(params, residuals.after_dgrad(), stash)

    def accumulate(self, main_grad: Tree, params: Tree, residuals: Residuals, stash: Stash) -> Tree:
        """Adds `wgrad` to `main_grad` in float32, inside the products; returns the sum. In place where `main_grad` is donated.

        Args:
            main_grad: a tree as params; delayed leaves are float32, other leaves are returned as they are. None may stand in
                the place of a part that has no delayed leaf.
            params, residuals, stash: as in `wgrad`.
        """
        self._match(residuals, stash)
        return self._accumulate(main_grad, params, residuals.after_dgrad(), stash)

    @staticmethod
    def merge(early: Tree, late: Tree) -> Tree:
        """Returns the gradients of all parameters from those of `dgrad` and those of `wgrad`."""
        return jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=lambda leaf: leaf is None)

    def spec(self, params: Tree, x: Tree, *extra: Tree) -> Spec:
        """Returns the shapes of the arrays that pass between the parts, from arrays or `jax.ShapeDtypeStruct`. Runs nothing."""
        y, residuals, *aux = jax.eval_shape(self.forward, params, x, *extra)
        _, _, stash = jax.eval_shape(self.dgrad, params, residuals, y)
        paths = leaf_names(self._params(params))
        delayed = tuple(path for path, late in zip(paths, residuals.plan.delayed, strict=False) if late)
        return Spec(y, residuals, stash, delayed, *aux)

    def _params(self, given: Tree) -> Tree:
        return self._own_products.params(given) if self._own_products else given

    def _own(self, held: Residuals | Stash, what: str) -> Plan:
        if held.plan.owner is not self:
            raise SplitError(f"the {what} come from another split_backward; use them with the one that made them")
        for leaf in jax.tree.leaves(held):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
                raise SplitError(
                    f"the {what} were donated to an earlier call and are gone; use them once, or do not donate them"
                )
        return held.plan

    def _match(self, residuals: Residuals, stash: Stash) -> None:
        self._own(residuals.after_dgrad(), "residuals")
        self._own(stash, "stash")
        if residuals.plan is not stash.plan:
            raise SplitError("the stash belongs to other residuals (other shapes); pass those that dgrad was given")

    @scope("forward")
    def _run_forward(self, params: Tree, x: Tree, *extra: Tree) -> tuple[Any, ...]:
        # What is traced here is traced again by dgrad, with zeros: those must be of the same types, mesh included.
        with jax.sharding.use_abstract_mesh(replay.mesh_of(jax.tree.leaves((params, x, extra)))):
            plan, traced = self._plan(params, x, extra)
            flat = jax.tree.leaves(params), jax.tree.leaves(x), jax.tree.leaves(extra)
            out, extras, leaves, _ = vjp(plan, *flat, traced)
            run_callbacks(plan, *flat, traced)
        candidates, num_y = [*leaves, *extras], len(plan.float_y)
        residuals = Residuals(tuple(candidates[i] for i in plan.for_dgrad), tuple(candidates[i] for i in plan.for_wgrad), plan)
        y, aux = jax.tree.unflatten(plan.trees[3], out[:num_y]), jax.tree.unflatten(plan.trees[4], out[num_y:])
        return (y, residuals, aux) if self._has_aux else (y, residuals)

    def _plan(self, params: Tree, x: Tree, extra: tuple[Tree, ...]) -> tuple[Plan, list[Any]]:
        """Returns the plan for these shapes, and the tracers that the stage closes over this time."""
        leaves, tree = jax.tree.flatten((params, x, extra))
        key = (tree, jax.sharding.get_abstract_mesh(), *map(jax.typeof, leaves))
        plan = self._plans.get(key)
        if plan is not None and all(const is not None for const in plan.consts):
            return plan, []
        _check_leaves(params, x)

        def stage(params, x, *extra):
            return self._stage(self._params(params), x, *extra)

        closed, y = jax.make_jaxpr(stage, return_shape=True)(params, x, *extra)
        if self._has_aux and not (isinstance(y, tuple) and len(y) == 2):
            raise SplitError(f"`stage_fn` returns {type(y).__name__}: must return (y, aux) with `has_aux`", field="has_aux")
        y, aux = y if self._has_aux else (y, ())
        _check_real(y, "y")
        if any(map(replay.spread_over, replay.values(closed.jaxpr))):
            raise SplitError(f"the stage computes with arrays on explicit axes of a mesh: {_AUTO}")
        if plan is None:
            trees = tuple(map(jax.tree.structure, (params, x, extra, y, aux)))
            own, names = self._own_products, leaf_names(self._params(params))
            bind = partial(own.bind, names=names, given=params, x=x, extra=extra) if own else None
            plan = self._plans[key] = make_plan(self, closed, trees, names, bind=bind, **self._options)
        return plan, [const for const, known in zip(closed.consts, plan.consts, strict=True) if known is None]


_AUTO = "must be automatic ones, jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...)), or under jax.shard_map"


def _check_leaves(params: Tree, x: Tree) -> None:
    """Raises SplitError where a leaf cannot be differentiated."""
    for what, tree in (("params", params), ("x", x)):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = path_name(path)
            if axes := replay.spread_over(jax.typeof(leaf)):
                raise SplitError(f"{_named(what, name)} lies on the explicit axes {axes} of a mesh: {_AUTO}", path=name)
            if what == "x" and not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise SplitError(
                    f"{_named(what, name)} is {jnp.result_type(leaf)}; only floating inputs are differentiated: pass it as "
                    f"an extra argument after x",
                    path=name,
                )
        _check_real(tree, what)


def _check_real(tree: Tree, what: str) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
            name, dtype = path_name(path), jnp.result_type(leaf)
            raise SplitError(
                f"{_named(what, name)} is {dtype}; params, x and y must be real: pass its real and imaginary parts", path=name
            )


def _named(what: str, name: str) -> str:
    return f"{what}/{name}" if name else what


def _kept(residuals: Residuals) -> dict[int, Any]:
    """Returns the residuals by place; after dgrad only those that wgrad needs."""
    plan = residuals.plan
    held = dict(zip(plan.for_wgrad, residuals.wgrad, strict=True))
    return held | (dict(zip(plan.for_dgrad, residuals.dgrad, strict=True)) if residuals.dgrad else {})


@scope("dgrad")
def _run_dgrad(params: Tree, residuals: Residuals, dy: Tree) -> tuple[Tree, Tree, Stash]:
    plan = residuals.plan
    flat = jax.tree.leaves(params)
    with jax.sharding.use_abstract_mesh(plan.mesh):
        dx, early, taps = dgrad_leaves(plan, flat, _kept(residuals), jax.tree.leaves(dy))
    given = iter(early)
    gradients = [
        next(given) if is_early else None if is_float(leaf) else np.zeros(jnp.shape(leaf), jax.dtypes.float0)
        for leaf, is_early in zip(flat, plan.early, strict=True)
    ]
    stash = Stash(tuple(taps[i] for i in plan.stashed), plan)
    return jax.tree.unflatten(plan.trees[1], dx), jax.tree.unflatten(plan.trees[0], gradients), stash


@scope("wgrad")
def _run_wgrad(params: Tree, residuals: Residuals, stash: Stash) -> Tree:
    plan = residuals.plan
    gradients = iter(_late(plan, jax.tree.leaves(params), residuals, stash))
    return jax.tree.unflatten(plan.trees[0], [next(gradients) if late else None for late in plan.delayed])


@scope("wgrad")
def _run_accumulate(main_grad: Tree, params: Tree, residuals: Residuals, stash: Stash) -> Tree:
    plan = residuals.plan
    # Where the gradient must go through a cast, it comes in the parameter's dtype and is widened only then.
    dtype = None if plan.exact else jnp.float32
    gradients = iter(_late(plan, jax.tree.leaves(params), residuals, stash, dtype, adding=True))
    late = jax.tree.unflatten(plan.trees[0], [next(gradients) if late else None for late in plan.delayed])

    def added(total: Any, late: Any) -> Any:
        if callable(late) and total is not None:
            return late(total)
        if isinstance(late, jax.Array) and total is not None:
            return total + late.astype(total.dtype)
        if jax.tree.leaves(late):
            raise SplitError("`main_grad` is None for a delayed parameter: must be a float32 sum for each", field="main_grad")
        return total

    return jax.tree.map(added, main_grad, late, is_leaf=lambda leaf: leaf is None)


def _late(
    plan: Plan, params: list[Any], residuals: Residuals, stash: Stash, dtype: Any = None, *, adding: bool = False
) -> list[Any]:
    """Gradients of the delayed parameters, in order; of `dtype`, or else of the parameters' dtypes.

    Args:
        adding: whether a function stands in the place of a gradient that a kernel adds onto a sum; it takes the sum.
    """
    kept = _kept(residuals)
    again: list[Any] = []
    if None in plan.taps_from:
        # Of this dgrad only those outputs of the taps are used that are made of residuals alone.
        with jax.sharding.use_abstract_mesh(plan.mesh):
            dy = [replay.zeros(aval) for aval in plan.y_avals]
            again = dgrad_leaves(plan, params, kept, dy)[2]
    delayed = [leaf.astype(dtype or leaf.dtype) for leaf, late in zip(params, plan.delayed, strict=True) if late]

    def weights(delayed):
        given = iter(delayed)
        inputs: list[Any] = [find.MISSING] * len(plan.jaxpr.invars)
        for i, const in enumerate(plan.consts):
            inputs[i] = find.MISSING if const is None else const
        for i, late in enumerate(plan.delayed):
            if late:
                inputs[len(plan.consts) + i] = next(given)
        return find.run_weights(plan.block, (), inputs, keep_dtype=not plan.exact)[1]

    products, pull_back = jax.vjp(weights, delayed)
    sites, extras, cotangents = plan.block.all_sites(), iter(kept[i] for i in plan.extras), []
    leaves = [again[i] if place is None else stash.arrays[place] for i, place in enumerate(plan.taps_from)]
    taps = jax.tree.unflatten(jax.tree.structure([site.tap() for site in sites]), leaves)
    # By the place of the parameter, where it is the weight as it is, and of that product alone.
    adders: dict[int, Callable[[Any], Any]] = {}
    as_they_are = weights(delayed) if adding else [None] * len(sites)
    for site, w, tap, own in zip(sites, products, taps, as_they_are, strict=True):
        extra = [next(extras) for _ in site.eqn.invars[2:]]
        place = next((i for i, leaf in enumerate(delayed) if leaf is own), None)
        if place is not None and site.adds and sum(bool(site.params & other.params) for other in sites) == 1:
            adders[place] = partial(site.add_weight_gradient, tap, extra)
            cotangents.append(replay.zeros(jax.typeof(w)))
        else:
            cotangents.append(site.weight_gradient(tap, extra, w.dtype))
    return [adders.get(i, gradient) for i, gradient in enumerate(pull_back(cotangents)[0])]
