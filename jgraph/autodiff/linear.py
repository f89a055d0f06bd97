"""One product of data and weight, whose backward rule multiplies once instead of twice.

A product y = x * w has two gradients, dx = dy * w and dw = x * dy. Here the backward rule computes dx and hands out dy instead
of dw: dy leaves as the cotangent of a *tap*, an extra argument of dy's shape that the product ignores. So one vjp with respect
to (x, taps) is dgrad, and what comes out of the taps is what wgrad needs. The tap brings x too: it is then plain to see what x
is made of, and whether wgrad can have it without dgrad.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.kernels import grouped

GROUPED = "grouped product"

# By name: the operands that may be the weight. What is neither weight nor data is kept as it is (group sizes).
PRODUCTS = {"dot_general": (0, 1), "conv_general_dilated": (1,), "ragged_dot": (1,), "ragged_dot_general": (1,), GROUPED: (1,)}


def name_of(eqn: core.JaxprEqn) -> str:
    """Returns what an equation is called in `PRODUCTS`: a `grouped_dot` by what it is, all else by its primitive."""
    name = eqn.primitive.name
    if name in replay.CUSTOM and [inner.params.get("name") for inner in replay.body(eqn).eqns] == [grouped.DOT]:
        # Under a vmap it has an axis more, and is no grouped product.
        return GROUPED if [v.aval.ndim for v in eqn.invars] == [2, 3, 1] else name  # pyright: ignore[reportAttributeAccessIssue]
    return name


@dataclass(frozen=True, eq=False)
class DelayedProduct:
    """A product with a delayed weight.

    Attributes:
        eqn: the product.
        weight: which operand is the weight; the data is the other of the first two.
        lead: lengths of the scans around it, outermost first.
        params: the delayed parameters that the weight is made of.
        moved: whether the weight is one of them but for casts, reshapes and slices.
    """

    eqn: core.JaxprEqn
    weight: int
    lead: tuple[int, ...]
    params: frozenset[int]
    moved: bool

    @property
    def data(self) -> int:
        return 1 - self.weight

    @property
    def name(self) -> str:
        return name_of(self.eqn)

    def run(self, x: Any, w: Any, extra: Sequence[Any]) -> jax.Array:
        operands = (x, w) if self.weight == 1 else (w, x)
        return replay.apply(self.eqn, (*operands, *extra))[0]

    @property
    def x_aval(self) -> Any:
        return self.eqn.invars[self.data].aval

    @property
    def w_aval(self) -> Any:
        return self.eqn.invars[self.weight].aval

    @property
    def is_wide(self) -> bool:
        """Whether it is a product of matrices that gives at least four times as many numbers as the data has."""
        is_plain = self.eqn.primitive.name == "dot_general" and not any(self.eqn.params["dimension_numbers"][1])
        return is_plain and self.eqn.outvars[0].aval.size >= 4 * self.x_aval.size  # pyright: ignore[reportAttributeAccessIssue]

    def computed_as(self) -> Any:
        """Returns the shapes and the dimension numbers of the `dot_general` that computes it."""
        lhs, rhs = (v.aval.shape for v in self.eqn.invars)  # pyright: ignore[reportAttributeAccessIssue]
        return lhs, rhs, self.eqn.params["dimension_numbers"]

    def tap(self) -> Any:
        """Zeros to differentiate by, whose cotangents wgrad reads: of x's shape and of dy's."""
        return replay.zeros(self.x_aval, *self.lead), replay.zeros(self.eqn.outvars[0].aval, *self.lead)

    def multiply(self, x: Any, w: Any, extra: Sequence[Any], tap: Any, given: Any) -> jax.Array:
        """Computes the product with a tap; `given` is what `OwnProducts` gives it."""
        return product(self, x, w, extra, tap)

    def keeping_x(self) -> "DelayedProduct":
        """Returns the product for where wgrad alone would keep what x is made of: the first leaf of the tap is kept instead."""
        return self

    def weight_gradient(self, tap: Any, extra: Sequence[Any], dtype: Any) -> jax.Array:
        """Computes dw in `dtype` from the cotangents of the tap; all with the axes `lead` in front."""
        one = partial(weight_gradient, self, dtype=dtype)
        for _ in self.lead:
            # A kernel has no second form for several.
            one = _turn_by_turn(one) if self.name == GROUPED else jax.vmap(one)
        return one(tap[0], extra, tap[1])

    @property
    def adds(self) -> bool:
        """Whether it has `add_weight_gradient`: the sums of other products XLA makes parts of them."""
        return self.name == GROUPED and not self.lead

    def add_weight_gradient(self, tap: Any, extra: Sequence[Any], total: jax.Array) -> jax.Array:
        """Adds dw to a float32 sum inside the kernel that computes it."""
        return grouped.grouped_wgrad(*tap, *extra, dtype=total.dtype, add_GKN=total)


class Bound(NamedTuple):
    """The products of a stage, some of them computed in a way of its own.

    Attributes:
        sites: its delayed products, in order.
        given: returns what each takes besides its operands, from the stage's first argument.
        differentiated: for each leaf of that argument, whether it has a gradient.
    """

    sites: Sequence[DelayedProduct]
    given: Callable[[Any], Sequence[Any]]
    differentiated: Sequence[bool]


class OwnProducts:
    """A stage that computes some products of a function in a way of its own. `split_backward` takes it as a function.

    The first argument of such a stage is a tree of the function's parameters and of what else its products take.

    Attributes:
        fn: the function, of parameters, x and extra arguments.
    """

    fn: Callable[..., Any]

    def params(self, given: Any) -> Any:
        """Returns the parameters, whose leaves are the first of the stage's first argument."""
        raise NotImplementedError

    def bind(self, sites: Sequence[DelayedProduct], names: Sequence[str], given: Any, x: Any, extra: Sequence[Any]) -> Bound:
        """Returns the products that take the place of `sites`, for parameters of these names."""
        raise NotImplementedError

    def traced(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a part of the split (forward, dgrad or wgrad), a function of arrays, as it is to be compiled."""
        return part


def _turn_by_turn(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.map(lambda args: fn(*args), args)


def product(site: DelayedProduct, x: Any, w: Any, extra: Sequence[Any], tap: Any) -> jax.Array:
    """Computes the product. Its gradients are dx for x and (x, dy) for the tap; the weight gets none here."""

    @jax.custom_vjp
    def run(x, w, extra, tap):
        return site.run(x, w, extra)

    def forward(x, w, extra, tap):
        return site.run(x, w, extra), (x, w, extra)

    def backward(kept, dy):
        x, w, extra = kept
        if site.name == GROUPED:
            dx = grouped.grouped_dgrad(dy, w, *extra)
        else:
            (dx,) = jax.linear_transpose(lambda x: site.run(x, w, extra), replay.zeros(site.x_aval))(dy)
        return dx, None, None, (x, dy)

    run.defvjp(forward, backward)
    return run(x, w, extra, tap)


def weight_gradient(site: DelayedProduct, x: Any, extra: Sequence[Any], dy: Any, dtype: Any) -> jax.Array:
    """Computes dw = x * dy of one product in `dtype`: float32 comes from the product's own accumulator, not rounded."""
    if site.name == GROUPED:
        return grouped.grouped_wgrad(x, dy, *extra, dtype=dtype)
    if np.dtype(dtype) != site.w_aval.dtype:
        if site.name == "dot_general":
            return _dot_gradient(site, x, dy, dtype)
        if site.eqn.params.get("ragged_dot_dimension_numbers") == grouped.ROWS:
            return lax.ragged_dot_general(x, dy, extra[0], grouped.SUMMED, preferred_element_type=dtype)
    (dw,) = jax.linear_transpose(lambda w: site.run(x, w, extra), replay.zeros(site.w_aval))(dy)
    return dw.astype(dtype)


def _dot_gradient(site: DelayedProduct, x: Any, dy: Any, dtype: Any) -> jax.Array:
    """Transposes `dot_general` with respect to the weight; written out so that it can be asked for another dtype."""
    contract, batch = site.eqn.params["dimension_numbers"]
    x_contract, w_contract = contract[site.data], contract[site.weight]
    x_batch, w_batch = batch[site.data], batch[site.weight]
    x_free = [d for d in range(x.ndim) if d not in (*x_contract, *x_batch)]
    w_free = [d for d in range(len(site.w_aval.shape)) if d not in (*w_contract, *w_batch)]
    # dy has the batch dimensions first, then the free ones of the left operand, then those of the right.
    first, second = (x_free, w_free) if site.weight == 1 else (w_free, x_free)
    places = np.split(np.arange(len(x_batch) + len(first) + len(second)), np.cumsum([len(x_batch), len(first)]))
    dy_x = (places[1] if site.weight == 1 else places[2]).tolist()
    dims = ((tuple(x_free), tuple(dy_x)), (tuple(x_batch), tuple(range(len(x_batch)))))
    dw = lax.dot_general(x, dy, dims, precision=site.eqn.params["precision"], preferred_element_type=dtype)
    # Out come batch, then x's contracted dimensions in ascending order, then w's free ones.
    by_x = sorted(range(len(x_contract)), key=lambda i: x_contract[i])
    order = [*w_batch, *(w_contract[i] for i in by_x), *w_free]
    return jnp.transpose(dw, np.argsort(order).tolist())
