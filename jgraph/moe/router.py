"""Which experts a token goes to, and with what weight. All of it is in float32.

Mixtral's and Qwen3's router (arXiv:2401.04088), and that of DeepSeek-V3 (arXiv:2412.19437), which a bias keeps even.
"""

# N tokens, D model, E experts, K experts of a token

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


@jax.custom_vjp
def logits(x_ND: Array, router_DE: Array) -> Array:
    """Returns x times the router's matrix in float32, and never in TF32: tokens whose experts are close would go to others.

    A bfloat16 x is multiplied with the matrix in three bfloat16 parts, which have its 24 bits: so the products are exact, and
    tensor cores add them in float32 (Henry, Tang and Heinecke, arXiv:1904.06376). Gradients are made the same way.

    Args:
        x_ND: bfloat16, or anything that is float32 without loss.
        router_DE: float32.
    """
    if x_ND.dtype != jnp.bfloat16:
        return jnp.matmul(x_ND.astype(jnp.float32), router_DE, precision=lax.Precision.HIGHEST)
    return _added(_product(x_ND, jnp.concatenate(_parts(router_DE), 1)))


def _logits_backward(residuals: tuple[Array, Array], dy_NE: Array) -> tuple[Array, Array]:
    x_ND, router_DE = residuals
    if x_ND.dtype != jnp.bfloat16:
        dx_ND = jnp.matmul(dy_NE, router_DE.T, precision=lax.Precision.HIGHEST)
        dw_DE = jnp.matmul(x_ND.astype(jnp.float32).T, dy_NE, precision=lax.Precision.HIGHEST)
        return dx_ND.astype(x_ND.dtype), dw_DE
    high_DE, low_DE, _ = _parts(router_DE)
    dy_parts = _parts(dy_NE)
    # It will be rounded to 8 bits; 16 of each operand suffice.
    paired_NF = jnp.concatenate([dy_parts[0], dy_parts[0], dy_parts[1]], 1)
    dx_ND = paired_NF @ jnp.concatenate([high_DE, low_DE, high_DE], 1).T
    return dx_ND, _added(_product(x_ND.T, jnp.concatenate(dy_parts, 1)))


logits.defvjp(lambda x_ND, router_DE: (logits(x_ND, router_DE), (x_ND, router_DE)), _logits_backward)


def _parts(a: Array) -> list[Array]:
    """Returns three bfloat16 arrays that add up to a float32 one, but for its last bit or two."""
    parts = []
    for _ in range(3):
        # Not a conversion there and back, which XLA leaves out.
        part = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        a = a - part
    return parts


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _added(thirds: Array) -> Array:
    """Returns the sum of three arrays that lie side by side, the smallest first."""
    first, second, third = jnp.split(thirds, 3, 1)
    return first + (second + third)


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
