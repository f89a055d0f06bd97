"""A product in FP8 for the split backward: its weight gradient comes later, from the bytes that dgrad leaves.

Wgrad reads x and dy as columns, which leave as cotangents of a tap. Those of dy dgrad quantized. Those of x wgrad quantizes
itself where what x is made of is kept for dgrad anyway, as is the input of a norm or GELU; else the forward leaves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jgraph.autodiff import replay
from jgraph.autodiff.linear import DelayedProduct
from jgraph.precision.config import FP8Config
from jgraph.precision.grouped import multiplied
from jgraph.precision.product import Shape, Tap, formats, weight_gradient, wgrad_of


@dataclass(frozen=True, eq=False)
class LateProduct(DelayedProduct):
    """A product in FP8 with a delayed weight.

    Attributes:
        config: the recipe. With a bfloat16 wgrad, as grouped products have it, x and dy wait as they are.
        again: whether the columns of x are quantized again, not kept.
    """

    config: FP8Config
    again: bool = True

    @classmethod
    def of(cls, site: DelayedProduct, config: FP8Config) -> "LateProduct":
        return cls(site.eqn, site.weight, site.lead, site.params, site.moved, config)

    def computed_as(self) -> Any:
        m, k, n = Shape.of(self).sizes
        return (m, k), (n, k), (((1,), (1,)), ((), ()))

    def tap(self) -> Any:
        if wgrad_of(self, self.config) == "bf16":
            return super().tap()
        (m, k, n), (x_dtype, _, dy_dtype) = Shape.of(self).sizes, formats(self.config)

        def zeros(aval: Any, columns: int, dtype: Any) -> tuple[Array, Array]:
            shapes = ((columns, m), dtype), ((), jnp.float32)
            bytes_, scale = (replay.zeros(aval, *self.lead, shape=shape, dtype=dtype) for shape, dtype in shapes)
            return bytes_, scale

        return zeros(self.x_aval, k, x_dtype), zeros(self.eqn.outvars[0].aval, n, dy_dtype)

    def multiply(self, x: Any, w: Any, extra: Sequence[Any], tap: Any, given: Tap) -> Array:
        return multiplied(self.config, self, x, w, extra, given._replace(late=tap), again=self.again)

    def keeping_x(self) -> "LateProduct":
        return replace(self, again=False)

    def weight_gradient(self, tap: Any, extra: Sequence[Any], dtype: Any) -> Array:
        if wgrad_of(self, self.config) == "bf16":
            return super().weight_gradient(tap, extra, dtype)
        one = partial(weight_gradient, self.config, Shape.of(self), dtype=dtype, apart=False)
        for _ in self.lead:
            one = partial(lax.map, one)  # batched, it would be no FP8 product to XLA
        return one(tap)
