"""A traced function of parameters and data. `Traced.run` computes the function with other matmuls.

A value is *data* if it depends on an argument that is data, or on the carry of a scan. A *site* is a matmul of data and a
weight that is computed from parameters, without data. If every value that is computed from a parameter without data becomes the
weight of a site, the gradient of the parameter can be computed at any time after the gradients of data: it is the sum of the
weight gradients, passed back through casts, reshapes and slices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import islice, repeat
from typing import Final, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.replay import Atom, Aval, Environment, Reader, aval_of
from jgraph.autodiff.view import View, moved, view_of
from jgraph.kernels import grouped
from jgraph.tree import leaf_names
from jgraph.types import Params, Tree

GROUPED = "grouped product"

# Indices of the operands that may be the weight, by the name of the matmul. Other operands, such as group sizes, are saved.
_PRODUCTS = {"dot_general": (0, 1), "conv_general_dilated": (1,), "ragged_dot": (1,), "ragged_dot_general": (1,), GROUPED: (1,)}

# Primitives that change only shape or dtype. A float32 gradient passes back through them without rounding.
# fmt: off
_MOVES = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "concatenate",
    "copy", "copy_p", "name", "sharding_constraint", "optimization_barrier", "expand_dims", "rev", "pvary", "pcast", "split",
})
# fmt: on

Given = TypeVar("Given")
"""The additional arguments of a site, a tree of arrays."""
Multiply: TypeAlias = Callable[["Site", Array, Array, Sequence[Array], Given], Array]
"""Computes a matmul from (site, x, w, other operands, additional arguments)."""


class Missing(Enum):
    """The type of `MISSING`."""

    MISSING = "missing"


MISSING: Final = Missing.MISSING
"""A value that is not known: one that depends on data, or an array that the function closed over in an earlier call."""
Known: TypeAlias = Array | Missing
"""A value that may be `MISSING`."""


@dataclass(frozen=True, eq=False)
class Site:
    """A matmul of data x and a weight w in a trace."""

    eqn: core.JaxprEqn  # a `dot_general`, convolution, ragged matmul or grouped matmul
    weight: int  # index of the operand that is the weight, 0 or 1
    lead: tuple[int, ...]  # lengths of the scans around the equation, outermost first
    params: frozenset[int]  # numbers of the parameters that the weight is computed from
    moved: bool  # only casts, reshapes, slices and other `_MOVES` compute the weight
    view: View | None  # place of the weight [*lead, ...] in its parameter; None if it is not the whole parameter

    @property
    def data(self) -> int:
        return 1 - self.weight

    @property
    def name(self) -> str:
        return _name_of(self.eqn)

    # The avals are those inside the scans, without the axes `lead`.
    @property
    def x_aval(self) -> Aval:
        return aval_of(self.eqn.invars[self.data])

    @property
    def w_aval(self) -> Aval:
        return aval_of(self.eqn.invars[self.weight])

    @property
    def y_aval(self) -> Aval:
        return aval_of(self.eqn.outvars[0])

    def run(self, x: Array, w: Array, extra: Sequence[Array]) -> Array:
        """Computes the matmul. `extra` are the operands after the first two, such as group sizes."""
        operands = (x, w) if self.weight == 1 else (w, x)
        return replay.apply(self.eqn, (*operands, *extra))[0]


def _name_of(eqn: core.JaxprEqn) -> str:
    name = eqn.primitive.name
    if name in replay.CUSTOM and [inner.params.get("name") for inner in replay.body(eqn).eqns] == [grouped.DOT]:
        # A vmapped `grouped_dot` has an additional axis and is not a grouped matmul.
        return GROUPED if [aval_of(v).ndim for v in eqn.invars] == [2, 3, 1] else name
    return name


@dataclass
class Block:
    """A jaxpr, its sites, and the blocks of its jit, checkpoint and scan equations that read values from parameters."""

    jaxpr: core.Jaxpr
    # The keys are indices in `jaxpr.eqns`.
    sites: dict[int, Site] = field(default_factory=dict)
    calls: dict[int, "Block"] = field(default_factory=dict)

    def all_sites(self) -> list[Site]:
        """Returns the sites of this block and of its calls, in the order of the equations."""
        sites = []
        for i in sorted({**self.sites, **self.calls}):
            sites += [self.sites[i]] if i in self.sites else self.calls[i].all_sites()
        return sites


@dataclass(frozen=True)
class _Value:
    """The properties of a variable."""

    data: bool
    params: frozenset[int] = frozenset()  # numbers of the parameters that it is computed from
    moved: bool = True  # only primitives in `_MOVES` compute it from the parameters
    view: View | None = None  # its place in its parameter if it has all elements once, with the axes of enclosing scans first


_DATA, _CONSTANT = _Value(True), _Value(False)

_Extra: TypeAlias = tuple[Array, ...]
"""The operands of a matmul other than the data and the weight."""


def _mark(stray: dict[int, str], values: Sequence[_Value], by: str, wanted: Iterable[bool] = repeat(True)) -> None:
    # The first use of a parameter is kept.
    for value, is_wanted in zip(values, wanted, strict=False):
        for p in value.params if is_wanted and not value.data else ():
            stray.setdefault(p, by)


def _walk(
    stray: dict[int, str], block: Block, given: Mapping[core.Var, _Value], lead: tuple[int, ...], wanted: Sequence[bool]
) -> list[_Value]:
    """Classifies all variables of a block. Adds the sites to the block, and the stray parameters to `stray`."""
    jaxpr = block.jaxpr
    live, _ = replay.live_variables(jaxpr, wanted)
    env: Environment[_Value] = dict.fromkeys(jaxpr.constvars, _CONSTANT) | dict(given)

    def read(atom: Atom) -> _Value:
        return _CONSTANT if isinstance(atom, core.Literal) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        name = _name_of(eqn)
        values = [read(v) for v in eqn.invars]
        flags = [v in live for v in eqn.outvars]
        used = frozenset().union(*(v.params for v in values if not v.data and any(flags)))
        out = [_DATA] * len(eqn.outvars)
        if not used:
            out = [_Value(any(v.data for v in values))] * len(eqn.outvars)
        elif name in replay.JITS + replay.CHECKPOINTS:
            inner = block.calls[i] = Block(replay.body(eqn))
            out = _walk(stray, inner, dict(zip(inner.jaxpr.invars, values, strict=True)), lead, flags)
        elif not any(v.data for v in values):
            is_move = name in _MOVES
            view = moved(values[0].view, eqn) if is_move else None
            out = [_Value(False, used, is_move and all(v.moved for v in values), view)] * len(eqn.outvars)
        elif (weight := _weight(name, values)) is not None:
            value = values[weight]
            block.sites[i] = Site(eqn, weight, lead, value.params, value.moved, value.view)
        elif name == replay.SCAN:
            inner = block.calls[i] = Block(replay.body(eqn))
            consts, carry = replay.scan_counts(eqn)
            inside = replay.wanted_inside(eqn, flags)
            _mark(stray, values[consts : consts + carry], "the carry of a scan", inside)
            fixed = [replace(value, view=None) for value in values[:consts]]
            entering = [*fixed, *[_DATA] * carry, *values[consts + carry :]]
            entering = dict(zip(inner.jaxpr.invars, entering, strict=True))
            stacked = _walk(stray, inner, entering, (*lead, eqn.params["length"]), inside)
            _mark(stray, stacked, "the output of a scan", inside)
        else:
            _mark(stray, values, name)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _weight(name: str, values: Sequence[_Value]) -> int | None:
    """Returns the index of the operand that is a weight; None if there is none, or another operand has parameters."""
    for i in _PRODUCTS.get(name, ()):
        others = [v for j, v in enumerate(values) if j != i]
        if not values[i].data and values[i].params and values[1 - i].data and not any(v.params for v in others if not v.data):
            return i
    return None


@dataclass(frozen=True, eq=False)
class Traced:
    """The trace of a function `fn(params, *args)`, and its *sites*: matmuls of data and a weight that parameters compute."""

    jaxpr: core.Jaxpr  # its inputs are the leaves of params and args
    consts: Sequence[Known]  # the arrays that the function closes over; tracers and `MISSING` are data
    args: tuple[Tree, ...]  # shapes and dtypes of (params, *args)
    out: Tree  # shapes and dtypes of the result
    replaceable: Sequence[bool]  # for each leaf of params, False if it counts as data
    wanted: Sequence[bool]  # for each leaf of the result, False to ignore matmuls that only it needs

    @classmethod
    def from_function(cls, fn: Callable[..., Tree], params: Params, *args: Tree) -> Self:
        """Traces a function of arrays or shapes. JAX caches the trace by shapes and dtypes."""
        closed, out = jax.make_jaxpr(fn, return_shape=True)(params, *args)
        shapes = jax.tree.unflatten(jax.tree.structure((params, *args)), closed.in_avals)
        result = jax.tree.unflatten(jax.tree.structure(out), closed.out_avals)
        replaceable = [True] * len(jax.tree.leaves(params))
        return cls(closed.jaxpr, closed.consts, shapes, result, replaceable, [True] * len(closed.out_avals))

    @cached_property
    def names(self) -> list[str]:
        return leaf_names(self.args[0])

    @cached_property
    def known(self) -> list[Array]:
        """The arrays that the function closes over, without those that are `MISSING`."""
        return [const for const in self.consts if not isinstance(const, Missing)]

    @cached_property
    def _found(self) -> tuple[Block, dict[int, str]]:
        block = Block(self.jaxpr)
        variables = (*self.jaxpr.constvars, *self.jaxpr.invars)
        params = zip(jax.tree.leaves(self.args[0]), self.replaceable, strict=True)
        given = [_DATA if const is MISSING or isinstance(const, Tracer) else _CONSTANT for const in self.consts]
        given += [
            _Value(False, frozenset([i]), view=view_of(aval.shape)) if can_be else _DATA
            for i, (aval, can_be) in enumerate(params)
        ]
        given += [_DATA] * (len(variables) - len(given))
        stray: dict[int, str] = {}
        out = _walk(stray, block, dict(zip(variables, given, strict=True)), (), self.wanted)
        _mark(stray, out, "the output itself", self.wanted)
        return block, stray

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The matmuls, in the order of the equations. `Site.params` are indices of leaves of params."""
        return tuple(self._found[0].all_sites())

    @cached_property
    def is_weight(self) -> list[bool]:
        """For each leaf of params, True if the weight of a site is computed from it."""
        weights = frozenset[int]().union(*(site.params for site in self.sites))
        return [i in weights for i in range(len(self.replaceable))]

    @property
    def stray(self) -> dict[int, str]:
        """The first use of each parameter other than as the weight of a site, by the index of the parameter."""
        # A use is the name of a primitive, `the output itself`, `the carry of a scan` or `the output of a scan`.
        return self._found[1]

    def run(
        self, multiply: Multiply[Given], given: Sequence[Given | None], *args: Tree, consts: Sequence[Array] | None = None
    ) -> tuple[Tree, list[_Extra]]:
        """Computes the function with `multiply(site, x, w, extra, given)` in place of each site with a `given`."""
        # `args` are (params, *args), as traced. `given` has the additional arguments of each site, a tree of arrays with a
        # leading axis for each scan around the site; None keeps the matmul. The second result has the other operands of each
        # site, with the same leading axes. Without `consts`, those of the trace must be known.
        consts = self.known if consts is None else consts
        out, extra = _run(self._found[0], consts, jax.tree.leaves(args), given, multiply)
        return jax.tree.unflatten(jax.tree.structure(self.out), out), extra

    def weights(self, params: Sequence[Known], consts: Sequence[Known] | None = None, *, keep_dtype: bool) -> list[Known]:
        """Computes the weight of each site, with a leading axis for each scan around it, or `MISSING`."""
        # `params` are leaves, `MISSING` for a parameter that is data or not needed; so is a weight that is computed from it.
        # `keep_dtype` skips casts between floating dtypes, so that a weight has the dtype of its parameter.
        consts = [MISSING] * len(self.consts) if consts is None else consts
        args = [*params, *[MISSING] * (len(self.jaxpr.invars) - len(params))]
        return _weights(self._found[0], consts, args, keep_dtype)[1]


