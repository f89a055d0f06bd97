"""The canonical layout of a state: the model's own tree. Checkpoints store it, so that a run can resume on other devices."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.tree import PyTree


@dataclass(frozen=True, eq=False)
class CanonicalLayout:
    """Converts a state to the canonical layout and back.

    In the canonical layout, parameters and optimizer moments have the structure of the model's own tree. A state is a dataclass
    with the fields `params` and `opt_state`. Other fields are not changed.

    Attributes:
        pack: Converts the model's tree to the arrays of the run.
        unpack: Inverts `pack`.
        own: The state of the run as `jax.ShapeDtypeStruct`s, with shardings on several devices.
        mesh: Mesh of the devices; None for one device.
        opt_state: Whether the optimizer state has the structure of the run's `arrays`, or of the model's `tree`.
    """

    pack: Callable[[PyTree], PyTree]
    unpack: Callable[[PyTree], PyTree]
    own: Any
    mesh: Mesh | None
    opt_state: Literal["arrays", "tree"] = "arrays"

    def of(self, state: Any) -> Any:
        """Returns a state in the canonical layout.

        Copies every array and donates nothing, so the devices need memory for a second state.
        """
        return self._mapped(state, lambda tree: in_turn(self._unpack(tree)), lambda leaf: leaf.copy())

    @cached_property
    def back(self) -> Callable[[Any], Any]:
        """Inverts `of`, bit for bit, also for a state that was saved on other devices. Donates nothing."""
        # Donation would save little: few buffers have the same size in both layouts, and saving needs memory for both anyway.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.own)
        back = jax.jit(
            lambda canonical: self._mapped(canonical, self.pack, lambda leaf: leaf),
            out_shardings=None if self.mesh is None else shardings,
        )
        return lambda canonical: in_turn(back(canonical))

    def shapes(self) -> Any:
        """Returns the result of `of` as `jax.ShapeDtypeStruct`s, to restore into; with shardings on several devices."""
        shapes = jax.eval_shape(lambda own: self._mapped(own, self._unpack, lambda leaf: leaf), self.own)
        if self.mesh is None:
            return shapes
        shardings = spread(self.mesh, self.own.params, shapes)
        return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings)

    def _mapped(self, state: Any, like_params: Callable[[PyTree], PyTree], other: Callable[[Array], Array]) -> Any:
        """Maps trees with the structure of the parameters, and other leaves. One by one, because the temporaries are large."""
        params = like_params(state.params)
        if self.opt_state == "tree":
            opt_state = jax.tree.map(other, state.opt_state)
        else:
            structure = jax.tree.structure(self.own.params)
            opt_state = jax.tree.map(
                lambda own, tree: like_params(tree) if jax.tree.structure(own) == structure else other(tree),
                self.own.opt_state,
                state.opt_state,
                is_leaf=lambda tree: jax.tree.structure(tree) == structure,
            )
        names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "opt_state")]
        rest = {name: jax.tree.map(other, getattr(state, name)) for name in names}
        return dataclasses.replace(state, params=params, opt_state=opt_state, **rest)

    @cached_property
    def _unpack(self) -> Callable[[PyTree], PyTree]:
        tree = jax.eval_shape(self.unpack, self.own.params)
        return jax.jit(self.unpack, out_shardings=None if self.mesh is None else spread(self.mesh, self.own.params, tree))


def spread(mesh: Mesh, sharded: PyTree, leaves: PyTree) -> PyTree:
    """Shards leaves over the mesh axes that shard some leaf of `sharded`, so that no device holds a whole large model.

    Args:
        mesh: The mesh.
        sharded: Arrays or shapes with shardings.
        leaves: Arrays or shapes of any sizes.

    Returns:
        A tree of `NamedSharding` with the structure of `leaves`.
    """
    used = jax.tree.leaves([list(leaf.sharding.spec) for leaf in jax.tree.leaves(sharded)])
    axes = {name: size for name, size in mesh.shape.items() if name in used}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _largest_spec(axes, leaf.shape)), leaves)


def _largest_spec(axes: dict[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns a spec that shards one array axis evenly over as many devices as possible; replicates if no axis is divisible."""
    choices = [names for count in range(len(axes), 0, -1) for names in combinations(axes, count)]
    devices = {names: math.prod(axes[name] for name in names) for names in choices}
    for names in sorted(choices, key=devices.__getitem__, reverse=True):
        for axis, size in enumerate(shape):
            if size % devices[names] == 0:
                return PartitionSpec(*[None] * axis, names)
    return PartitionSpec()
