"""A matmul of data and a weight with a backward rule that computes only dx.

The matmul y = x * w has two gradients, dx = dy * w and dw = x * dy. The backward rule computes dx, and returns dy instead of dw
as the cotangent of a *tap*, an additional argument with the shape of dy that the matmul does not read. dgrad is therefore one
vjp with respect to x and the taps, and the cotangents of the taps are the operands of wgrad. The tap also returns x, so that
the trace of dgrad shows the computation of x, and whether wgrad can recompute it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.replay import Aval, aval_of
from jgraph.autodiff.view import View
from jgraph.kernels import grouped

GROUPED = "grouped product"

# Indices of the operands that may be the weight, by the name of the matmul. Other operands, such as group sizes, are saved.
PRODUCTS = {"dot_general": (0, 1), "conv_general_dilated": (1,), "ragged_dot": (1,), "ragged_dot_general": (1,), GROUPED: (1,)}


def name_of(eqn: core.JaxprEqn) -> str:
    """Returns the name of an equation, to be looked up in `PRODUCTS`, the dict of the kinds of matmuls in this module.

    Args:
        eqn: Any equation.

    Returns:
        The constant `GROUPED` for a call of `grouped_dot` that is not vmapped. Otherwise, the name of the primitive. The
        equation is a matmul if its name is a key of `PRODUCTS`.
    """
    name = eqn.primitive.name
    if name in replay.CUSTOM and [inner.params.get("name") for inner in replay.body(eqn).eqns] == [grouped.DOT]:
        # A vmapped `grouped_dot` has an additional axis and is not a grouped matmul.
        return GROUPED if [aval_of(v).ndim for v in eqn.invars] == [2, 3, 1] else name
    return name


@dataclass(frozen=True, eq=False)
class DelayedProduct:
    """A matmul with a delayed weight gradient: wgrad computes dw, after dgrad has computed dx.

    The matmul multiplies the data x by the weight w. dx, dw and dy are the gradients of x, w and the output.

    Attributes:
        eqn: The equation: a `dot_general`, convolution, ragged matmul or grouped matmul.
        weight: Index of the operand that is the weight, 0 or 1. The other one of these two operands is the data.
        lead: Lengths of the scans around the equation, outermost first. Empty outside of scans.
        params: Indices of the delayed parameters that the weight is computed from, as in the argument `params` of
            `jgraph.autodiff.find.find`.
        moved: True if only operations without arithmetic, such as casts, reshapes and slices, compute the weight from the
            parameters.
        view: Place of the weight [*lead, ...] in its parameter, if it is the whole parameter after transposes, reshapes and
            casts. Otherwise None.
    """

    eqn: core.JaxprEqn
    weight: int
    lead: tuple[int, ...]
    params: frozenset[int]
    moved: bool
    view: View | None

    @property
    def data(self) -> int:
        """Index of the operand that is the data, 1 or 0."""
        return 1 - self.weight

    @property
    def name(self) -> str:
        """Kind of the matmul: the name of its primitive, or `GROUPED` for a grouped matmul. A key of `PRODUCTS`."""
        return name_of(self.eqn)

    @property
    def x_aval(self) -> Aval:
        """Shape and dtype of the data, without the leading axes `lead`."""
        return aval_of(self.eqn.invars[self.data])

    @property
    def w_aval(self) -> Aval:
        """Shape and dtype of the weight, without the leading axes `lead`."""
        return aval_of(self.eqn.invars[self.weight])

    @property
    def is_wide(self) -> bool:
        """True for a `dot_general` without batch axes, if its output has at least four times as many elements as the data."""
        is_plain = self.eqn.primitive.name == "dot_general" and not any(self.eqn.params["dimension_numbers"][1])
        return is_plain and aval_of(self.eqn.outvars[0]).size >= 4 * self.x_aval.size

    def run(self, x: Array, w: Array, extra: Sequence[Array]) -> Array:
        """Computes the matmul.

        Args:
            x: The data, with the shape and dtype `x_aval`.
            w: The weight, with the shape and dtype `w_aval`.
            extra: The operands after the first two, such as the group sizes of a ragged matmul. Empty if there are none.

        Returns:
            The result, with the shape and dtype of the output of the equation.
        """
        operands = (x, w) if self.weight == 1 else (w, x)
        return replay.apply(self.eqn, (*operands, *extra))[0]

    def computed_as(self) -> Any:
        """Returns (lhs shape, rhs shape, dimension numbers) of the `dot_general` that computes the matmul.

        A policy of `jax.checkpoint` recognizes the matmul by these values. The shapes are tuples of integers. Call this only
        for a `dot_general`; for other matmuls it raises ValueError or KeyError.
        """
        lhs, rhs = (aval_of(v).shape for v in self.eqn.invars)
        return lhs, rhs, self.eqn.params["dimension_numbers"]

    def tap(self) -> Any:
        """Returns the tap, an additional argument of `multiply` that is zeros and is not read.

        The backward rule of `multiply` returns the arrays that `weight_gradient` needs as the cotangent of the tap. In this
        class, these are x and dy.

        Returns:
            In this class, a pair of arrays: zeros [*lead, *shape of x] in the dtype of x, and zeros [*lead, *shape of the
            output] in the dtype of the output. A subclass may return another tree.
        """
        return replay.zeros(self.x_aval, *self.lead), replay.zeros(aval_of(self.eqn.outvars[0]), *self.lead)

    def multiply(self, x: Array, w: Array, extra: Sequence[Array], tap: Any, given: Any) -> Array:
        """Computes the matmul, with a backward rule that computes dx and does not compute dw.

        The cotangent of `x` is dx. The cotangent of `tap` is (x, dy) in this class. The cotangents of `w` and `extra` are zero.

        Args:
            x: The data, with the shape and dtype `x_aval`.
            w: The weight, with the shape and dtype `w_aval`.
            extra: The operands after the first two, such as the group sizes of a ragged matmul. Empty if there are none.
            tap: The tap, as `tap` returns it but without the leading axes `lead`. Its values are not read.
            given: The additional arguments of this matmul from `BoundProducts.given`. Not read in this class.

        Returns:
            The result, with the shape and dtype of the output of the equation.
        """

        @jax.custom_vjp
        def run(x, w, extra, tap):
            return self.run(x, w, extra)

        def forward(x, w, extra, tap):
            return self.run(x, w, extra), (x, w, extra)

        def backward(kept, dy):
            x, w, extra = kept
            if self.name == GROUPED:
                dx = grouped.grouped_dgrad(dy, w, *extra)
            else:
                (dx,) = jax.linear_transpose(lambda x: self.run(x, w, extra), replay.zeros(self.x_aval))(dy)
            return dx, None, None, (x, dy)

        run.defvjp(forward, backward)
        return run(x, w, extra, tap)

    def keeping_x(self) -> "DelayedProduct":
        """Returns the matmul to use in place of this one when it is better to save x for wgrad than to recompute x.

        The caller uses the result if x takes less memory than the arrays from which wgrad would recompute x.

        Returns:
            In this class, `self`. A subclass may return another matmul, with a tap whose cotangent contains x.
        """
        return self

    def weight_gradient(self, tap: Any, extra: Sequence[Array], dtype: Any) -> Array:
        """Computes dw, the gradient of the weight.

        Args:
            tap: Cotangent of the tap that `multiply` got. In this class, the pair (x, dy), of the shapes [*lead, *shape of x]
                and [*lead, *shape of the output].
            extra: The operands of the matmul after the first two, each with the leading axes `lead`. Empty if there are none.
            dtype: Floating dtype of the result.

        Returns:
            The array dw in `dtype`, [*lead, *shape of the weight].
        """
        wgrad = partial(_weight_gradient, self, dtype=dtype)
        for _ in self.lead:
            # The kernel of a grouped matmul cannot be vmapped.
            wgrad = _mapped(wgrad) if self.name == GROUPED else jax.vmap(wgrad)
        return wgrad(tap[0], extra, tap[1])

    @property
    def adds(self) -> bool:
        """True if `add_weight_gradient` may be called. In this class, True for a grouped matmul outside of scans.

        If False, call `weight_gradient` and add the result to the sum. XLA fuses this addition into the matmul.
        """
        return self.name == GROUPED and not self.lead

    def add_weight_gradient(self, tap: Any, extra: Sequence[Array], total: Array) -> Array:
        """Adds dw to a sum inside the kernel that computes dw. Call this only if the property `adds` is True.

        Args:
            tap: Cotangent of the tap that `multiply` got. In this class, the pair (x, dy).
            extra: The operands of the matmul after the first two: one array, the group sizes.
            total: The sum, float32 in the shape of the weight. Updated in place if the caller's `jax.jit` donates it.

        Returns:
            The new sum, float32 in the shape of the weight.
        """
        return grouped.grouped_wgrad(*tap, *extra, dtype=total.dtype, add_GKN=total)


class BoundProducts(NamedTuple):
    """The delayed matmuls of a stage after `OwnProducts.bind` has replaced some of them.

    Attributes:
        sites: All delayed matmuls of the stage after the replacement, in the order of the argument `sites` of
            `OwnProducts.bind`.
        given: A function of the first argument of the stage. Returns a sequence with one element for each matmul of `sites`, in
            the same order: a tree of the additional arguments of the matmul. The element is passed to
            `DelayedProduct.multiply` as `given`.
        differentiated: For each leaf of the first argument of the stage, True if the stage computes its gradient.
    """

    sites: Sequence[DelayedProduct]
    given: Callable[[Any], Sequence[Any]]
    differentiated: Sequence[bool]


@dataclass(frozen=True, eq=False)
class OwnProducts:
    """A stage: a function, and how to replace its delayed matmuls. `split_backward` accepts it in place of a function.

    The first argument of the stage is a tree with the parameters of `fn`, followed by the additional arguments of the matmuls.
    In this base class, no matmul is replaced, and the first argument of the stage is the parameters of `fn`. `jgraph.fp8` makes
    a subclass that replaces matmuls by FP8 matmuls.

    Attributes:
        fn: `fn(params, x, *extra)`, a pure function of trees of arrays.
    """

    fn: Callable[..., Any]

    def params(self, given: Any) -> Any:
        """Selects the parameters of `fn` from the first argument of the stage.

        Args:
            given: First argument of the stage, a tree. Its first leaves are the leaves of the parameters of `fn`.

        Returns:
            The first argument of `fn`. In this class, `given` itself.
        """
        return given

    def bind(
        self, sites: Sequence[DelayedProduct], names: Sequence[str], given: Any, x: Any, extra: Sequence[Any]
    ) -> BoundProducts:
        """Selects the matmuls that replace `sites`. Called once per trace of the stage.

        Args:
            sites: The delayed matmuls that were found in `fn`, in the order of its equations.
            names: Names of the parameters of `fn`, in the order of their leaves.
            given: First argument of the stage, a tree of arrays, tracers or shapes.
            x: Second argument of the stage, a tree of arrays, tracers or shapes.
            extra: The arguments of the stage after x.

        Returns:
            The matmuls and their additional arguments. In this class, the matmuls are `sites`, the additional arguments of
            each matmul are (), and every leaf of `given` has a gradient.
        """
        return BoundProducts(sites, lambda _: [()] * len(sites), [True] * len(jax.tree.leaves(given)))

    def traced(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """Transforms one of the functions forward, dgrad and wgrad before `jax.jit`. Called once for each of the three.

        Args:
            part: The function. Its arguments and results are trees of arrays.

        Returns:
            A function with the same arguments and results. In this class, `part` itself.
        """
        return part


def _mapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: lax.map(lambda args: fn(*args), args)


def _weight_gradient(site: DelayedProduct, x: Array, extra: Sequence[Array], dy: Array, dtype: Any) -> Array:
    """Computes dw = x * dy. A float32 result is the accumulator of the matmul and is not rounded."""
    if site.name == GROUPED:
        return grouped.grouped_wgrad(x, dy, *extra, dtype=dtype)
    if np.dtype(dtype) != site.w_aval.dtype:
        if site.name == "dot_general":
            return _dot_gradient(site, x, dy, dtype)
        if site.eqn.params.get("ragged_dot_dimension_numbers") == grouped.ROWS:
            return lax.ragged_dot_general(x, dy, extra[0], grouped.SUMMED, preferred_element_type=dtype)
    (dw,) = jax.linear_transpose(lambda w: site.run(x, w, extra), replay.zeros(site.w_aval))(dy)
    return dw.astype(dtype)


def _dot_gradient(site: DelayedProduct, x: Array, dy: Array, dtype: Any) -> Array:
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
