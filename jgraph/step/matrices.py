"""Optax transforms of whole matrices, such as Muon and Shampoo, whose work the devices of a mesh share.

Each device updates some of the matrices completely, instead of a part of each. An all-to-all moves the matrices of one shape to
their devices, and another one moves the results back. XLA makes them from the shardings that `_moves` asks for.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from jgraph.errors import ConfigError
from jgraph.mesh import PARTITIONED_AXES, Axis
from jgraph.step.transform import Transform, check_transform
from jgraph.tree import path_name
from jgraph.types import OptState, Params, Tree

_OfBatch: TypeAlias = Callable[[list[Array], Tree], tuple[Array, Tree]]
"""A function `([[K, m, n], ...], state) -> ([K, m, n], state)` of a batch of matrices."""

_REPLICAS = (Axis.DATA, Axis.CONTEXT)  # mesh axes whose devices have the same parameters


def sharded_matrices(transform: Transform) -> optax.GradientTransformationExtraArgs:
    """Makes an optax transform that updates each matrix by itself, and shares the matrices out over the devices.

    Use it for transforms that multiply or decompose whole matrices: Muon, Shampoo, SOAP. XLA would otherwise gather every
    matrix on every device, several times, and compute each update on all of them. Here, matrices of equal shape are updated in
    one batch, by `jax.vmap`. Every device has an equal number of them, and the batch is padded with zeros if it cannot be
    shared equally. The work is shared over the devices of all axes of the mesh.

    The mesh is that of the current trace. `train_step` sets it. In another loop, call the jitted step in
    `with jax.set_mesh(mesh)`, with a mesh of `Auto` axes. Without a mesh, matrices are updated in batches on one device.

    Args:
        transform: An optax transform. Its `init` and `update` get one matrix [m, n] instead of a tree. Do not let it clip
            by a global norm, because it does not see the other matrices.

    Returns:
        A transform for trees of arrays [..., m, n]; the axes before the last two, such as those of experts or stacked layers,
        count matrices. Its state is a dict. An entry `MxN` has the states of all matrices [M, N] in the order of the tree, and
        the entries of arrays with more axes have their names in the tree. Every array of the state has a first axis for
        the matrices. `train_step` shards it over the devices that the parameters are sharded over.

    Raises:
        ConfigError: If `transform` has no methods `init` and `update`. Its `init` and `update` raise one if an array of the
            tree has fewer than two axes, or the mesh has axes of type `Explicit`.

    Examples:
        >>> import optax
        >>> def kind(params):
        ...     return jax.tree.map(lambda leaf: "matrix" if leaf.ndim >= 2 else "rest", params)
        >>> muon = jgraph.sharded_matrices(optax.contrib.muon(0.02))
        >>> transform = optax.partition({"matrix": muon, "rest": optax.adamw(3e-4)}, kind)
        >>> state = transform.init({"w": jnp.ones((8, 4)), "b": jnp.zeros(4)})
        >>> list(state.inner_states["matrix"].inner_state)
        ['8x4']
    """
    check_transform(transform)
    one = optax.with_extra_args_support(transform)  # pyright: ignore[reportArgumentType], a Transform

    def init(params: Params) -> dict[str, Any]:
        leaves = jax.tree.leaves(params)
        return {name: jax.vmap(one.init)(_stacked([leaves[i] for i in members])) for name, members in _groups(params).items()}

    def update(grads: Params, state: Any, params: Params | None = None, **extra: Any) -> tuple[Params, dict[str, Any]]:
        extra.pop("grad", None)  # that of the whole tree

        def update_all(matrices: list[Array], state: OptState) -> tuple[Any, Any]:
            of_one = jax.vmap(lambda state, grad, *param: one.update(grad, state, *param, **extra))
            return of_one(state, *matrices)

        return _in_batches(update_all, [grads] if params is None else [grads, params], state)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType], trees of any kind


def map_matrices(fn: Callable[[Array], Array], tree: Params) -> Params:
    """Applies a function of batches [K, m, n] to the arrays [..., m, n] of a tree. Each device has whole matrices."""
    return _in_batches(lambda matrices, state: (fn(*matrices), state), [tree], dict.fromkeys(_groups(tree), ()))[0]


def _in_batches(fn: _OfBatch, trees: list[Params], states: dict[str, Any]) -> tuple[Params, dict[str, Any]]:
    """Calls `fn` on each batch, with the state of the batch. Returns the results as a tree like the first, and the states."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    results, after = list(leaves[0]), dict[str, Any]()
    for name, members in _groups(trees[0]).items():
        arrays, after[name] = _on_devices(fn, [[tree[i] for i in members] for tree in leaves], states[name])
        for i, array in zip(members, arrays, strict=True):
            results[i] = array
    return jax.tree.structure(trees[0]).unflatten(results), after


