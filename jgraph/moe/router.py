"""Which experts a token goes to, and with what weight. All of it is in float32.

Mixtral's and Qwen3's router (arXiv:2401.04088), and that of DeepSeek-V3 (arXiv:2412.19437), which a bias keeps even.
"""

# N tokens, E experts, K experts of a token

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.moe.config import MoEConfig


class Routing(NamedTuple):
    """Says where the tokens of a microbatch go.

    Attributes:
        experts: int32 [N, K], the experts of each token, all different.
        weights: [N, K], what their results are multiplied by.
        probabilities: [N, E], of all experts; their sum is one.
        counts: int32 [E], tokens of each expert.
    """

    experts: Array
    weights: Array
    probabilities: Array
    counts: Array


def route(logits_NE: Array, config: MoEConfig, bias_E: Array | None = None) -> Routing:
    """Chooses the experts of every token.

    Args:
        logits_NE: float32.
        config: which router.
        bias_E: what is added to the sigmoids for the choice alone; not in the weights, and without a gradient.
    """
    if config.router == "sigmoid":
        scores_NE = jax.nn.sigmoid(logits_NE)
        probabilities_NE = scores_NE / jnp.sum(scores_NE, -1, keepdims=True)
    else:
        scores_NE = probabilities_NE = jax.nn.softmax(logits_NE, -1)
    ranked_NE = lax.stop_gradient(logits_NE if config.router != "sigmoid" else scores_NE)
    if bias_E is not None:
        ranked_NE += lax.stop_gradient(bias_E)
    _, experts_NK = lax.top_k(ranked_NE, config.experts_per_token)
    # Not by indices: the gradient of a look-up would be a scatter.
    is_NKE = experts_NK[..., None] == jnp.arange(config.num_experts, dtype=experts_NK.dtype)
    of_NE = logits_NE if config.router == "topk-softmax" else scores_NE
    weights_NK = jnp.sum(jnp.where(is_NKE, of_NE[:, None], 0), -1)
    if config.router == "topk-softmax":
        weights_NK = jax.nn.softmax(weights_NK, -1)
    elif config.weights == "normalized":
        weights_NK /= jnp.sum(weights_NK, -1, keepdims=True)
    counts_E = jnp.sum(is_NKE, (0, 1), dtype=jnp.int32)
    return Routing(experts_NK, weights_NK * config.weights_scale, probabilities_NE, counts_E)


def balanced(bias_E: Array, counts_E: Array, rate: float) -> Array:
    """Returns the biases after a step in which the experts had so many tokens: up by `rate` below the mean, down above it."""
    counts_E = counts_E.astype(jnp.float32)
    return bias_E + rate * jnp.sign(jnp.mean(counts_E) - counts_E)


def entropy(probabilities_NE: Array) -> Array:
    """Returns the mean entropy of a token's probabilities in nats; log E where the router does not choose."""
    return -jnp.mean(jnp.sum(jax.scipy.special.xlogy(probabilities_NE, probabilities_NE), -1))
