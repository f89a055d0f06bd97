"""A model of one's own, trained from the command line: a Flax NNX module with `loss(tokens)` and `logits(tokens)`.

python -m jgraph.train --model.module examples.own_model:Bigram --steps 50 --run-dir /tmp/bigram
"""

import jax
import jax.numpy as jnp
from flax import nnx


class Bigram(nnx.Module):
    """Predicts a byte from the one before it."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.vocab_size)))

    def logits(self, tokens):
        return self.table[...][tokens]

    def loss(self, tokens):
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        return jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(self.logits(inputs)), labels[..., None], -1))
