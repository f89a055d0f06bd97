"""Plain JAX peer: greedy generation with Flax layers, library attention and a static KV cache that is updated in place.

Variants: `scan` is one jitted program with `jax.lax.scan` over the tokens. `loop` calls a jitted step with a donated cache for
each token and reads all tokens at the end.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.rows import Row, gpt_config_from
from jgraph_models.gpt import GPT, rotary_of
from jgraph_models.gpt_config import GPTConfig
from jgraph_models.rotary import rotate

# T tokens that are read, C length of the cache, H query heads, G key/value heads, K head size, D model. The batch size is 1.

Tree = Any


def generator(config: GPTConfig, params: Tree, prompt_T: np.ndarray, new: int, variant: str) -> Callable[[], np.ndarray]:
    """Returns a function that continues a prompt, with parameters in the compute dtype."""
    dtype = jnp.dtype(config.compute_dtype)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    H, G, K = config.num_heads, config.num_kv_heads, config.head_size
    length = len(prompt_T) + new
    tables = rotary_of(config, length)

    def empty() -> Tree:
        return [(jnp.zeros((1, length, G, K), dtype),) * 2 for _ in range(config.num_layers)]

    def read(params: Tree, tokens_1T: Array, position: Array, caches: Tree) -> tuple[Array, Array, Tree]:
        """Adds tokens to the caches. Returns the most likely next token, its position and the caches."""
        gpt: Any = nnx.merge(graphdef, params)
        T = tokens_1T.shape[1]
        rotary_T1K: Any = tuple(jax.lax.dynamic_slice_in_dim(jnp.asarray(table), position, T) for table in tables)
        mask_TC = jnp.arange(length) <= position + jnp.arange(T)[:, None]
        x_1TD, updated = gpt.embedding_VD[...][tokens_1T], []
        for block, cache in zip(gpt.blocks, caches, strict=True):
            qkv = block.attention.qkv(block.attention_norm(x_1TD)).reshape(1, T, -1, K)
            q, k, v = jnp.split(qkv, [H, H + G], axis=2)
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(stored, one, position, axis=1)
                for stored, one in zip(cache, (rotate(k, rotary_T1K), v), strict=True)
            )
            y_1THK = jax.nn.dot_product_attention(rotate(q, rotary_T1K), k, v, mask=mask_TC[None, None])
            x_1TD = x_1TD + block.attention.out(y_1THK.reshape(1, T, -1))
            x_1TD = x_1TD + block.mlp(block.mlp_norm(x_1TD))
            updated.append((k, v))
        logits = jnp.matmul(gpt.norm(x_1TD[:, -1]), gpt.output(), preferred_element_type=jnp.float32)
        return jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32), position + T, updated

    prompt_1T, start = jnp.asarray(prompt_T, jnp.int32)[None], jnp.zeros((), jnp.int32)

    @jax.jit
    def scanned(params: Tree, prompt_1T: Array) -> Array:
        def step(carry: tuple[Array, Array, Tree], _: None) -> tuple[tuple[Array, Array, Tree], Array]:
            carry = read(params, *carry)
            return carry, carry[0]

        first = read(params, prompt_1T, start, empty())
        _, rest = jax.lax.scan(step, first, length=new - 1)
        return jnp.concatenate([first[0], rest[:, :, 0].T], axis=1)[0]

    jitted, make_empty = jax.jit(read, donate_argnums=3), jax.jit(empty)

    def looped() -> np.ndarray:
        token, position, caches = jitted(params, prompt_1T, start, make_empty())
        tokens = [token]
        for _ in range(new - 1):
            token, position, caches = jitted(params, token, position, caches)
            tokens.append(token)
        return np.concatenate(jax.device_get(tokens), axis=1)[0]

    return {"scan": lambda: np.asarray(scanned(params, prompt_1T)), "loop": looped}[variant]


def time_generation(request: Row) -> None:
    """Times generation per token. Entry point of the candidate process."""
    config = gpt_config_from(request["model"])

    @jax.jit
    def init() -> Tree:
        params = nnx.to_pure_dict(nnx.split(GPT(config, rngs=nnx.Rngs(0)))[1])
        return jax.tree.map(lambda leaf: leaf.astype(config.compute_dtype), params)

    prompt_T = np.random.default_rng(0).integers(0, config.vocab_size, request["prompt"])
    run = generator(config, init(), prompt_T, request["new"], request["variant"])
    run()
    answer(device=jax.devices()[0].device_kind)
    take_turns(lambda timer: timer.per_token(run, lambda: None, request["new"]))


if __name__ == "__main__":
    time_generation(read_request())
