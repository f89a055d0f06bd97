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

from jgraph.backward.linear import GROUPED, DelayedProduct
from jgraph.precision.config import FP8Config
from jgraph.precision.grouped import grouped_product
from jgraph.precision.product import Shape, Tap, formats, product, weight_gradient
from jgraph.trace import replay


@dataclass(frozen=True, eq=False)
class LateProduct(DelayedProduct):
    """A product in FP8 with a delayed weight.

    Attributes:
        config: the recipe. With a bfloat16 wgrad, x and dy wait as they are.
        again: whether the columns of x are quantized again, not kept.
    """

    config: FP8Config
    again: bool = True

    def computed_as(self) -> Any:
        m, k, n = Shape.of(self).sizes
        return (m, k), (n, k), (((1,), (1,)), ((), ()))

    def tap(self) -> Any:
        if self.config.wgrad == "bf16":
            return super().tap()
        (m, k, n), (x_dtype, _, dy_dtype) = Shape.of(self).sizes, formats(self.config)

        def zeros(aval: Any, columns: int, dtype: Any) -> tuple[Array, Array]:
            shapes = ((columns, m), dtype), ((), jnp.float32)
            bytes_, scale = (replay.zeros(aval, *self.lead, shape=shape, dtype=dtype) for shape, dtype in shapes)
            return bytes_, scale

        return zeros(self.x_aval, k, x_dtype), zeros(self.eqn.outvars[0].aval, n, dy_dtype)

    def multiply(self, x: Any, w: Any, extra: Sequence[Any], tap: Any, given: Tap) -> Array:
        return product(self.config, self, x, w, given._replace(late=tap), again=self.again)

    def keeping_x(self) -> "LateProduct":
        return replace(self, again=False)

    def weight_gradient(self, tap: Any, extra: Sequence[Any], dtype: Any) -> Array:
        if self.config.wgrad == "bf16":
            return super().weight_gradient(tap, extra, dtype)
        one = partial(weight_gradient, self.config, Shape.of(self), dtype=dtype, apart=False)
        for _ in self.lead:
            one = partial(lax.map, one)  # batched, it would be no FP8 product to XLA
        return one(tap)


@dataclass(frozen=True, eq=False)
class LateGroupedProduct(DelayedProduct):
    """A grouped product in FP8 with delayed weights, whose x and dy wait as they are.

    Attributes:
        config: the recipe.
    """

    config: FP8Config

    def multiply(self, x: Any, w: Any, extra: Sequence[Any], tap: Any, given: Tap) -> Array:
        return grouped_product(self.config, self, x, w, extra[0], given._replace(late=tap))


def late_product(site: DelayedProduct, config: FP8Config) -> DelayedProduct:
    """Returns a product in FP8, for one with a delayed weight."""
    kind = LateGroupedProduct if site.name == GROUPED else LateProduct
    return kind(site.eqn, site.weight, site.lead, site.params, site.moved, config)


def multiplied(config: FP8Config, site: DelayedProduct, x: Array, w: Array, extra: Sequence[Any], tap: Tap) -> Array:
    """Computes a product in FP8, with the gradient of its weight."""
    if site.name == GROUPED:
        return grouped_product(config, site, x, w, extra[0], tap)
    return product(config, site, x, w, tap)
