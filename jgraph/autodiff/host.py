"""Arrays in pinned host memory: their shardings, and programs that copy few of them to the device at a time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.extend import core
from jax.sharding import NamedSharding

from jgraph.autodiff import replay
from jgraph.autodiff.linear import WIDE
from jgraph.kernels import SAVED_ATTENTION
from jgraph.tree import HOST
from jgraph.types import Shardings, Tree

_Result = TypeVar("_Result")


def in_host_memory(shardings: Shardings, shapes: Tree) -> Shardings:
    """Moves all arrays to pinned host memory except scalars, such as counts."""

    def place(sharding: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        there = sharding.with_memory_kind(HOST)
        if there.memory_kind is None:  # JAX drops the memory of devices that are not present, but not of an abstract mesh
            there = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=HOST)
        return there if leaf.ndim else sharding

    return jax.tree.map(place, shardings, shapes)


def is_in_host_space(aval: Any) -> bool:
    """True for the abstract value of an array in host memory. A token has no memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def in_order(function: Callable[..., _Result], *args: Tree, start: Sequence[Array] = ()) -> _Result:
    """Calls a function of arrays in host memory under `jax.jit`. Its results are on the device.

    Computes the results in order, but each together with all results of the same arrays. An array is copied to the device when
    a result needs it, after `start` and after the result before the previous one. XLA would copy all arrays first.
    """
    leaves, structure = jax.tree.flatten(args)
    on_host = [is_in_host_space(jax.typeof(leaf)) for leaf in leaves]
    if not any(on_host):
        return function(*args)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    closed, result = jax.make_jaxpr(function, return_shape=True)(*structure.unflatten(shapes))
    # optax has jitted functions of all moments.
    closed = jax.make_jaxpr(partial(_run_inlined, closed.jaxpr, closed.consts))(shapes)
    jaxpr = closed.jaxpr
    env = replay.environment(jaxpr, closed.consts, leaves)
    read = replay.reader(env)
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    waiting = {v for v, flag in zip(jaxpr.invars, on_host, strict=True) if flag}
    sources = _sources(jaxpr, waiting)
    done = [start, start]

    def compute(wanted: core.Var) -> None:
        needed: set[int] = set()
        stack: list[replay.Atom] = [wanted]
        while stack:
            v = stack.pop()
            if not isinstance(v, core.Var):
                continue
            if v in waiting:
                waiting.remove(v)
                env[v] = jax.device_put(lax.optimization_barrier((env[v], done[-2]))[0], jax.memory.Space.Device)
            elif v not in env and (i := makers[v]) not in needed:
                needed.add(i)
                stack += jaxpr.eqns[i].invars
        for eqn in (jaxpr.eqns[i] for i in sorted(needed)):
            replay.write(env, eqn.outvars, replay.apply(eqn, [read(v) for v in eqn.invars]))

    left = [v for v in jaxpr.outvars if isinstance(v, core.Var)]
    while left:
        compute(left[0])
        done.append([read(left[0])])
        for v in left:
            if not sources[v] & waiting:
                compute(v)
        left = [v for v in left if sources[v] & waiting]
    return jax.tree.unflatten(jax.tree.structure(result), map(read, jaxpr.outvars))


def back(leaf: Array, like: Array) -> Array:
    """Copies an array to the memory of `like`, under `jax.jit`."""
    space = jax.typeof(like).memory_space
    return leaf if jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)


def _sources(jaxpr: core.Jaxpr, inputs: set[core.Var]) -> dict[core.Var, frozenset[core.Var]]:
    """Returns the inputs that each variable depends on."""
    found = {v: frozenset({v} & inputs) for v in (*jaxpr.constvars, *jaxpr.invars)}
    for eqn in jaxpr.eqns:
        operands = [found[v] for v in eqn.invars if isinstance(v, core.Var)]
        found |= dict.fromkeys(eqn.outvars, frozenset().union(*operands))
    return found


def _run_inlined(jaxpr: core.Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Runs a jaxpr without calls of jitted functions."""

    def evaluate(_: int, eqn: core.JaxprEqn, read: replay.Reader[Array]) -> list[Array]:
        values = [read(v) for v in eqn.invars]
        is_call = eqn.primitive.name in replay.JITS
        return _run_inlined(replay.body(eqn), replay.body_consts(eqn), values) if is_call else replay.apply(eqn, values)

    return replay.interpret(jaxpr, consts, args, evaluate)


_PRODUCTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", HOST)
_OFFLOAD = _PRODUCTS(lax.dot_general_p, dimension_numbers=(((), ()), ((), ())))


def offload_residuals(primitive: Any, *avals: Any, **params: Any) -> Any:
    """A policy of `jax.checkpoint` that keeps results of attention kernels and of matmuls with weights in host memory.

    Recomputes matmuls with an output at least four times as wide as the input, such as the first of an MLP, because XLA does
    not hide the copies of their results.
    """
    if primitive is lax.dot_general_p:
        (_, contracted), _ = params["dimension_numbers"]
        width = math.prod(avals[1].shape[axis] for axis in contracted)
        return _PRODUCTS(primitive, *avals, **params) if avals[1].size < WIDE * width**2 else False
    is_attention = primitive.name == "dot_product_attention_fwd_wrapper" or params.get("name") == SAVED_ATTENTION
    return _OFFLOAD if is_attention else False
