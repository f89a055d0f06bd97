"""Reads jaxprs and replays them, equation by equation.

Uses `jax.extend.core` and the parameters of four kinds of equations: jit, checkpoint, scan and functions with a custom
derivative. Never constructs an equation: an equation is run as a jaxpr with one equation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.typing import DTypeLike

from jgraph.kernels.quantize import CALLS
from jgraph.types import Leaf, Tree

# Names of primitives, equal in jax 0.10.2, 0.11.2 and 0.12.
JITS = ("jit",)
CHECKPOINTS = ("remat2",)
SCAN = "scan"
CUSTOM = ("custom_jvp_call", "custom_vjp_call")
CALLBACKS = ("debug_callback", "debug_print", "io_callback")
_WITH_BODY = (*JITS, *CHECKPOINTS, SCAN)

Aval: TypeAlias = ShapedArray
Atom: TypeAlias = core.Var | core.Literal
Value = TypeVar("Value")
"""The values of variables: arrays, tracers, or markers of an interpreter."""
Environment: TypeAlias = dict[core.Var, Value]
Reader: TypeAlias = Callable[[Atom], Value]
_Result = TypeVar("_Result")


def aval_of(atom: Any) -> Aval:
    """Returns the abstract value of a variable or literal. This is `atom.aval` with a useful type for type checkers."""
    return atom.aval


def body(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the jaxpr inside a jit, checkpoint, scan, `custom_jvp` or `custom_vjp` equation, without its constants."""
    inner = _closed_body(eqn)
    return getattr(inner, "jaxpr", inner)


def body_consts(eqn: core.JaxprEqn) -> list[jax.Array]:
    """Returns the values of the constants of `body`, for the same equations."""
    return list(getattr(_closed_body(eqn), "consts", ()))


def _closed_body(eqn: core.JaxprEqn) -> Any:
    # A ClosedJaxpr or a Jaxpr. They are one class since jax 0.11.
    return eqn.params["call_jaxpr" if eqn.primitive.name in CUSTOM else "jaxpr"]


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns the numbers of constants and of carries of a scan. Its other operands are the arrays that it scans over."""
    if "num_carry" in eqn.params:  # before jax 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_literal(atom: Atom) -> bool:
    """True for a literal, which is not hashable, and False for a variable."""
    return isinstance(atom, core.Literal)


def apply(eqn: core.JaxprEqn, values: Sequence[jax.Array]) -> list[Any]:
    """Runs one equation on new operands. Inside a trace, this adds it to the trace."""
    # Values for literals are ignored. An output that is marked as unread (`DropVar`) is None.
    given = {v: value for v, value in zip(eqn.invars, values, strict=True) if isinstance(v, core.Var)}
    out = iter(run([eqn], given, [v for v in eqn.outvars if not isinstance(v, core.DropVar)]))
    return [None if isinstance(v, core.DropVar) else next(out) for v in eqn.outvars]


def run(eqns: Sequence[core.JaxprEqn], env: Mapping[core.Var, jax.Array], wanted: Sequence[Atom]) -> list[jax.Array]:
    """Runs equations of a jaxpr, and returns the wanted values. `env` has the variables that the equations read."""
    debug_info = core.DebugInfo("replay", "equations", ("",) * len(env), ("",) * len(wanted))
    program = core.Jaxpr((), list(env), list(wanted), list(eqns), _effects(eqns), debug_info)
    return core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*env.values())


def environment(jaxpr: core.Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> Environment[Value]:
    """Returns the values of the variables before the first equation of a jaxpr."""
    return dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))


def reader(env: Environment[Value]) -> Reader[Value]:
    """Returns a function that reads a variable in an environment, or a literal. It also sees later values."""
    return lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]


def write(env: Environment[Value], outvars: Iterable[core.Var], values: Iterable[Value]) -> None:
    """Adds the outputs of an equation to an environment. Skips outputs that are marked as unread (`DropVar`)."""
    env.update((v, x) for v, x in zip(outvars, values, strict=True) if not isinstance(v, core.DropVar))


def interpret(
    jaxpr: core.Jaxpr,
    consts: Sequence[Value],
    args: Sequence[Value],
    evaluate: Callable[[int, core.JaxprEqn, Reader[Value]], Sequence[Value] | None],
) -> list[Value]:
    """Evaluates a jaxpr with the rule `evaluate(index, equation, read)`, which returns None to skip an equation."""
    env = environment(jaxpr, consts, args)
    read = reader(env)
    for i, eqn in enumerate(jaxpr.eqns):
        if (values := evaluate(i, eqn, read)) is not None:
            write(env, eqn.outvars, values)
    return [read(v) for v in jaxpr.outvars]


def depends(jaxpr: core.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Finds the outputs that depend on marked inputs. May report an output that does not depend on them."""
    # Each result of an equation other than jit, checkpoint and scan counts as depending on all operands of the equation.
    marked = _depending(jaxpr, given)
    return [not is_literal(v) and v in marked for v in jaxpr.outvars]


