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
    """Returns the abstract value of a variable or literal, an object with `shape` and `dtype`.

    This is `atom.aval`. The function only gives it a useful type for type checkers.
    """
    return atom.aval


def body(eqn: core.JaxprEqn) -> core.Jaxpr:
    """Returns the jaxpr inside a jit, checkpoint, scan, `custom_jvp` or `custom_vjp` equation.

    The values of its constants are not part of the result. Raises KeyError for another equation.
    """
    inner = eqn.params["call_jaxpr" if eqn.primitive.name in CUSTOM else "jaxpr"]
    return getattr(inner, "jaxpr", inner)


def body_consts(eqn: core.JaxprEqn) -> list[Any]:
    """Returns a new list of the values of the constants of the jaxpr inside a jit, checkpoint or scan equation.

    Empty if there are none.
    """
    return list(getattr(eqn.params["jaxpr"], "consts", ()))


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Counts the operands of a scan by role.

    Args:
        eqn: A scan equation.

    Returns:
        (constants, carries): the numbers of operands of these roles. The operands of the scan are first the constants, then
        the carries, then the arrays that are scanned over.
    """
    if "num_carry" in eqn.params:  # before jax 0.11
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def is_literal(atom: Any) -> bool:
    """True if an operand of an equation is a literal, False if it is a variable.

    Literals are not hashable, so they cannot be looked up in an environment (a dict from variables to values).
    """
    return isinstance(atom, core.Literal)


def apply(eqn: core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Runs one equation on new operands. Inside a trace, this adds it to the trace.

    Args:
        eqn: The equation.
        values: One value for each operand, with the shape and dtype of the operand. Values for literals are ignored.

    Returns:
        One value for each output of the equation. None for an output that is marked as unread (`DropVar`).
    """
    given: dict[Any, Any] = {v: value for v, value in zip(eqn.invars, values, strict=True) if not is_literal(v)}
    results = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    debug_info = core.DebugInfo("replay", eqn.primitive.name, ("",) * len(given), ("",) * len(results))
    program = core.Jaxpr((), list(given), results, [eqn], eqn.effects, debug_info)
    out = iter(core.jaxpr_as_fun(core.ClosedJaxpr(program, ()))(*given.values()))
    return [None if isinstance(v, core.DropVar) else next(out) for v in eqn.outvars]


def environment(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> Environment:
    """Builds the environment (a dict from variables to values) before the first equation of a jaxpr.

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
        A function `read(atom)`. For a variable, it returns the value in `env`, and raises KeyError if there is none. For a
        literal, it returns the value of the literal.
    """
    return lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]


def write(env: Environment, outvars: Iterable[core.Var], values: Iterable[Any]) -> None:
    """Adds the outputs of an equation to an environment, in place. Skips outputs that are marked as unread (`DropVar`).

    Args:
        env: The environment: a dict from variables to values.
        outvars: Output variables of the equation.
        values: Values of the outputs, one each.
    """
    env.update((v, x) for v, x in zip(outvars, values, strict=True) if not isinstance(v, core.DropVar))


def depends(jaxpr: core.Jaxpr, given: Sequence[bool]) -> list[bool]:
    """Finds the outputs that depend on marked inputs. May report an output that does not depend on them.

    Args:
        jaxpr: The jaxpr.
        given: For each input, True if it is marked.

    Returns:
        For each output, True if it depends on a marked input. Each result of an equation other than jit, checkpoint and scan,
        such as `cond` or `while`, counts as depending on all operands of the equation.
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
        True if at least one equation has a primitive with one of the names.
    """
    return any(eqn.primitive.name in names for eqn in jaxpr.eqns) or any(holds(inner, names) for inner in core.subjaxprs(jaxpr))


def primitives(name: str, params: dict[str, Any]) -> set[str]:
    """Lists the primitives that an equation runs.

    Args:
        name: Name of the primitive of the equation.
        params: Parameters of the equation (`eqn.params`).

    Returns:
        A set of names. For an equation other than jit, `custom_jvp` and `custom_vjp`, {name}. For these, the primitives of the
        equations inside, where nested jits, `custom_jvp`s and `custom_vjp`s are replaced by their own contents.
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
        data: For each input, True if it is data. Primitives without an operand that depends on data are then left out of
            `names`. None leaves none out.

    Returns:
        (needed, names): a list with a bool for each input, True if the wanted outputs need the input; and the set of the names
        of the primitives, including those of nested jaxprs.
    """
    live, used = live_variables(jaxpr, wanted, data)
    return [v in live for v in jaxpr.invars], used


