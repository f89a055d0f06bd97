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
from jgraph.kernels import grouped

GROUPED = "grouped product"

# Indices of the operands that may be the weight, by the name of the matmul. Other operands, such as group sizes, are saved.
PRODUCTS = {"dot_general": (0, 1), "conv_general_dilated": (1,), "ragged_dot": (1,), "ragged_dot_general": (1,), GROUPED: (1,)}


def name_of(eqn: core.JaxprEqn) -> str:
    """Returns the name of an equation in `PRODUCTS`: `GROUPED` for a `grouped_dot`, else the name of its primitive."""
    name = eqn.primitive.name
    if name in replay.CUSTOM and [inner.params.get("name") for inner in replay.body(eqn).eqns] == [grouped.DOT]:
        # A vmapped `grouped_dot` has an additional axis and is not a grouped matmul.
        return GROUPED if [aval_of(v).ndim for v in eqn.invars] == [2, 3, 1] else name
    return name


@dataclass(frozen=True, eq=False)
class DelayedProduct:
    """A matmul with a delayed weight gradient.

    Attributes:
        eqn: The equation.
        weight: Index of the operand that is the weight, 0 or 1. The other one is the data.
        lead: Lengths of the enclosing scans, outermost first.
        params: Indices of the delayed parameters that the weight is computed from.
        moved: True if only casts, reshapes and slices compute the weight from the parameter.
    """

    eqn: core.JaxprEqn
    weight: int
    lead: tuple[int, ...]
    params: frozenset[int]
    moved: bool

    @property
    def data(self) -> int:
        """Index of the operand that is the data."""
        return 1 - self.weight

    @property
    def name(self) -> str:
        """Name of the matmul in `PRODUCTS`."""
        return name_of(self.eqn)

    @property
    def x_aval(self) -> Aval:
        """Shape and dtype of the data."""
        return aval_of(self.eqn.invars[self.data])

    @property
    def w_aval(self) -> Aval:
        """Shape and dtype of the weight."""
        return aval_of(self.eqn.invars[self.weight])

    @property
    def is_wide(self) -> bool:
        """True for a matmul without batch axes that has at least four times as many output elements as data elements."""
        is_plain = self.eqn.primitive.name == "dot_general" and not any(self.eqn.params["dimension_numbers"][1])
        return is_plain and aval_of(self.eqn.outvars[0]).size >= 4 * self.x_aval.size

    def run(self, x: Array, w: Array, extra: Sequence[Array]) -> Array:
        """Computes the matmul without a tap.

        Args:
            x: The data.
            w: The weight.
            extra: The other operands.

        Returns:
            The result.
        """
        operands = (x, w) if self.weight == 1 else (w, x)
        return replay.apply(self.eqn, (*operands, *extra))[0]

    def computed_as(self) -> Any:
        """Returns (lhs shape, rhs shape, dimension numbers) of the `dot_general` that computes the matmul."""
        lhs, rhs = (aval_of(v).shape for v in self.eqn.invars)
        return lhs, rhs, self.eqn.params["dimension_numbers"]

    def tap(self) -> Any:
        """Returns the tap: zeros with the shapes of x and dy and the leading axes `lead`. Its cotangents are x and dy."""
        return replay.zeros(self.x_aval, *self.lead), replay.zeros(aval_of(self.eqn.outvars[0]), *self.lead)

    def multiply(self, x: Array, w: Array, extra: Sequence[Array], tap: Any, given: Any) -> Array:
        """Computes the matmul with a tap. The gradient of x is dx, the gradient of the tap is (x, dy), and w has no gradient.

        Args:
            x: The data.
            w: The weight.
            extra: The other operands.
            tap: The tap, without the leading axes `lead`.
            given: Additional arguments from `BoundProducts.given`; unused here.

        Returns:
            The result.
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
        """Returns a matmul for which wgrad does not recompute x, if the class has one; here `self`."""
        return self

    def weight_gradient(self, tap: Any, extra: Sequence[Array], dtype: Any) -> Array:
        """Computes dw.

        Args:
            tap: Cotangents of the tap, with the leading axes `lead`.
            extra: The other operands, with the leading axes `lead`.
            dtype: Dtype of the result.

        Returns:
            The gradient of the weight, with the leading axes `lead`.
        """
        wgrad = partial(_weight_gradient, self, dtype=dtype)
        for _ in self.lead:
            # The kernel of a grouped matmul cannot be vmapped.
            wgrad = _mapped(wgrad) if self.name == GROUPED else jax.vmap(wgrad)
        return wgrad(tap[0], extra, tap[1])

    @property
    def adds(self) -> bool:
        """True if `add_weight_gradient` is supported. XLA fuses the sum into other matmuls without help."""
        return self.name == GROUPED and not self.lead

    def add_weight_gradient(self, tap: Any, extra: Sequence[Array], total: Array) -> Array:
        """Adds dw to a sum inside the kernel that computes dw.

        Args:
            tap: As for `weight_gradient`.
            extra: As for `weight_gradient`.
            total: The sum, float32 in the shape of the weight.

        Returns:
            The new sum.
        """
        return grouped.grouped_wgrad(*tap, *extra, dtype=total.dtype, add_GKN=total)


class BoundProducts(NamedTuple):
    """The delayed matmuls of a stage after `OwnProducts.bind` has replaced some of them.

    Attributes:
        sites: The matmuls, in the order of the stage.
        given: Maps the first argument of the stage to the additional arguments of each matmul.
        differentiated: For each leaf of the first argument of the stage, True if it has a gradient.
    """

    sites: Sequence[DelayedProduct]
    given: Callable[[Any], Sequence[Any]]
    differentiated: Sequence[bool]


@dataclass(frozen=True, eq=False)
class OwnProducts:
    """A stage that can replace the matmuls of a function. `split_backward` accepts it in place of a function.

    The first argument of the stage is a tree with the parameters of the function and the additional arguments of its matmuls.
    This base class replaces no matmul and adds no arguments.

    Attributes:
        fn: `fn(params, x, *extra)`.
    """

    fn: Callable[..., Any]

    def params(self, given: Any) -> Any:
        """Returns the parameters in `given`, the first argument of the stage. Their leaves are its first leaves."""
        return given

    def bind(
        self, sites: Sequence[DelayedProduct], names: Sequence[str], given: Any, x: Any, extra: Sequence[Any]
    ) -> BoundProducts:
        """Selects the matmuls that replace `sites`.

        Args:
            sites: The matmuls that were found in the function.
            names: Names of the parameters.
            given: First argument of the stage.
            x: Input of the stage.
            extra: Extra arguments of the stage.

        Returns:
            The matmuls and their additional arguments.
        """
        return BoundProducts(sites, lambda _: [()] * len(sites), [True] * len(jax.tree.leaves(given)))

    def traced(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """Transforms forward, dgrad or wgrad, a function of arrays, before it is jitted."""
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
