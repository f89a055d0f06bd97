"""Tests FLOP counts of matmuls against closed formulas."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jgraph.autodiff import product_flops
from jgraph.kernels.grouped import grouped_dot
from jgraph_models.gpt import GPT, GPTConfig

A, B = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))


@pytest.mark.parametrize(
    ("fn", "args", "flops"),
    [
        (jnp.matmul, (A, B), 2 * 2 * 3 * 4 * 5),
        (lambda a, b: jnp.sin(a) + 1, (A, B), 0),
        (jax.jit(jax.checkpoint(jnp.matmul)), (A, B), 240),
        (lambda a, b: jax.lax.scan(lambda c, _: (c, a @ b), 0, None, length=7)[1], (A, B), 7 * 240),
        (lambda a, b: jax.lax.cond(a[0, 0, 0] > 0, lambda: (a @ b) @ jnp.ones((5, 5)), lambda: a @ b), (A, B), 240 + 300),
        # 6 x 6 outputs of 8 channels, with a window of 3 x 3 x 2.
        (lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"), (jnp.ones((1, 2, 8, 8)), jnp.ones((8, 2, 3, 3))), 2 * 36 * 8 * 18),
        (jax.lax.ragged_dot, (jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([2, 4])), 2 * 6 * 4 * 5),
    ],
    ids=["batched", "elementwise", "nested", "scan", "cond", "convolution", "ragged"],
)
def test_a_matmul_has_two_flops_per_multiply_add(fn, args, flops):
    assert product_flops(fn, *args) == flops


@pytest.mark.parametrize("product", [grouped_dot, jax.lax.ragged_dot])
def test_a_grouped_matmul_and_its_two_gradients_are_counted_once_each(product):
    gradients = jax.grad(lambda x, w: product(x, w, jnp.array([2, 1, 3])).sum(), (0, 1))
    assert product_flops(gradients, jnp.ones((6, 4)), jnp.ones((3, 4, 5))) == 3 * 2 * 6 * 4 * 5


@pytest.mark.parametrize(("head_dim", "width"), [(0, 32), (24, 48)])
def test_the_flops_of_a_gpt_equal_its_own_count_plus_masked_attention(head_dim, width):
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "d_ff": 64, "vocab_size": 96}
    config = GPTConfig(attention="xla", head_dim=head_dim, qk_norm="head", attention_bias="qkv", **sizes)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    tokens_BS = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    counted = 3 * product_flops(lambda params, tokens: nnx.merge(graphdef, params).loss(tokens), params, tokens_BS)
    masked = 6 * 2 * width * 16 * 4 * 16
    assert counted == config.flops(4, 16) + masked
