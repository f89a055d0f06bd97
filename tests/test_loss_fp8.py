"""Cross-entropy with FP8 matmuls: compares with a NumPy emulation of the quantization."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jgraph
from jgraph.errors import ConfigError, ShapeError
from tests.precision.test_fp8 import rounded
from tests.test_loss import example, referee

N, D, V = 64, 32, 48


def arrays(dtype=jnp.float32):
    return example(batch=4, length=N // 4, width=D, vocab=V, dtype=dtype)


def graded(x, head, labels, **options):
    """Returns (loss, (dx, dhead)) in FP8."""

    def loss(x, head):
        return jgraph.cross_entropy(x, head, labels, precision="fp8", **options)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, head)


def emulated(x_BTD, head_DV, labels_BT, weights_N=None):
    """Returns (loss, (dx, dhead)) in float64 from quantized hidden states, head and gradient of the logits."""
    x_ND, head_DV = rounded(x_BTD, jnp.float8_e4m3fn).reshape(N, D), rounded(head_DV, jnp.float8_e4m3fn)
    weights_N = np.ones(N) if weights_N is None else weights_N
    logits_NV, one_hot_NV = x_ND @ head_DV, np.eye(V)[np.asarray(labels_BT).ravel()]
    softmax_NV = np.exp(logits_NV) / np.exp(logits_NV).sum(1, keepdims=True)
    loss = -(np.log((softmax_NV * one_hot_NV).sum(1)) * weights_N).mean()
    # The scale depends on the bound of the gradient, which is the largest weight.
    scale = 2.0 ** np.floor(np.log2(57344 / weights_N.max()))
    dlogits_NV = ((softmax_NV - one_hot_NV) * weights_N[:, None] * scale).astype(np.float32)
    dlogits_NV = dlogits_NV.astype(jnp.float8_e5m2).astype(np.float64) / scale / N
    return loss, ((dlogits_NV @ head_DV.T).reshape(x_BTD.shape), x_ND.T @ dlogits_NV)


def difference(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def assert_quantized(found, expected, exact):
    # A value at the boundary of two FP8 values may be rounded either way.
    assert float(found[0]) == pytest.approx(expected[0], rel=1e-5)
    for gradient, quantized, unquantized in zip(found[1], expected[1], exact[1], strict=True):
        assert difference(gradient, quantized) < 0.005
        assert 0.02 < difference(gradient, unquantized) < 0.15


def test_loss_and_gradients_use_quantized_operands():
    given = arrays()
    assert_quantized(graded(*given), emulated(*given), referee(*given))


def test_chunks_are_quantized_separately():
    given = arrays()
    assert_quantized(graded(*given, chunk=16), emulated(*given), referee(*given))


def test_the_loss_without_gradients_is_the_same_in_fp8():
    given = arrays()
    assert float(jgraph.cross_entropy(*given, precision="fp8")) == pytest.approx(float(graded(*given)[0]), rel=1e-6)


def test_weights_change_the_scale_of_the_gradient():
    given, weights_N = arrays(), 3.0 * np.random.default_rng(0).random(N)
    found = graded(*given, weights_BT=jnp.asarray(weights_N, jnp.float32).reshape(given[2].shape))
    expected = emulated(*given, weights_N)
    assert float(found[0]) == pytest.approx(expected[0], rel=1e-5)
    for gradient, quantized in zip(found[1], expected[1], strict=True):
        assert difference(gradient, quantized) < 0.005


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_sharded_and_padded_vocabulary_has_the_gradients_of_one_device():
    x, head, labels = arrays()
    padded = jnp.pad(head, [(0, 0), (0, 16)])
    mesh = Mesh(np.array(jax.devices()[:2]), ("cut",))

    def loss(x, head):
        return jgraph.cross_entropy(x, head, labels, axis="cut", vocab_size=V, precision="fp8")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(None, "cut")), out_specs=(P(), P(), P(None, "cut")))
    def sharded(x, head):
        found, (dx, dhead) = jax.value_and_grad(loss, argnums=(0, 1))(jax.lax.pcast(x, "cut", to="varying"), head)
        return found, jax.lax.psum(dx, "cut") / 2, dhead / 2

    found, dx, dhead = sharded(x, padded)
    expected = emulated(x, head, labels)
    assert float(found) == pytest.approx(expected[0], rel=0.01)
    assert not np.any(dhead[:, V:])
    # Each device has its own scale of the head.
    assert difference(dx, expected[1][0]) < 0.05
    assert difference(dhead[:, :V], expected[1][1]) < 0.05


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"precision": "int8"}, "precision"),
        ({"precision": "fp8", "chunk": 8}, "chunk"),
    ],
)
def test_unsupported_fp8_arguments_are_refused(change, field):
    with pytest.raises((ConfigError, ShapeError)) as error:
        jgraph.cross_entropy(*arrays(), **change)
    assert error.value.field == field


def test_a_vocabulary_that_is_not_a_multiple_of_16_is_refused():
    x, head, labels = arrays()
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(x, head[:, :40], labels % 40, precision="fp8")
    assert error.value.field == "head_DV"


def test_infinite_hidden_states_are_not_clipped():
    x, head, labels = arrays()
    assert np.isnan(graded(x.at[0, 0, 0].set(jnp.inf), head, labels)[0])
