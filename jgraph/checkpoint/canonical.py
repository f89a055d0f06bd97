"""The canonical layout of a state: the model's own tree. Checkpoints store it, so that a run can resume on other devices."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Generic, Protocol, TypeVar

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.layout import Layout
from jgraph.mesh import PARTITIONED_AXES
from jgraph.types import Arrays, OptState, Params, Registered, Shardings, Tree


class _State(Registered, Protocol):
    """A training state."""

    @property
    def params(self) -> Arrays: ...

    @property
    def opt_state(self) -> OptState: ...


State = TypeVar("State", bound=_State)


@dataclass(frozen=True, eq=False)
class CanonicalLayout(Generic[State]):
    """Converts a training state between the layout of a run and the canonical layout.

    A run may store its parameters in other arrays than the model's parameter tree has, for example stacked or padded for its
    devices. This is the layout of the run. In the canonical layout, parameters and optimizer moments have the structure of the
    model's parameter tree, which does not depend on the devices. A state is a dataclass with the fields `params` and
    `opt_state`. All other fields have the same structure in both layouts. `TrainStep.canonical` is the object of a run.

    Attributes:
        params: The layout of the parameters of the run.
        moments: The layout of the optimizer moments, such as Adam's. Each tree of `own.opt_state` with the structure of its
            arrays is converted. None if moments have the structure of the model's parameter tree already.
        own: The state in the layout of the run, with a `jax.ShapeDtypeStruct` for every array. On a mesh, every one has a
            `NamedSharding`.
        mesh: Mesh of the devices; None for one device.
    """

    params: Layout[Params]
    moments: Layout[Params] | None
    own: State
    mesh: Mesh | None

    def of(self, state: State) -> State:
        """Converts a state from the layout of the run to the canonical layout.

        Copies every array. `state` stays valid, so the devices need memory for a second state.

        Args:
            state: A state of arrays with the structure, shapes and dtypes of `own`.

        Returns:
            A new dataclass of the type of `state`. `params`, and the moments that `moments` describes, have the structure of
            the model's parameter tree. On a mesh, their arrays are sharded by `spread`: each is split over as many
            devices as possible. All other arrays keep their structure and shardings.
        """
        params, moments = self._unpacks
        of_moments = None if moments is None else partial(_run, moments)
        return self._mapped(state, partial(_run, params), of_moments, lambda leaf: leaf.copy())

    @cached_property
    def back(self) -> Callable[[State], State]:
        """The function that inverts the method `of`, bit for bit. A property: call `layout.back(state)`.

        The argument is a state of arrays in the canonical layout, with the structure of `shapes()` and any sharding. It stays
        valid. The result is a new state with the structure of `own`, and on a mesh with the shardings of `own`. The function
        is compiled in its first call.
        """
        # Donation would save little: few buffers have the same size in both layouts, and saving needs memory for both anyway.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.own)
        pack_moments = None if self.moments is None else self.moments.pack
        back = jax.jit(
            lambda canonical: self._mapped(canonical, self.params.pack, pack_moments, lambda leaf: leaf),
            out_shardings=None if self.mesh is None else shardings,
        )
        return lambda canonical: in_turn(back(canonical))

    def shapes(self) -> State:
        """Returns the state in the canonical layout with a `jax.ShapeDtypeStruct` for every array. Creates no arrays.

        The result is a dataclass of the type of `own`. It can be the argument `like` of `Checkpoints.restore_latest`. On a
        mesh, every leaf has a `NamedSharding` that splits it over as many devices as possible. If `mesh` is None, the
        leaves have no sharding.
        """
        params, moments = self._unpacks
        shapes = jax.eval_shape(lambda own: self._mapped(own, params, moments, lambda leaf: leaf), self.own)
        if self.mesh is None:
            return shapes
        shardings = spread(self.mesh, self.own.params, shapes)
        return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings)

    def _mapped(
        self,
        state: State,
        like_params: Callable[[Arrays], Params],
        like_moments: Callable[[Arrays], Params] | None,
        other: Callable[[Array], Array],
    ) -> State:
        """Maps parameters, moments and other leaves. One tree at a time, because the temporaries are large."""
        params = like_params(state.params)
        if self.moments is None or like_moments is None:
            opt_state = jax.tree.map(other, state.opt_state)
        else:
            structure = jax.tree.structure(dict(self.moments.shapes()))
            opt_state = jax.tree.map(
                lambda own, tree: like_moments(tree) if jax.tree.structure(own) == structure else other(tree),
                self.own.opt_state,
                state.opt_state,
                is_leaf=lambda tree: jax.tree.structure(tree) == structure,
            )
        names = [field.name for field in dataclasses.fields(state) if field.name not in ("params", "opt_state")]
        rest = {name: jax.tree.map(other, getattr(state, name)) for name in names}
        return dataclasses.replace(state, params=params, opt_state=opt_state, **rest)

    @cached_property
    def _unpacks(self) -> tuple[Callable[[Arrays], Params], Callable[[Arrays], Params] | None]:
        """Jitted functions that convert parameters and moments to the model's own tree."""
        return self._jitted(self.params), None if self.moments is None else self._jitted(self.moments)

    def _jitted(self, layout: Layout[Params]) -> Callable[[Arrays], Params]:
        if self.mesh is None:
            return jax.jit(layout.unpack)
        tree = jax.eval_shape(layout.unpack, layout.shapes())
        return jax.jit(layout.unpack, out_shardings=spread(self.mesh, self.own.params, tree))


