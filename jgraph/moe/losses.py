"""Losses of a router, and how they reach the gradient where no loss can be returned, as inside a pipeline's stage."""

# N tokens, E experts

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jgraph.mesh import Axis


def balance_loss(probabilities_NE: Array, counts_E: Array, axes: Sequence[str] = ()) -> Array:
    """Returns Switch's load-balancing loss of a layer (arXiv:2101.03961): E times the sum of fraction times mean probability.

    An expert's fraction is its tokens over all tokens, as `load_balancing_loss_func` of transformers has it: with K experts a
    token the fractions' sum is K, and so is the loss of an even router.

    Args:
        probabilities_NE: float32; the gradient goes through them.
        counts_E: tokens of each expert.
        axes: mesh axes, under `jax.shard_map`, whose devices share the microbatch: both means are over all of its tokens, and
            only then multiplied.
    """
    fractions_E = lax.stop_gradient(counts_E.astype(jnp.float32)) / len(probabilities_NE)
    means_E = jnp.mean(probabilities_NE, 0)
    if axes:
        fractions_E, means_E = lax.pmean(jnp.stack([fractions_E, means_E]), tuple(axes))
    return len(counts_E) * jnp.sum(fractions_E * means_E)


def z_loss(logits_NE: Array) -> Array:
    """Returns the mean square of the tokens' log-sum-exp (ST-MoE, arXiv:2202.08906), which keeps logits small."""
    return jnp.mean(jnp.square(jax.nn.logsumexp(logits_NE, -1)))


def axes_here() -> tuple[str, ...]:
    """Returns the axes `data` and `fsdp` of the `jax.shard_map` that this is traced in: their devices share a microbatch."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a.value for a in (Axis.DATA, Axis.FSDP) if a in mesh.manual_axes and mesh.shape[a] > 1)


@jax.custom_vjp
def attach(y: Array, loss: Array) -> Array:
    """Returns y. The gradient of whatever y goes into is as if `loss`, a scalar, had been added to it.

    That is so wherever the loss of a microbatch is differentiated as it is, not multiplied by anything first: in every strategy
    of jgraph. Where it is a sum (`jgraph.Loss` with a weight) multiply `loss` by its weight.
    """
    return y


attach.defvjp(lambda y, loss: (y, jnp.ones_like(loss)), lambda one, dy: (dy, one))
