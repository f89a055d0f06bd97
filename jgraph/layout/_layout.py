"""A layout maps the parameters of a model to the arrays of a step, and layouts compose.

A strategy is a chain of layouts and a way to sum gradients. Each layout is a function of the description of its input, and
returns the description of its output with two functions: `pack`, and `unpack`, which inverts it bit for bit.

Look for: `Layout.then`, which composes; `Layout.trained`, the same chain without frozen parameters; `named`, the first layout
of a chain; and `described`, which moves nothing. `param.py` has the description of one array.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jgraph.layout._param import Description, Param
from jgraph.tree import leaf_names
from jgraph.types import Arrays, Avals, Tree

# The argument of `pack`: the model's own tree, or the arrays of the layout before.
Whole = TypeVar("Whole", bound=Tree)


@dataclass(frozen=True, eq=False)
class Layout(Generic[Whole]):
    """How the parameters of a model are stored as the arrays of a step. Padding is zero.

    Examples:
        >>> from jgraph.layout import named, packed
        >>> layout = named({"a": jnp.zeros(3), "b": jnp.zeros(2)}).then(packed())
        >>> layout.pack({"a": jnp.zeros(3), "b": jnp.ones(2)})
        {'small vectors (float32)': Array([0., 0., 0., 1., 1.], dtype=float32)}
    """

    params: Description
    pack: Callable[[Whole], Arrays]
    unpack: Callable[[Arrays], Whole]
    first: "Layout[Whole] | None" = None  # None if it is this one

    def then(self, make: "MakeLayout") -> "Layout[Whole]":
        """Composes two layouts, like `optax.chain`: the output of this layout is the input of the next one."""
        after = make(self.params)

        def pack(tree: Whole) -> Arrays:
            return after.pack(self.pack(tree))

        def unpack(arrays: Arrays) -> Whole:
            return self.unpack(after.unpack(arrays))

        return Layout(after.params, pack, unpack, self.own)

    @property
    def own(self) -> "Layout[Whole]":
        """The first layout of the chain, which names the leaves of the model's own tree."""
        return self.first or self

    @property
    def trained(self) -> "Layout[Whole]":
        """The same layout for gradients and moments, which frozen parameters do not have.

        In the model's own tree, None is in the place of frozen parameters. Arrays with frozen parameters only are missing.
        """
        own = self.own
        if all(param.is_trained for param in own.params.values()):
            return self
        kept = {name: param for name, param in self.params.items() if param.is_trained}

        def pack(tree: Whole) -> Arrays:
            arrays = self.pack(own.unpack(filled(own.pack(tree), own.params)))
            return {name: arrays[name] for name in kept}

        def unpack(arrays: Arrays) -> Whole:
            whole = own.pack(self.unpack(filled(arrays, self.params)))
            return own.unpack({name: whole[name] for name, param in own.params.items() if param.is_trained})

        return Layout(kept, pack, unpack, own)

    def shardings(self, mesh: Mesh | None) -> dict[str, NamedSharding | None]:
        return {name: None if mesh is None else NamedSharding(mesh, param.spec) for name, param in self.params.items()}

    def shapes(self) -> Avals:
        """In the dtypes of the model's own parameters."""
        return {name: param.aval for name, param in self.params.items()}

    def tree_shapes(self) -> Whole:
        return jax.eval_shape(self.unpack, self.shapes())


def filled(arrays: Mapping[str, Array], params: Description) -> Arrays:
    """Adds zeros for missing arrays."""
    # Bools, which JAX promotes to the dtype of any array that they are joined with. XLA removes these zeros.
    return {name: arrays[name] if name in arrays else jnp.zeros(p.shape, jnp.bool_) for name, p in params.items()}


MakeLayout: TypeAlias = Callable[[Description], Layout[Arrays]]


def named(tree: Whole, frozen: Collection[str] = ()) -> Layout[Whole]:
    """The first layout of a chain: maps the model's own tree to a dict of its leaves by name."""
    leaves, structure = jax.tree.flatten(tree)
    names = leaf_names(tree)
    pairs = zip(names, leaves, strict=True)
    params = {name: Param.describe(name, leaf, trained=name not in frozen) for name, leaf in pairs}

    def pack(tree: Whole) -> Arrays:
        found = zip(names, structure.flatten_up_to(tree), strict=True)
        return {name: leaf for name, leaf in found if leaf is not None}

    def unpack(arrays: Arrays) -> Whole:
        return structure.unflatten([arrays.get(name) for name in names])

    return Layout(params, pack, unpack)


def each(change: Callable[[str, Param], "Change | None"]) -> MakeLayout:
    """A layout that changes arrays one by one and keeps their names. `change` returns None to leave an array alone."""

    def make(params: Description) -> Layout[Arrays]:
        changes = {name: found for name, param in params.items() if (found := change(name, param)) is not None}

        def pack(arrays: Arrays) -> Arrays:
            return {name: changes[name].pack(array) if name in changes else array for name, array in arrays.items()}

        def unpack(arrays: Arrays) -> Arrays:
            return {name: changes[name].unpack(array) if name in changes else array for name, array in arrays.items()}

        return Layout({name: changes[name].param if name in changes else p for name, p in params.items()}, pack, unpack)

    return make


def _same(array: Array) -> Array:
    return array


@dataclass(frozen=True, eq=False)
class Change:
    """A new description of one array, and how the array changes."""

    param: Param
    pack: Callable[[Array], Array] = _same
    unpack: Callable[[Array], Array] = _same


def described(change: Callable[[str, Param], Param]) -> MakeLayout:
    """A layout that changes descriptions only."""
    return each(lambda name, param: Change(change(name, param)))


def alone(names: Collection[str] | None = None) -> MakeLayout:
    """A layout in which the named parameters, or all of them, share no array with others."""
    return described(lambda name, param: replace(param, joins=param.joins and names is not None and name not in names))