def _groups(tree: Params) -> dict[str, list[int]]:
    """Returns the indices of the leaves of each batch. An array with more axes is one, because devices may share its first."""
    groups = dict[str, list[int]]()
    for i, (path, array) in enumerate(jax.tree.leaves_with_path(tree)):
        name = path_name(path)
        if array.ndim < 2:
            must = "must have at least two axes; update other arrays by another transform, with optax.partition"
            raise ConfigError(f"`params` has {name} of shape {list(array.shape)}: {must}", field="transform")
        groups.setdefault("x".join(map(str, array.shape)) if array.ndim == 2 else name, []).append(i)
    return groups


def _stacked(arrays: list[Array]) -> Array:
    """Returns the matrices of arrays [..., m, n] as [K, m, n]."""
    return jnp.concatenate([array.reshape(-1, *array.shape[-2:]) for array in arrays])


def _on_devices(fn: _OfBatch, trees: list[list[Array]], state: Tree) -> tuple[list[Array], Tree]:
    """Calls `fn([[K, m, n], ...], state) -> ([K, m, n], state)`, where each device has K / devices of the matrices.

    `trees` has the arrays of a batch for each argument, [..., m, n]. K is padded to a multiple of the devices.
    """
    first, *moves = _moves()
    arrays = trees[0]
    K = sum(math.prod(array.shape[:-2]) for array in arrays)
    padding = -K % math.prod(_shared().values())

    def moved(array: Array) -> Array:
        return _through(moves, jnp.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)))

    def back(array: Array) -> Array:
        return _through([*moves[-2::-1], first], array)[:K]

    result, state = fn([moved(_stacked(arrays)) for arrays in trees], jax.tree.map(moved, state))
    state = jax.tree.map(back, state) if padding else state
    if arrays[0].ndim == 2:
        return list(back(result)), state
    return [_through(moves[-2::-1], result)[:K].reshape(arrays[0].shape)], state


def _shared() -> dict[str, int]:
    """Returns the mesh axes that share matrices and their sizes: first those that the parameters are sharded over."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = [name for name, size in reversed(mesh.shape.items()) if size > 1 and kinds[name] != AxisType.Manual]
    if any(kinds[name] == AxisType.Explicit for name in names):
        must = "must have axes of type jax.sharding.AxisType.Auto, e.g. by `axis_types` of jax.make_mesh"
        raise ConfigError(f"`mesh` has axes of types {mesh.axis_types}: {must}", field="mesh")
    names.sort(key=lambda name: (name in _REPLICAS, name not in PARTITIONED_AXES))
    return {name: mesh.shape[name] for name in names}


def _moves() -> list[PartitionSpec]:
    """Returns the shardings of a batch of matrices, from parts of each matrix to whole ones."""
    # One more axis at a time, because XLA replicates an array to move two mesh axes at once. The other array axes are left to
    # XLA, which takes those of the parameters. They are replicated if the parameters are.
    axes = list(_shared())
    sharded = [name for name in axes if name not in _REPLICAS]
    free = 2 * [PartitionSpec.UNCONSTRAINED]
    steps = [PartitionSpec(tuple(sharded[:i]) or None, *free) for i in range(len(sharded))] or [PartitionSpec(None)]
    if Axis.PIPE in sharded:
        steps[0] = PartitionSpec(None, Axis.PIPE, PartitionSpec.UNCONSTRAINED)
    return [*steps, PartitionSpec(tuple(sharded) or None), PartitionSpec(tuple(axes) or None)]


def _through(specs: list[PartitionSpec], array: Array) -> Array:
    for spec in specs if _shared() else ():
        array = lax.with_sharding_constraint(array, PartitionSpec(*spec[: array.ndim]))
    return array
