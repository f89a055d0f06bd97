"""Models that cannot be trained, each for a different reason, and models that cannot be sampled."""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jgraph_models.gpt import GPTConfig


class WithoutLogits(nnx.Module):
    """Has no `logits`. Its loss is the mean token id, so that tests can compute the expected value."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.zeros(2))

    def loss(self, tokens_BS: Array) -> Array:
        return jnp.mean(tokens_BS.astype(jnp.float32)) + jnp.sum(jnp.sin(self.scale[...]))


class WithoutLoss(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.zeros(2))


class VectorLoss(WithoutLogits):
    def loss(self, tokens_BS: Array) -> Array:
        return jnp.mean(tokens_BS.astype(jnp.float32), axis=1) + self.scale[0]


class BadLoss(WithoutLogits):
    def loss(self, tokens_BS: Array) -> Array:
        return tokens_BS @ tokens_BS


class OtherArguments(WithoutLogits):
    def __init__(self, config: GPTConfig, depth: int):
        super().__init__(config, rngs=nnx.Rngs(depth))


class NoModule:
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        raise NotImplementedError


class BadLogits(WithoutLogits):
    def logits(self, tokens_BT: Array) -> Array:
        return tokens_BT.astype(jnp.float32)
