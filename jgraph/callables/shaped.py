"""A callable for fixed shapes: its forward, dgrad and wgrad as functions of leaves.

An array that an action passes through unchanged, such as an input that is also a residual, is not an output of its program.
The host keeps the input array instead, so nothing is copied and the owner of the array does not change.
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

TreeDef = Any  # Type checkers do not accept `jax.tree_util.PyTreeDef`.


@dataclass(frozen=True)
class Side:
    """The leaves of one argument or result.

    Attributes:
        tree: The tree structure.
        avals: Shape and dtype of each leaf.
        paths: Path of each leaf, such as `blocks/0/kernel`, for messages. Empty for a tree that is one leaf.
    """

    tree: TreeDef
    avals: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Side":
        """Describes a tree of arrays, numbers or shapes. Ignores shardings and weak types."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(map(shape_of, leaves)), tuple(leaf_names(tree)))

    def __len__(self) -> int:
        return len(self.avals)

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Returns a tree with the structure of this side and these leaves, in the order of `avals`."""
        return self.tree.unflatten(leaves)

    def shapes(self) -> PyTree:
        """Returns the tree of shapes and dtypes, with `jax.ShapeDtypeStruct`s as leaves."""
        return self.unflatten(self.avals)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A callable, differentiated for one set of shapes. Made by `shape_callable`.

    The index of a parameter is its position among the leaves of `params`. A *late* parameter has a gradient from wgrad, an
    *early* one from dgrad.

    Attributes:
        index: The number of the callable.
        split: Computes forward, dgrad and wgrad.
        params: Parameters.
        x: Input.
        extra: (positional arguments after x, keyword arguments).
        y: Output.
        residuals: Arrays from forward to the backward: first the pool forward_dgrad, then the pool forward_wgrad.
        stash: Arrays from dgrad to wgrad.
        num_dgrad: Number of residuals in the pool forward_dgrad.
        takes_gradient: True if x is floating and has a gradient dx.
        late: Indices of parameters with a gradient from wgrad.
        early: Indices of parameters with a gradient from dgrad. Integers and FP8 weights are in neither.
        device: The device of the callable.
        maxima: Indices of early parameters that are amax histories. The gradient of a history is its new value, which is
            reduced over microbatches by maximum instead of sum.
        reads: Indices of the parameters that each action reads, by kind of action: `forward`, `dgrad`, `wgrad` and `backward`.
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
        """Indices of the parameters with a gradient from each action: a dict by `forward`, `dgrad`, `wgrad` and `backward`."""
        return {"forward": (), "dgrad": self.early, "wgrad": self.late, "backward": (*self.early, *self.late)}

    @cached_property
    def call_tree(self) -> TreeDef:
        """Structure of (params, (x, (args, kwargs)))."""
        return jax.tree.structure((self.params.shapes(), (self.x.shapes(), self.extra.shapes())))

    @cached_property
    def num_dx(self) -> int:
        """Number of leaves of dx; 0 if x has integers."""
        return len(self.x) if self.takes_gradient else 0

    @cached_property
    def positional(self) -> Side:
        """The positional part of `extra`: the arguments after x."""
        return Side.of(self.extra.shapes()[0])

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Indices of the leaves of `extra` that are random keys and in keyword arguments."""
        avals = enumerate(self.extra.avals)
        return tuple(i for i, a in avals if i >= len(self.positional) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key))

    def fill(self, part: str, read: Sequence[Any]) -> list[Any]:
        """Completes the leaves of params for an action.

        Args:
            part: Kind of the action: `forward`, `dgrad`, `wgrad` or `backward`.
            read: The parameters that the action reads, in the order of `reads[part]`.

        Returns:
            All leaves, with zeros for parameters that the action does not read.
        """
        return filled(self.params.avals, self.reads[part], read)

    def forward(self, params: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Computes forward. A pure function of leaves, to be traced.

        Args:
            params: All leaves of params.
            inputs: Leaves of (x, extra).

        Returns:
            The leaves of (y, residuals, aux).
        """
        x, extra = self.x.unflatten(inputs[: len(self.x)]), self.extra.unflatten(inputs[len(self.x) :])
        return jax.tree.leaves(self.split.forward(self.params.unflatten(params), *_stage_args(x, extra, self.takes_gradient)))

    def dgrad(
        self, params: Sequence[Any], residuals: Sequence[Any], dy: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Any], list[Any]]:
        """Computes dgrad. A pure function of leaves, to be traced.

        Args:
            params: All leaves of params.
            residuals: All leaves of the residuals.
            dy: Leaves of dy, the gradient of y.

        Returns:
            The leaves of dx, the early gradients by parameter index, and the leaves of the stash.
        """
        weights = self.params.unflatten(params)
        dx, early, stash = self.split.dgrad(weights, self.residuals.unflatten(residuals), self.y.unflatten(dy))
        gradients = self.params.tree.flatten_up_to(early)
        return jax.tree.leaves(dx), {i: gradients[i] for i in self.early}, jax.tree.leaves(stash)

    def wgrad(
        self, params: Sequence[Any], residuals: Sequence[Any], stash: Sequence[Any], sums: Mapping[int, Any] | None
    ) -> dict[int, Any]:
        """Computes wgrad. A pure function of leaves, to be traced.

        Args:
            params: All leaves of params.
            residuals: All leaves of the residuals; None for leaves of the pool forward_dgrad.
            stash: All leaves of the stash.
            sums: float32 sums by parameter index, to which the gradients are added. None returns gradients in the dtypes of the
                parameters.

        Returns:
            By parameter index, the late gradients, or the new sums if `sums` is given. Empty without late parameters.
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
    """Returns the shape and dtype of a leaf as a `jax.ShapeDtypeStruct`, without sharding and weak type.

    Args:
        leaf: An array, tracer, shape or Python number.
    """
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def reads_of(jaxpr: Any, count: int) -> tuple[int, ...]:
    """Finds the arguments that a computation reads. May report an argument that it does not need.

    Args:
        jaxpr: The computation.
        count: Number of leading arguments to consider.

    Returns:
        The indices of the arguments, ascending, below `count`.
    """
    needed, _ = replay.needs(jaxpr, [True] * len(jaxpr.outvars))
    return tuple(i for i in range(count) if needed[i])


def filled(avals: Sequence[jax.ShapeDtypeStruct], places: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
    """Completes a list of arrays with zeros.

    Args:
        avals: Shape and dtype of each array of the result.
        places: Index in the result of each array in `arrays`.
        arrays: The given arrays, as many as `places`.

    Returns:
        One array per aval, new zeros where no array is given.
    """
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
    """Traces forward, dgrad and wgrad of a callable. Does not run or compile them.

    Args:
        fn: `fn(params, x, *extra, **kwargs) -> y`, a pure function, or an FP8 function (`jgraph.fp8`).
        index: The number of the callable.
        params: Parameters, arrays or shapes; (params, state, weights) for an FP8 function.
        args: (x, *extra), arrays or shapes.
        kwargs: Keyword arguments, arrays or shapes.
        device: The device of the callable.
        has_aux: True if `fn` returns (y, aux). aux is not differentiated.
        recompute: Operations that the backward recomputes instead of saving their results: `elementwise` (elementwise
            operations), `wide` (also matmuls with at least four times as many output elements as data elements) or `nothing`.

    Returns:
        The callable for these shapes.

    Raises:
        CallableError: If a parameter is complex, x mixes floating and other leaves, y has a leaf that is not floating, or the
            callable reduces over a mesh axis.
        ConfigError: If `recompute` is unknown.
        SplitError: If the backward cannot be split: an array is complex or sharded over explicit mesh axes, the result of a
            callback is read, or `fn` does not return a pair with `has_aux`.
    """
    weights, x, extra = Side.of(params), Side.of(args[0]), Side.of((tuple(args[1:]), dict(kwargs)))
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

    def stage(params: PyTree, x: PyTree, rest: PyTree) -> PyTree:
        integers, (positional, named) = rest
        return products.fn(params, x if takes_gradient else integers, *positional, **named)

    split = split_backward(replace(products, fn=stage), has_aux=has_aux, recompute=recompute)
    reason = "must not, because a callable runs on one device"
    with refused_axes(lambda axis: CallableError(f"callable {index} reduces over the mesh axis {axis!r}: {reason}")):
        spec = split.spec(weights.shapes(), *_stage_args(x.shapes(), extra.shapes(), takes_gradient))
    y, kept = Side.of(spec.y), spec.residuals.trace
    for path, aval in zip(y.paths, y.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            raise CallableError(f"callable {index}: y{path and '/' + path} is {aval.dtype}; every output must be floating")
    num_params = len(jax.tree.leaves(products.params(params)))
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
    """Returns the arguments of a stage after params. Integers are an extra argument, because they are not differentiated."""
    return (x, ((), extra)) if takes_gradient else ((), (x, extra))


def _flows(shaped: Shaped) -> dict[str, Any]:
    """Traces the actions to find the parameters that each of them reads, and the arrays that it passes through."""
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
