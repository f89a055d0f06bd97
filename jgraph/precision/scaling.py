"""Scales of FP8 arrays: powers of two, from the largest magnitude (amax) of the array or of those before it.

An array x is kept as q = x * scale in FP8, and read as q / scale. With a power of two, both are exact but for q's own rounding.
Delayed scaling is that of Transformer Engine (docs/features/low_precision_training/fp8_delayed_scaling): amax of a window of
steps, its maximum or most recent, and a margin.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.precision.config import FP8Config

# S products, H steps of history; 3 = x, w, dy

_EXPONENT = 0x7F800000
_LARGEST_SCALE = 2.0**126  # whose inverse is no denormal


class History(NamedTuple):
    """The state of delayed scaling, for all products together.

    The amax of dy is stored in units of the gradient of the batch's mean loss. `observe` converts it, so that a history does
    not depend on the number of devices and microbatches that share a batch.

    Attributes:
        window: float32 [H, S, 3], amax of the previous steps, the latest first.
        used: float32 [S, 3], the amax behind the scales of the last step; 0 before the first step.
    """

    window: Array
    used: Array

    @classmethod
    def zeros(cls, products: int, steps: int) -> "History":
        return cls(jnp.zeros((steps, products, 3)), jnp.zeros((products, 3)))

    def amax(self, config: FP8Config) -> Array:
        """Returns the amax [S, 3] to scale by. Where it is 0 or not finite, the one before stays, as in Transformer Engine."""
        found = self.window[0] if config.amax == "most_recent" else jnp.max(self.window, axis=0)
        return jnp.where((found > 0) & jnp.isfinite(found), found, self.used)

    def after(self, amax_S3: Array, config: FP8Config) -> "History":
        """Returns the state after a step whose arrays had this amax."""
        return History(jnp.concatenate([amax_S3[None], self.window[:-1]]), self.amax(config))


def scale_for(amax: Array, dtype: Any, margin: int = 0) -> Array:
    """Returns the largest power of two that brings `amax` into the range of an FP8 dtype, divided by 2**margin.

    1 for an amax of 0 or one that is not finite.
    """
    ratio = jnp.minimum(float(jnp.finfo(dtype).max) / amax.astype(jnp.float32), _LARGEST_SCALE)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(ratio, jnp.uint32) & _EXPONENT, jnp.float32)
    return jnp.where((amax > 0) & jnp.isfinite(amax), power * 2.0**-margin, 1.0)


def seen(scale: Array, amax: Array) -> Array:
    """Returns a scale to read an array by: NaN where its amax is not finite, as what lies beyond the range was cut off."""
    return jnp.where(jnp.isfinite(amax), scale, jnp.nan)


def observe(history: History, config: FP8Config, dtypes: Sequence[Any], num_losses: int = 1) -> tuple[list[Array], list[Array]]:
    """Computes the scales of every product, and makes taps that collect the amax of its arrays.

    The cotangent of `history` is the history after the step, because only the backward pass knows the amax of dy.

    Args:
        history: The state of S products.
        config: The recipe.
        dtypes: FP8 dtypes of x, w and dy.
        num_losses: Number of losses that are averaged into the batch's loss. Each is differentiated by itself, so its dy is
            `num_losses` times as large as the dy of the batch's loss.

    Returns:
        For each product its scales, float32 [3], and a tap, float32 [3]. The cotangent of the tap must be the amax of the
        product's x, w and dy.
    """
    products = history.used.shape[0]
    # The power of two is rounded up, so that no dy overflows.
    factors = (1.0, 1.0, 2.0 ** -(num_losses - 1).bit_length())

    @jax.custom_vjp
    def run(history: History) -> tuple[list[Array], list[Array]]:
        columns = zip(history.amax(config).T, dtypes, factors, strict=True)
        scales_S3 = jnp.stack([scale_for(amax_S, dtype, config.margin) * factor for amax_S, dtype, factor in columns], axis=1)
        return list(scales_S3), [jnp.zeros(3)] * products

    def forward(history: History) -> tuple[tuple[list[Array], list[Array]], History]:
        return run(history), history

    def backward(history: History, cotangents: tuple[list[Array], list[Array]]) -> tuple[History]:
        return (history.after(jnp.stack(cotangents[1]) / jnp.array([1, 1, num_losses], jnp.float32), config),)

    run.defvjp(forward, backward)
    return run(history)
