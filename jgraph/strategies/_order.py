"""Keeps XLA from delaying the weight gradients of recomputed layers, and the copies of residuals to host memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.host import is_in_host_space
from jgraph.types import Tree

_Result = TypeVar("_Result")
_Aux = TypeVar("_Aux")


def vjp(function: Callable[..., tuple[Array, _Aux]], *args: Tree) -> tuple[Array, Callable[[Array], Any], _Aux]:
    """Is `jax.vjp` with `has_aux`. If residuals are offloaded, at most two at a time are being copied to host memory.

    XLA would copy them at the end of the forward pass, and keep all of them on the device until then.
    """

    def forward(*args: Tree) -> Any:
        return jax.vjp(function, *args, has_aux=True)

    # Only a trace shows whether a policy of `jax.checkpoint` offloads. If it does, XLA drops this trace.
    found = forward(*args)
    if not is_offloaded(found[1]):
        return found
    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    env = replay.environment(jaxpr, closed.consts, jax.tree.leaves(args))
    read = replay.reader(env)
    copies: list[list[Array]] = [[], []]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put" and is_in_host_space(replay.aval_of(eqn.outvars[0])):
            # The next reader of the residual waits for the copy before the previous one.
            (source,) = eqn.invars
            env[source], _ = lax.optimization_barrier((read(source), copies[-2]))
            copies.append(replay.apply(eqn, [read(source)]))
            replay.write(env, eqn.outvars, copies[-1])
        else:
            replay.write(env, eqn.outvars, replay.apply(eqn, [read(v) for v in eqn.invars]))
    return jax.tree.unflatten(jax.tree.structure(shapes), map(read, jaxpr.outvars))


def is_offloaded(pull_back: Callable[[Array], Any]) -> bool:
    """True if residuals of a backward pass are in host memory."""
    return any(is_in_host_space(jax.typeof(leaf)) for leaf in jax.tree.leaves(pull_back))


def by_layer(pull_back: Callable[[Array], _Result], seed: Array) -> _Result:
    """Runs a backward pass in which each `jax.checkpoint` is complete before the equations that follow read its results.

    XLA's latency-hiding scheduler delays weight gradients to hide collectives and copies beside them. Then the recomputed
    activations of many layers are in memory at once. A reduction still runs beside the backward pass of the next layer, and so
    do the copies of a layer's residuals from host memory.
    """
    closed, shapes = jax.make_jaxpr(pull_back, return_shape=True)(seed)
    jaxpr = closed.jaxpr
    layers = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in replay.CHECKPOINTS]
    env = replay.environment(jaxpr, closed.consts, [seed])
    last_read = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not replay.is_literal(v)}
    last_read |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not replay.is_literal(v)}
    start = 0
    done: list[list[Array]] = [[], []]
    for end in [i + 1 for i in layers]:
        eqn = jaxpr.eqns[end - 1]
        if on_host := _on_host(eqn):
            # The copies run beside the layer before this one. JAX's own barrier would delay them to the end of that layer.
            values, _ = lax.optimization_barrier(([env[v] for v in on_host], done[-2]))
            env |= zip(on_host, values, strict=True)
            eqn = eqn.replace(params=eqn.params | {"prevent_cse": tuple(v not in on_host for v in eqn.invars)})
        eqns = [*jaxpr.eqns[start : end - 1], eqn]
        made = [v for e in eqns for v in e.outvars if last_read.get(v, 0) >= end]
        env |= zip(made, replay.run(eqns, env, made), strict=True)
        layer = [v for v in eqn.outvars if v in made]
        done.append(lax.optimization_barrier([env[v] for v in layer]))
        env |= zip(layer, done[-1], strict=True)
        start = end
    return jax.tree.unflatten(jax.tree.structure(shapes), replay.run(jaxpr.eqns[start:], env, jaxpr.outvars))


def _on_host(eqn: core.JaxprEqn) -> list[core.Var]:
    """Returns the operands in host memory."""
    return [v for v in eqn.invars if isinstance(v, core.Var) and is_in_host_space(replay.aval_of(v))]
