"""Reads jaxprs and replays them, equation by equation.

Uses `jax.extend.core` and the parameters of four kinds of equations: jit, checkpoint, scan and functions with a custom
derivative. Never constructs an equation: an equation is run as a jaxpr with one equation.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core

from jgraph.kernels.quantize import CALLS

JITS = ("jit", "pjit")
CHECKPOINTS = ("checkpoint", "remat", "remat2")
SCAN = "scan"
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
CALLBACKS = ("debug_callback", "debug_print", "io_callback")
_RULES = ("custom_jvp_call", "custom_vjp_call", *JITS)
_WITH_BODY = (*JITS, *CHECKPOINTS, SCAN)

Aval: TypeAlias = ShapedArray
Atom: TypeAlias = core.Var | core.Literal
# The values of variables: arrays, tracers, or markers of an interpreter.
Environment: TypeAlias = dict[core.Var, Any]


def aval_of(atom: Any) -> Aval:
    """Returns the abstract value of a variable or literal. JAX types it as `AbstractValue`, which has no shape."""
    return atom.aval


def body(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the jaxpr inside a jit, checkpoint, scan or custom derivative equation, without its constants."""
    inner = eqn.params["call_jaxpr" if eqn.primitive.name in CUSTOM else "jaxpr"]
    return getattr(inner, "jaxpr", inner)


def body_consts(eqn: core.JaxprEqn) -> list[Any]:
    """Returns the constants of the jaxpr inside a jit, checkpoint or scan equation."""
    return list(getattr(eqn.params["jaxpr"], "consts", ()))


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Counts the operands of a scan by role.

    Args:
        eqn: A scan equation.

    Returns:
        The number of constants and the number of carries. The operands after these are scanned over.
    """
    if "num_carry" in eqn.params:  # before jax 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_literal(atom: Any) -> bool:
    """True for a literal. Literals are not hashable, so they cannot be looked up in an environment."""
    return isinstance(atom, core.Literal)


def apply(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Runs one equation on new operands. Inside a trace, this adds it to the trace.

    Args:
        eqn: The equation.
        values: Values of its operands, with the shapes and dtypes of the equation. Values of literals are ignored.

    Returns:
        The outputs, with None for outputs that nothing reads.
    """
    given: dict[Any, Any] = {v: value for v, value in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    debug_info = core.DebugInfo("replay", eqn.primitive.name, ("",) * len(given), ("",) * len(results))
    program = core.Jaxpr((), list(given), results, [eqn], eqn.effects, debug_info)
    out = iter(core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*given.values()))
    return [None if isinstance(v, core.DropVar) else next(out) for v in eqn.outvars]


def environment(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Environment:
    """Builds the environment before the first equation of a jaxpr.

    Args:
        jaxpr: The jaxpr.
        consts: Values of its constants, one each.
        args: Values of its inputs, one each.

    Returns:
        A new dict from variables (of constants and inputs) to values.
    """
    return dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))


def reader(env: Environment) -> Callable[[Atom], Any]:
    """Returns a function that reads an environment.

    Args:
        env: Maps variables to values. Not copied, so the function also sees later values.

    Returns:
        A function from a variable to its value, or from a literal to the value of the literal. It raises KeyError for a
        variable without a value.
    """
    return lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]


def write(env: Environment, outvars: Iterable[core.Var], values: Iterable[Any]) -> None:
    """Adds the outputs of an equation to an environment, in place. Ignores outputs that nothing reads.

    Args:
        env: The environment: a dict from variables to values.
        outvars: Output variables of the equation.
        values: Values of the outputs, one each.
    """
    env.update((v, x) for v, x in zip(outvars, values, strict=True) if not isinstance(v, core.DropVar))