def _run(
    block: Block, consts: Sequence[Array], args: Sequence[Array], given: Sequence[Given | None], multiply: Multiply[Given]
) -> tuple[list[Array], list[_Extra]]:
    left = iter(given)
    extras = list[_Extra]()

    def evaluate(i: int, eqn: core.JaxprEqn, read: Reader[Array]) -> Sequence[Array]:
        values = [read(v) for v in eqn.invars]
        if i in block.sites:
            site = block.sites[i]
            own = next(left)
            extra = tuple(values[2:])
            x, w = values[site.data], values[site.weight]
            extras.append(extra)
            return [site.run(x, w, extra) if own is None else multiply(site, x, w, extra, own)]
        if i not in block.calls:
            return replay.apply(eqn, values)
        inner = block.calls[i]
        run = _run_scan if eqn.primitive.name == replay.SCAN else _run_call
        out, more = run(inner, eqn, values, list(islice(left, len(inner.all_sites()))), multiply)
        extras.extend(more)
        return out

    return replay.interpret(block.jaxpr, consts, args, evaluate), extras


def _run_call(
    inner: Block, eqn: core.JaxprEqn, values: Sequence[Array], given: Sequence[Given | None], multiply: Multiply[Given]
) -> tuple[list[Array], list[_Extra]]:
    def run(values: list[Array], given: Sequence[Given | None]) -> tuple[list[Array], list[_Extra]]:
        return _run(inner, replay.body_consts(eqn), values, given, multiply)

    if eqn.primitive.name in replay.CHECKPOINTS:
        run = jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
    return run(list(values), given)


