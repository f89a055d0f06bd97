"""Draws tokens from logits with temperature, top-k and top-p, without sorting the vocabulary."""

# B rows, V vocabulary, N bins

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.errors import require

# The settings of `draw` by name; empty for greedy decoding.
Settings: TypeAlias = dict[str, float]

_RADIX_BITS = 8
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def settings_of(temperature: float, top_k: int, top_p: float) -> Settings:
    """Returns the settings of `draw`. Settings without an effect are left out, so that they cost nothing.

    A temperature below float32's smallest normal number is the same as 0, because XLA flushes subnormal numbers to zero.

    Args:
        temperature: Divides the logits; 0 for greedy decoding.
        top_k: Number of likeliest tokens to draw from; 0 for all.
        top_p: Probability mass of the likeliest tokens to draw from; 1 for all.

    Returns:
        The settings by name; an empty dict for greedy decoding.

    Raises:
        ConfigError: If a value is out of range.
    """
    require(0 <= temperature <= _LARGEST, "temperature", temperature, f"between 0 and {_LARGEST:.1e}")
    require(isinstance(top_k, int) and top_k >= 0, "top_k", top_k, "a positive integer, or 0 for all tokens")
    require(0 < top_p <= 1, "top_p", top_p, "greater than 0 and at most 1")
    if temperature < _SMALLEST:
        return {}
    settings: Settings = {"temperature": float(temperature)}
    if top_k:
        settings["top_k"] = float(top_k)
    if top_p < 1:
        settings["top_p"] = max(float(top_p), _SMALLEST)
    return settings


def draw(logits_BV: Array, settings: Settings, keys_B: Array) -> Array:
    """Draws one token for each row.

    Args:
        logits_BV: Logits of any float dtype.
        settings: Settings from `settings_of`.
        keys_B: A jax key for each row; unused by greedy decoding.

    Returns:
        The token ids, int32 of shape (B,).
    """
    if not settings:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = filtered_logits(logits_BV.astype(jnp.float32), settings)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def filtered_logits(logits_BV: Array, settings: Settings) -> Array:
    """Divides logits by the temperature and masks the tokens that top-k and top-p exclude.

    Args:
        logits_BV: float32 logits.
        settings: Settings from `settings_of`, with a temperature.

    Returns:
        The logits, shifted so that the largest of a row is 0; -inf for excluded tokens.
    """
    # Shifted first: without the shift, logits / temperature overflows to inf at low temperatures.
    scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / settings["temperature"]
    # Tokens are compared by their unscaled logits: the division can round different logits to the same number.
    if "top_k" in settings:
        kept_BV = _keep_likeliest(logits_BV, jnp.ones_like(logits_BV), settings["top_k"])
        scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
    if "top_p" in settings:
        kept_BV = _keep_likeliest(logits_BV, jax.nn.softmax(scaled_BV), settings["top_p"])
        scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
    return scaled_BV


def _keep_likeliest(logits_BV: Array, weights_BV: Array, limit: float | Array) -> Array:
    """Returns a mask, True for a token if the total weight of all likelier tokens is below `limit`.

    The likeliest token is always kept, and so are all tokens with the same logit as the last one kept. A radix search finds the
    smallest kept logit, `_RADIX_BITS` bits per pass: sorting the vocabulary takes longer than a transformer layer.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits_BV == 0, 0.0, logits_BV), jnp.uint32)  # -0 ties with 0
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits < sign, bits | sign, ~bits)  # unsigned integers in the order of the floats
    least_B = jnp.zeros(len(logits_BV), jnp.uint32)
    for shift in range(32 - _RADIX_BITS, -1, -_RADIX_BITS):
        starts_BN = least_B[:, None] | (jnp.arange(1 << _RADIX_BITS, dtype=jnp.uint32) << shift)
        ends_BN = starts_BN | jnp.uint32((1 << shift) - 1)
        beyond_BNV = order_BV[:, None] > ends_BN[:, :, None]
        fits_BN = jnp.sum(jnp.where(beyond_BNV, weights_BV[:, None], 0.0), axis=-1) < limit
        least_B = jnp.take_along_axis(starts_BN, jnp.argmax(fits_BN, axis=-1)[:, None], axis=1)[:, 0]
    return order_BV >= least_B[:, None]
