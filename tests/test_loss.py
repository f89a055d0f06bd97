"""Compares the loss with optax in float64, at extreme logits, and checks its memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jgraph
from jgraph.errors import ShapeError
from jgraph.loss import _auto_chunk
from jgraph.xla import aot

# N tokens, D model, V vocabulary

BF16_ROUNDING = 2**-9  # a bfloat16 has 8 significant bits, so rounding changes it by at most half of the last bit


def referee(x_BTD, head_DV, labels_BT):
    """Returns (loss, (dx, dhead)) of optax's cross-entropy in float64."""

    def loss(x_BTD, head_DV):
        return optax.softmax_cross_entropy_with_integer_labels(x_BTD @ head_DV, labels_BT).mean()

    with jax.enable_x64(True), jax.disable_jit(False):
        x64, head64 = (jnp.asarray(np.asarray(a).astype(np.float64)) for a in (x_BTD, head_DV))
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x64, head64))


@partial(jax.jit, static_argnames="chunk")
def ours(x_BTD, head_DV, labels_BT, chunk=0):
    """Returns (loss, (dx, dhead))."""

    def loss(x_BTD, head_DV):
        return jgraph.cross_entropy(x_BTD, head_DV, labels_BT, chunk=chunk)

    return jax.value_and_grad(loss, argnums=(0, 1))(x_BTD, head_DV)


def example(batch=2, length=8, width=16, vocab=32, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x_BTD = jnp.asarray(rng.standard_normal((batch, length, width)), dtype)
    head_DV = jnp.asarray(rng.standard_normal((width, vocab)) / width**0.5, dtype)
    return x_BTD, head_DV, jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)


def exact_logits(logits_NV, labels_N, dtype=jnp.float32):
    """Returns (x, head, labels) with these logits, unrounded: token n selects row n of the head."""
    logits_NV = jnp.asarray(logits_NV, dtype)
    return jnp.eye(len(logits_NV), dtype=dtype)[None], logits_NV, jnp.asarray(labels_N, jnp.int32)[None]