def _run_scan(
    inner: Block, eqn: core.JaxprEqn, values: Sequence[Array], given: Sequence[Given | None], multiply: Multiply[Given]
) -> tuple[list[Array], list[_Extra]]:
    consts, carry = replay.scan_counts(eqn)

    def run(
        carried: list[Array], scanned: tuple[list[Array], Sequence[Given | None]]
    ) -> tuple[list[Array], tuple[list[Array], list[_Extra]]]:
        xs, given = scanned
        out, extras = _run(inner, replay.body_consts(eqn), [*values[:consts], *carried, *xs], given, multiply)
        return out[:carry], (out[carry:], extras)

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    scanned = (list(values[consts + carry :]), given)
    carried, (ys, extras) = lax.scan(run, list(values[consts : consts + carry]), scanned, **options)
    return [*carried, *ys], extras


def _weights(block: Block, consts: Sequence[Known], args: Sequence[Known], keep_dtype: bool) -> tuple[list[Known], list[Known]]:
    """Returns the outputs of the jaxpr and the weights of its sites, `MISSING` where they depend on `MISSING` inputs."""
    weights = list[Known]()

    def evaluate(i: int, eqn: core.JaxprEqn, read: Reader[Known]) -> Sequence[Known]:
        values = [read(v) for v in eqn.invars]
        out = list[Known]([MISSING] * len(eqn.outvars))
        known = [value for value in values if not isinstance(value, Missing)]
        if i in block.sites:
            weights.append(values[block.sites[i].weight])
        elif i in block.calls and eqn.primitive.name == replay.SCAN:
            weights.extend(_scanned_weights(block.calls[i], eqn, values, keep_dtype))
        elif i in block.calls:
            out, more = _weights(block.calls[i], replay.body_consts(eqn), values, keep_dtype)
            weights.extend(more)
        elif len(known) == len(values):
            out = values if keep_dtype and _is_float_cast(eqn) else replay.apply(eqn, known)
        return out

    return replay.interpret(block.jaxpr, consts, args, evaluate), weights


def _is_float_cast(eqn: core.JaxprEqn) -> bool:
    avals = map(aval_of, (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name == "convert_element_type" and all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals)


def _scanned_weights(inner: Block, eqn: core.JaxprEqn, values: Sequence[Known], keep_dtype: bool) -> list[Known]:
    """Returns the weights of all iterations of a scan, stacked. Uses `jax.vmap`, because they do not depend on the carry."""
    consts, carry = replay.scan_counts(eqn)
    xs = {k: v for k, v in enumerate(values) if k >= consts + carry and not isinstance(v, Missing)}

    def step(xs: dict[int, Array]) -> dict[int, Array]:
        entering = [values[k] if k < consts else xs.get(k, MISSING) for k in range(len(values))]
        weights = _weights(inner, replay.body_consts(eqn), entering, keep_dtype)[1]
        return {i: w for i, w in enumerate(weights) if not isinstance(w, Missing)}

    stacked = jax.vmap(step, axis_size=eqn.params["length"])(xs)
    return [stacked.get(i, MISSING) for i in range(len(inner.all_sites()))]
