"""A callable for fixed shapes: the leaves that its forward, dgrad and wgrad take and return.

An array that a part passes through unchanged (an input that is also a residual, a dy that is also in the stash) is not an
output of its program. The host keeps the input array instead, so nothing is copied and the owner of the array stays known.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.autodiff import Recompute, Split, replay, split_backward
from jgraph.autodiff.linear import OwnProducts
from jgraph.errors import CallableError
from jgraph.mesh import refused_axes
from jgraph.tree import PyTree, leaf_names

TreeDef = Any  # `jax.tree_util.PyTreeDef` is not a type to checkers


@dataclass(frozen=True)
class Side:
    """The leaves of one argument or result: tree structure, shapes, and paths for messages."""

    tree: TreeDef
    avals: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Side":
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(map(shape_of, leaves)), tuple(leaf_names(tree)))

    def __len__(self) -> int:
        return len(self.avals)

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        return self.tree.unflatten(leaves)

    def shapes(self) -> PyTree:
        return self.unflatten(self.avals)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A callable, differentiated for one set of shapes.

    Parameters are numbered by their position among the leaves of `params`.

    Attributes:
        index: The number of the callable.
        split: Its forward, dgrad and wgrad.
        params, x, extra, y: Arguments and result. `extra` is (positional arguments after x, keyword arguments).
        residuals, stash: Arrays that forward leaves for the backward, and dgrad for wgrad. Residuals of the pool forward_dgrad
            come before those of forward_wgrad.
        num_dgrad: Number of residuals in the pool forward_dgrad.
        takes_gradient: True if x is floating and has a gradient dx.
        late, early: Parameters that get their gradient from wgrad, and from dgrad. Integers and FP8 weights have no gradient.
        device: The device that it runs on.
        maxima: The early parameters that are amax histories. The "gradient" of a history is its new value; several
            microbatches are reduced by the maximum, not by the sum.
        reads: The parameters that each part reads, by kind of action.
        residuals_from: For each residual, the leaf of (x, extra) that forward passes through, or None.
        stash_from: For each leaf of the stash, the leaf of (residuals, dy) that dgrad passes through, or None.
        aux: Results of forward besides y.
    """

    index: int
    split: Split
    params: Side
    x: Side
    extra: Side
    y: Side
    residuals: Side
    stash: Side
    num_dgrad: int
    takes_gradient: bool
    late: tuple[int, ...]
    early: tuple[int, ...]
    device: Any
    maxima: tuple[int, ...] = ()
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    residuals_from: tuple[int | None, ...] = ()
    stash_from: tuple[int | None, ...] = ()
    aux: Side = field(default_factory=lambda: Side.of(()))

    @cached_property
    def grads(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters of the gradients that each part makes, by kind of action."""
        return {"forward": (), "dgrad": self.early, "wgrad": self.late, "backward": (*self.early, *self.late)}

    @cached_property
    def call_tree(self) -> TreeDef:
        """Structure of (params, (x, (args, kwargs)))."""
        return jax.tree.structure((self.params.shapes(), (self.x.shapes(), self.extra.shapes())))

    @cached_property
    def num_dx(self) -> int:
        """Number of leaves of dx."""
        return len(self.x) if self.takes_gradient else 0

    @cached_property
    def positional(self) -> Side:
        """The positional part of `extra`."""
        return Side.of(self.extra.shapes()[0])

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Leaves of `extra` that are random keys among the keyword arguments."""
        avals = enumerate(self.extra.avals)
        return tuple(i for i, a in avals if i >= len(self.positional) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key))

    def fill(self, part: str, read: Sequence[Any]) -> list[Any]:
        """Returns all leaves of params, with zeros for leaves that a part does not read."""
        return filled(self.params.avals, self.reads[part], read)

    def forward(self, params: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns the leaves of (y, residuals, aux)."""
        x, extra = self.x.unflatten(inputs[: len(self.x)]), self.extra.unflatten(inputs[len(self.x) :])
        return jax.tree.leaves(self.split.forward(self.params.unflatten(params), *_stage_args(x, extra, self.takes_gradient)))

    def dgrad(
        self, params: Sequence[Any], residuals: Sequence[Any], dy: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """Returns the leaves of dx, the early gradients by parameter, and the leaves of the stash."""
        weights = self.params.unflatten(params)
        dx, early, stash = self.split.dgrad(weights, self.residuals.unflatten(residuals), self.y.unflatten(dy))
        gradients = self.params.tree.flatten_up_to(early)
        return jax.tree.leaves(dx), {i: gradients[i] for i in self.early}, jax.tree.leaves(stash)

    def wgrad(
        self, params: Sequence[Any], residuals: Sequence[Any], stash: Sequence[Any], sums: Mapping[int, Any] | None
    ) -> dict[int, Any]:
        """Returns the late gradients by parameter.

        Args:
            params, residuals, stash: All leaves; None for residuals of the pool forward_dgrad.
            sums: Float32 sums by parameter; the gradients are added to them. None returns gradients in the parameters' dtypes.
        """
        if not self.late:
            return {}
        given = self.params.unflatten(params), self.residuals.unflatten(residuals), self.stash.unflatten(stash)
        if sums is None:
            out = self.split.wgrad(*given)
        else:
            out = self.split.accumulate(self.params.unflatten([sums.get(i) for i in range(len(self.params))]), *given)
        leaves = self.params.tree.flatten_up_to(out)
        return {i: leaves[i] for i in self.late}


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of a leaf, without its sharding and weak type."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def reads_of(jaxpr: Any, count: int) -> tuple[int, ...]:
    """Returns the numbers of the arguments that a computation reads, among its first `count` arguments."""
    needed, _ = replay.needs(jaxpr, [True] * len(jaxpr.outvars))
    return tuple(i for i in range(count) if needed[i])


def filled(avals: Sequence[jax.ShapeDtypeStruct], places: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays of all shapes: the given arrays at their places, and zeros at other places."""
    given = dict(zip(places, arrays, strict=True))
    return [given[i] if i in given else replay.zeros(aval) for i, aval in enumerate(avals)]


def shape_callable(
    fn: Callable[..., PyTree] | OwnProducts,
    index: int,
    params: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, Any],
    *,
    device: Any,
    has_aux: bool = False,
    recompute: Recompute = "elementwise",
) -> Shaped:
    """Traces the parts of a callable. Computes nothing.

    Args:
        fn: `fn(params, x, *extra, **kwargs) -> y`, or an FP8 function.
        index: The number of the callable, for messages.
        params: Arrays or shapes. Those of an FP8 function are (params, state, weights).
        args: (x, *extra), arrays or shapes.
        kwargs: Keyword arguments, arrays or shapes.
        device: The device that it will run on.
        has_aux: True if `fn` returns (y, aux).
        recompute: As in `split_backward`.

    Raises:
        CallableError: A parameter is complex, x mixes floating and other leaves, y has a leaf that is not floating, or the
            callable reduces over a mesh axis.
    """
    weights, x, extra = Side.of(params), Side.of(args[0]), Side.of((tuple(args[1:]), dict(kwargs)))
    for path, aval in zip(weights.paths, weights.avals, strict=True):
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise CallableError(f"callable {index}: params/{path} is {aval.dtype}; give its real and imaginary parts")
    floating = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in x.avals]
    takes_gradient = all(floating)
    if any(floating) and not takes_gradient:
        i = floating.index(False)
        raise CallableError(
            f"callable {index}: x has floating leaves, but {x.paths[i] or 'a leaf'} is {x.avals[i].dtype}: pass leaves without "
            f"a gradient as an argument after x"
        )
    own = fn if isinstance(fn, OwnProducts) else OwnProducts(fn)

    def stage(params: PyTree, x: PyTree, rest: PyTree) -> PyTree:
        integers, (positional, named) = rest
        return own.fn(params, x if takes_gradient else integers, *positional, **named)

    split = split_backward(replace(own, fn=stage), has_aux=has_aux, recompute=recompute)
    alone = "a callable runs on one device, so it must not"
    with refused_axes(lambda axis: CallableError(f"callable {index} reduces over the mesh axis {axis!r}: {alone}")):
        spec = split.spec(weights.shapes(), *_stage_args(x.shapes(), extra.shapes(), takes_gradient))
    y, kept = Side.of(spec.y), spec.residuals.trace
    for path, aval in zip(y.paths, y.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            raise CallableError(f"callable {index}: y{path and '/' + path} is {aval.dtype}; every output must be floating")
    num_params = len(jax.tree.leaves(own.params(params)))
    shaped = Shaped(
        index=index,
        split=split,
        params=weights,
        x=x,
        extra=extra,
        y=y,
        residuals=Side.of(spec.residuals),
        stash=Side.of(spec.stash),
        num_dgrad=len(spec.residuals.dgrad),
        takes_gradient=takes_gradient,
        late=tuple(i for i, late in enumerate(kept.delayed) if late),
        early=tuple(i for i, early in enumerate(kept.early) if early),
        device=device,
        aux=Side.of(spec.aux),
        maxima=tuple(i for i, early in enumerate(kept.early) if early and i >= num_params),
    )
    return replace(shaped, **_flows(shaped))


def _stage_args(x: PyTree, extra: PyTree, takes_gradient: bool) -> tuple[PyTree, PyTree]:
    """Returns the arguments of a stage after params. Integers are not differentiated, so they are an extra argument."""
    return (x, ((), extra)) if takes_gradient else ((), (x, extra))


def _flows(shaped: Shaped) -> dict[str, Any]:
    """Reads off the traces which parameters each part reads and which arrays it passes through."""
    weights, residuals, stash, dy = (side.avals for side in (shaped.params, shaped.residuals, shaped.stash, shaped.y))
    forward = jax.make_jaxpr(shaped.forward)(weights, (*shaped.x.avals, *shaped.extra.avals)).jaxpr
    back = jax.make_jaxpr(shaped.dgrad)(weights, residuals, dy).jaxpr
    late = jax.make_jaxpr(partial(shaped.wgrad, sums=None))(weights, residuals, stash).jaxpr
    count = len(weights)

    def passed(jaxpr: Any, start: int, length: int) -> tuple[int | None, ...]:
        sources = replay.forwarded(jaxpr)[start : start + length]
        return tuple(i - count if i is not None and i >= count else None for i in sources)

    by_kind = {kind: reads_of(jaxpr, count) for kind, jaxpr in (("forward", forward), ("dgrad", back), ("wgrad", late))}
    return {
        "reads": by_kind | {"backward": (*by_kind["dgrad"], *by_kind["wgrad"])},
        "residuals_from": passed(forward, len(dy), len(residuals)),
        "stash_from": passed(back, shaped.num_dx + len(shaped.early), len(stash)),
    }
