"""Finds the parameters of a stage with gradients that can be delayed, and their matmuls.

A value is *data* if it depends on the microbatch, on a parameter that is not delayed, or on the carry of a scan. The gradient
of a parameter can be delayed if every value that is computed from the parameter without data becomes the weight of a matmul
with data. The gradient is then the sum of the weight gradients of these matmuls, passed back through casts, reshapes and
slices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.linear import PRODUCTS, DelayedProduct, name_of
from jgraph.autodiff.replay import Environment, aval_of
from jgraph.autodiff.view import View, moved, view_of

# Primitives that change only shape or dtype. A float32 gradient passes back through them without rounding.
# fmt: off
_MOVES = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "concatenate",
    "copy", "copy_p", "name", "sharding_constraint", "optimization_barrier", "expand_dims", "rev", "pvary", "pcast", "split",
})
# fmt: on

# Computes a matmul from (matmul, x, w, other operands, tap).
_Multiply: TypeAlias = Callable[[DelayedProduct, Any, Any, Sequence[Any], Any], Array]

MISSING = object()
"""Marker for data in a jaxpr that is run only on parameters."""


@dataclass
class Block:
    """A jaxpr with its delayed matmuls.

    A *delayed parameter* is one whose gradient wgrad computes, after dgrad has computed dx. A *delayed matmul* multiplies data
    by a weight that is computed from delayed parameters, without data. `find` defines *data*.

    Attributes:
        jaxpr: The jaxpr.
        sites: The delayed matmuls among the equations of this jaxpr. The key is an index in `jaxpr.eqns`.
        calls: The blocks of the jaxprs inside jit, checkpoint and scan equations that read values computed from delayed
            parameters. The key is an index in `jaxpr.eqns`.
    """

    jaxpr: core.Jaxpr
    sites: dict[int, DelayedProduct] = field(default_factory=dict)
    calls: dict[int, "Block"] = field(default_factory=dict)

    def all_sites(self) -> list[DelayedProduct]:
        """Returns a new list of all delayed matmuls, in the order of the equations.

        The matmuls inside an equation of `calls` are at the place of this equation.
        """
        sites = []
        for i in sorted({**self.sites, **self.calls}):
            sites += [self.sites[i]] if i in self.sites else self.calls[i].all_sites()
        return sites

    def replace(self, sites: Mapping[DelayedProduct, DelayedProduct]) -> None:
        """Replaces delayed matmuls in this block and, at any depth, in the blocks of `calls`. Changes the blocks in place.

        Args:
            sites: Maps old delayed matmuls, by identity, to new ones. A matmul of the block that is not a key stays. A key that
                is not in the block is ignored.
        """
        self.sites = {i: sites.get(site, site) for i, site in self.sites.items()}
        for inner in self.calls.values():
            inner.replace(sites)


@dataclass
class Found:
    """The result of `find`.

    Attributes:
        block: The jaxpr with its delayed matmuls.
        stray: The parameters with a gradient that cannot be delayed, because they have a use other than as the weight of a
            matmul with data. The key is the index of the parameter, as in the argument `params` of `find`. The value is the
            first such use: the name of a primitive, `the output itself`, `the carry of a scan` or `the output of a scan`.
    """

    block: Block
    stray: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Value:
    """The properties of a variable.

    Attributes:
        data: True if the variable is data.
        params: Indices of the delayed parameters that it is computed from.
        moved: True if only primitives in `_MOVES` compute it from the parameters.
        view: Its place in its parameter if it has all elements once, with the axes of enclosing scans first; otherwise None.
    """

    data: bool
    params: frozenset[int] = frozenset()
    moved: bool = True
    view: View | None = None


_DATA, _CONSTANT = _Value(True), _Value(False)


def find(jaxpr: core.Jaxpr, wanted: Sequence[bool], params: Sequence[int | None], data: Sequence[bool]) -> Found:
    """Finds the matmuls of data and a weight that is computed only from delayed parameters.

    A parameter is *delayed* if its gradient is computed after the gradient of the input (wgrad after dgrad). A value is *data*
    if it depends on the microbatch, on a parameter that is not delayed, or on the carry of a scan.

    Args:
        jaxpr: Jaxpr of the stage, the function that is differentiated. Not changed.
        wanted: For each output of the jaxpr, True if it is differentiated. Equations that only other outputs need are ignored.
        params: For each input of the jaxpr, a number of the caller's choice if the input is a delayed parameter, otherwise
            None. The result names parameters by these numbers.
        data: For each input of the jaxpr, True if it is data. False for a delayed parameter.

    Returns:
        A new `Found`: the delayed matmuls, and the parameters with a gradient that cannot be delayed.
    """
    found = Found(Block(jaxpr))
    given = [
        _Value(is_data) if p is None else _Value(is_data, frozenset([p]), view=view_of(aval_of(v).shape))
        for v, p, is_data in zip(jaxpr.invars, params, data, strict=True)
    ]
    _mark(found, _walk(found, found.block, given, (), wanted), "the output itself", wanted)
    return found


def find_all(jaxpr: core.Jaxpr, num_params: int) -> Found:
    """Finds the matmuls of a function with all its parameters, and differentiates all outputs.

    Args:
        jaxpr: Jaxpr of a function of parameters and data. Not changed.
        num_params: Number of inputs that are parameters. They are the first inputs and are numbered from 0. The other inputs
            are data.

    Returns:
        The result of `find`.
    """
    is_data = [i >= num_params for i in range(len(jaxpr.invars))]
    return find(jaxpr, [True] * len(jaxpr.outvars), [None if data else i for i, data in enumerate(is_data)], is_data)


def _mark(found: Found, values: Sequence[_Value], by: str, wanted: Iterable[bool] = repeat(True)) -> None:
    """Records the parameters of wanted values as stray, with the primitive `by`."""
    for value, is_wanted in zip(values, wanted, strict=False):
        for p in value.params if is_wanted and not value.data else ():
            found.stray.setdefault(p, by)


def _walk(found: Found, block: Block, given: Sequence[_Value], lead: tuple[int, ...], wanted: Sequence[bool]) -> list[_Value]:
    """Classifies all variables of a block. Adds the matmuls to the block, and the stray parameters to `found`."""
    jaxpr, (live, _) = block.jaxpr, replay.live_variables(block.jaxpr, wanted)
    env: Environment = dict.fromkeys(jaxpr.constvars, _CONSTANT) | dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> _Value:
        return _CONSTANT if replay.is_literal(atom) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        name, values = name_of(eqn), [read(v) for v in eqn.invars]
        flags = [v in live for v in eqn.outvars]
        used = frozenset().union(*(v.params for v in values if not v.data and any(flags)))
        out = [_DATA] * len(eqn.outvars)
        if not used:
            out = [_Value(any(v.data for v in values))] * len(eqn.outvars)
        elif name in replay.JITS + replay.CHECKPOINTS:
            inner = block.calls[i] = Block(replay.body(eqn))
            out = _walk(found, inner, values, lead, flags)
        elif not any(v.data for v in values):
            is_move = name in _MOVES
            view = moved(values[0].view, eqn) if is_move else None
            out = [_Value(False, used, is_move and all(v.moved for v in values), view)] * len(eqn.outvars)
        elif name in PRODUCTS and (weight := _weight(name, values)) is not None:
            value = values[weight]
            block.sites[i] = DelayedProduct(eqn, weight, lead, value.params, value.moved, value.view)
        elif name == replay.SCAN:
            inner = block.calls[i] = Block(replay.body(eqn))
            (consts, carry), inside = replay.scan_counts(eqn), replay.wanted_inside(eqn, flags)
            _mark(found, values[consts : consts + carry], "the carry of a scan", inside)
            fixed = [replace(value, view=None) for value in values[:consts]]
            entering = [*fixed, *[_DATA] * carry, *values[consts + carry :]]
            stacked = _walk(found, inner, entering, (*lead, eqn.params["length"]), inside)
            _mark(found, stacked, "the output of a scan", inside)
        else:
            _mark(found, values, name)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _weight(name: str, values: Sequence[_Value]) -> int | None:
    """Returns the index of the operand that is a delayed weight; None if there is none, or another operand has parameters."""
    for i in PRODUCTS[name]:
        others = [v for j, v in enumerate(values) if j != i]
        if not values[i].data and values[i].params and values[1 - i].data and not any(v.params for v in others if not v.data):
            return i
    return None


def run_forward(
    block: Block, consts: Sequence[Any], args: Sequence[Any], taps: Sequence[Any], multiply: _Multiply
) -> tuple[list[Any], list[Any]]:
    """Runs a stage with taps on its delayed matmuls.

    A *tap* is an additional argument of a matmul, a tree of arrays of zeros that the matmul does not read. The backward rule
    of the matmul returns the arrays from which wgrad computes the weight gradient as the cotangent of the tap.

    Args:
        block: The jaxpr of the stage and its delayed matmuls.
        consts: Values of the constants of the jaxpr, one each.
        args: Values of the inputs of the jaxpr, one each.
        taps: One tap for each delayed matmul, as `DelayedProduct.tap` returns it, in the order of `Block.all_sites`. Each leaf
            has one leading axis for each enclosing scan, outermost first.
        multiply: Called in place of each delayed matmul with (matmul, x, w, other operands, tap), where x is the data, w the
            weight, and the tap has no leading axes. Returns the result of the matmul.

    Returns:
        (outputs, extra): the list of the outputs of the jaxpr; and a list with one tuple for each delayed matmul, in the order
        of `taps`. The tuple has the operands other than weight and data, such as group sizes, with one leading axis for each
        enclosing scan. It is empty for a matmul of two operands.
    """
    env = replay.environment(block.jaxpr, consts, args)
    read, taps, kept = replay.reader(env), list(taps), []
    for i, eqn in enumerate(block.jaxpr.eqns):
        values = [read(v) for v in eqn.invars]
        if i in block.sites:
            site = block.sites[i]
            x, w, extra = values[site.data], values[site.weight], tuple(values[2:])
            out = [multiply(site, x, w, extra, taps.pop(0))]
            kept.append(extra)
        elif i in block.calls:
            inner = block.calls[i]
            count = len(inner.all_sites())
            inside, taps = taps[:count], taps[count:]
            run = _run_scan if eqn.primitive.name == replay.SCAN else _run_call
            out, more = run(inner, eqn, values, inside, multiply)
            kept += more
        else:
            out = replay.apply(eqn, values)
        replay.write(env, eqn.outvars, out)
    return [read(v) for v in block.jaxpr.outvars], kept


def _run_call(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], taps: Sequence[Any], multiply: _Multiply):
    def run(values, taps):
        return run_forward(inner, replay.body_consts(eqn), values, taps, multiply)

    if eqn.primitive.name in replay.CHECKPOINTS:
        run = jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
    return run(list(values), list(taps))


def _run_scan(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], taps: Sequence[Any], multiply: _Multiply):
    consts, carry = replay.scan_counts(eqn)

    def run(carried, scanned):
        xs, taps = scanned
        out, kept = run_forward(inner, replay.body_consts(eqn), [*values[:consts], *carried, *xs], taps, multiply)
        return out[:carry], (out[carry:], kept)

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    scanned = (list(values[consts + carry :]), list(taps))
    carried, (ys, kept) = lax.scan(run, list(values[consts : consts + carry]), scanned, **options)
    return [*carried, *ys], kept


def run_weights(block: Block, consts: Sequence[Any], args: Sequence[Any], *, keep_dtype: bool) -> tuple[list[Any], list[Any]]:
    """Runs the equations of a stage that depend only on parameters, to compute the weights of its matmuls.

    Args:
        block: The jaxpr of the stage and its delayed matmuls.
        consts: Values of the constants of the jaxpr, one each.
        args: Values of the inputs of the jaxpr, one each. The marker `MISSING` of this module in place of each input that is
            data.
        keep_dtype: True to skip casts between floating dtypes, so that a weight has the dtype of its parameter. False to run
            them, so that a weight has the dtype of the operand of the matmul.

    Returns:
        (outputs, weights): the list of the outputs of the jaxpr, with `MISSING` for outputs that depend on data and for
        outputs of scans with delayed parameters; and the list of the weights of the delayed matmuls, in the order of
        `Block.all_sites`. A weight has one leading axis for each enclosing scan, outermost first.
    """
    env = replay.environment(block.jaxpr, consts, args)
    read, weights = replay.reader(env), []
    for i, eqn in enumerate(block.jaxpr.eqns):
        values = [read(v) for v in eqn.invars]
        out: list[Any] = [MISSING] * len(eqn.outvars)
        if i in block.sites:
            weights.append(values[block.sites[i].weight])
        elif i in block.calls:
            inner = block.calls[i]
            if eqn.primitive.name == replay.SCAN:
                weights += _scanned_weights(inner, eqn, values, keep_dtype)
            else:
                out, more = run_weights(inner, replay.body_consts(eqn), values, keep_dtype=keep_dtype)
                weights += more
        elif not any(v is MISSING for v in values):
            out = values if keep_dtype and _is_float_cast(eqn) else replay.apply(eqn, values)
        replay.write(env, eqn.outvars, out)
    return [read(v) for v in block.jaxpr.outvars], weights


def _is_float_cast(eqn: core.JaxprEqn) -> bool:
    avals = map(aval_of, (*eqn.invars, *eqn.outvars))
    return eqn.primitive.name == "convert_element_type" and all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals)


def _scanned_weights(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], keep_dtype: bool) -> list[Array]:
    """Returns the weights of all iterations of a scan, stacked. Uses `jax.vmap`, because they do not depend on the carry."""
    consts, carry = replay.scan_counts(eqn)
    xs = {k: v for k, v in enumerate(values) if k >= consts + carry and v is not MISSING}

    def step(xs):
        entering = [values[k] if k < consts else xs.get(k, MISSING) for k in range(len(values))]
        return run_weights(inner, replay.body_consts(eqn), entering, keep_dtype=keep_dtype)[1]

    return jax.vmap(step, axis_size=eqn.params["length"])(xs)
