"""A token drawn from logits: temperature, the k likeliest, the likeliest that have a probability. Nothing is sorted."""

# B rows, V vocabulary, N bins

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.errors import require

_BITS = 8  # of a key that a pass over the logits settles


def settings_of(temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Returns what `draw` needs, by name; what changes nothing is left out. Raises ConfigError for values that cannot work."""
    require(0 <= temperature < float("inf"), "temperature", temperature, "0 or positive")
    require(isinstance(top_k, int) and top_k >= 0, "top_k", top_k, "a positive integer, or 0 for all tokens")
    require(0 < top_p <= 1, "top_p", top_p, "above 0 and at most 1")
    if temperature == 0:
        return {}
    settings: dict[str, Any] = {"temperature": float(temperature)}
    return settings | ({"top_k": float(top_k)} if top_k else {}) | ({"top_p": float(top_p)} if top_p < 1 else {})


def draw(logits_BV: Array, settings: dict[str, Any], keys_B: Array) -> Array:
    """Draws a token of each row, int32; `settings` are those of `settings_of`."""
    if not settings:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = likely(logits_BV.astype(jnp.float32) / settings["temperature"], settings)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def likely(logits_BV: Array, settings: dict[str, Any]) -> Array:
    """Returns the logits with -inf for tokens that must not be drawn."""
    if "top_k" in settings:
        logits_BV = _above(logits_BV, jnp.ones_like(logits_BV), settings["top_k"])
    if "top_p" in settings:
        logits_BV = _above(logits_BV, jax.nn.softmax(logits_BV), settings["top_p"])
    return logits_BV


def _above(logits_BV: Array, weights_BV: Array, limit: Any) -> Array:
    """Keeps a token where all that are likelier have together less weight than the limit: so the likeliest in any case.

    The least such logit is found bit by bit, `_BITS` at a time: a sort of a whole vocabulary takes longer than a layer.
    """
    bits = jax.lax.bitcast_convert_type(logits_BV + 0.0, jnp.uint32)  # -0 is 0
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits < sign, bits | sign, ~bits)  # as integers, in the order of the floats
    least_B = jnp.zeros(len(logits_BV), jnp.uint32)
    for shift in range(32 - _BITS, -1, -_BITS):
        starts_BN = least_B[:, None] | (jnp.arange(1 << _BITS, dtype=jnp.uint32) << shift)
        ends_BN = starts_BN | jnp.uint32((1 << shift) - 1)
        beyond_BNV = order_BV[:, None] > ends_BN[:, :, None]
        fits_BN = jnp.sum(jnp.where(beyond_BNV, weights_BV[:, None], 0.0), axis=-1) < limit
        least_B = jnp.take_along_axis(starts_BN, jnp.argmax(fits_BN, axis=-1)[:, None], axis=1)[:, 0]
    return jnp.where(order_BV >= least_B[:, None], logits_BV, -jnp.inf)
