"""A callable for fixed shapes: its forward, dgrad and wgrad as functions of leaves.

An array that an action passes through unchanged, such as an input that is also a residual, is not an output of its program.
The host keeps the input array instead, so nothing is copied and the owner of the array does not change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from jgraph.autodiff import Recompute, Residuals, Split, Stash, replay, split_backward
from jgraph.autodiff.linear import OwnProducts
from jgraph.errors import CallableError
from jgraph.mesh import refused_axes
from jgraph.tree import leaf_names
from jgraph.types import JaxDevice, Leaf, Params, Tree

TreeDef: TypeAlias = jax.tree_util.PyTreeDef  # pyright: ignore[reportInvalidTypeForm]
"""The structure of a tree. Type checkers do not accept the class itself, because jax declares it without a type."""


@dataclass(frozen=True)
class Side:
    """The structure of one argument or result of a function, a tree, and the shapes and dtypes of its leaves."""

    tree: TreeDef
    avals: tuple[jax.ShapeDtypeStruct, ...]  # of each leaf
    paths: tuple[str, ...]  # of each leaf, such as `blocks/0/kernel`, for messages; "" for a tree that is a single leaf

    @classmethod
    def from_tree(cls, tree: "Tree | Residuals | Stash | None") -> "Side":
        """Returns the `Side` of a tree of arrays, Python numbers or shapes. Ignores shardings and weak types."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(map(shape_of, leaves)), tuple(leaf_names(tree)))

    def __len__(self) -> int:
        return len(self.avals)

    def unflatten(self, leaves: Sequence[Leaf | None]) -> Any:
        return self.tree.unflatten(leaves)

    def shapes(self) -> Any:
        return self.unflatten(self.avals)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A callable of a chain, differentiated for one set of shapes. Made by `shape_callable`.

    forward computes y, dgrad the gradient dx of x and those of *early* parameters, wgrad those of *late* parameters, and
    backward is dgrad and wgrad in one. The index of a parameter is its position among the leaves of `params`.
    """

    index: int  # position of the callable in the chain
    split: Split
    params: Side
    x: Side  # the first argument after `params`
    extra: Side  # the other arguments: (positional arguments after x, keyword arguments)
    y: Side
    residuals: Side  # saved by forward: first the pool `forward_dgrad`, which only dgrad reads, then the pool `forward_wgrad`
    stash: Side  # saved by dgrad for wgrad
    num_dgrad: int  # number of residuals in the pool `forward_dgrad`
    takes_gradient: bool  # all leaves of x are floating, so that dgrad computes dx
    late: tuple[int, ...]  # ascending
    early: tuple[int, ...]  # ascending; integers and FP8 weights are neither late nor early
    device: JaxDevice
    # Early parameters that are amax histories. The gradient of a history is its new value, which is reduced over microbatches
    # by maximum instead of sum.
    maxima: tuple[int, ...] = ()
    # Parameters that each action reads, by `forward`, `dgrad`, `wgrad` and `backward`.
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # The leaf of (x, extra) that forward passes through as this residual, None if forward computes it; and the leaf of
    # (residuals, dy) that dgrad passes through as this leaf of the stash.
    residuals_from: tuple[int | None, ...] = ()
    stash_from: tuple[int | None, ...] = ()
    # The auxiliary output of the function, which is not differentiated. Without leaves if there is none.
    aux: Side = field(default_factory=lambda: Side.from_tree(()))

    @cached_property
    def grads(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the parameters with a gradient from each action. Those of `backward`: early ones, then late ones."""
        return {"forward": (), "dgrad": self.early, "wgrad": self.late, "backward": (*self.early, *self.late)}

    @cached_property
    def call_tree(self) -> TreeDef:
        """Tree structure of (params, (x, (args, kwargs))). args is the tuple of the positional arguments after x."""
        return jax.tree.structure((self.params.shapes(), (self.x.shapes(), self.extra.shapes())))

    @cached_property
    def num_dx(self) -> int:
        return len(self.x) if self.takes_gradient else 0

    @cached_property
    def positional(self) -> Side:
        """The positional arguments after x, the first part of `extra`."""
        return Side.from_tree(self.extra.shapes()[0])

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Indices in `extra` of the random keys with a key dtype (`jax.random.key`) in keyword arguments, ascending."""
        avals = enumerate(self.extra.avals)
        return tuple(i for i, a in avals if i >= len(self.positional) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key))

    def fill(self, part: str, read: Sequence[Array]) -> list[Array]:
        """Returns all leaves of `params`: those that an action (`part`) reads, in the order of `reads[part]`, and zeros."""
        return filled(self.params.avals, self.reads[part], read)

    def forward(self, params: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
        """Computes the leaves of y, then of `residuals`, then of `aux`, from all leaves of `params` and of (x, extra)."""
        x, extra = self.x.unflatten(inputs[: len(self.x)]), self.extra.unflatten(inputs[len(self.x) :])
        return jax.tree.leaves(self.split.forward(self.params.unflatten(params), *_stage_args(x, extra, self.takes_gradient)))

    def dgrad(
        self, params: Sequence[Array], residuals: Sequence[Array], dy: Sequence[Array]
    ) -> tuple[list[Array], dict[int, Array], list[Array]]:
        """Computes the leaves of dx (none without `takes_gradient`), the early gradients by index, and the stash."""
        weights = self.params.unflatten(params)
        dx, early, stash = self.split.dgrad(weights, self.residuals.unflatten(residuals), self.y.unflatten(dy))
        gradients = self.params.tree.flatten_up_to(early)
        return jax.tree.leaves(dx), {i: gradients[i] for i in self.early}, jax.tree.leaves(stash)

    def wgrad(
        self,
        params: Sequence[Array],
        residuals: Sequence[Array | None],  # the first `num_dgrad` are not read
        stash: Sequence[Array],
        sums: Mapping[int, Array] | None,
    ) -> dict[int, Array]:
        """Computes the gradients of late parameters by index, or with `sums` their new float32 sums."""
        if not self.late:
            return {}
        given = self.params.unflatten(params), self.residuals.unflatten(residuals), self.stash.unflatten(stash)
        if sums is None:
            out = self.split.wgrad(*given)
        else:
            out = self.split.accumulate(self.params.unflatten([sums.get(i) for i in range(len(self.params))]), *given)
        leaves = self.params.tree.flatten_up_to(out)
        return {i: leaves[i] for i in self.late}


def shape_of(leaf: Leaf | float) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, tracer, shape or Python number, without sharding and weak type."""
    aval: Any = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def reads_of(jaxpr: core.Jaxpr, count: int) -> tuple[int, ...]:
    """Finds the first `count` inputs that the outputs of a jaxpr depend on. May report an input that is not needed."""
    needed, _ = replay.needs(jaxpr, [True] * len(jaxpr.outvars))
    return tuple(i for i in range(count) if needed[i])


