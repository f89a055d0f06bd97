"""A matmul of data and a weight with a backward rule that computes only dx.

The matmul y = x * w has two gradients, dx = dy * w and dw = x * dy. The backward rule computes dx, and returns dy instead of dw
as the cotangent of a *tap*, an additional argument with the shape of dy that the matmul does not read. dgrad is therefore one
vjp with respect to x and the taps, and the cotangents of the taps are the operands of wgrad. The tap also returns x, so that
the trace of dgrad shows the computation of x, and whether wgrad can recompute it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.autodiff import replay
from jgraph.autodiff.replay import aval_of
from jgraph.autodiff.traced import GROUPED, Site
from jgraph.kernels import grouped
from jgraph.kernels.blocks import Blocks
from jgraph.types import Params, Tree

Operand: TypeAlias = Array | tuple[Array | Blocks, Array]
"""An operand of wgrad, x or dy: the array, or in FP8 its columns and their scale."""
Operands: TypeAlias = tuple[Operand, Operand]
"""A tap, or its cotangent: the operands (x, dy) of wgrad."""
Wide: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], lax.DotDimensionNumbers]
"""(lhs shape, rhs shape, dimension numbers) of a `dot_general`."""
WIDE = 4
"""A wide matmul has at least this many times as many results as data."""
_Kept: TypeAlias = tuple[Array, Array, Sequence[Array]]  # x, w and the other operands
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class DelayedProduct:
    """A matmul with a delayed weight gradient: wgrad computes dw, after dgrad has computed dx. FP8 has subclasses."""

    site: Site

    # In all methods, `extra` are the operands after x and w, such as group sizes.

    @property
    def is_wide(self) -> bool:
        """True for a `dot_general` without batch axes, if its output has at least four times as many elements as the data."""
        is_plain = self.site.name == "dot_general" and not any(self.site.eqn.params["dimension_numbers"][1])
        return is_plain and self.site.y_aval.size >= WIDE * self.site.x_aval.size

    def computed_as(self) -> Wide:
        """Describes the `dot_general` of a wide matmul, so that a policy of `jax.checkpoint` recognizes it."""
        lhs, rhs = (aval_of(v).shape for v in self.site.eqn.invars)
        return lhs, rhs, self.site.eqn.params["dimension_numbers"]

    def tap(self) -> Operands:
        """Returns zeros with the shapes of the operands of wgrad, here of (x, dy), with the leading axes of the scans."""
        site = self.site
        return replay.zeros(site.x_aval, *site.lead), replay.zeros(site.y_aval, *site.lead)

    def multiply(self, x: Array, w: Array, extra: Sequence[Array], tap: Operands, given: Any) -> Array:
        """Computes the matmul. The cotangent of `tap` is the operands of wgrad, and those of `w` and `extra` are zero."""
        # `tap` is not read. Nor is `given`, the additional arguments of this matmul from `BoundProducts.given`: FP8 reads them.
        site = self.site

        @jax.custom_vjp
        def run(x: Array, w: Array, extra: Sequence[Array], tap: Operands) -> Array:
            return site.run(x, w, extra)

        def forward(x: Array, w: Array, extra: Sequence[Array], tap: Operands) -> tuple[Array, _Kept]:
            return site.run(x, w, extra), (x, w, extra)

        def backward(kept: _Kept, dy: Array) -> tuple[Array, None, None, Operands]:
            x, w, extra = kept
            if site.name == GROUPED:
                dx = grouped.grouped_dgrad(dy, w, *extra)
            else:
                (dx,) = jax.linear_transpose(lambda x: site.run(x, w, extra), replay.zeros(site.x_aval))(dy)
            return dx, None, None, (x, dy)

        run.defvjp(forward, backward)
        return run(x, w, extra, tap)

    def keeping_x(self) -> "DelayedProduct":
        """Returns the matmul to use if x has fewer bytes than the arrays that wgrad recomputes x from."""
        # A subclass may return a matmul that saves x for wgrad.
        return self

    def weight_gradient(self, tap: Operands, extra: Sequence[Array], dtype: DTypeLike) -> Array:
        """Computes dw in `dtype` from the cotangent of the tap. All arrays have the leading axes of the scans."""
        wgrad = partial(_weight_gradient, self.site, dtype)
        for _ in self.site.lead:
            # The kernel of a grouped matmul cannot be vmapped.
            wgrad = partial(lax.map, wgrad) if self.site.name == GROUPED else jax.vmap(wgrad)
        x, dy = jax.tree.leaves(tap)
        return wgrad((x, extra, dy))

    @property
    def adds(self) -> bool:
        """True if `add_weight_gradient` exists. Otherwise, XLA fuses the addition to the sum into the matmul."""
        return self.site.name == GROUPED and not self.site.lead

    def add_weight_gradient(self, tap: Operands, extra: Sequence[Array], total: Array) -> Array:
        """Adds dw to a float32 sum inside the kernel that computes dw. Updates the sum in place if it is donated."""
        x, dy = jax.tree.leaves(tap)
        return grouped.grouped_wgrad(x, dy, *extra, dtype=total.dtype, add_GKN=total)


class BoundProducts(NamedTuple):
    """The matmuls of a stage, from `OwnProducts.bind`."""

    products: Sequence[DelayedProduct]  # the matmul of each site
    given: Callable[[Params], Sequence[Any]]  # maps the first argument to the additional arguments of each matmul
    differentiated: Sequence[bool]  # for each leaf of the first argument, True if the stage computes its gradient


@dataclass(frozen=True, eq=False)
class OwnProducts:
    """A stage: a function `fn(params, x, *extra)`, and its own matmuls. `split_backward` accepts it in place of a function."""

    fn: Callable[..., Tree]

    def params(self, given: Tree) -> Params:
        """Selects params from the first argument of the stage, a tree that begins with params."""
        return given

    def bind(self, sites: Sequence[Site], names: Sequence[str], given: Tree, x: Tree, *extra: Tree) -> BoundProducts:
        """Selects the matmuls of the sites with a delayed gradient. Called once per trace with the arguments of the stage."""
        num_leaves = len(jax.tree.leaves(given))
        return BoundProducts([DelayedProduct(site) for site in sites], lambda _: [()] * len(sites), [True] * num_leaves)

    def traced(self, part: Callable[..., Result]) -> Callable[..., Result]:
        """Transforms forward, dgrad or wgrad before `jax.jit`."""
        return part


def _weight_gradient(site: Site, dtype: DTypeLike, operands: tuple[Array, Sequence[Array], Array]) -> Array:
    """Computes dw = x * dy. A float32 result is the accumulator of the matmul and is not rounded."""
    x, extra, dy = operands
    if site.name == GROUPED:
        return grouped.grouped_wgrad(x, dy, *extra, dtype=dtype)
    if np.dtype(dtype) != site.w_aval.dtype:
        if site.name == "dot_general":
            return _dot_gradient(site, x, dy, dtype)
        if site.eqn.params.get("ragged_dot_dimension_numbers") == grouped.ROWS:
            return lax.ragged_dot_general(x, dy, extra[0], grouped.SUMMED, preferred_element_type=dtype)
    (dw,) = jax.linear_transpose(lambda w: site.run(x, w, extra), replay.zeros(site.w_aval))(dy)
    return dw.astype(dtype)


def _dot_gradient(site: Site, x: Array, dy: Array, dtype: DTypeLike) -> Array:
    """Computes dw of a `dot_general` in `dtype`. JAX's transpose rule cannot return a different dtype."""
    contract, batch = site.eqn.params["dimension_numbers"]
    x_contract, w_contract = contract[site.data], contract[site.weight]
    x_batch, w_batch = batch[site.data], batch[site.weight]
    x_free = [d for d in range(x.ndim) if d not in (*x_contract, *x_batch)]
    w_free = [d for d in range(site.w_aval.ndim) if d not in (*w_contract, *w_batch)]
    # dy has the batch axes first, then the free axes of the left operand, then the free axes of the right operand.
    first = len(x_batch) + (0 if site.weight == 1 else len(w_free))
    dy_x = tuple(range(first, first + len(x_free)))
    dims = ((tuple(x_free), dy_x), (tuple(x_batch), tuple(range(len(x_batch)))))
    dw = lax.dot_general(x, dy, dims, precision=site.eqn.params["precision"], preferred_element_type=dtype)
    # The result has the batch axes first, then the contracted axes of x in ascending order, then the free axes of w.
    by_x = sorted(range(len(x_contract)), key=lambda i: x_contract[i])
    order = [*w_batch, *(w_contract[i] for i in by_x), *w_free]
    return jnp.transpose(dw, np.argsort(order).tolist())
