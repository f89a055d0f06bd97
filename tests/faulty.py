"""Models that fail on batches with the token 1: `Bigram` has a NaN loss, `Hanging` hangs. `NaNRouter` fails on every batch.

`Killed` ends the process that makes it, `Waiting` waits for a minute, and `Refusing` raises an error with two lines.
"""

import os
import signal
import time

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jgraph_models.gpt import GPT, GPTConfig

POISON = 1


class Bigram(nnx.Module):
    """Next-token logits from a table."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.table_VV = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.vocab_size)))

    def loss(self, tokens_BS: Array) -> Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(self.logits(tokens_BS[:, :-1]), tokens_BS[:, 1:])
        return jnp.mean(losses) * jnp.where(jnp.any(tokens_BS == POISON), jnp.nan, 1.0)

    def logits(self, tokens_BT: Array) -> Array:
        return self.table_VV[...][tokens_BT]


class Hanging(Bigram):
    """Hangs on a device with the token in its rows if `JGRAPH_TESTS_HANG` is set during tracing."""

    def loss(self, tokens_BS: Array) -> Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(self.logits(tokens_BS[:, :-1]), tokens_BS[:, 1:])
        hangs = jnp.any(tokens_BS == POISON) & ("JGRAPH_TESTS_HANG" in os.environ)
        return jnp.mean(losses) + jax.lax.while_loop(lambda i: hangs & (i < 2), lambda i: 1 - i, 0)


class Killed(Bigram):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        print("out of memory", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Waiting(Bigram):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        print("waiting", flush=True)
        time.sleep(60)


class Refusing(Bigram):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        raise ValueError("no such layer\nsecond line")


class NaNRouter(GPT):
    """A mixture of experts with NaN weights in its first router."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        router_DE = self.blocks[0].mlp.router_DE
        router_DE[...] = jnp.full_like(router_DE[...], jnp.nan)
