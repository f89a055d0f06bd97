"""Models of the jgraph candidates: MLP layers `x + gelu(x @ a) @ b`, GPT, and GPT blocks. `peers/` has the same in PyTorch."""

# M microbatches, B batch, T sequence, S = T + 1, N tokens, D model, F hidden

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.rows import Row
from benchmarks.works import GPTSize, MLPSize, Size
from jgraph.pipeline import PipelineModel
from jgraph_models.gpt import GPT, Block, GPTConfig, pipeline_model
from jgraph_models.rotary import rotary


@dataclass(frozen=True)
class Model:
    """A pipeline model, the parameters of its ends and of each layer, and a batch that is stacked by microbatch."""

    parts: PipelineModel
    ends: Any
    layers: list[Any]
    inputs: Any
    compute_dtype: Any


def model_of(size: Size, ranks: int) -> Model:
    """Creates the model and batch of a work: a GPT with both ends and cross-entropy, or an MLP with a squared loss."""
    if isinstance(size, GPTSize):
        return _gpt(size, ranks)
    parts = PipelineModel(lambda ends, x: x, mlp_layer, lambda ends, y, x: half_square(y))
    inputs = jax.random.normal(jax.random.key(1), (size.microbatches, size.tokens, size.d_model), jnp.bfloat16)
    return Model(parts, {}, mlp_layers(size), inputs, None)


def _gpt(size: GPTSize, ranks: int) -> Model:
    config = size.model
    parts = pipeline_model(config, ranks)
    make: Callable[[], Any] = jax.jit(lambda: nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param)))
    ends, layers = parts.split(make())
    shape = size.microbatches, size.batch, size.length + 1
    tokens_MBS = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    return Model(parts, ends, layers, tokens_MBS, jnp.dtype(config.compute_dtype))


def mlp_layer(params: tuple[jax.Array, jax.Array], x_ND: jax.Array) -> jax.Array:
    """Computes `x + gelu(x @ a) @ b`."""
    a_DF, b_FD = params
    return x_ND + jax.nn.gelu(x_ND @ a_DF, approximate=True) @ b_FD


def half_square(y_ND: jax.Array) -> jax.Array:
    """Returns a scaled sum of squares as loss."""
    return 0.5e-3 * jnp.sum(jnp.square(y_ND.astype(jnp.float32)))


def mlp_layers(size: MLPSize) -> list[Any]:
    """Creates bfloat16 parameters with the uniform initialization of `torch.nn.Linear`."""

    @jax.jit
    def layer(key):
        shapes = (size.d_model, size.d_ff), (size.d_ff, size.d_model)
        keys = jax.random.split(key)
        return tuple(
            jax.random.uniform(k, shape, jnp.bfloat16, -(shape[0] ** -0.5), shape[0] ** -0.5)
            for k, shape in zip(keys, shapes, strict=True)
        )

    return [layer(key) for key in jax.random.split(jax.random.key(0), size.layers)]


def gpt_blocks(size: Row) -> tuple[Callable[[Any, jax.Array], jax.Array], list[Any], jax.Array, jax.Array]:
    """Returns a block as a function, the float32 parameters of each block, and x and dy in bfloat16."""
    num_blocks, batch, length = (size[key] for key in ("num_blocks", "batch", "length"))
    widths = {key: size[key] for key in ("d_model", "num_heads", "d_ff")}
    config = GPTConfig(vocab_size=256, num_layers=num_blocks, num_kv_heads=size["num_heads"], **widths)
    rngs = nnx.Rngs(0)
    splits = [nnx.split(Block(config, rngs=rngs)) for _ in range(num_blocks)]
    graph, table_T1K = splits[0][0], rotary(length, config.head_size, config.rope_theta)

    def stage(params: Any, x_BTD: jax.Array) -> jax.Array:
        block: Any = nnx.merge(graph, params)
        return block(x_BTD, table_T1K)

    x, dy = (jax.random.normal(jax.random.key(i), (batch, length, config.d_model), jnp.bfloat16) for i in (1, 2))
    # jax flattens dicts in C++. An nnx.State is flattened in Python, which takes 9 us.
    return stage, [nnx.to_pure_dict(params) for _, params in splits], x, dy
