"""Text from a model that has `logits`: one program, one loop, no cache of keys and values; for a look, not for serving."""

# L prompt and generated tokens, W window that the model sees, V vocabulary

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any

_TEMPERATURE = 0.8


@partial(jax.jit, static_argnames=("logits_fn", "num_tokens", "window"))
def generate(
    logits_fn: Callable[[PyTree, Array], Array],
    params: PyTree,
    prompt_L: Array,
    key: Array,
    *,
    num_tokens: int,
    window: int,
) -> Array:
    """Draws `num_tokens` tokens, int32, one after the other, each from the softmax of logits / 0.8.

    Args:
        logits_fn: `logits_fn(params, tokens_BW)` returns the logits of the next token after each position, (B, W, V); causal.
        prompt_L: int32 ids to start from, at least one.
        key: jax.random key; the same one gives the same tokens.
        window: tokens that the model sees at most, e.g. the length it was trained on. A shorter context is padded on the
            right, where a causal model does not look.
    """
    num_prompt = prompt_L.shape[0]
    assert min(num_prompt, num_tokens, window) >= 1
    tokens_L = jnp.zeros(max(num_prompt + num_tokens, window), jnp.int32).at[:num_prompt].set(prompt_L.astype(jnp.int32))

    def draw(position: Array, tokens_L: Array) -> Array:
        start = jnp.maximum(0, position - window)
        context_W = jax.lax.dynamic_slice_in_dim(tokens_L, start, window)
        logits_V = logits_fn(params, context_W[None])[0, position - 1 - start]
        token = jax.random.categorical(jax.random.fold_in(key, position), logits_V / _TEMPERATURE)
        return tokens_L.at[position].set(token.astype(jnp.int32))

    tokens_L = jax.lax.fori_loop(num_prompt, num_prompt + num_tokens, draw, tokens_L)
    return tokens_L[num_prompt : num_prompt + num_tokens]
