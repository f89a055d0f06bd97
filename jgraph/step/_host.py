"""Optimizer state in pinned host memory: its placement, its copies in the step, and float32 main parameters.

Look for: `in_order`, which updates one parameter after the other. XLA would otherwise copy the whole state to the device first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from jgraph.autodiff import replay
from jgraph.errors import ConfigError, check_choice
from jgraph.step.transform import Transform
from jgraph.types import Arrays, OptState, Shardings, Tree

Space = jax.memory.Space
_KIND = "pinned_host"


class Masters(NamedTuple):
    """Optimizer state with the float32 parameters that the transform updates. The parameters of the step are a cast copy."""

    params: Tree  # as the transform sees them
    inner: OptState


def with_masters(transform: Transform) -> Transform:
    """Returns a transform that makes `Masters`. Its `update` is that of `transform` and gets `Masters.inner`."""

    def init(params: Any) -> Masters:  # optax annotates its trees as any iterables
        return Masters(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), transform.init(params))

    return optax.GradientTransformationExtraArgs(init, transform.update)  # pyright: ignore[reportArgumentType]


def check_offload(offload: str, mesh: Mesh | None) -> None:
    """Checks the argument `offload` of `train_step`."""
    check_choice("offload", offload, ("nothing", "optimizer"))
    if offload != "nothing" and mesh is None:
        must = "must be nothing without a mesh; on one device, pass jax.make_mesh((1,), ('data',)) to the strategy"
        raise ConfigError(f"`offload` is {offload}: {must}", field="offload")


def in_host_memory(shardings: Shardings, shapes: Tree) -> Shardings:
    """Moves all arrays to pinned host memory except scalars, such as counts."""

    def place(sharding: NamedSharding, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if not leaf.ndim:
            return sharding
        # JAX drops the memory of devices that are not present, but not of an abstract mesh.
        there = sharding.with_memory_kind(_KIND)
        return there if there.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=_KIND)

    return jax.tree.map(place, shardings, shapes)


def in_order(
    update: Callable[[OptState], tuple[Arrays, OptState]], opt_state: OptState, start: Array
) -> tuple[Arrays, OptState]:
    """Runs an update one parameter after the other, and copies each array of `opt_state` to the device for its parameter.

    A copy waits for the update of the parameter before the previous one, and the first ones wait for `start`, so the state of
    two parameters is on the device. Returns the new state in the memory of `opt_state`. Traced under `jax.jit`.
    """
    leaves, structure = jax.tree.flatten(opt_state)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    closed, (new_params, _) = jax.make_jaxpr(update, return_shape=True)(structure.unflatten(shapes))
    # optax has jitted functions of all moments.
    closed = jax.make_jaxpr(partial(_run_inlined, closed.jaxpr, closed.consts))(shapes)
    jaxpr = closed.jaxpr
    makers = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    params, state = jaxpr.outvars[: len(new_params)], jaxpr.outvars[len(new_params) :]
    places = {v: i for i, v in enumerate(jaxpr.invars)}
    on_host = {v for v, leaf in zip(jaxpr.invars, leaves, strict=True) if jax.typeof(leaf).memory_space == Space.Host}
    env = replay.environment(jaxpr, closed.consts, leaves)
    read = replay.reader(env)
    copied: list[int] = []
    done = [start, start]

    def compute(wanted: replay.Atom) -> Array:
        needed: set[int] = set()
        stack = [wanted]
        while stack:
            v = stack.pop()
            if replay.is_literal(v):
                continue
            if v in on_host:
                on_host.remove(v)
                leaf, _ = lax.optimization_barrier((env[v], done[-2]))
                env[v] = jax.device_put(leaf, Space.Device)
                copied.append(places[v])
            elif v not in env and (i := makers[v]) not in needed:
                needed.add(i)
                stack += jaxpr.eqns[i].invars
        for i in sorted(needed):
            eqn = jaxpr.eqns[i]
            replay.write(env, eqn.outvars, replay.apply(eqn, list(map(read, eqn.invars))))
        return read(wanted)

    for v in params:
        done.append(compute(v))
        while copied:
            compute(state[copied.pop()])
    new_state = [_put(compute(v), jax.typeof(leaf).memory_space) for v, leaf in zip(state, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(new_params), map(read, params)), structure.unflatten(new_state)


def _run_inlined(jaxpr: core.Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Runs a jaxpr without calls of jitted functions."""

    def evaluate(_: int, eqn: core.JaxprEqn, read: replay.Reader[Array]) -> list[Array]:
        values = [read(v) for v in eqn.invars]
        is_call = eqn.primitive.name in replay.JITS
        return _run_inlined(replay.body(eqn), replay.body_consts(eqn), values) if is_call else replay.apply(eqn, values)

    return replay.interpret(jaxpr, consts, args, evaluate)


def _put(leaf: Array, space: Space) -> Array:
    return leaf if jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)
