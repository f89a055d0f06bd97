"""The kernel's own body, interpreted on the CPU, against plain jax; compiled for a GPU that is not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ShapeError
from jgraph.kernels.one_query import one_query
from jgraph.xla import aot
from jgraph_models.rotary import rotary, rotate


def arrays(H, G, C, K, dtype="float32"):
    rng = np.random.default_rng(0)
    qkv_NK, kv_ECK = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((H + 2 * G, K), (2 * G, C, K)))
    cos_LK, sin_LK = (jnp.asarray(table[:, 0]) for table in rotary(2 * C, K, 100.0))
    return qkv_NK, kv_ECK, jnp.int32(0), cos_LK, sin_LK


def reference(qkv_NK, kv_ECK, position, cos_LK, sin_LK, scales=None, epsilon=0.0):
    (E, C, K), H = kv_ECK.shape, len(qkv_NK) - len(kv_ECK)
    q_HK, k_GK, v_GK = jnp.split(qkv_NK, [H, H + E // 2])
    if scales:
        norm = lambda x, scale: x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon) * scale  # noqa: E731
        q_HK, k_GK = norm(q_HK, scales[0]), norm(k_GK, scales[1])
    q_HK, k_GK = (rotate(x, (cos_LK[position], sin_LK[position])) for x in (q_HK, k_GK))
    kv_ECK = kv_ECK.at[:, position % C].set(jnp.concatenate([k_GK, v_GK]))
    k_HCK, v_HCK = (jnp.repeat(x, 2 * H // E, axis=0) for x in jnp.split(kv_ECK, 2))
    scores_HC = jnp.where(jnp.arange(C) <= position, K**-0.5 * jnp.einsum("hk,hck->hc", q_HK, k_HCK), -jnp.inf)
    return jnp.einsum("hc,hck->hk", jax.nn.softmax(scores_HC), v_HCK), kv_ECK


# The first slot, one in the middle, the last one, and one that is taken again; pieces of one size and of several.
@pytest.mark.parametrize("position", [0, 200, 303, 310])
@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("normed", [False, True])
def test_a_token_is_written_and_answered_as_by_plain_jax(position, H, G, normed):
    own = list(arrays(H, G, 304, 16))
    own[2] = jnp.int32(position)
    scales = tuple(jnp.linspace(0.5, 2, 16) + i for i in range(2)) if normed else None
    names = {} if scales is None else {"q_scale_K": scales[0], "k_scale_K": scales[1]}
    found, wanted = one_query(*own, **names, epsilon=0.1, interpret=True), reference(*own, scales, 0.1)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("H", "G", "C", "K"), [(2, 2, 24, 16), (2, 2, 4096, 16), (2, 2, 16, 24), (3, 2, 16, 16)])
def test_sizes_that_the_kernel_does_not_take_are_refused(H, G, C, K):
    with pytest.raises(ShapeError) as error:
        one_query(*arrays(H, G, C, K))
    assert error.value.field == "kv_ECK"


@pytest.mark.target
@pytest.mark.long
@pytest.mark.parametrize(("H", "G", "C"), [(16, 16, 384), (16, 8, 2048)])
def test_it_is_one_kernel_for_an_h200_that_writes_in_place(h200, H, G, C):
    own = jax.eval_shape(lambda: arrays(H, G, C, 128, "bfloat16"))
    program, report = aot.compile_for(jax.jit(one_query, donate_argnums=1), *own)
    assert report.total == 1
    assert program.memory_analysis().alias_size_in_bytes == own[1].size * 2
