"""The loss against optax in float64, its numbers at the edges, and the memory that it promises not to take."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jgraph
from jgraph.errors import ShapeError
from jgraph.loss import auto_chunk
from jgraph.xla import aot

# N tokens, D model, V vocabulary

BF16_ROUNDING = 2**-9  # a bfloat16 has 8 significant bits: rounding moves a number by at most half of the last one


def referee(x_BTD, head_DV, labels_BT):
    """(loss, (dx, dhead)) of optax's cross-entropy of the same numbers in float64."""

    def loss(x_BTD, head_DV):
        return optax.softmax_cross_entropy_with_integer_labels(x_BTD @ head_DV, labels_BT).mean()

    with jax.enable_x64(True), jax.disable_jit(False):
        x64, head64 = (jnp.asarray(np.asarray(a).astype(np.float64)) for a in (x_BTD, head_DV))
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x64, head64))


@partial(jax.jit, static_argnames="chunk")
def ours(x_BTD, head_DV, labels_BT, chunk=0):
    """(loss, (dx, dhead))."""

    def loss(x_BTD, head_DV):
        return jgraph.cross_entropy(x_BTD, head_DV, labels_BT, chunk=chunk)

    return jax.value_and_grad(loss, argnums=(0, 1))(x_BTD, head_DV)


def example(batch=2, length=8, width=16, vocab=32, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    x_BTD = jnp.asarray(rng.standard_normal((batch, length, width)), dtype)
    head_DV = jnp.asarray(rng.standard_normal((width, vocab)) / width**0.5, dtype)
    return x_BTD, head_DV, jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)


def exact_logits(logits_NV, labels_N, dtype=jnp.float32):
    """(x, head, labels) whose product is these logits without any rounding: token n picks row n of the head."""
    logits_NV = jnp.asarray(logits_NV, dtype)
    return jnp.eye(len(logits_NV), dtype=dtype)[None], logits_NV, jnp.asarray(labels_N, jnp.int32)[None]


def assert_close(actual, expected, rtol):
    """Relative to the largest entry: the small ones are differences of large ones."""
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("chunk", [0, 1, 4, 16], ids=lambda chunk: f"chunk {chunk}")
def test_the_loss_is_the_mean_cross_entropy(chunk):
    arrays = example()
    assert_close(ours(*arrays, chunk=chunk)[0], referee(*arrays)[0], rtol=1e-6)


@pytest.mark.parametrize("chunk", [0, 1, 4, 16], ids=lambda chunk: f"chunk {chunk}")
def test_both_gradients_are_those_of_the_mean_cross_entropy(chunk):
    arrays = example()
    for actual, expected in zip(ours(*arrays, chunk=chunk)[1], referee(*arrays)[1], strict=True):
        assert_close(actual, expected, rtol=1e-5)


@pytest.mark.once
@settings(max_examples=8, deadline=None)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 6), width=st.integers(1, 9), vocab=st.integers(1, 17))
def test_any_shape_and_any_chunk_that_divides_the_tokens_will_do(data, batch, length, width, vocab):
    arrays = example(batch, length, width, vocab, seed=data.draw(st.integers(0, 99)))
    chunk = data.draw(st.sampled_from([c for c in range(batch * length + 1) if c == 0 or batch * length % c == 0]))
    actual, expected = jax.tree.leaves(ours(*arrays, chunk=chunk)), jax.tree.leaves(referee(*arrays))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_multiplied_by_what_comes_from_outside():
    arrays = example()
    gradient = jax.grad(lambda x: 3 * jgraph.cross_entropy(x, *arrays[1:]))(arrays[0])
    assert_close(gradient, 3 * referee(*arrays)[1][0], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_evaluation_gives_the_loss_that_training_gives(dtype):
    arrays = example(dtype=dtype)
    evaluation = jax.jit(partial(jgraph.cross_entropy, chunk=4))(*arrays)
    assert evaluation == pytest.approx(float(ours(*arrays, chunk=4)[0]), rel=1e-6)


# --- bfloat16 ---


@pytest.fixture
def op_by_op():
    """Compiled as a whole, a CPU may keep float32 where bfloat16 was asked for, and a mistake would not show."""
    with jax.disable_jit():
        yield


def test_gradients_have_the_dtypes_of_what_they_belong_to_and_the_loss_is_float32():
    loss, gradients = jax.eval_shape(ours, *example(dtype=jnp.bfloat16))
    assert (loss.dtype, *(g.dtype for g in gradients)) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)


