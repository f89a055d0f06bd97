"""Optimizer state in pinned host memory: its placement, its copies in the step, and float32 main parameters.

Look for: `in_order`, which updates one parameter after the other. XLA would otherwise copy the whole state to the device first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
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
    jaxpr = closed.jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    params, state = jaxpr.outvars[: len(new_params)], jaxpr.outvars[len(new_params) :]
    on_host = {v: i for i, v in enumerate(jaxpr.invars) if jax.typeof(leaves[i]).memory_space == Space.Host}
    env = replay.environment(jaxpr, closed.consts, leaves)
    read = replay.reader(env)
    copied: list[int] = []
    after = [start, start]

    def compute(atom: replay.Atom) -> None:
        if replay.is_literal(atom):
            return
        if (i := on_host.pop(atom, None)) is not None:
            leaf, _ = lax.optimization_barrier((leaves[i], after[-2]))
            env[atom] = jax.device_put(leaf, Space.Device)
            copied.append(i)
        elif atom not in env:
            eqn = makers[atom]
            for v in eqn.invars:
                compute(v)
            replay.write(env, eqn.outvars, replay.apply(eqn, [read(v) for v in eqn.invars]))

    for v in params:
        compute(v)
        after.append(read(v))
        while copied:
            compute(state[copied.pop()])
    for v in state:
        compute(v)
    new = [_put(read(v), jax.typeof(leaf).memory_space) for v, leaf in zip(state, leaves, strict=True)]
    return dict(zip(sorted(new_params), map(read, params), strict=True)), structure.unflatten(new)


def _put(leaf: Array, space: Space) -> Array:
    return leaf if jax.typeof(leaf).memory_space == space else jax.device_put(leaf, space)
