"""A custom model for the training command: a Flax NNX module with `loss(tokens)` and `logits(tokens)`.

python -m jgraph.train --model.module examples.own_model:Bigram --model.width 64 --steps 50 --run-dir /tmp/bigram
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class BigramConfig:
    """Settings of the model. Each field becomes a flag, and its docstring the help text."""

    width: int = 32
    """Width of the embedding."""
    dropout: float = 0.1
    """Dropout rate."""


class Bigram(nnx.Module):
    """Predicts each byte from the previous one."""

    def __init__(self, config: BigramConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, rngs=rngs)

    def logits(self, tokens):
        return self.head(self.dropout(self.embed(tokens)))

    def loss(self, tokens):
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        return jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(self.logits(inputs)), labels[..., None], -1))