def test_statistics_of_bfloat16_logits_are_as_good_as_float32(op_by_op):
    # Exact logits, so the statistics alone are rounded. In bfloat16 a sum of 1024 ones would stop at 256, log(4) too low.
    rng = np.random.default_rng(0)
    arrays = exact_logits(rng.standard_normal((64, 1024)), rng.integers(0, 1024, 64), jnp.bfloat16)
    assert_close(ours(*arrays)[0], referee(*arrays)[0], rtol=1e-6)


def test_rounding_logits_to_bfloat16_moves_the_loss_by_no_more_than_it_moves_two_logits(op_by_op):
    # Logits off by at most r move log-sum-exp by at most r and the label's logit by at most r: in each token, so in the mean.
    arrays = example(8, 64, 32, 1024, dtype=jnp.bfloat16)
    largest = np.abs(np.einsum("btd,dv->btv", *(np.asarray(a).astype(np.float64) for a in arrays[:2]))).max()
    assert abs(ours(*arrays)[0] - referee(*arrays)[0]) <= 2 * BF16_ROUNDING * largest


def test_gradients_of_the_head_are_summed_over_chunks_in_float32(op_by_op):
    # Under a uniform softmax a token's gradient is a quarter of its x: 1, then 2**-9 each. In bfloat16 1 + 2**-9 is 1.
    x_BTD = jnp.full((1, 16, 1), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    _, (_, dhead_DV) = ours(x_BTD, jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros((1, 16), jnp.int32), chunk=1)
    expected = (1 + 15 * 2**-9) / 4 / 16
    np.testing.assert_allclose(dhead_DV[0, 1:].astype(jnp.float32), expected, rtol=BF16_ROUNDING)


def test_gradients_in_bfloat16_are_off_by_their_own_rounding_only(op_by_op):
    rng = np.random.default_rng(0)
    arrays = exact_logits(rng.standard_normal((16, 64)), rng.integers(0, 64, 16), jnp.bfloat16)
    _, (_, expected) = referee(*arrays)
    _, (_, actual) = ours(*arrays)
    # Each entry is one logit's gradient, rounded once or (with its copy in between) twice.
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
def test_large_logits_give_the_right_loss_and_gradients(label, winner, others):
    arrays = confident(label, winner, others)
    for actual, expected in zip(jax.tree.leaves(ours(*arrays)), jax.tree.leaves(referee(*arrays)), strict=True):
        # Relative 1e-5: near 60 nats a float32 margin is rounded by 4e-6, and exp passes that on as a relative error.
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("margin", [89, 100, 3e4])
def test_a_loss_beyond_what_exp_can_hold_is_finite_and_at_least_70_nats(margin):
    loss = jgraph.cross_entropy(*confident(-margin / 2, margin / 2))
    assert np.isfinite(loss)
    assert loss >= 70


@pytest.mark.parametrize("margin", [89, 100, 3e4])
def test_a_loss_beyond_what_exp_can_hold_still_pulls_the_label_up_and_the_winner_down(margin):
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
def test_arrays_that_do_not_fit_are_refused_with_their_shapes(change):
    x_BTD, head_DV, labels_BT = change(*example())
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(x_BTD, head_DV, labels_BT)
    for part in (f"x {x_BTD.dtype}{x_BTD.shape}", f"head {head_DV.dtype}{head_DV.shape}", f"labels {labels_BT.shape}"):
        assert part in str(error.value)


# --- Memory ---


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32])
def test_the_gradient_does_not_depend_on_the_integers_that_labels_are(dtype):
    x, head, labels = example(vocab=70_000 if dtype == jnp.uint16 else 33_000 if dtype == jnp.int16 else 300)
    labels = labels % 100
    expected, actual = ours(x, head, labels), ours(x, head, labels.astype(dtype))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("label", [-1, -100, 32, 10**6])
