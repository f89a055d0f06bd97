"""Reading a traced function and running it again, equation by equation: the part that knows what a jaxpr looks like.

Only `jax.extend.core` and the parameters of four primitives are used (jit, checkpoint, scan, and the products in `linear.py`).
Nothing is built by hand: an equation runs again as the one-equation program it is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jgraph.kernels.quantize import CALLS

JITS = ("jit", "pjit")
CHECKPOINTS = ("checkpoint", "remat", "remat2")
SCAN = "scan"
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
RULES = ("custom_jvp_call", "custom_vjp_call", *JITS)
CALLBACKS = ("debug_callback", "debug_print", "io_callback")


def body(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the jaxpr inside a jit, checkpoint or scan equation, or of a function with its own gradient."""
    inner = eqn.params["call_jaxpr" if eqn.primitive.name in CUSTOM else "jaxpr"]
    return getattr(inner, "jaxpr", inner)


def body_consts(eqn: core.JaxprEqn) -> list[Any]:
    return list(getattr(eqn.params["jaxpr"], "consts", ()))


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants and how many are the carry; the rest is scanned over.

    jax 0.10 says it in two numbers, jax 0.11 in a tree of the operands.
    """
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def apply(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Runs one equation on other values; None for the outputs that nothing reads."""
    given: dict[Any, Any] = {v: value for v, value in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    debug_info = core.DebugInfo("replay", eqn.primitive.name, ("",) * len(given), ("",) * len(results))
    program = core.Jaxpr((), list(given), results, [eqn], eqn.effects, debug_info)
    out = iter(core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*given.values()))
    return [None if isinstance(v, core.DropVar) else next(out) for v in eqn.outvars]


def environment(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))


def reader(env: dict[Any, Any]) -> Callable[[Any], Any]:
    return lambda atom: atom.val if is_literal(atom) else env[atom]


def write(env: dict[Any, Any], outvars: Iterable[Any], values: Iterable[Any]) -> None:
    env.update((v, x) for v, x in zip(outvars, values, strict=True) if not isinstance(v, core.DropVar))


