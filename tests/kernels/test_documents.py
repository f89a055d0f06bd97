"""Attention within documents: compares the kernel, interpreted on the CPU, with plain JAX, and compiles it for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import document_attention
from jgraph.xla import aot

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="needs Mosaic of jax 0.11 or newer")


def arrays(length, size, heads=4, groups=2, rows=2, dtype=jnp.bfloat16):
    shapes = [(rows, length, n, size) for n in (heads, groups, groups, heads)]
    q, k, v, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    # Documents of one token, a few tokens and several blocks. One document starts at the last token of a block. The last row is
    # one document.
    begins = np.zeros((rows, length), int)
    for place in (3, 17, 63, length // 2 + 20, length - 1):
        begins[:-1, place % length] = place % length
    return q, k, v, jnp.asarray(np.maximum.accumulate(begins, axis=1), jnp.int32), dy


def run(q, k, v, starts, dy, positions=None, **how):
    y, vjp = jax.vjp(lambda q, k, v: document_attention(q, k, v, starts, positions, **how), q, k, v)
    return y, *vjp(dy)


def zigzag(length, devices, device):
    """Positions of a device's queries: the chunks `device` and `2 * devices - 1 - device`."""
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return jnp.asarray(chunks[[device, -1 - device]].reshape(-1))


def local(given, positions):
    """Returns the arguments of `run` for the queries at `positions`."""
    q, k, v, starts, dy = given
    return q[:, positions], k, v, starts[:, positions], dy[:, positions], positions


# The first case has several tiles per row. The second pads rows and heads. In the third, queries end before the last tile of
# keys. In the fourth, queries after a gap read all tiles. In the last, the gap is within a tile of queries.
@needs_mosaic
@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "size", "positions"),
    [(384, 64, None), (100, 24, None), (512, 64, (2, 1)), (512, 128, (2, 0)), (256, 24, (2, 0))],
)
def test_the_kernel_is_as_accurate_as_plain_jax_with_a_mask(length, size, positions):
    given = arrays(length, size, heads=2, groups=1)
    if positions:
        given = local(given, zigzag(length, *positions))
    exact = run(*(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in given), implementation="xla")
    found, plain = run(*given, implementation="mosaic"), run(*given, implementation="xla")
    for one, other, expected in zip(found, plain, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        off = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert off[0] <= 1.3 * off[1]


def test_a_token_attends_only_to_earlier_tokens_of_its_document():
    q, k, v, starts, _ = arrays(32, 16, rows=1, dtype=jnp.float32)
    starts = starts.at[:].set(jnp.where(jnp.arange(32) < 20, 0, 20))
    gradient = jax.jit(jax.jacobian(lambda v: document_attention(q, k, v, starts)[0].sum((1, 2))))(v)
    seen = np.abs(gradient[:, 0]).sum((2, 3)) > 0
    places = np.arange(32)
    own = (places[:, None] < 20) == (places[None] < 20)
    np.testing.assert_array_equal(seen, own & (places[None] <= places[:, None]))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_devices_with_zigzag_chunks_of_queries_together_compute_the_attention_of_the_whole_sequence(devices):
    given = arrays(64, 16, dtype=jnp.float32)
    compute = jax.jit(run)
    y, dq, dk, dv = compute(*given)
    positions = [zigzag(64, devices, device) for device in range(devices)]
    parts = [compute(*local(given, part)) for part in positions]
    order = jnp.argsort(jnp.concatenate(positions))
    for whole, pieces in zip((y, dq), list(zip(*parts, strict=True))[:2], strict=True):
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1)[:, order], whole, rtol=1e-5, atol=1e-6)
    for whole, pieces in zip((dk, dv), list(zip(*parts, strict=True))[2:], strict=True):
        np.testing.assert_allclose(sum(pieces), whole, rtol=1e-5, atol=1e-5)


@needs_mosaic
def test_the_kernel_without_a_gradient_returns_the_attention():
    q, k, v, starts, _ = arrays(100, 24)
    found = jax.eval_shape(lambda *args: document_attention(*args, implementation="mosaic"), q, k, v, starts)
    assert (found.shape, found.dtype) == (q.shape, q.dtype)