@pytest.mark.parametrize("over_devices", [False, True])
def test_a_label_that_is_no_token_makes_the_loss_not_a_number(label, over_devices):
    x, head, labels = example()
    labels = labels.at[1, 3].set(label)
    loss = jgraph.cross_entropy
    if over_devices:
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("cut",))
        spec = jax.sharding.PartitionSpec
        loss = jax.shard_map(
            partial(loss, axis="cut"), mesh=mesh, in_specs=(spec(), spec(None, "cut"), spec()), out_specs=spec()
        )
    assert np.isnan(loss(x, head, labels))


def no_tokens(x, head, labels):
    return x[:0], head, labels[:0]


def no_vocabulary(x, head, labels):
    return x, head[:, :0], labels


def flat_head(x, head, labels):
    return x, head[:, 0], labels


def labels_with_a_fraction(x, head, labels):
    return x, head, labels.astype(jnp.float32)


def labels_of_truth(x, head, labels):
    return x, head, labels > 3


def whole_numbers(x, head, labels):
    return x.astype(jnp.int32), head.astype(jnp.int32), labels


def complex_numbers(x, head, labels):
    return x.astype(jnp.complex64), head.astype(jnp.complex64), labels


@pytest.mark.parametrize(
    "change",
    [no_tokens, no_vocabulary, flat_head, labels_with_a_fraction, labels_of_truth, whole_numbers, complex_numbers],
)
def test_arrays_that_have_no_cross_entropy_are_refused(change):
    with pytest.raises(ShapeError):
        jgraph.cross_entropy(*change(*example()))


@pytest.mark.parametrize("vocab_size", [-1, 8.0])
def test_a_vocabulary_that_is_no_count_is_refused(vocab_size):
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(*example(), vocab_size=vocab_size)
    assert error.value.field == "vocab_size"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_lists_are_refused_by_name(place):
    given = list(example())
    given[place] = given[place].tolist()
    with pytest.raises(ShapeError) as error:
        jgraph.cross_entropy(*given)
    assert error.value.field == ("x_BTD", "head_DV", "labels_BT")[place]


@given(num_tokens=st.integers(1, 5000), vocab_size=st.integers(1, 2**31), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_the_chunk_it_picks_divides_the_tokens_and_has_at_most_half_a_billion_logits(num_tokens, vocab_size, dtype):
    chunk = auto_chunk(num_tokens, vocab_size, dtype)
    assert num_tokens % chunk == 0
    assert chunk * vocab_size <= 2**29 or chunk == 1


@given(num_tokens=st.integers(2, 5000), vocab_size=st.integers(1, 2**31))
def test_the_chunk_it_picks_never_holds_all_logits_where_they_are_float32(num_tokens, vocab_size):
    assert auto_chunk(num_tokens, vocab_size, jnp.float32) < num_tokens


def temporary_bytes_per_logit(chunk):
    """Of the loss and its gradients for an H200, where logits are nearly all there is."""
    tokens, width, vocab = 8192, 64, 50304
    shapes = ((1, tokens, width), jnp.bfloat16), ((width, vocab), jnp.bfloat16), ((1, tokens), jnp.int32)
    program = jax.jit(lambda *arrays: ours(*arrays, chunk=chunk))
    compiled, _ = aot.compile_for(program, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return compiled.memory_analysis().temp_size_in_bytes / (tokens * vocab)


@pytest.mark.target
@pytest.mark.parametrize("chunk", [0, 1024])
def test_the_compiled_gradient_never_holds_float32_logits_of_the_whole_batch(h200, chunk):
    # The plain formula takes 6 bytes a logit: float32 logits and their gradient in bfloat16.
    assert temporary_bytes_per_logit(chunk) < 4


@pytest.mark.target
@pytest.mark.xfail(
    jax.__version_info__ < (0, 11),
    strict=True,
    reason="XLA of jax 0.10 fuses the gradients of all chunks' logits into one kernel, so all are held: 2.25 bytes a logit",
)
def test_no_logits_outlive_their_chunk(h200):
    # Logits of an eighth of the batch and their gradient, in bfloat16, are half a byte a logit of the batch.
    assert temporary_bytes_per_logit(1024) < 1
