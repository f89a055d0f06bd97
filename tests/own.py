"""User models for tests: with and without settings, with dropout and running statistics, in NNX and Linen."""

from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jgraph import BATCH_AXES, PipelineModel
from jgraph.moe.config import rows_per_pair


def next_token_loss(logits_BTV: Array, tokens_BS: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:]))


@dataclass(frozen=True)
class Settings:
    width: int = 16
    """Columns of the table."""
    rate: float = 0.5


class Normed(nnx.Module):
    """Dropout and batch norm over an embedding. Has no logits, no FLOP count and no vocabulary size."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, config.width, rngs=rngs)
        self.norm = nnx.BatchNorm(config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.rate, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, rngs=rngs)

    def loss(self, tokens_BS: Array) -> Array:
        return next_token_loss(self.head(self.dropout(self.norm(self.embedding(tokens_BS[:, :-1])))), tokens_BS)


class Synced(Normed):
    """The same model with batch statistics over the rows of all devices."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.norm = nnx.BatchNorm(config.width, axis_name=BATCH_AXES, rngs=rngs)


class Block(nnx.Module):
    """A layer with running statistics."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm, self.linear = nnx.BatchNorm(width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return x + nnx.gelu(self.linear(self.norm(x)))


class Stacked(nnx.Module):
    """Layers with running statistics, and their pipeline description."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config.width, rngs) for _ in range(3)])
        self.head = nnx.Linear(config.width, 256, rngs=rngs)

    def loss(self, tokens_BS: Array) -> Array:
        x = self.embedding(tokens_BS[:, :-1])
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(x), tokens_BS)

    @staticmethod
    def pipeline_model(config: Settings, ranks: int) -> PipelineModel:
        graph, _, _ = nnx.split(Block(config.width, nnx.Rngs(0)), nnx.Param, ...)

        def layer(params, x, carried):
            block = nnx.merge(graph, params, carried)
            return block(x), nnx.to_pure_dict(nnx.state(block, nnx.Not(nnx.Param)))

        def head(outer, x, tokens_BS):
            return next_token_loss(x @ outer["head"]["kernel"] + outer["head"]["bias"], tokens_BS)

        return PipelineModel(
            embed=lambda outer, tokens_BS: outer["embedding"]["embedding"][tokens_BS[:, :-1]],
            layer=layer,
            head=head,
            split=lambda params: ({k: v for k, v in params.items() if k != "blocks"}, list(params["blocks"].values())),
            join=lambda outer, layers: outer | {"blocks": dict(enumerate(layers))},
            split_carried=lambda carried: list(carried["blocks"].values()),
            join_carried=lambda layers: {"blocks": dict(enumerate(layers))},
        )


class StackedWithDropout(Stacked):
    """The same pipeline with dropout before every layer."""

    @staticmethod
    def pipeline_model(config: Settings, ranks: int) -> PipelineModel:
        model = Stacked.pipeline_model(config, ranks)

        def layer(params, x, key, carried):
            return model.layer(params, x * jax.random.bernoulli(key, 1 - config.rate, x.shape), carried)

        return replace(model, layer=layer, takes_key=True)


class StackedWithMean(Stacked):
    """The same model with a loss that is averaged over all devices."""

    @staticmethod
    def pipeline_model(config: Settings, ranks: int) -> PipelineModel:
        model = Stacked.pipeline_model(config, ranks)
        return replace(model, head=lambda *args: jax.lax.pmean(model.head(*args), BATCH_AXES))


@dataclass(frozen=True)
class SpillingMoE:
    capacity: float = 1.0
    """Fraction of the tokens that fit."""
    experts_per_token: int = 1


@dataclass(frozen=True)
class SpillingSettings:
    moe: SpillingMoE = SpillingMoE()


class Spilling(nnx.Module):
    """Keeps a limited number of spaces. Drops further spaces and halts the step, like sharded experts over capacity."""

    def __init__(self, config: SpillingSettings, *, rngs: nnx.Rngs):
        self.capacity, self.use_running_average = config.moe.capacity, False
        self.embedding, self.head = nnx.Embed(256, 8, rngs=rngs), nnx.Linear(8, 256, rngs=rngs)
        self.overflow = nnx.Variable(jnp.zeros((), jnp.int32), reduction="halt")

    def loss(self, tokens_BS: Array) -> Array:
        x = self.embedding(tokens_BS[:, :-1])
        if not self.use_running_average:
            is_space = tokens_BS[:, :-1].reshape(-1) == ord(" ")
            limit, needed = rows_per_pair(self.capacity, is_space.size, 1), jnp.sum(is_space)
            self.overflow.set_value(jnp.where(needed > limit, needed, 0))
            x *= (~is_space | (jnp.cumsum(is_space) <= limit)).reshape(*x.shape[:-1], 1)
        return next_token_loss(self.head(x), tokens_BS)


class Stuck(Normed):
    """Halts at every step, although it has no capacity setting."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.overflow = nnx.Variable(jnp.zeros((), jnp.int32), reduction="halt")

    def loss(self, tokens_BS: Array) -> Array:
        self.overflow.set_value(jnp.ones((), jnp.int32))
        return super().loss(tokens_BS)


class Bare(nnx.Module):
    """Takes no settings."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Param(0.02 * jax.random.normal(rngs.params(), (256, 256)))

    def loss(self, tokens_BS: Array) -> Array:
        return next_token_loss(self.table[...][tokens_BS[:, :-1]], tokens_BS)


class Linen(nn.Module):
    """A Linen model with dropout and running statistics."""

    config: Settings

    @nn.compact
    def __call__(self, tokens_BT: Array, train: bool) -> Array:
        x = nn.Embed(256, self.config.width)(tokens_BT)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(256)(nn.Dropout(self.config.rate, deterministic=not train)(x))

    def loss(self, tokens_BS: Array, train: bool) -> Array:
        return next_token_loss(self(tokens_BS[:, :-1], train), tokens_BS)
