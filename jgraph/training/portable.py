"""A run's state in the model's own tree: what checkpoints hold, so that a run can go on over other devices than it began on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from jgraph.checkpoint.canonical import spread
from jgraph.dispatch import in_turn
from jgraph.training.forms import Form
from jgraph.training.step import TrainState

PyTree = Any


@dataclass(frozen=True, eq=False)
class Portable:
    """Between a state and its portable kind: parameters, and what the optimizer keeps like them, unpacked.

    Attributes:
        form: of the run.
        own: its state as `jax.ShapeDtypeStruct`s, with shardings if it is on several devices.
        mesh: these devices, or None.
    """

    form: Form
    own: TrainState
    mesh: Mesh | None

    def of(self, state: TrainState) -> TrainState:
        """The portable kind. All arrays are new and nothing is donated: the devices need room for the state a second time."""
        # One tree after the other, so that one's scratch is free for the next: over ranks it is as large as the tree.
        return self._each(state, lambda tree: in_turn(self._unpack(tree)))

    @cached_property
    def back(self) -> Callable[[TrainState], TrainState]:
        """The inverse of `of`, bit for bit; also of what a run over other devices gave. Nothing is donated."""

        def back(portable: TrainState) -> TrainState:
            pack = self.form.pack
            return jax.tree.map(
                lambda own, tree: pack(tree) if self._is_like(own) else tree, self.own, portable, is_leaf=self._is_like
            )

        # Hardly a buffer of the one fits into the other, and saving needs the room of both anyway.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.own)
        jitted = jax.jit(back, out_shardings=None if self.mesh is None else shardings)
        return lambda portable: in_turn(jitted(portable))

    def shapes(self) -> TrainState:
        """What `of` returns as `jax.ShapeDtypeStruct`s, with shardings if it is on several devices."""
        shapes = jax.eval_shape(lambda state: self._each(state, self._unpack), self.own)
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, self._shardings(shapes)
        )

    @cached_property
    def _unpack(self) -> Callable[[PyTree], PyTree]:
        tree = jax.eval_shape(self.form.unpack, self.own.params)
        return jax.jit(self.form.unpack, out_shardings=None if self.mesh is None else self._shardings(tree))

    def _each(self, state: TrainState, unpack: Callable[[PyTree], PyTree]) -> TrainState:
        is_like = self._is_like
        return jax.tree.map(lambda tree: unpack(tree) if is_like(tree) else tree.copy(), state, is_leaf=is_like)

    def _is_like(self, tree: PyTree) -> bool:
        """Whether a tree is built as the parameters are: a dict, and not one array alone."""
        return jax.tree.structure(tree) == jax.tree.structure(self.own.params)

    def _shardings(self, leaves: PyTree) -> PyTree:
        assert self.mesh is not None
        return spread(self.mesh, self.own, leaves)
