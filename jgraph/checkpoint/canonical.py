"""A run's state in the model's own tree: what checkpoints hold, so that a run can go on over other devices than it began on."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn

Tree = Any


@dataclass(frozen=True, eq=False)
class CanonicalLayout:
    """Converts a state to its canonical layout and back: parameters and the optimizer's moments in the model's own tree.

    A state is a dataclass with `params` and `opt_state`; what else it has stays as it is.

    Attributes:
        pack, unpack: from the model's tree to the arrays of the run, and back.
        own: the run's state as `jax.ShapeDtypeStruct`s, with shardings if it is on several devices.
        mesh: these devices, or None.
        opt_state: whether it lies as the `arrays` do, or in the model's own `tree` already.
    """

    pack: Callable[[Tree], Tree]
    unpack: Callable[[Tree], Tree]
    own: Any
    mesh: Mesh | None
    opt_state: Literal["arrays", "tree"] = "arrays"

    def of(self, state: Any) -> Any:
        """Returns a state in the canonical layout.

        All arrays are new and nothing is donated: the devices need room for the state a second time.
        """
        return self._mapped(state, lambda tree: in_turn(self._unpack(tree)), lambda leaf: leaf.copy())

    @cached_property
    def back(self) -> Callable[[Any], Any]:
        """Inverts `of`, bit for bit, also for a state from a run over other devices. Nothing is donated."""

        # Hardly a buffer of the one fits into the other, and saving needs the room of both anyway.
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
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, self._shardings(shapes)
        )

    def _mapped(self, state: Any, like: Callable[[Tree], Tree], other: Callable[[Any], Any]) -> Any:
        """Maps trees that are built as the parameters are, and other leaves. One after the other: their scratch is large."""
        params = like(state.params)
        if self.opt_state == "tree":
            opt_state = jax.tree.map(other, state.opt_state)
        else:
            structure = jax.tree.structure(self.own.params)
            opt_state = jax.tree.map(
                lambda own, tree: like(tree) if jax.tree.structure(own) == structure else other(tree),
                self.own.opt_state,
                state.opt_state,
                is_leaf=lambda tree: jax.tree.structure(tree) == structure,
            )
        names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "opt_state")]
        rest = {name: jax.tree.map(other, getattr(state, name)) for name in names}
        return dataclasses.replace(state, params=params, opt_state=opt_state, **rest)

    @cached_property
    def _unpack(self) -> Callable[[Tree], Tree]:
        tree = jax.eval_shape(self.unpack, self.own.params)
        return jax.jit(self.unpack, out_shardings=None if self.mesh is None else self._shardings(tree))

    def _shardings(self, leaves: Tree) -> Tree:
        assert self.mesh is not None
        return spread(self.mesh, self.own.params, leaves)


def spread(mesh: Mesh, sharded: Tree, leaves: Tree) -> Tree:
    """Returns NamedShardings of leaves over the axes of a mesh that shard some leaf of `sharded`.

    So no device holds more than its share of a large model, whatever the shapes of the leaves.
    """
    used = jax.tree.leaves([list(leaf.sharding.spec) for leaf in jax.tree.leaves(sharded)])
    axes = {name: size for name, size in mesh.shape.items() if name in used}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _spread(axes, leaf.shape)), leaves)


def _spread(axes: dict[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns one axis of an array over as many ranks as can share it evenly; where none can, nothing."""
    choices = [names for count in range(len(axes), 0, -1) for names in combinations(axes, count)]
    ranks = {names: math.prod(axes[name] for name in names) for names in choices}
    for names in sorted(choices, key=ranks.__getitem__, reverse=True):
        for axis, size in enumerate(shape):
            if size % ranks[names] == 0:
                return PartitionSpec(*[None] * axis, names)
    return PartitionSpec()
