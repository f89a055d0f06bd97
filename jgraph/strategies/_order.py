"""Keeps XLA from delaying the weight gradients of recomputed layers."""

from collections.abc import Callable
from typing import Literal, TypeVar

import jax
from jax import Array, lax
from jax.extend import core

from jgraph.autodiff import replay

_Result = TypeVar("_Result")


def by_layer(pull_back: Callable[[Array], _Result], seed: Array, *, when: Literal["always", "offloaded"]) -> _Result:
    """Runs a backward pass in which each `jax.checkpoint` is complete before the equations that follow read its results.

    XLA's latency-hiding scheduler delays weight gradients to hide collectives and copies beside them. Then the recomputed
    activations of many layers are in memory at once. A reduction still runs beside the backward pass of the next layer, and so
    do the copies of a layer's residuals from host memory. `when` offloaded changes only passes with such copies.
    """
    closed, shapes = jax.make_jaxpr(pull_back, return_shape=True)(seed)
    jaxpr = closed.jaxpr
    layers = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in replay.CHECKPOINTS]
    if when == "offloaded" and not any(_on_host(jaxpr.eqns[i]) for i in layers):
        return pull_back(seed)
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
    return [v for v in eqn.invars if isinstance(v, core.Var) and replay.aval_of(v).memory_space == jax.memory.Space.Host]