def _depending(jaxpr: core.Jaxpr, given: Sequence[bool]) -> set[core.Var]:
    marked = {v for v, flag in zip(jaxpr.invars, given, strict=True) if flag}  # never a constant
    for eqn in jaxpr.eqns:
        flags = [not is_literal(v) and v in marked for v in eqn.invars]
        if not any(flags):
            continue
        out = depends(body(eqn), flags) if eqn.primitive.name in _WITH_BODY else [True] * len(eqn.outvars)
        if eqn.primitive.name == SCAN:
            # A carry that an iteration marks is marked in the next iteration, which may mark others.
            consts, carry = scan_counts(eqn)
            carried = slice(consts, consts + carry)
            while (grown := [a or b for a, b in zip(flags[carried], out[:carry], strict=True)]) != flags[carried]:
                flags[carried] = grown
                out = depends(body(eqn), flags)
        marked.update(v for v, flag in zip(eqn.outvars, out, strict=True) if flag)
    return marked


def holds(jaxpr: core.Jaxpr, names: Sequence[str]) -> bool:
    """True if a jaxpr or a jaxpr nested in it has an equation with one of the primitives."""
    return any(runs(eqn, names) for eqn in jaxpr.eqns)


def runs(eqn: core.JaxprEqn, names: Sequence[str]) -> bool:
    """True if an equation or a jaxpr nested in it has one of the primitives."""
    return eqn.primitive.name in names or any(holds(inner, names) for inner in core.jaxprs_in_params(eqn.params))


def primitives(name: str, params: Mapping[str, Any]) -> set[str]:
    """Returns the primitives that an equation runs: its own, or for jit and custom derivatives, those inside."""
    # Not of a JaxprEqn, because a policy of `jax.checkpoint` gets the name and the parameters only.
    if name not in (*JITS, *CUSTOM):
        return {name}
    inner = [eqn for jaxpr in core.jaxprs_in_params(params) for eqn in jaxpr.eqns]
    return set().union(*(primitives(eqn.primitive.name, eqn.params) for eqn in inner))


