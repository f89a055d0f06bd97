"""A model of one's own, trained from the command line: a Flax module with `loss(tokens)`. `logits(tokens)` is for samples.

python -m jgraph.train --model.module examples.own_model:Bigram --model.scale 0.1 --steps 50 --run-dir /tmp/bigram
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class Settings:
    """Fields of the constructor's first argument are flags: --model.scale."""

    vocab_size: int = 256
    scale: float = 0.02
    """Of the first table."""


class Bigram(nnx.Module):
    """Predicts a byte from the one before it."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        shape = (settings.vocab_size, settings.vocab_size)
        self.table = nnx.Param(settings.scale * jax.random.normal(rngs.params(), shape))

    def logits(self, tokens):
        return self.table[...].astype(jnp.float32)[tokens]

    def loss(self, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(self.logits(tokens[:, :-1]), tokens[:, 1:]).mean()