def depends(jaxpr: core.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Finds the outputs that depend on marked inputs. May report an output that does not.

    Args:
        jaxpr: The jaxpr.
        given: For each input, True if it is marked.

    Returns:
        For each output, True if it depends on a marked input. A result of a `cond` or `while` depends on all its operands.
    """
    marked = _depending(jaxpr, given)
    return [not is_literal(v) and v in marked for v in jaxpr.outvars]


def _depending(jaxpr: core.Jaxpr, given: Sequence[bool]) -> set[Any]:
    """Returns the variables that depend on a marked input."""
    marked = {v for v, flag in zip(jaxpr.invars, given, strict=True) if flag}
    for eqn in jaxpr.eqns:
        flags = [not is_literal(v) and v in marked for v in eqn.invars]
        if not any(flags):
            continue
        out = depends(body(eqn), flags) if eqn.primitive.name in _WITH_BODY else [True] * len(eqn.outvars)
        if eqn.primitive.name == SCAN:
            consts, carry = scan_counts(eqn)
            while (grown := [a or b for a, b in zip(flags[consts:], out[:carry], strict=False)]) != flags[consts:][:carry]:
                flags[consts : consts + carry] = grown
                out = depends(body(eqn), flags)
        marked.update(v for v, flag in zip(eqn.outvars, out, strict=True) if flag)
    return marked


def holds(jaxpr: core.Jaxpr, names: Sequence[str]) -> bool:
    """Searches a jaxpr and the jaxprs nested in it for primitives.

    Args:
        jaxpr: The jaxpr.
        names: Names of the primitives, such as `scan`.

    Returns:
        True if an equation has one of the primitives.
    """
    return any(eqn.primitive.name in names for eqn in jaxpr.eqns) or any(holds(inner, names) for inner in core.subjaxprs(jaxpr))


def primitives(name: str, params: dict[str, Any]) -> set[str]:
    """Lists the primitives that an equation runs.

    Args:
        name: Name of the primitive of the equation.
        params: Parameters of the equation.

    Returns:
        The name itself; for a jit, `custom_jvp` or `custom_vjp` instead the names of the primitives inside, at any depth of
        such calls.
    """
    if name not in _RULES:
        return {name}
    inner = [eqn for jaxpr in core.jaxprs_in_params(params) for eqn in jaxpr.eqns]
    return set().union(*(primitives(eqn.primitive.name, eqn.params) for eqn in inner))


def needs(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[list[bool], set[str]]:
    """Finds the inputs and primitives that compute the wanted outputs. May report an input that is not needed.

    A call of a quantization kernel counts as one primitive with the name of the kernel.

    Args:
        jaxpr: The jaxpr.
        wanted: For each output, True if it is wanted.
        data: For each input, True if it is data. Then only primitives with an operand that depends on data are returned. None
            returns all primitives.

    Returns:
        (needed, names): for each input, True if the wanted outputs need it; and the set of names of the primitives.
    """
    live, used = live_variables(jaxpr, wanted, data)
    return [v in live for v in jaxpr.invars], used


def live_variables(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[set[Any], set[str]]:
    """Finds the variables and primitives that compute the wanted outputs. May report a variable that is not needed.

    A call of a quantization kernel counts as one primitive with the name of the kernel.

    Args:
        jaxpr: The jaxpr.
        wanted: For each output, True if it is wanted.
        data: For each input, True if it is data. Then only primitives with an operand that depends on data are returned. None
            returns all primitives.

    Returns:
        (variables, names): the set of variables of `jaxpr`, including inputs, that the wanted outputs need; and the set of
        names of the primitives, including those of nested jaxprs.
    """
    live: set[Any] = {v for v, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and not is_literal(v)}
    marked = None if data is None else _depending(jaxpr, data)
    used: set[str] = set()
    for eqn in reversed(jaxpr.eqns):
        flags = [v in live for v in eqn.outvars]
        if not any(flags):
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
        live.update(v for v, flag in zip(eqn.invars, given, strict=True) if flag and not is_literal(v))
    return live, used


def wanted_inside(eqn: core.JaxprEqn, wanted: Sequence[bool]) -> list[bool]:
    """Finds the wanted outputs of the jaxpr inside a jit, checkpoint or scan.

    Args:
        eqn: A jit, checkpoint or scan equation.
        wanted: For each output of the equation, True if it is wanted.

    Returns:
        For each output of the jaxpr, True if it is wanted. For a scan, a carry is wanted if any iteration needs it for a wanted
        output.
    """
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
    """Finds the outputs that are inputs, passed through unchanged, also through nested jits and checkpoints.

    Args:
        jaxpr: The jaxpr.

    Returns:
        For each output, the index of the input; None for a computed output or a literal.
    """
    place = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in JITS + CHECKPOINTS:
            for v, inner in zip(eqn.outvars, forwarded(body(eqn)), strict=True):
                if inner is not None and not is_literal(source := eqn.invars[inner]) and source in place:
                    place[v] = place[source]
    return [place.get(v) if isinstance(v, core.Var) else None for v in jaxpr.outvars]


def without_callbacks(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Removes debug and I/O callbacks with unread results, also from nested jaxprs. Does not change the argument.

    Keeps callbacks inside functions with a custom derivative, because their derivative rules cannot be inspected.

    Args:
        jaxpr: The jaxpr.

    Returns:
        A new jaxpr; `jaxpr` itself if it has no callbacks.
    """
    if not holds(jaxpr, CALLBACKS):
        return jaxpr
    read = {v for v in (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars) if not is_literal(v)}
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLBACKS and not read & set(eqn.outvars):
            continue
        if eqn.primitive.name not in CUSTOM:
            params = {name: _param_without_callbacks(value) for name, value in eqn.params.items()}
            gone = _effects(core.jaxprs_in_params(eqn.params)) - _effects(core.jaxprs_in_params(params))
            eqn = eqn.replace(params=params, effects=eqn.effects - gone)
        eqns.append(eqn)
    effects = set(jaxpr.effects) - (_effects(jaxpr.eqns) - _effects(eqns))
    return jaxpr.replace(eqns=eqns, effects=effects, debug_info=jaxpr.debug_info)


def _param_without_callbacks(param: Any) -> Any:
    """Removes callbacks from a parameter of an equation: a jaxpr, a tuple of jaxprs (`cond`), or any other value."""
    if isinstance(param, core.Jaxpr):
        return without_callbacks(param)
    if isinstance(param, core.ClosedJaxpr):
        return param.replace(jaxpr=without_callbacks(param.jaxpr))
    return tuple(map(_param_without_callbacks, param)) if type(param) is tuple else param


def _effects(holders: Iterable[core.Jaxpr | core.JaxprEqn]) -> set[Any]:
    return set().union(*(holder.effects for holder in holders))


def exact_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Removes `reduce_precision` equations that round the output of a matmul to its own dtype.

    `jax.checkpoint` inserts them for residuals. They prevent XLA from fusing a GELU into the epilogue of the matmul.

    Args:
        fn: A function of positional arguments that are trees of arrays.

    Returns:
        A function with the same arguments and results. A call traces `fn` and runs the changed jaxpr. Nested jaxprs are not
        changed.
    """

    @wraps(fn)
    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        products, same, eqns = set[Any](), dict[Any, Any](), []
        for eqn in closed.jaxpr.eqns:
            inputs = [v if is_literal(v) else same.get(v, v) for v in eqn.invars]
            if eqn.primitive.name == "reduce_precision" and inputs[0] in products and _keeps_all_bits(eqn):
                same[eqn.outvars[0]] = inputs[0]
                continue
            products.update(eqn.outvars if eqn.primitive.name == "dot_general" else ())
            eqns.append(eqn.replace(invars=inputs))
        outs = [v if is_literal(v) else same.get(v, v) for v in closed.jaxpr.outvars]
        program = closed.jaxpr.replace(eqns=eqns, outvars=outs, debug_info=closed.jaxpr.debug_info)
        results = core.jaxpr_as_fun(core.ClosedJaxpr(program, closed.consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


def _keeps_all_bits(eqn: core.JaxprEqn) -> bool:
    info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def avals(jaxpr: core.Jaxpr) -> Iterator[Aval]:
    """Yields the abstract values of all operands and results in a jaxpr and the jaxprs nested in it, with repetitions."""
    for eqn in jaxpr.eqns:
        yield from map(aval_of, (*eqn.invars, *eqn.outvars))
    for inner in core.subjaxprs(jaxpr):
        yield from avals(inner)


def explicit_axes(aval: Aval) -> list[Any]:
    """Lists the explicit mesh axes that an abstract value is sharded over.

    Returns:
        The entries of its PartitionSpec that are not None, each an axis name or a tuple of names. Empty without a sharding.
    """
    return [axis for axis in getattr(getattr(aval, "sharding", None), "spec", ()) if axis is not None]


def mesh_of(leaves: Iterable[Any]) -> jax.sharding.AbstractMesh:
    """Returns the mesh of the first array that has one, else the current abstract mesh, which may be empty."""
    meshes = (aval.sharding.mesh for aval in map(jax.typeof, leaves) if hasattr(aval, "sharding"))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def zeros(aval: Any, *lead: int, shape: Sequence[int] | None = None, dtype: Any = None) -> jax.Array:
    """Makes zeros that vary over the same mesh axes as an abstract value inside `jax.shard_map`.

    Args:
        aval: An abstract value or `jax.ShapeDtypeStruct`. Its dtype may be that of random keys.
        *lead: Lengths of additional leading axes.
        shape: Replaces the shape of `aval`; None keeps it.
        dtype: Replaces the dtype of `aval`; None keeps it.

    Returns:
        The array of zeros, [*lead, *shape].
    """
    blank = jnp.zeros((*lead, *(aval.shape if shape is None else shape)), dtype or aval.dtype)
    # `mat.varying` since jax 0.12.
    axes = tuple(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", ()))
    return lax.pcast(blank, axes, to="varying") if axes else blank
