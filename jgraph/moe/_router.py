"""Routes tokens to experts, and computes the losses of the router, in float32.

The routers of Mixtral and Qwen3 (arXiv:2401.04088), and of DeepSeek-V3 (arXiv:2412.19437), which a bias balances.
"""

# N tokens, D model, E experts, K experts per token

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.mesh import BATCH_AXES, Axis
from jgraph.moe.config import MoEConfig


class Routing(NamedTuple):
    """The experts of the tokens of a microbatch."""

    experts: Array  # int32 [N, K], different ones for each token
    weights: Array  # float32 [N, K], of the results of these experts
    probabilities: Array  # float32 [N, E], a row sums to one
    counts: Array  # int32 [E], tokens of each expert


@jax.custom_vjp
def logits(x_ND: Array, router_DE: Array) -> Array:
    """Multiplies tokens by the router's matrix in float32. TF32 would change the experts of tokens that are close to a tie.

    `x_ND` is bfloat16, or of a dtype that converts to float32 without loss.
    """
    if x_ND.dtype != jnp.bfloat16:
        return jnp.matmul(x_ND.astype(jnp.float32), router_DE, precision=lax.Precision.HIGHEST)
    # Three bfloat16 parts of the matrix have its 24 bits together. The products are exact, and tensor cores add them in float32
    # (Henry, Tang and Heinecke, arXiv:1904.06376).
    return _sum_of_thirds(_matmul(x_ND, jnp.concatenate(_parts(router_DE), 1)))


def _logits_backward(residuals: tuple[Array, Array], dy_NE: Array) -> tuple[Array, Array]:
    x_ND, router_DE = residuals
    if x_ND.dtype != jnp.bfloat16:
        dx_ND = jnp.matmul(dy_NE, router_DE.T, precision=lax.Precision.HIGHEST)
        dw_DE = jnp.matmul(x_ND.astype(jnp.float32).T, dy_NE, precision=lax.Precision.HIGHEST)
        return dx_ND.astype(x_ND.dtype), dw_DE
    high_DE, low_DE, _ = _parts(router_DE)
    dy_parts = _parts(dy_NE)
    # dx is rounded to 8 bits, so 16 bits of each operand suffice. 3E: the columns of three products.
    dy_N3E = jnp.concatenate([dy_parts[0], dy_parts[0], dy_parts[1]], 1)
    dx_ND = dy_N3E @ jnp.concatenate([high_DE, low_DE, high_DE], 1).T
    return dx_ND, _sum_of_thirds(_matmul(x_ND.T, jnp.concatenate(dy_parts, 1)))


logits.defvjp(lambda x_ND, router_DE: (logits(x_ND, router_DE), (x_ND, router_DE)), _logits_backward)


def _parts(a: Array) -> list[Array]:
    """Returns three bfloat16 arrays, the largest first. Their sum is the float32 array, exactly for magnitudes above 1e-31."""
    parts = []
    for _ in range(3):
        # Not a conversion to bfloat16 and back, because XLA removes it.
        part = lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        a = a - part
    return parts


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _sum_of_thirds(thirds: Array) -> Array:
    first, second, third = jnp.split(thirds, 3, 1)
    return first + (second + third)  # the smallest first


def route(logits_NE: Array, config: MoEConfig, bias_E: Array | None = None) -> Routing:
    """Selects the experts of every token, and computes their weights. The selection is not differentiable.

    The bias is added to the ranked values for the selection. It does not change the weights and has no gradient.
    """
    if config.router == "sigmoid":
        scores_NE = jax.nn.sigmoid(logits_NE)
        probabilities_NE = scores_NE / jnp.sum(scores_NE, -1, keepdims=True)
    else:
        scores_NE = probabilities_NE = jax.nn.softmax(logits_NE, -1)
    # Softmax keeps the order of the logits. The bias is added to sigmoids.
    ranked_NE = lax.stop_gradient(scores_NE if config.router == "sigmoid" else logits_NE)
    if bias_E is not None:
        ranked_NE += lax.stop_gradient(bias_E)
    _, experts_NK = lax.top_k(ranked_NE, config.experts_per_token)
    # A mask instead of indexing, because the gradient of indexing is a scatter.
    is_NKE = experts_NK[..., None] == jnp.arange(config.num_experts, dtype=experts_NK.dtype)
    weights_NE = logits_NE if config.router == "topk-softmax" else scores_NE
    weights_NK = jnp.sum(jnp.where(is_NKE, weights_NE[:, None], 0), -1)
    if config.router == "topk-softmax":
        weights_NK = jax.nn.softmax(weights_NK, -1)
    elif config.weights == "normalized":
        weights_NK /= jnp.sum(weights_NK, -1, keepdims=True)
    counts_E = jnp.sum(is_NKE, (0, 1), dtype=jnp.int32)
    return Routing(experts_NK, weights_NK * config.weights_scale, probabilities_NE, counts_E)


def updated_bias(bias_E: Array, counts_E: Array, rate: float) -> Array:
    """Adds `rate` to the biases of experts with fewer tokens than the mean in a step, and subtracts it for more tokens."""
    counts_E = counts_E.astype(jnp.float32)
    # Exactly the mean changes nothing.
    return bias_E + rate * jnp.sign(jnp.mean(counts_E) - counts_E)


def entropy(probabilities_NE: Array) -> Array:
    """Returns the mean entropy over tokens in nats, at most log E."""
    return -jnp.mean(jnp.sum(jax.scipy.special.xlogy(probabilities_NE, probabilities_NE), -1))


def balance_loss(probabilities_NE: Array, counts_E: Array) -> Array:
    """Returns the load-balancing loss of Switch (arXiv:2101.03961): E times the sum over experts of fraction times probability.

    A fraction is tokens / N, as in `load_balancing_loss_func` of transformers. They sum to K: a balanced router has the loss K.
    """
    fractions_E = lax.stop_gradient(counts_E.astype(jnp.float32)) / len(probabilities_NE)
    means_E = jnp.mean(probabilities_NE, 0)
    # Under `jax.shard_map`, both are averaged over the devices that share the microbatch.
    mesh = jax.sharding.get_abstract_mesh()
    if axes := tuple(axis for axis in (*BATCH_AXES, Axis.CONTEXT.value) if axis in mesh.manual_axes and mesh.shape[axis] > 1):
        fractions_E, means_E = lax.pmean(jnp.stack([fractions_E, means_E]), axes)
    return len(counts_E) * jnp.sum(fractions_E * means_E)


def z_loss(logits_NE: Array) -> Array:
    """Returns the mean over tokens of the squared log-sum-exp of the logits (ST-MoE, arXiv:2202.08906)."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits_NE, -1)))


@jax.custom_vjp
def attach(y: Array, loss: Array) -> Array:
    """Returns y, and adds the gradient of the scalar `loss` to the gradient of any loss that is computed from y."""
    return y


# Every strategy differentiates the loss of a microbatch with the cotangent 1. If that loss is a weighted sum (`jgraph.Loss`),
# pass `loss` times the weight.
attach.defvjp(lambda y, loss: (y, jnp.ones_like(loss)), lambda one, dy: (dy, one))