def needs(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[list[bool], set[str]]:
    """Like `live_variables`, but returns a flag for each input instead of a set of variables."""
    live, used = live_variables(jaxpr, wanted, data)
    return [v in live for v in jaxpr.invars], used


def live_variables(
    jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None
) -> tuple[set[core.Var], set[str]]:
    """Finds the variables, including inputs, and the primitives of wanted outputs and of callbacks. May report too many."""
    # `data` marks inputs: primitives without an operand that depends on a marked input are then left out. The variables do not
    # depend on `data`. A call of a quantization kernel counts as one primitive with the name of the kernel.
    live = {v for v, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and isinstance(v, core.Var)}
    marked = None if data is None else _depending(jaxpr, data)
    used: set[str] = set()
    for eqn in reversed(jaxpr.eqns):
        flags = [v in live for v in eqn.outvars]
        if not any(flags) and not runs(eqn, CALLBACKS):
            continue
        is_data = None if marked is None else [not is_literal(v) and v in marked for v in eqn.invars]
        given = [True] * len(eqn.invars)
        if eqn.primitive.name in JITS and eqn.params["name"] in CALLS:
            names = {eqn.params["name"]}
        elif eqn.primitive.name in _WITH_BODY:
            # For a scan, all primitives count, because it is not known which carries are data.
            inside = None if eqn.primitive.name == SCAN else is_data
            given, names = needs(body(eqn), wanted_inside(eqn, flags), inside)
        else:
            names = primitives(eqn.primitive.name, eqn.params)
        used |= names if is_data is None or any(is_data) else set()
        live.update(v for v, flag in zip(eqn.invars, given, strict=True) if flag and isinstance(v, core.Var))
    return live, used


def wanted_inside(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """Returns the wanted outputs of the jaxpr inside a jit, checkpoint or scan from the wanted outputs of its equation."""
    wanted = list(wanted)
    if eqn.primitive.name == SCAN:
        # A carry is also wanted if a later iteration reads it to compute a wanted output.
        consts, carry = scan_counts(eqn)
        while True:
            given = needs(body(eqn), wanted)[0][consts : consts + carry]
            grown = [a or b for a, b in zip(wanted[:carry], given, strict=True)]
            if grown == wanted[:carry]:
                break
            wanted[:carry] = grown
    return wanted


def forwarded(jaxpr: core.Jaxpr) -> list[int | None]:
    """Returns for each output the index of the input that it is, also through jits and checkpoints; None for others."""
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JITS + CHECKPOINTS:
            for v, inner in zip(eqn.outvars, forwarded(body(eqn)), strict=True):
                if inner is not None and not is_literal(source := eqn.invars[inner]) and source in place:
                    place[v] = place[source]
    return [place.get(v) if isinstance(v, core.Var) else None for v in jaxpr.outvars]


def without_callbacks(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Removes debug and I/O callbacks with unread results, also from nested jaxprs."""
    if not holds(jaxpr, CALLBACKS):
        return jaxpr
    read = {v for v in (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars) if not is_literal(v)}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLBACKS and not read & set(eqn.outvars):
            continue
        # The derivative rules of functions with a custom derivative cannot be inspected, so their callbacks are kept.
        if eqn.primitive.name not in CUSTOM:
            params = {name: _param_without_callbacks(value) for name, value in eqn.params.items()}
            gone = _effects(core.jaxprs_in_params(eqn.params)) - _effects(core.jaxprs_in_params(params))
            eqn = eqn.replace(params=params, effects=eqn.effects - gone)
        eqns.append(eqn)
    effects = set(jaxpr.effects) - (_effects(jaxpr.eqns) - _effects(eqns))
    return jaxpr.replace(eqns=eqns, effects=effects)


def _param_without_callbacks(param: Any) -> Any:
    """Removes callbacks from a parameter of an equation: a jaxpr, a tuple of jaxprs (`cond`), or any other value."""
    if isinstance(param, core.Jaxpr):
        return without_callbacks(param)
    if isinstance(param, core.ClosedJaxpr):
        return param.replace(jaxpr=without_callbacks(param.jaxpr))
    return tuple(map(_param_without_callbacks, param)) if type(param) is tuple else param


def _effects(holders: Iterable[core.Jaxpr | core.JaxprEqn]) -> set[core.Effect]:
    return set().union(*(holder.effects for holder in holders))


def exact_products(fn: Callable[..., _Result]) -> Callable[..., _Result]:
    """Wraps a function: runs it without `reduce_precision` equations that round a matmul's output to its own dtype."""

    # These equations change no value. `jax.checkpoint` inserts them for residuals, and they prevent XLA from fusing a GELU into
    # the matmul. Nested jaxprs are not changed. Each call traces `fn`, so jit the result.
    @wraps(fn)
    def run(*args: Tree) -> _Result:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        products = set[int]()  # ids of variables

        def evaluate(_: int, eqn: core.JaxprEqn, read: Reader[jax.Array]) -> Sequence[jax.Array]:
            name = eqn.primitive.name
            values = [read(v) for v in eqn.invars]
            is_exact = name == "reduce_precision" and products.issuperset(map(id, eqn.invars)) and _keeps_all_bits(eqn)
            products.update(map(id, eqn.outvars) if is_exact or name == "dot_general" else ())
            return values if is_exact else apply(eqn, values)

        results = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), evaluate)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


def _keeps_all_bits(eqn: core.JaxprEqn) -> bool:
    info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def avals(jaxpr: core.Jaxpr) -> Iterator[Aval]:
    """Yields the shape and dtype of every operand and result of every equation, also of nested jaxprs."""
    for eqn in jaxpr.eqns:
        yield from map(aval_of, (*eqn.invars, *eqn.outvars))
    for inner in core.subjaxprs(jaxpr):
        yield from avals(inner)


def explicit_axes(aval: Aval | jax.ShapeDtypeStruct) -> list[str | tuple[str, ...]]:
    """Returns the explicit mesh axes that an array is sharded over: the type of an array names no automatic axes."""
    return [axis for axis in getattr(getattr(aval, "sharding", None), "spec", ()) if axis is not None]


def mesh_of(leaves: Iterable[Leaf]) -> jax.sharding.AbstractMesh:
    """Returns the mesh of the first leaf with a non-empty mesh in its type, or else the current abstract mesh."""
    meshes = (aval.sharding.mesh for aval in map(jax.typeof, leaves) if hasattr(aval, "sharding"))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def zeros(aval: Aval | Leaf, *lead: int, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None) -> jax.Array:
    """Makes zeros with the shape and dtype of an abstract value, after the axes `lead`."""
    # The dtype may be that of random keys. Inside `jax.shard_map`, the type of the array varies over the same mesh axes.
    blank = jnp.zeros((*lead, *(aval.shape if shape is None else shape)), dtype or aval.dtype)
    # `mat.varying` since jax 0.12.
    axes = tuple(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", ()))
    return lax.pcast(blank, axes, to="varying") if axes else blank