def filled(avals: Sequence[jax.ShapeDtypeStruct], places: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
    """Returns one array for each element of `avals`: `arrays` at the indices `places`, and zeros elsewhere."""
    given = dict(zip(places, arrays, strict=True))
    return [given[i] if i in given else replay.zeros(aval) for i, aval in enumerate(avals)]


def shape_callable(
    fn: Callable[..., Tree] | OwnProducts,
    index: int,
    params: Params,  # for an FP8 function (params, state, weights)
    args: Sequence[Tree],  # (x, *extra)
    kwargs: Mapping[str, Tree],
    *,
    device: JaxDevice,
    has_aux: bool = False,  # `fn` returns (y, aux); aux is not differentiated
    recompute: Recompute = "elementwise",
) -> Shaped:
    """Traces forward, dgrad and wgrad of a callable, a pure function or an FP8 function. Does not compile them."""
    weights = Side.from_tree(params)
    x = Side.from_tree(args[0])
    extra = Side.from_tree((tuple(args[1:]), dict(kwargs)))
    for path, aval in zip(weights.paths, weights.avals, strict=True):
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise CallableError(f"callable {index}: params/{path} is {aval.dtype}; pass its real and imaginary parts")
    floating = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in x.avals]
    takes_gradient = all(floating)
    if any(floating) and not takes_gradient:
        i = floating.index(False)
        raise CallableError(
            f"callable {index}: x has floating leaves, but {x.paths[i] or 'a leaf'} is {x.avals[i].dtype}: pass leaves without "
            f"a gradient as an argument after x"
        )
    products = fn if isinstance(fn, OwnProducts) else OwnProducts(fn)

    def stage(params: Params, x: Tree, rest: tuple[Tree, tuple[Sequence[Tree], Mapping[str, Tree]]]) -> Tree:
        integers, (positional, named) = rest
        return products.fn(params, x if takes_gradient else integers, *positional, **named)

    split = split_backward(replace(products, fn=stage), has_aux=has_aux, recompute=recompute)
    reason = "must not, because a callable runs on one device"
    with refused_axes(lambda axis: CallableError(f"callable {index} reduces over the mesh axis {axis!r}: {reason}")):
        spec = split.spec(weights.shapes(), *_stage_args(x.shapes(), extra.shapes(), takes_gradient))
    y = Side.from_tree(spec.y)
    for path, aval in zip(y.paths, y.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            raise CallableError(f"callable {index}: y{path and '/' + path} is {aval.dtype}; every output must be floating")
    num_params = len(jax.tree.leaves(products.params(params)))
    kept = spec.residuals.trace.stage
    shaped = Shaped(
        index=index,
        split=split,
        params=weights,
        x=x,
        extra=extra,
        y=y,
        residuals=Side.from_tree(spec.residuals),
        stash=Side.from_tree(spec.stash),
        num_dgrad=len(spec.residuals.dgrad),
        takes_gradient=takes_gradient,
        late=tuple(i for i, late in enumerate(kept.traced.is_weight) if late),
        early=tuple(i for i, early in enumerate(kept.early) if early),
        device=device,
        aux=Side.from_tree(spec.aux),
        maxima=tuple(i for i, early in enumerate(kept.early) if early and i >= num_params),
    )
    return replace(shaped, **_flows(shaped))


class _Flows(TypedDict):
    """The fields of `Shaped` that a trace of its actions gives."""

    reads: Mapping[str, tuple[int, ...]]
    residuals_from: tuple[int | None, ...]
    stash_from: tuple[int | None, ...]


def _stage_args(x: Tree, extra: Tree, takes_gradient: bool) -> tuple[Tree, Tree]:
    """Returns the arguments of a stage after params. Integers are an extra argument, because they are not differentiated."""
    return (x, ((), extra)) if takes_gradient else ((), (x, extra))


def _flows(shaped: Shaped) -> _Flows:
    """Traces the actions to find the parameters that each of them reads, and the arrays that it passes through."""
    weights, residuals, stash, dy = (side.avals for side in (shaped.params, shaped.residuals, shaped.stash, shaped.y))
    forward = jax.make_jaxpr(shaped.forward)(weights, (*shaped.x.avals, *shaped.extra.avals)).jaxpr
    back = jax.make_jaxpr(shaped.dgrad)(weights, residuals, dy).jaxpr
    late = jax.make_jaxpr(partial(shaped.wgrad, sums=None))(weights, residuals, stash).jaxpr
    count = len(weights)

    def passed(jaxpr: core.Jaxpr, start: int, length: int) -> tuple[int | None, ...]:
        sources = replay.forwarded(jaxpr)[start : start + length]
        return tuple(i - count if i is not None and i >= count else None for i in sources)

    by_kind = {kind: reads_of(jaxpr, count) for kind, jaxpr in (("forward", forward), ("dgrad", back), ("wgrad", late))}
    return {
        "reads": by_kind | {"backward": (*by_kind["dgrad"], *by_kind["wgrad"])},
        "residuals_from": passed(forward, len(dy), len(residuals)),
        "stash_from": passed(back, shaped.num_dx + len(shaped.early), len(stash)),
    }
