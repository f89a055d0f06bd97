"""The canonical layout of a state: the model's own tree. Checkpoints store it, so that a run can resume on other devices."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Any, Generic, Protocol, TypeVar

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.autodiff.host import in_host_memory, in_order
from jgraph.dispatch import in_turn
from jgraph.layout import Layout
from jgraph.mesh import PARTITIONED_AXES
from jgraph.tree import is_on_host, path_name
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
    """Converts a training state between the layout of a run and the canonical layout. `TrainStep.canonical` is one.

    A state is a dataclass with `params` and `opt_state`; all its other fields are the same in both layouts.
    """

    params: Layout[Params]
    # Each tree of `own.opt_state` with the structure of the arrays of `moments` is converted. None if moments have the
    # structure of the model's parameter tree already.
    moments: Layout[Params] | None
    own: State  # the state in the layout of the run, with shapes, and shardings on a mesh
    mesh: Mesh | None  # None for one device

    def of(self, state: State) -> State:
        """Converts a state to the canonical layout.

        Args:
            state: The state in the layout of the run. It stays valid, so memory must hold both.

        Returns:
            A state with parameters and moments in the structure of the model's own tree, for example
            `step.canonical.of(state).params`. All its arrays are copies.
        """
        params, moments = self._unpacks
        of_moments = None if moments is None else partial(_run, moments)
        return self._mapped(state, partial(_run, params), of_moments, _copy)

    @cached_property
    def back(self) -> Callable[[State], State]:
        """The function that inverts `of` bit for bit, from any sharding. Compiled in its first call."""
        # Donation would save little: few buffers have the same size in both layouts, and saving needs memory for both anyway.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.own)
        pack_moments = None if self.moments is None else self.moments.pack
        back = jax.jit(
            partial(in_order, lambda canonical: self._mapped(canonical, self.params.pack, pack_moments, lambda leaf: leaf)),
            out_shardings=None if self.mesh is None else shardings,
        )
        return lambda canonical: in_turn(back(canonical))

    def shapes(self) -> State:
        """Returns the shapes of the canonical state, for the argument `like` of `Checkpoints.restore_latest`.

        Returns:
            A state of `jax.ShapeDtypeStruct`. On a mesh, their shardings spread every array over the devices.
        """
        params, moments = self._unpacks
        shapes = jax.eval_shape(lambda own: self._mapped(own, params, moments, lambda leaf: leaf), self.own)
        if self.mesh is None:
            return shapes
        shardings: Any = spread(self.mesh, self.own.params, shapes)
        if self._is_on_host:
            shardings = dataclasses.replace(shardings, opt_state=in_host_memory(shardings.opt_state, shapes.opt_state))
        return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), shapes, shardings)

    @property
    def _is_on_host(self) -> bool:
        """True if the optimizer state is in host memory."""
        return any(map(is_on_host, jax.tree.leaves(self.own.opt_state)))

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the leaves that no step changes, for the argument `frozen` of `Checkpoints`. A new set."""
        own = self.params.own
        return frozenset(leaf for name, leaf in leaves_of(own.tree_shapes()).items() if not own.params[name].is_trained)

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
        moments = None if self.moments is None else self._jitted(self.moments, is_on_host=self._is_on_host)
        return self._jitted(self.params), moments

    def _jitted(self, layout: Layout[Params], *, is_on_host: bool = False) -> Callable[[Arrays], Params]:
        if self.mesh is None:
            return jax.jit(layout.unpack)
        tree = jax.eval_shape(layout.unpack, layout.shapes())
        shardings = spread(self.mesh, self.own.params, tree)
        shardings = in_host_memory(shardings, tree) if is_on_host else shardings
        return jax.jit(partial(in_order, layout.unpack), out_shardings=shardings)


def leaves_of(params: Params) -> dict[str, str]:
    """Returns the leaf of a checkpoint, such as `.params['norm']['scale']`, of each parameter by its name."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {path_name(path): f".params{jax.tree_util.keystr(path)}" for path, _ in paths}


def _run(function: Callable[[Arrays], Params], arrays: Arrays) -> Params:
    return in_turn(function(arrays))


def _copy(leaf: Array) -> Array:
    """Copies an array within its memory."""
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def spread(mesh: Mesh, sharded: Tree, leaves: Tree) -> Shardings:
    """Returns shardings that split each leaf over many devices, so that no device holds a whole large model. Moves no data."""
    # Only the mesh axes that the shardings of `sharded` name are used.
    used = jax.tree.leaves([list(leaf.sharding.spec) for leaf in jax.tree.leaves(sharded)])
    axes = {name: size for name, size in mesh.shape.items() if name in used}
    return jax.tree.map(lambda leaf: NamedSharding(mesh, _largest_spec(axes, leaf.shape)), leaves)


def _largest_spec(axes: dict[str, int], shape: tuple[int, ...]) -> PartitionSpec:
    """Returns a spec that splits array axes evenly over as many devices as possible; an empty one if no split is possible."""
    # The axes of ranks split one array axis. Partitioned mesh axes split another one, because XLA replicates an array to move
    # it between a split of one array axis over both and the layout of a pipeline.
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