def live_variables(jaxpr: core.Jaxpr, wanted: Sequence[bool], data: Sequence[bool] | None = None) -> tuple[set[Any], set[str]]:
    """Finds the variables and primitives that compute the wanted outputs. May report a variable that is not needed.

    A call of a quantization kernel counts as one primitive with the name of the kernel.

    Args:
        jaxpr: The jaxpr.
        wanted: For each output, True if it is wanted.
        data: For each input, True if it is data. Primitives without an operand that depends on data are then left out of
            `names`. None leaves none out. `variables` does not depend on this argument.

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
        A list with a bool for each output of the inner jaxpr, True if it is wanted. For jit and checkpoint, equal to `wanted`.
        For a scan, a carry is also wanted if a later iteration reads it to compute a wanted output.
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
    """Finds the outputs that are inputs which the jaxpr passes through unchanged.

    Also finds inputs that are passed through nested jits and checkpoints.

    Args:
        jaxpr: The jaxpr.

    Returns:
        For each output, the index of the input that it is. None if the output is computed, or is a literal or constant.
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
        A new jaxpr with the same inputs and outputs. `jaxpr` itself if it has no debug or I/O callbacks.
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
    """Wraps a function so that it runs without `reduce_precision` equations that round a matmul's output to its own dtype.

    These equations change no value. `jax.checkpoint` inserts them for residuals, and they prevent XLA from fusing a GELU into
    the matmul.

    Args:
        fn: A function of positional arguments that are trees of arrays.

    Returns:
        A function with the same arguments and results. Each call traces `fn`, removes the equations that follow a
        `dot_general`, and runs the changed jaxpr. Nested jaxprs are not changed.
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
    """Yields the abstract value (shape and dtype) of every operand and result of every equation.

    Includes the equations of nested jaxprs. An array that several equations use is yielded several times.
    """
    for eqn in jaxpr.eqns:
        yield from map(aval_of, (*eqn.invars, *eqn.outvars))
    for inner in core.subjaxprs(jaxpr):
        yield from avals(inner)


def explicit_axes(aval: Aval) -> list[Any]:
    """Lists the explicit mesh axes that an abstract value is sharded over.

    Args:
        aval: The abstract value of an array.

    Returns:
        The entries of its PartitionSpec that are not None, each an axis name or a tuple of names. Empty without a sharding.
    """
    return [axis for axis in getattr(getattr(aval, "sharding", None), "spec", ()) if axis is not None]


def mesh_of(leaves: Iterable[Any]) -> jax.sharding.AbstractMesh:
    """Returns the abstract mesh of the first leaf with a non-empty mesh in its type.

    Args:
        leaves: Arrays or tracers.

    Returns:
        The mesh. If no leaf has one, the current abstract mesh of JAX, which is empty if none was set.
    """
    meshes = (aval.sharding.mesh for aval in map(jax.typeof, leaves) if hasattr(aval, "sharding"))
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def zeros(aval: Any, *lead: int, shape: Sequence[int] | None = None, dtype: Any = None) -> jax.Array:
    """Makes an array of zeros with the shape and dtype of an abstract value.

    Inside `jax.shard_map`, the type of the array varies over the same mesh axes as the abstract value.

    Args:
        aval: An abstract value or `jax.ShapeDtypeStruct`. Its dtype may be that of random keys.
        *lead: Lengths of additional leading axes.
        shape: Shape of the array after the leading axes. None takes the shape of `aval`.
        dtype: Dtype of the array. None takes the dtype of `aval`.

    Returns:
        The array of zeros, [*lead, *shape], in `dtype`.
    """
    blank = jnp.zeros((*lead, *(aval.shape if shape is None else shape)), dtype or aval.dtype)
    # `mat.varying` since jax 0.12.
    axes = tuple(getattr(aval, "vma", None) or getattr(getattr(aval, "mat", None), "varying", ()))
    return lax.pcast(blank, axes, to="varying") if axes else blank
