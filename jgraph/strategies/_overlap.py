"""Overlaps gradient reductions with the backward pass, one bucket at a time.

XLA's latency-hiding scheduler works backwards from the end of the program. There, the gradient norm needs every reduction at
once, so the scheduler issues reductions late and in an arbitrary order, and each one delays the dgrads behind it. This module
replays the backward trace and inserts an optimization barrier after each bucket of gradients: the equations that follow wait
for the bucket, and for the reduction of the bucket before it. At most one reduction is in flight while the next layer's dgrad
runs.

Buckets follow PyTorch DDP (Li et al., arXiv:2006.15704, section 4.2), but are sized in bytes of the reduced dtype.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.typing import DTypeLike

from jgraph.autodiff import replay
from jgraph.types import Tree

Aux = TypeVar("Aux")

# In the dtype of the sums, and without the last bucket. Smaller collectives cost more in launches than they hide.
_BUCKET_BYTES = 2**27


def reduce_in_buckets(
    backward: Callable[..., tuple[dict[str, Array], Aux]],
    args: tuple[Tree | Callable[..., Tree], ...],
    reduce: Callable[[str, Array], Array],
    dtype: DTypeLike,
) -> tuple[dict[str, Array], Aux]:
    """Returns the gradients of `backward(*args)`, summed by `reduce(name, gradient)` in `dtype`, and the auxiliary outputs.

    Replays a trace of `backward`. Reduces each bucket as soon as all its gradients are computed.
    """
    closed, (shapes, aux) = jax.make_jaxpr(backward, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    gradient_vars = dict(zip(sorted(shapes), jaxpr.outvars, strict=False))
    last_use = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not replay.is_literal(v)}
    env = replay.environment(jaxpr, closed.consts, jax.tree.leaves(args))
    read = replay.reader(env)
    nbytes = {name: shape.size * jnp.dtype(dtype).itemsize for name, shape in shapes.items()}
    buckets = _buckets(jaxpr, gradient_vars, nbytes)
    reduced: dict[str, Array] = {}
    in_flight: dict[str, Array] = {}
    live: list[core.Var] = []  # variables that are computed since the last bucket and read later

    for i, eqn in enumerate(jaxpr.eqns):
        replay.write(env, eqn.outvars, replay.apply(eqn, [read(v) for v in eqn.invars]))
        live = [v for v in (*live, *eqn.outvars) if last_use.get(v, i) > i]
        if i not in buckets:
            continue
        names, needed_next = buckets[i]
        delayed = [v for v in live if v in needed_next]
        gradients = {name: read(gradient_vars[name]).astype(dtype) for name in names}
        gradients, _, values = lax.optimization_barrier((gradients, in_flight, [env[v] for v in delayed]))
        env.update(zip(delayed, values, strict=True))
        in_flight = {name: reduce(name, gradient) for name, gradient in gradients.items()}
        reduced |= in_flight
        live = []

    # Gradients that no equation computes (constants, or parameters passed through) belong to no bucket.
    reduced |= {name: reduce(name, read(v).astype(dtype)) for name, v in gradient_vars.items() if name not in reduced}
    return reduced, jax.tree.unflatten(jax.tree.structure(aux), [read(v) for v in jaxpr.outvars[len(gradient_vars) :]])


def _buckets(
    jaxpr: core.Jaxpr, gradient_vars: Mapping[str, core.Var], nbytes: Mapping[str, int]
) -> dict[int, tuple[list[str], set[core.Var]]]:
    """Groups gradients into buckets by the index of the equation that completes the bucket.

    A bucket has the parameter names, and the variables that the next bucket depends on.
    """
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    places = {name: made[v] for name, v in gradient_vars.items() if not replay.is_literal(v) and v in made}
    buckets: dict[int, list[str]] = {}
    bucket: list[str] = []
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        bucket.append(name)
        if sum(nbytes[n] for n in bucket) >= _BUCKET_BYTES:
            buckets[place], bucket = buckets.get(place, []) + bucket, []
    if bucket:
        end = max(places.values())
        buckets[end] = buckets.get(end, []) + bucket
    following = [{gradient_vars[name] for name in names} for names in [*list(buckets.values())[1:], []]]
    needed = [replay.live_variables(jaxpr, [v in some for v in jaxpr.outvars])[0] for some in following]
    return {place: (names, some) for (place, names), some in zip(buckets.items(), needed, strict=True)}
