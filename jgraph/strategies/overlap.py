"""Sums of gradients over devices beside the backward that makes them: each begins when its gradient is there.

XLA's scheduler goes through a program from its end, where the gradient's norm asks for all sums at once, and takes them in an
order of its own. Whichever it takes holds up the dgrads behind it, so no sum begins before the last dgrad is done. The trace of
a backward is in the order of the layers, and there a barrier says what waits: all that comes after a gradient waits for that
gradient and for the sum before its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from jgraph.autodiff import replay

Rest = TypeVar("Rest")

_ENOUGH = 2**27
"""Bytes of gradients that are summed together, at least: a collective has costs of its own."""


def summed_in_turn(
    backward: Callable[..., tuple[dict[str, Array], Rest]],
    args: tuple[Any, ...],
    add: Callable[[str, Array], Array],
    dtype: Any,
) -> tuple[dict[str, Array], Rest]:
    """Returns the sums of gradients, by name, and the rest.

    Args:
        backward: of `args`; returns gradients by name, and the rest.
        args: trees of arrays.
        add: sums the gradient of this name over devices.
        dtype: that gradients are cast to first.
    """
    closed, (shapes, rest) = jax.make_jaxpr(backward, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    outputs = dict(zip(sorted(shapes), jaxpr.outvars, strict=False))
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not replay.is_literal(v)}
    env = replay.environment(jaxpr, closed.consts, jax.tree.leaves(args))
    read, groups, sums = replay.reader(env), _groups(jaxpr, outputs, jnp.dtype(dtype).itemsize), {}
    made: list[Any] = []  # since the sums before, and read later: of the rows that go from layer to layer one array is enough
    before: dict[str, Array] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        replay.write(env, eqn.outvars, replay.apply(eqn, [read(v) for v in eqn.invars]))
        made = [v for v in (*made, *eqn.outvars) if last.get(v, i) > i]
        if i in groups:
            names, needed = groups[i]
            waiting = [v for v in made if v in needed]
            found = {name: read(outputs[name]).astype(dtype) for name in names}, before, [env[v] for v in waiting]
            gradients, _, values = lax.optimization_barrier(found)
            env.update(zip(waiting, values, strict=True))
            before = {name: add(name, gradient) for name, gradient in gradients.items()}
            sums |= before
            made = []
    sums |= {name: add(name, read(v).astype(dtype)) for name, v in outputs.items() if name not in sums}
    return sums, jax.tree.unflatten(jax.tree.structure(rest), [read(v) for v in jaxpr.outvars[len(outputs) :]])


def _groups(jaxpr: core.Jaxpr, outputs: Mapping[str, Any], itemsize: int) -> dict[int, tuple[list[str], set[Any]]]:
    """Returns the gradients that are summed together, and what the next ones are made of, by the equation behind which."""
    made = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    places = {name: made[v] for name, v in outputs.items() if not replay.is_literal(v) and v in made}
    groups: dict[int, list[str]] = {}
    group: list[str] = []
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        group.append(name)
        if sum(outputs[n].aval.size * itemsize for n in group) >= _ENOUGH:
            groups[place], group = groups.get(place, []) + group, []
    if group:
        end = max(places.values())
        groups[end] = groups.get(end, []) + group
    following = [*list(groups.values())[1:], []]
    wanted = [{outputs[name] for name in names} for names in following]
    needed = [replay.live_variables(jaxpr, [v in some for v in jaxpr.outvars])[0] for some in wanted]
    return {place: (names, some) for (place, names), some in zip(groups.items(), needed, strict=True)}
