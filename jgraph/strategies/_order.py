"""Keeps XLA from delaying the weight gradients of recomputed layers."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array, lax

from jgraph.autodiff import replay

_Result = TypeVar("_Result")


def by_layer(pull_back: Callable[[Array], _Result], seed: Array) -> _Result:
    """Runs a backward pass in which each `jax.checkpoint` is complete before the equations that follow read its results.

    XLA's latency-hiding scheduler delays weight gradients to hide collectives beside them. Then the recomputed activations of
    many layers are in memory at once. A reduction still runs beside the backward pass of the next layer.
    """
    closed, shapes = jax.make_jaxpr(pull_back, return_shape=True)(seed)
    jaxpr = closed.jaxpr
    env = replay.environment(jaxpr, closed.consts, [seed])
    last_read = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not replay.is_literal(v)}
    last_read |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not replay.is_literal(v)}
    start = 0
    for end in [i + 1 for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in replay.CHECKPOINTS]:
        made = [v for eqn in jaxpr.eqns[start:end] for v in eqn.outvars if last_read.get(v, 0) >= end]
        env |= zip(made, replay.run(jaxpr.eqns[start:end], env, made), strict=True)
        layer = [v for v in jaxpr.eqns[end - 1].outvars if v in made]
        env |= zip(layer, lax.optimization_barrier([env[v] for v in layer]), strict=True)
        start = end
    return jax.tree.unflatten(jax.tree.structure(shapes), replay.run(jaxpr.eqns[start:], env, jaxpr.outvars))