def _run(function: Callable[[Arrays], Params], arrays: Arrays) -> Params:
    return in_turn(function(arrays))


def spread(mesh: Mesh, sharded: Tree, leaves: Tree) -> Shardings:
    """Returns shardings that split each leaf over many devices, so that no device holds a whole large model. Moves no data.

    The mesh axes of ranks split one array axis of a leaf, the partitioned mesh axes another one. The product of the sizes of
    the mesh axes must divide the size of the array axis. The split over the most devices is used. A leaf without a possible
    split is replicated.

    Args:
        mesh: The mesh of all leaves.
        sharded: Pytree of arrays or `jax.ShapeDtypeStruct`s with `NamedSharding`s on `mesh`. Only the mesh axes that their
            shardings name are used. `sharded` may have another structure than `leaves`.
        leaves: Pytree of arrays or `jax.ShapeDtypeStruct`s of any shapes, for which shardings are returned.

    Returns:
        A pytree of `NamedSharding` with the structure of `leaves`.
    """
    used = jax.tree.leaves([list(leaf.sharding.spec) for leaf in jax.tree.leaves(sharded)])
    axes = {name: size for name, size in mesh.shape.items() if name in used}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _largest_spec(axes, leaf.shape)), leaves)


def _largest_spec(axes: dict[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns a spec that splits array axes evenly over as many devices as possible.

    The axes of ranks split one array axis. Partitioned mesh axes split another one, because XLA replicates an array to move it
    between a split of one array axis over both and the layout of a pipeline.
    """
    ranks = {name: size for name, size in axes.items() if name not in PARTITIONED_AXES}
    names: dict[int, tuple[str, ...]] = {}
    for group in (ranks, {name: size for name, size in axes.items() if name not in ranks}):
        choices = [choice for count in range(len(group), 0, -1) for choice in combinations(group, count)]
        possible = [
            (math.prod(group[name] for name in choice), axis, choice)
            for choice in choices
            for axis, size in enumerate(shape)
            if axis not in names and size % math.prod(group[name] for name in choice) == 0
        ]
        if possible:
            _, axis, choice = max(possible, key=lambda found: found[0])
            names[axis] = choice
    return PartitionSpec(*[names.get(axis) for axis in range(1 + max(names, default=-1))])