# The queries are in the second of four tiles. Documents begin in the first tile and at the first query.
@needs_mosaic
def test_keys_that_no_query_reads_have_zero_gradients_in_the_kernel():
    positions = jnp.arange(128, 256, dtype=jnp.int32)
    q, k, v, _, dy = arrays(512, 64, heads=1, groups=1)
    starts = jnp.broadcast_to(jnp.array([[100], [128]]), (2, 128))
    *_, dk, dv = run(q[:, positions], k, v, starts, dy[:, positions], positions, implementation="mosaic")
    places = np.arange(512)
    read = (places >= np.array([[100], [128]])) & (places < 256)
    for gradient in (dk, dv):
        np.testing.assert_array_equal(np.abs(gradient.astype(jnp.float32)).max((2, 3)) > 0, read)


@pytest.mark.long
def test_unsupported_arguments_are_refused():
    q, k, v, starts, _ = arrays(32, 256)
    for wrong, how in [((q[:, :8], k, v, starts), {}), ((q[:, :, :3], k, v, starts), {}), ((q, k, v, starts[0]), {}),
                       ((q, k, v, starts), {"implementation": "mosaic"})]:  # fmt: skip
        with pytest.raises(ShapeError) as error:
            document_attention(*wrong, **how)
        assert error.value.field == "q_BSHK"
    q, k, v, starts, _ = arrays(32, 64)
    half = jnp.arange(16)
    for wrong, field, message in [
        ((q, k[:, :16], v[:, :16], starts, jnp.arange(32)), "q_BSHK", "at most T with `positions_S`"),
        ((q[:, :16], k, v, starts[:, :16], jnp.arange(8)), "positions_S", r"int32\[8\]: must be int32\[16\]"),
        ((q[:, :16], k, v, starts[:, :16], half.astype(jnp.float32)), "positions_S", r"float32\[16\]: must be int32\[16\]"),
    ]:
        with pytest.raises(ShapeError, match=message) as error:
            document_attention(*wrong)
        assert error.value.field == field
    with pytest.raises(ShapeError, match=r"S and T \(here 32\) multiples of 128"):
        document_attention(q[:, :16], k, v, starts[:, :16], half, implementation="mosaic")
    with pytest.raises(ConfigError) as refused:
        document_attention(q, k, v, starts, implementation="cudnn")
    assert refused.value.field == "implementation"


@needs_mosaic
@pytest.mark.target
def test_long_sequences_are_captured_on_an_h200_without_a_score_matrix(h200):
    with aot.lowering_for("h200"):
        for size, dtype, is_kernel in [(128, jnp.bfloat16, True), (256, jnp.bfloat16, False), (128, jnp.float32, False)]:
            traced = jax.make_jaxpr(lambda *args: run(*args))(*jax.eval_shape(lambda: arrays(128, size, dtype=dtype)))  # noqa: B023
            assert ("_jgraph_documents" in str(traced)) == is_kernel
        for queries, is_kernel in [(256, True), (64, False)]:
            specs = jax.eval_shape(lambda: local(arrays(512, 128), jnp.arange(queries)))  # noqa: B023
            traced = jax.make_jaxpr(lambda *args: run(*args))(*specs)
            assert ("_jgraph_documents" in str(traced)) == is_kernel
    length = 8192
    shapes = jax.eval_shape(lambda: arrays(length, 128, heads=8, rows=1))
    compiled, report = aot.compile_for(jax.jit(run), *shapes, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    # Less than one bit per pair of query and key.
    assert compiled.memory_analysis().temp_size_in_bytes < length * length


@needs_mosaic
@pytest.mark.target
def test_the_kernels_of_a_part_of_the_queries_compile_for_an_h200(h200):
    shapes = jax.eval_shape(lambda: local(arrays(1024, 128), zigzag(1024, 2, 0)))
    compiled, report = aot.compile_for(jax.jit(run), *shapes, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == 3
    assert report.captured == report.total