def assert_close(actual, expected, rtol):
    """Compares relative to the largest entry, because small entries are differences of large numbers."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("chunk", [0, 1, 4, 16], ids=lambda chunk: f"chunk {chunk}")
def test_loss_and_gradients_equal_the_mean_cross_entropy(chunk):
    arrays = example()
    (loss, gradients), (expected_loss, expected_gradients) = ours(*arrays, chunk=chunk), referee(*arrays)
    assert_close(loss, expected_loss, rtol=1e-6)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.once
@settings(max_examples=8)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 6), width=st.integers(1, 9), vocab=st.integers(1, 17))
def test_every_shape_works_with_every_chunk_that_divides_its_tokens(data, batch, length, width, vocab):
    arrays = example(batch, length, width, vocab, seed=data.draw(st.integers(0, 99)))
    chunk = data.draw(st.sampled_from([c for c in range(batch * length + 1) if c == 0 or batch * length % c == 0]))
    actual, expected = jax.tree.leaves(ours(*arrays, chunk=chunk)), jax.tree.leaves(referee(*arrays))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_the_gradient_is_scaled_by_the_cotangent():
    arrays = example()
    gradient = jax.grad(lambda x: 3 * jgraph.cross_entropy(x, *arrays[1:]))(arrays[0])
    assert_close(gradient, 3 * referee(*arrays)[1][0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_without_gradients_is_the_same(dtype):
    arrays = example(dtype=dtype)
    evaluation = jax.jit(partial(jgraph.cross_entropy, chunk=4))(*arrays)
    assert evaluation == pytest.approx(float(ours(*arrays, chunk=4)[0]), rel=1e-6)


# --- bfloat16 ---


@pytest.fixture
def op_by_op():
    """Disables jit, because XLA on a CPU may compute in float32 in place of bfloat16."""
    with jax.disable_jit():
        yield


def test_gradients_have_the_dtypes_of_their_arguments_and_the_loss_is_float32():
    loss, gradients = jax.eval_shape(ours, *example(dtype=jnp.bfloat16))
    assert (loss.dtype, *(g.dtype for g in gradients)) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)


@pytest.mark.long
def test_statistics_of_bfloat16_logits_have_float32_precision(op_by_op):
    # The logits are exact, so only the statistics are rounded. A bfloat16 sum of 1024 ones would stop at 256, log(4) too low.
    rng = np.random.default_rng(0)
    arrays = exact_logits(rng.standard_normal((64, 1024)), rng.integers(0, 1024, 64), jnp.bfloat16)
    assert_close(ours(*arrays)[0], referee(*arrays)[0], rtol=1e-6)


@pytest.mark.long
def test_rounding_logits_to_bfloat16_changes_the_loss_by_at_most_two_roundings(op_by_op):
    # An error of at most r in the logits changes log-sum-exp and the label's logit by at most r each.
    arrays = example(8, 64, 32, 1024, dtype=jnp.bfloat16)
    largest = np.abs(np.einsum("btd,dv->btv", *(np.asarray(a).astype(np.float64) for a in arrays[:2]))).max()
    assert abs(ours(*arrays)[0] - referee(*arrays)[0]) <= 2 * BF16_ROUNDING * largest


@pytest.mark.long
def test_gradients_of_the_head_are_summed_over_chunks_in_float32(op_by_op):
    # With a uniform softmax, the gradient of a token is a quarter of its x: 1, then 2**-9 each. In bfloat16, 1 + 2**-9 is 1.
    x_BTD = jnp.full((1, 16, 1), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    _, (_, dhead_DV) = ours(x_BTD, jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros((1, 16), jnp.int32), chunk=1)
    expected = (1 + 15 * 2**-9) / 4 / 16
    np.testing.assert_allclose(dhead_DV[0, 1:].astype(jnp.float32), expected, rtol=BF16_ROUNDING)


@pytest.mark.long
def test_gradients_in_bfloat16_differ_by_rounding_only(op_by_op):
    rng = np.random.default_rng(0)
    arrays = exact_logits(rng.standard_normal((16, 64)), rng.integers(0, 64, 16), jnp.bfloat16)
    _, (_, expected) = referee(*arrays)
    _, (_, actual) = ours(*arrays)
    # Each entry is the gradient of one logit, rounded once or twice.
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=2.1 * BF16_ROUNDING)


# --- Large logits ---


def confident(label_logit, winner_logit, others=0.0, vocab=8):
    logits_NV = np.full((2, vocab), others)
    logits_NV[:, 3], logits_NV[:, 5] = label_logit, winner_logit
    return exact_logits(logits_NV, [3, 3])


@pytest.mark.parametrize(
    ("label", "winner", "others"),
    [(50, -50, -50), (0, 60, 0), (0, 50, -50), (-10, 50, 50), (30, 30, -50), (1000, 1000, 950), (-1000, -940, -1000)],
)
def test_large_logits_have_the_exact_loss_and_gradients(label, winner, others):
    arrays = confident(label, winner, others)
    for actual, expected in zip(jax.tree.leaves(ours(*arrays)), jax.tree.leaves(referee(*arrays)), strict=True):
        # Relative 1e-5: near 60 nats the rounding of a float32 margin is 4e-6, a relative error of its exp.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("margin", [89, 100, 3e4])
def test_a_loss_beyond_the_range_of_exp_is_finite_and_at_least_70_nats(margin):
    loss = jgraph.cross_entropy(*confident(-margin / 2, margin / 2))
    assert np.isfinite(loss)
    assert loss >= 70


@pytest.mark.parametrize("margin", [89, 100, 3e4])
def test_a_loss_beyond_the_range_of_exp_has_gradients(margin):
    x_BTD, head_DV, labels_BT = confident(-margin / 2, margin / 2, others=-margin / 2)
    _, (_, dlogits_NV) = ours(x_BTD, head_DV, labels_BT)
    expected = np.zeros((2, 8))
    expected[:, 3], expected[:, 5] = -0.5, 0.5
    np.testing.assert_allclose(dlogits_NV, expected, atol=1e-6)


# --- Refusals ---


@pytest.mark.parametrize("chunk", [-4, 3, 17, 4.0, "4"])
def test_a_chunk_that_does_not_divide_the_tokens_is_refused(chunk):
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(*example(), chunk=chunk)
    assert error.value.field == "chunk"
    assert str(error.value) == f"`chunk` is {chunk!r}: must divide the 16 tokens of a microbatch"


@pytest.mark.parametrize(
    "change",
    [
        lambda x, head, labels: (x, head, labels[:, 1:]),
        lambda x, head, labels: (x[..., 1:], head, labels),
        lambda x, head, labels: (x.astype(jnp.bfloat16), head, labels),
    ],
    ids=["labels shorter", "width", "dtype"],
)
def test_arrays_of_mismatched_shapes_are_refused_with_their_shapes(change):
    x_BTD, head_DV, labels_BT = change(*example())
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(x_BTD, head_DV, labels_BT)
    for part in (f"x {x_BTD.dtype}{x_BTD.shape}", f"head {head_DV.dtype}{head_DV.shape}", f"labels {labels_BT.shape}"):
        assert part in str(error.value)


# --- Memory ---


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32])
def test_the_gradient_does_not_depend_on_the_dtype_of_the_labels(dtype):
    x, head, labels = example(vocab=70_000 if dtype == jnp.uint16 else 33_000 if dtype == jnp.int16 else 300)
    labels = labels % 100
    expected, actual = ours(x, head, labels), ours(x, head, labels.astype(dtype))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(a, b)


@jax.jit
def sharded_loss(x, head, labels):
    mesh, spec = jax.sharding.Mesh(jax.devices()[:2], ("cut",)), jax.sharding.PartitionSpec
    specs = (spec(), spec(None, "cut"), spec())
    return jax.shard_map(partial(jgraph.cross_entropy, axis="cut"), mesh=mesh, in_specs=specs, out_specs=spec())(
        x, head, labels
    )


@pytest.mark.parametrize("label", [-1, -100, 32, 10**6])
@pytest.mark.parametrize("over_devices", [False, True])
def test_a_label_outside_the_vocabulary_makes_the_loss_nan(label, over_devices):
    x, head, labels = example()
    labels = labels.at[1, 3].set(label)
    assert np.isnan((sharded_loss if over_devices else jgraph.cross_entropy)(x, head, labels))


def no_tokens(x, head, labels):
    return x[:0], head, labels[:0]


def no_vocabulary(x, head, labels):
    return x, head[:, :0], labels


def flat_head(x, head, labels):
    return x, head[:, 0], labels


def float_labels(x, head, labels):
    return x, head, labels.astype(jnp.float32)


def boolean_labels(x, head, labels):
    return x, head, labels > 3


def integer_arrays(x, head, labels):
    return x.astype(jnp.int32), head.astype(jnp.int32), labels


def complex_arrays(x, head, labels):
    return x.astype(jnp.complex64), head.astype(jnp.complex64), labels


@pytest.mark.parametrize(
    "change",
    [no_tokens, no_vocabulary, flat_head, float_labels, boolean_labels, integer_arrays, complex_arrays],
)
def test_arrays_of_wrong_shape_or_dtype_are_refused(change):
    with pytest.raises(ShapeError):
        jgraph.cross_entropy(*change(*example()))


@pytest.mark.parametrize("vocab_size", [-1, 8.0])
def test_a_vocab_size_must_be_a_nonnegative_integer(vocab_size):
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(*example(), vocab_size=vocab_size)
    assert error.value.field == "vocab_size"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_lists_are_refused_with_the_name_of_the_argument(place):
    given = list(example())
    given[place] = given[place].tolist()
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(*given)
    assert error.value.field == ("x_BTD", "head_DV", "labels_BT")[place]


@given(num_tokens=st.integers(1, 5000), vocab_size=st.integers(1, 2**31), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_the_default_chunk_divides_the_tokens_and_has_at_most_half_a_billion_logits(num_tokens, vocab_size, dtype):
    chunk = _auto_chunk(num_tokens, vocab_size, dtype)
    assert num_tokens % chunk == 0
    assert chunk * vocab_size <= 2**29 or chunk == 1


@given(num_tokens=st.integers(2, 5000), vocab_size=st.integers(1, 2**31))
def test_the_default_chunk_never_holds_all_float32_logits(num_tokens, vocab_size):
    assert _auto_chunk(num_tokens, vocab_size, jnp.float32) < num_tokens


def in_loop(fn):
    """Returns a function that sums the gradients of three microbatches in a loop."""

    def run(x_BTD, head_DV, labels_BT):
        def add(total, x_BTD):
            return jax.tree.map(jnp.add, total, fn(x_BTD, head_DV, labels_BT)), None

        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(fn, x_BTD, head_DV, labels_BT))
        return jax.lax.scan(add, start, jnp.stack([x_BTD, x_BTD + 1, x_BTD + 2]))[0]

    return run


def temporary_bytes_per_logit(chunk, around=lambda fn: fn):
    """Compiles loss and gradients for an H200, with logits as almost all of the memory."""
    tokens, width, vocab = 8192, 64, 50304
    shapes = ((1, tokens, width), jnp.bfloat16), ((width, vocab), jnp.bfloat16), ((1, tokens), jnp.int32)
    program = jax.jit(around(lambda *arrays: ours(*arrays, chunk=chunk)))
    compiled, _ = aot.compile_for(program, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return compiled.memory_analysis().temp_size_in_bytes / (tokens * vocab)


@pytest.mark.long
@pytest.mark.target
@pytest.mark.parametrize("chunk", [0, 1024])
def test_the_compiled_gradient_holds_no_float32_logits_of_the_whole_batch(h200, chunk):
    # The plain formula needs 6 bytes per logit: float32 logits and their gradient in bfloat16.
    assert temporary_bytes_per_logit(chunk) < 4


@pytest.mark.long
@pytest.mark.target
@pytest.mark.parametrize("around", [lambda fn: fn, in_loop], ids=["alone", "in a loop over microbatches"])
def test_no_logits_outlive_their_chunk(h200, around):
    # bfloat16 logits of an eighth of the batch and their gradient take half a byte per logit of the batch, and the gradient of
    # the head takes 0.03. Without order, XLA of jax 0.10 holds 2.3 and that of 0.11 holds 0.74.
    assert temporary_bytes_per_logit(1024, around) < 0.7


@pytest.mark.parametrize("chunk", [8, 32])
def test_the_gradient_of_a_frozen_head_is_not_computed(chunk):
    x_BTD, head_DV, labels_BT = jnp.ones((1, 32, 16)), jnp.ones((16, 64)), jnp.zeros((1, 32), int)

    def matmuls(*argnums):
        loss = partial(jgraph.cross_entropy, chunk=chunk)
        # Before XLA, which keeps what a barrier reads.
        return (
            jax.jit(jax.grad(loss, argnums=argnums)).lower(x_BTD, head_DV, labels_BT).as_text().count("stablehlo.dot_general")
        )

    assert (matmuls(0), matmuls(0, 1)) == (2 * 32 // chunk, 3 * 32 // chunk)
