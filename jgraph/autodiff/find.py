"""What of a stage can be delayed: finds the products whose weight comes from parameters alone.

A value is *data* if it depends on the microbatch, on a parameter that is not delayed, or on what a scan carries. A parameter
can be delayed if all that is made of it without data ends as the weight of a product with data: then its gradient is those
products' weight gradients, pulled back through casts, reshapes and slices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.linear import PRODUCTS, DelayedProduct, name_of

# Between a parameter and its product these change shape or dtype but no value, so a float32 gradient may pass as it is.
# fmt: off
_MOVES = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice", "concatenate",
    "copy", "copy_p", "name", "sharding_constraint", "optimization_barrier", "expand_dims", "rev", "pvary", "pcast", "split",
})
# fmt: on

Product: TypeAlias = Callable[[DelayedProduct, Any, Any, Sequence[Any], Any], jax.Array]

MISSING = object()
"""Stands for data where only what comes from parameters is computed."""


@dataclass
class Block:
    """A jaxpr with what was found in it: products by equation, and the jits, checkpoints and scans that hold products."""

    jaxpr: core.Jaxpr
    sites: dict[int, DelayedProduct] = field(default_factory=dict)
    calls: dict[int, "Block"] = field(default_factory=dict)

    def all_sites(self) -> list[DelayedProduct]:
        """In the order of the equations."""
        found = []
        for i in sorted({**self.sites, **self.calls}):
            found += [self.sites[i]] if i in self.sites else self.calls[i].all_sites()
        return found

    def replace(self, sites: Mapping[DelayedProduct, DelayedProduct]) -> None:
        """Puts other products in the places of those found."""
        self.sites = {i: sites[site] for i, site in self.sites.items()}
        for inner in self.calls.values():
            inner.replace(sites)


@dataclass
class Found:
    """A block, and the parameters that stand in the way.

    Attributes:
        block: with the products found.
        weights: the delayed parameters that products use.
        stray: places of the parameters that reach data other than as a product's weight, and the primitive they reach it by.
    """

    block: Block
    weights: set[int] = field(default_factory=set)
    stray: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Value:
    """A variable: whether it is data, which delayed parameters it is made of, and whether only moves lie between."""

    data: bool
    params: frozenset[int] = frozenset()
    moved: bool = True


def find(jaxpr: core.Jaxpr, wanted: Sequence[bool], params: Sequence[int | None], data: Sequence[bool]) -> Found:
    """Finds the products with a delayed weight.

    Args:
        jaxpr: of the stage.
        wanted: for each output, whether it is differentiated; what only the others need is passed over.
        params: for each input, which delayed parameter it is, or None.
        data: for each input, whether it is data.
    """
    found = Found(Block(jaxpr))
    given = [_Value(is_data, frozenset() if p is None else frozenset([p])) for p, is_data in zip(params, data, strict=True)]
    _mark(found, _walk(found, found.block, given, (), wanted), "the output itself", wanted)
    return found


def _mark(found: Found, values: Sequence[_Value], by: str, wanted: Iterable[bool] = repeat(True)) -> None:
    """Marks the parameters of values as used in a way that no product's weight gradient covers."""
    for value, is_wanted in zip(values, wanted, strict=False):
        for p in value.params if is_wanted and not value.data else ():
            found.stray.setdefault(p, by)


