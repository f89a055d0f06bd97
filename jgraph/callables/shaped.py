"""A callable with its shapes: what its forward, dgrad and wgrad take and give, leaf by leaf.

Arrays that a part only hands on (an input that is also a residual, a dy that is also the stash) are not outputs of its program:
the host keeps the array that went in. So nothing is copied, and who owns the array stays known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.autodiff import Recompute, Split, replay, split_backward
from jgraph.errors import CallableError
from jgraph.mesh import refused_axes
from jgraph.precision.transform import FP8Function
from jgraph.tree import path_name

Tree = Any


@dataclass(frozen=True)
class Side:
    """The leaves of one argument or result: their structure, shapes, and paths for messages."""

    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    paths: tuple[str, ...]

    @classmethod
    def of(cls, tree: Tree) -> "Side":
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple(path_name(path) for path, _ in leaves)
        return cls(structure, tuple(shape_of(leaf) for _, leaf in leaves), paths)

    def __len__(self) -> int:
        return len(self.avals)

    def unflatten(self, leaves: Sequence[Any]) -> Tree:
        return jax.tree.unflatten(self.tree, leaves)

    def shapes(self) -> Tree:
        return self.unflatten(self.avals)


@dataclass(frozen=True, eq=False)
class Shaped:
    """A callable, differentiated for one set of shapes.

    Attributes:
        index: of the callable.
        split: its parts.
        params, x, extra, y: sides; `extra` is (positional arguments after x, keyword arguments).
        residuals, stash: sides; `residuals` are those of the pool forward -> dgrad, then those of forward -> wgrad.
        num_dgrad: how many of the residuals are in the first of the two pools.
        takes_gradient: whether x is floating, so that there is a dx.
        late, early: places of the parameters whose gradients come from wgrad; from dgrad. Integers have none, nor
            have weights in FP8.
        maxima: of the early ones, amax histories. Their "gradient" is the history after a microbatch; of several it is the
            maximum, not the sum.
        device: where it runs.
        reads: for `forward`, `dgrad` and `wgrad`, the places of the parameters that it reads.
        residuals_from: for each residual, its place in (x, extra) where forward only hands it on, or None.
        stash_from: for each leaf of the stash, its place in (residuals, dy) where dgrad only hands it on, or None.
        aux: side of what forward gives besides y.
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
    reads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    residuals_from: tuple[int | None, ...] = ()
    stash_from: tuple[int | None, ...] = ()
    aux: Side = field(default_factory=lambda: Side.of(()))

    @cached_property
    def inputs_tree(self) -> Any:
        """Structure of (x, extra)."""
        return jax.tree.structure((self.x.shapes(), self.extra.shapes()))

    @cached_property
    def num_dx(self) -> int:
        """Leaves of dx."""
        return len(self.x) if self.takes_gradient else 0

    @cached_property
    def positional(self) -> Side:
        """The positional part of `extra`."""
        return Side.of(self.extra.shapes()[0])

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """Places in `extra` of random keys among the keyword arguments."""
        avals = enumerate(self.extra.avals)
        return tuple(i for i, a in avals if i >= len(self.positional) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key))

    def fill(self, part: str, read: Sequence[Any]) -> list[Any]:
        """Returns all leaves of params from those that a part reads; zeros for the others."""
        given = dict(zip(self.reads[part], read, strict=True))
        return [given[i] if i in given else replay.zeros(aval) for i, aval in enumerate(self.params.avals)]

    def forward(self, params: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Returns the leaves of (y, residuals, aux)."""
        x, extra = self.x.unflatten(inputs[: len(self.x)]), self.extra.unflatten(inputs[len(self.x) :])
        given = (x, extra) if self.takes_gradient else ((), (x, extra))
        return jax.tree.leaves(self.split.forward(self.params.unflatten(params), *given))

    def dgrad(self, params: Sequence[Any], residuals: Sequence[Any], dy: Sequence[Any]):
        """Returns the leaves of dx, gradients by place, and the leaves of the stash."""
        weights = self.params.unflatten(params)
        dx, early, stash = self.split.dgrad(weights, self.residuals.unflatten(residuals), self.y.unflatten(dy))
        gradients = self.params.tree.flatten_up_to(early)
        return jax.tree.leaves(dx), {i: gradients[i] for i in self.early}, jax.tree.leaves(stash)

    def wgrad(self, params: Sequence[Any], residuals: Sequence[Any], stash: Sequence[Any], sums: dict[int, Any] | None):
        """Returns gradients by place, of the parameters' dtypes; or, given float32 sums by place, the sums with them added."""
        if not self.late:
            return {}
        weights, kept = self.params.unflatten(params), self.residuals.unflatten(residuals)
        left = self.stash.unflatten(stash)
        if sums is None:
            out = self.split.wgrad(weights, kept, left)
        else:
            total = self.params.unflatten([sums.get(i) for i in range(len(self.params))])
            out = self.split.accumulate(total, weights, kept, left)
        leaves = self.params.tree.flatten_up_to(out)
        return {i: leaves[i] for i in self.late}


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype alone: not where it is, nor whether its dtype is a weak one."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def shape_callable(
    fn: Callable[..., Tree] | FP8Function,
    index: int,
    params: Tree,
    args: Sequence[Tree],
    kwargs: dict[str, Any],
    *,
    device: Any,
    has_aux: bool = False,
    recompute: Recompute = "elementwise",
) -> Shaped:
    """Traces a callable's parts; computes nothing. With `has_aux` it returns (y, aux); `recompute` is `split_backward`'s.

    Raises:
        CallableError: a parameter is complex, x mixes floating and other leaves, y has a leaf that is not floating, or the
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
            f"callable {index}: x has floating leaves, and {x.paths[i] or 'a leaf'} is {x.avals[i].dtype}; pass what has no "
            f"gradient as an argument after x"
        )
    plain = fn.fn if isinstance(fn, FP8Function) else fn
    if takes_gradient:
        stage: Any = lambda params, x, extra: plain(params, x, *extra[0], **extra[1])  # noqa: E731
        arguments = (weights.shapes(), x.shapes(), extra.shapes())
    else:
        stage = lambda params, _, rest: plain(params, rest[0], *rest[1][0], **rest[1][1])  # noqa: E731
        arguments = (weights.shapes(), (), (x.shapes(), extra.shapes()))
    split = split_backward(
        replace(fn, fn=stage) if isinstance(fn, FP8Function) else stage, has_aux=has_aux, recompute=recompute
    )
    alone = "it must not, because a callable runs on one device"
    with refused_axes(lambda axis: CallableError(f"callable {index} reduces over the mesh axis {axis!r}: {alone}")):
        spec = split.spec(*arguments)
    y, residuals, stash = Side.of(spec.y), Side.of(spec.residuals), Side.of(spec.stash)
    for path, aval in zip(y.paths, y.avals, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            raise CallableError(f"callable {index}: y{path and '/' + path} is {aval.dtype}; every output must be floating")
    plan = spec.residuals.trace
    num_params = len(jax.tree.leaves(params[0])) if isinstance(fn, FP8Function) else len(weights)
    shaped = Shaped(
        index=index,
        split=split,
        params=weights,
        x=x,
        extra=extra,
        y=y,
        residuals=residuals,
        stash=stash,
        num_dgrad=len(spec.residuals.dgrad),
        takes_gradient=takes_gradient,
        late=tuple(i for i, late in enumerate(plan.delayed) if late),
        early=tuple(i for i, early in enumerate(plan.early) if early),
        device=device,
        aux=Side.of(spec.aux),
        maxima=tuple(i for i, early in enumerate(plan.early) if early and i >= num_params),
    )
    return replace(shaped, **_flows(shaped))


def _flows(shaped: Shaped) -> dict[str, Any]:
    """Returns the fields of `Shaped` that are read off the traces: parameters read, arrays handed on."""
    weights, count = list(shaped.params.avals), len(shaped.params)
    inputs = [*shaped.x.avals, *shaped.extra.avals]
    residuals, stash, dy = list(shaped.residuals.avals), list(shaped.stash.avals), list(shaped.y.avals)

    def dgrad(params, residuals, dy):
        dx, early, stash = shaped.dgrad(params, residuals, dy)
        return dx, stash, list(early.values())

    forward = jax.make_jaxpr(shaped.forward)(weights, inputs).jaxpr
    back = jax.make_jaxpr(dgrad)(weights, residuals, dy).jaxpr
    late = jax.make_jaxpr(partial(shaped.wgrad, sums=None))(weights, residuals, stash).jaxpr

    def reads(jaxpr: Any) -> tuple[int, ...]:
        needed, _ = replay.needs(jaxpr, [True] * len(jaxpr.outvars))
        return tuple(i for i in range(count) if needed[i])

    def flows(jaxpr: Any, start: int, length: int) -> tuple[int | None, ...]:
        sources = replay.forwarded(jaxpr)[start : start + length]
        return tuple(i - count if i is not None and i >= count else None for i in sources)

    return {
        "reads": {"forward": reads(forward), "dgrad": reads(back), "wgrad": reads(late)},
        "residuals_from": flows(forward, len(dy), len(residuals)),
        "stash_from": flows(back, shaped.num_dx, len(stash)),
    }