def depends(jaxpr: core.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Returns for each output whether it depends on a marked input; never False for one that does."""
    marked = depending(jaxpr, given)
    return [not is_literal(v) and v in marked for v in jaxpr.outvars]


def depending(jaxpr: core.Jaxpr, given: Sequence[bool]) -> set[Any]:
    """Returns the variables that depend on a marked input."""
    marked = {v for v, flag in zip(jaxpr.invars, given, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [not is_literal(v) and v in marked for v in eqn.invars]
        out = [any(flags)] * len(eqn.outvars)
        if any(flags) and eqn.primitive.name in (*JITS, *CHECKPOINTS, SCAN):
            out = depends(body(eqn), flags)
        if any(flags) and eqn.primitive.name == SCAN:
            consts, carry = scan_counts(eqn)
            while (grown := [a or b for a, b in zip(flags[consts:], out[:carry], strict=False)]) != flags[consts:][:carry]:
                flags[consts : consts + carry] = grown
                out = depends(body(eqn), flags)
        marked.update(v for v, flag in zip(eqn.outvars, out, strict=True) if flag)
    return marked


def holds(jaxpr: core.Jaxpr, names: Sequence[str]) -> bool:
    """Returns whether one of these primitives is anywhere in a jaxpr."""
    return any(eqn.primitive.name in names for eqn in jaxpr.eqns) or any(holds(inner, names) for inner in core.subjaxprs(jaxpr))


def primitives(name: str, params: dict[str, Any]) -> set[str]:
    """Returns the primitives that one is made of: itself, or those that a function with its own gradient calls."""
    if name not in RULES:
        return {name}
    inner = [eqn for jaxpr in core.jaxprs_in_params(params) for eqn in jaxpr.eqns]
    return set().union(*(primitives(eqn.primitive.name, eqn.params) for eqn in inner))


def needs(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[list[bool], set[str]]:
    """Returns for each input whether the wanted outputs need it, never False for one that they do; and by which primitives.

    A call of a kernel that quantizes counts as one, by its name. Given marks of the inputs that are `data`, primitives are
    those alone that compute with data.
    """
    found, used = live_variables(jaxpr, wanted, data)
    return [v in found for v in jaxpr.invars], used


def live_variables(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[set[Any], set[str]]:
    """Returns the variables that the wanted outputs need, and the primitives by which they are made, as `needs` has them."""
    live: set[Any] = {v for v, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and not is_literal(v)}
    marked = None if data is None else depending(jaxpr, data)
    used: set[str] = set()
    for eqn in reversed(jaxpr.eqns):
        flags = [v in live for v in eqn.outvars]
        if not any(flags):
            continue
        own = None if marked is None else [not is_literal(v) and v in marked for v in eqn.invars]
        if eqn.primitive.name in JITS and eqn.params["name"] in CALLS:
            given, names = [True] * len(eqn.invars), {eqn.params["name"]}
        elif eqn.primitive.name in (*JITS, *CHECKPOINTS, SCAN):
            # What of a scan's carry is data, only its turns tell.
            inside = None if eqn.primitive.name == SCAN else own
            given, names = needs(body(eqn), wanted_inside(eqn, flags), inside)
        else:
            given, names = [True] * len(eqn.invars), primitives(eqn.primitive.name, eqn.params)
        used |= names if own is None or any(own) else set()
        live.update(v for v, flag in zip(eqn.invars, given, strict=True) if flag and not is_literal(v))
    return live, used


def wanted_inside(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """Returns which outputs are wanted of the jaxpr inside a jit, checkpoint or scan; a scan's, of all of its steps."""
    wanted = list(wanted)
    if eqn.primitive.name == SCAN:
        consts, carry = scan_counts(eqn)
        while True:
            given = needs(body(eqn), wanted)[0][consts : consts + carry]
            grown = [a or b for a, b in zip(wanted[:carry], given, strict=True)]
            if grown == wanted[:carry]:
                break
            wanted[:carry] = grown
    return wanted


def forwarded(jaxpr: core.Jaxpr) -> list[int | None]:
    """Returns for each output the place of the input that it is, unchanged; None for a computed one."""
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JITS + CHECKPOINTS:
            for v, inner in zip(eqn.outvars, forwarded(body(eqn)), strict=True):
                if inner is not None and not is_literal(source := eqn.invars[inner]) and source in place:
                    place[v] = place[source]
    return [place.get(v) if isinstance(v, core.Var) else None for v in jaxpr.outvars]


def without_callbacks(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Leaves out the callbacks whose results nothing reads; returns the same object where there are none.

    Functions with a gradient of their own stay as they are: their rules cannot be read.
    """
    if not holds(jaxpr, CALLBACKS):
        return jaxpr
    read = {v for v in (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars) if not is_literal(v)}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLBACKS and not read & set(eqn.outvars):
            continue
        if eqn.primitive.name not in CUSTOM:
            params = {name: _without_callbacks(value) for name, value in eqn.params.items()}
            gone = _effects(core.jaxprs_in_params(eqn.params)) - _effects(core.jaxprs_in_params(params))
            eqn = eqn.replace(params=params, effects=eqn.effects - gone)
        eqns.append(eqn)
    effects = set(jaxpr.effects) - (_effects(jaxpr.eqns) - _effects(eqns))
    return jaxpr.replace(eqns=eqns, effects=effects, debug_info=jaxpr.debug_info)


def exact_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of arrays whose products are not rounded to the dtype that they have.

    `jax.checkpoint` rounds what it keeps. Behind such a rounding, XLA does not make a GELU the epilogue of its product.
    """

    @wraps(fn)
    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        products, same, eqns = set[Any](), dict[Any, Any](), []
        for eqn in closed.jaxpr.eqns:
            inputs = [v if is_literal(v) else same.get(v, v) for v in eqn.invars]
            if eqn.primitive.name == "reduce_precision" and inputs[0] in products and _keeps_all(eqn):
                same[eqn.outvars[0]] = inputs[0]
                continue
            products.update(eqn.outvars if eqn.primitive.name == "dot_general" else ())
            eqns.append(eqn.replace(invars=inputs))
        outs = [v if is_literal(v) else same.get(v, v) for v in closed.jaxpr.outvars]
        program = closed.jaxpr.replace(eqns=eqns, outvars=outs, debug_info=closed.jaxpr.debug_info)
        results = core.jaxpr_as_fun(core.ClosedJaxpr(program, closed.consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


def _keeps_all(eqn: core.JaxprEqn) -> bool:
    """Returns whether a rounding is to as many bits as the dtype has."""
    info = jnp.finfo(eqn.outvars[0].aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def _without_callbacks(param: Any) -> Any:
    """Returns a parameter of an equation (a jaxpr, several as of a `cond`, or anything else) without callbacks."""
    if isinstance(param, core.Jaxpr):
        return without_callbacks(param)
    if isinstance(param, core.ClosedJaxpr):
        return param.replace(jaxpr=without_callbacks(param.jaxpr))
    return tuple(map(_without_callbacks, param)) if type(param) is tuple else param


def _effects(holders: Iterable[core.Jaxpr | core.JaxprEqn]) -> set[Any]:
    return set().union(*(holder.effects for holder in holders))


def values(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """Yields the types of all values in a jaxpr."""
    for eqn in jaxpr.eqns:
        yield from (v.aval for v in (*eqn.invars, *eqn.outvars))
    for inner in core.subjaxprs(jaxpr):
        yield from values(inner)


def spread_over(aval: Any) -> list[Any]:
    """Returns the explicit axes of a mesh that a value is spread over."""
    return [axis for axis in getattr(getattr(aval, "sharding", None), "spec", ()) if axis is not None]


def mesh_of(leaves: Iterable[Any]) -> jax.sharding.AbstractMesh:
    """Returns the mesh that arrays are placed on, else the current one; jax's types of values name it."""
    meshes = (aval.sharding.mesh for aval in map(jax.typeof, leaves) if hasattr(aval, "sharding"))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def zeros(aval: Any, *lead: int, shape: Sequence[int] | None = None, dtype: Any = None) -> jax.Array:
    """Zeros of an abstract value, `lead` dimensions in front; varying over the same mesh axes inside `shard_map`.

    `shape` and `dtype` take the place of the value's own.
    """
    shape = (*lead, *(aval.shape if shape is None else shape))
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        blank = jax.random.wrap_key_data(
            jnp.zeros((*shape, *jax.random.key_data(jax.random.key(0, impl=_impl(aval.dtype))).shape), jnp.uint32),
            impl=_impl(aval.dtype),
        )
    else:
        blank = jnp.zeros(shape, dtype or aval.dtype)
    axes = tuple(varying_axes(aval))
    return lax.pcast(blank, axes, to="varying") if axes else blank


def _impl(dtype: Any) -> str:
    """Name of the random number generator of a key's dtype, e.g. `fry` -> threefry2x32."""
    return {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}[str(dtype)]


def varying_axes(aval: Any) -> frozenset[str]:
    """Mesh axes over which a value differs inside `shard_map`."""
    return getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", frozenset())
