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
    """Converts a training state between the layout of a run and the canonical layout.

    In the canonical layout, parameters and optimizer moments have the structure of the model's own parameter tree, which does
    not depend on the devices. A state is a dataclass with the fields `params` and `opt_state`. All other fields are the same in
    both layouts.

    Attributes:
        pack: Jittable function from the model's parameter tree to the parameters in the layout of the run.
        unpack: Jittable function that inverts `pack`.
        own: The state in the layout of the run, as `jax.ShapeDtypeStruct`s. On a mesh they have `NamedSharding`s.
        mesh: Mesh of the devices; None for one device.
        opt_state: Structure of the moments in `opt_state` of the run. `arrays`: the structure of `own.params`, so they are
            converted like the parameters. `tree`: the model's parameter tree, so they are only copied.
    """

    pack: Callable[[PyTree], PyTree]
    unpack: Callable[[PyTree], PyTree]
    own: Any
    mesh: Mesh | None
    opt_state: Literal["arrays", "tree"] = "arrays"

    def of(self, state: Any) -> Any:
        """Converts a state of the run to the canonical layout.

        Copies every array and donates nothing, so the devices need memory for a second state.

        Args:
            state: A state with the structure of `own`.

        Returns:
            A new dataclass of the same type. On a mesh, converted arrays are sharded by `spread`: each is split along one axis
            over as many devices as possible. Other arrays keep their shardings.
        """
        return self._mapped(state, lambda tree: in_turn(self._unpack(tree)), lambda leaf: leaf.copy())

    @cached_property
    def back(self) -> Callable[[Any], Any]:
        """A function that inverts `of`, bit for bit. Its argument may be on other devices than `own`.

        The function is jitted on first use. It maps a state in the canonical layout to a state with the structure of `own`, on
        a mesh also with the shardings of `own`. It donates nothing.
        """
        # Donation would save little: few buffers have the same size in both layouts, and saving needs memory for both anyway.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.own)
        back = jax.jit(
            lambda canonical: self._mapped(canonical, self.pack, lambda leaf: leaf),
            out_shardings=None if self.mesh is None else shardings,
        )
        return lambda canonical: in_turn(back(canonical))

    def shapes(self) -> Any:
        """Returns the canonical state as `jax.ShapeDtypeStruct`s, for `Checkpoints.restore_latest`.

        Computes nothing on the devices.

        On a mesh, every leaf has a `NamedSharding` that splits one axis over as many devices as possible. On one device, the
        leaves have no sharding.
        """
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
    """Returns shardings that split each leaf over many devices, so that no device holds a whole large model. Moves no data.

    Uses only the mesh axes that shard some leaf of `sharded`. A leaf is split along one array axis, over the most devices that
    divide the size of the axis. A leaf without such an axis is replicated.

    Args:
        mesh: The mesh of all leaves.
        sharded: Pytree of arrays or `jax.ShapeDtypeStruct`s with `NamedSharding`s.
        leaves: Pytree of arrays or `jax.ShapeDtypeStruct`s of any shapes.

    Returns:
        A pytree of `NamedSharding` with the structure of `leaves`.
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