def _walk(found: Found, block: Block, given: Sequence[_Value], lead: tuple[int, ...], wanted: Sequence[bool]) -> list[_Value]:
    jaxpr, (live, _) = block.jaxpr, replay.live_variables(block.jaxpr, wanted)
    env: dict[Any, _Value] = dict.fromkeys(jaxpr.constvars, _Value(False)) | dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> _Value:
        return _Value(False) if replay.is_literal(atom) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        name, values = name_of(eqn), [read(v) for v in eqn.invars]
        flags = [v in live for v in eqn.outvars]
        made = frozenset().union(*(v.params for v in values if not v.data and any(flags)))
        if not made:
            out = [_Value(any(v.data for v in values))] * len(eqn.outvars)
        elif name in replay.JITS + replay.CHECKPOINTS:
            inner = block.calls[i] = Block(replay.body(eqn))
            out = _walk(found, inner, values, lead, flags)
        elif not any(v.data for v in values):
            moved = name in _MOVES and all(v.moved for v in values)
            out = [_Value(False, made, moved)] * len(eqn.outvars)
        elif name in PRODUCTS and (weight := _weight(name, values)) is not None:
            used = values[weight]
            block.sites[i] = DelayedProduct(eqn, weight, lead, used.params, used.moved)
            found.weights |= used.params
            out = [_Value(True)]
        elif name == replay.SCAN:
            inner = block.calls[i] = Block(replay.body(eqn))
            (consts, carry), inside = replay.scan_counts(eqn), replay.wanted_inside(eqn, flags)
            _mark(found, values[consts : consts + carry], "the carry of a scan", inside)
            entering = [*values[:consts], *[_Value(True)] * carry, *values[consts + carry :]]
            stacked = _walk(found, inner, entering, (*lead, eqn.params["length"]), inside)
            _mark(found, stacked, "the output of a scan", inside)
            out = [_Value(True)] * len(eqn.outvars)
        else:
            _mark(found, values, name)
            out = [_Value(True)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _weight(name: str, values: Sequence[_Value]) -> int | None:
    """Returns the operand that is a delayed weight beside data; None if none is, or the other is made of parameters too."""
    for i in PRODUCTS[name]:
        others = [v for j, v in enumerate(values) if j != i]
        if not values[i].data and values[i].params and values[1 - i].data and not any(v.params for v in others if not v.data):
            return i
    return None


def run_forward(
    block: Block, consts: Sequence[Any], args: Sequence[Any], taps: Sequence[Any], product: Product
) -> tuple[list[Any], list[Any]]:
    """Returns the stage's outputs with taps on its products, and every product's operands that are neither weight nor data.

    Args:
        block, consts, args: of the stage, and what it is given.
        taps: a tree for every product, in the order of `Block.all_sites`; its leaves are stacked over the scans around it.
        product: does a product, of (it, x, w, the other operands, its tap).
    """
    env = replay.environment(block.jaxpr, consts, args)
    read, taps, kept = replay.reader(env), list(taps), []
    for i, eqn in enumerate(block.jaxpr.eqns):
        values = [read(v) for v in eqn.invars]
        if i in block.sites:
            site = block.sites[i]
            x, w, extra = values[site.data], values[site.weight], tuple(values[2:])
            out = [product(site, x, w, extra, taps.pop(0))]
            kept.append(extra)
        elif i in block.calls:
            inner = block.calls[i]
            count = len(inner.all_sites())
            inside, taps = taps[:count], taps[count:]
            out, more = _RUN_CALL[_kind(eqn)](inner, eqn, values, inside, product)
            kept += more
        else:
            out = replay.apply(eqn, values)
        replay.write(env, eqn.outvars, out)
    return [read(v) for v in block.jaxpr.outvars], kept


def _kind(eqn: core.JaxprEqn) -> str:
    name = eqn.primitive.name
    return "jit" if name in replay.JITS else "checkpoint" if name in replay.CHECKPOINTS else "scan"


def _run_jit(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], taps: Sequence[Any], product: Product):
    return run_forward(inner, replay.body_consts(eqn), values, taps, product)


def _run_checkpoint(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], taps: Sequence[Any], product: Product):
    def run(values, taps):
        return run_forward(inner, replay.body_consts(eqn), values, taps, product)

    options = {"policy": eqn.params["policy"], "prevent_cse": eqn.params["prevent_cse"]}
    return jax.checkpoint(run, **options)(list(values), list(taps))


def _run_scan(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], taps: Sequence[Any], product: Product):
    consts, carry = replay.scan_counts(eqn)

    def run(carried, scanned):
        xs, taps = scanned
        out, kept = run_forward(inner, replay.body_consts(eqn), [*values[:consts], *carried, *xs], taps, product)
        return out[:carry], (out[carry:], kept)

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    scanned = (list(values[consts + carry :]), list(taps))
    carried, (ys, kept) = lax.scan(run, list(values[consts : consts + carry]), scanned, **options)
    return [*carried, *ys], kept


_RUN_CALL = {"jit": _run_jit, "checkpoint": _run_checkpoint, "scan": _run_scan}


def run_weights(block: Block, consts: Sequence[Any], args: Sequence[Any], *, keep_dtype: bool) -> tuple[list[Any], list[Any]]:
    """Runs a block on parameters alone. Returns its outputs, and the weight of every product.

    Args:
        block, consts: of the stage.
        args: the stage's inputs; `MISSING` for data.
        keep_dtype: whether a cast between a parameter and its product is left out, so that the weight has the parameter's
            dtype.
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
            if _kind(eqn) == "scan":
                weights += _scanned_weights(inner, eqn, values, keep_dtype)
            else:
                out, more = run_weights(inner, replay.body_consts(eqn), values, keep_dtype=keep_dtype)
                weights += more
        elif not any(v is MISSING for v in values):
            out = values if keep_dtype and _is_float_cast(eqn) else replay.apply(eqn, values)
        replay.write(env, eqn.outvars, out)
    return [read(v) for v in block.jaxpr.outvars], weights


def _is_float_cast(eqn: core.JaxprEqn) -> bool:
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name == "convert_element_type" and all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals)


def _scanned_weights(inner: Block, eqn: core.JaxprEqn, values: Sequence[Any], keep_dtype: bool) -> list[Any]:
    """Stacked over the scan: nothing of it depends on the carry, so all steps are done at once."""
    consts, carry = replay.scan_counts(eqn)
    xs = {k: v for k, v in enumerate(values) if k >= consts + carry and v is not MISSING}

    def step(xs):
        entering = [values[k] if k < consts else xs.get(k, MISSING) for k in range(len(values))]
        return run_weights(inner, replay.body_consts(eqn), entering, keep_dtype=keep_dtype)[1]

    return jax.vmap(step, axis_size=eqn.params["length"])(xs)
