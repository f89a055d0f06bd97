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


def run(q, k, v, starts, dy, **how):
    y, vjp = jax.vjp(lambda q, k, v: document_attention(q, k, v, starts, **how), q, k, v)
    return y, *vjp(dy)


# The first case has several tiles per row. The second pads rows and heads.
@needs_mosaic
@pytest.mark.long
@pytest.mark.parametrize(("length", "size"), [(384, 64), (100, 24)])
def test_the_kernel_is_as_accurate_as_plain_jax_with_a_mask(length, size):
    given = arrays(length, size, heads=2, groups=1)
    exact = run(*(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in given), implementation="xla")
    found, plain = run(*given, implementation="mosaic"), run(*given, implementation="xla")
    for one, other, expected in zip(found, plain, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        off = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert off[0] <= 1.3 * off[1]


def test_a_token_attends_only_to_earlier_tokens_of_its_document():
    q, k, v, starts, _ = arrays(32, 16, rows=1, dtype=jnp.float32)
    starts = starts.at[:].set(jnp.where(jnp.arange(32) < 20, 0, 20))
    gradient = jax.jacobian(lambda v: document_attention(q, k, v, starts)[0].sum((1, 2)))(v)
    seen = np.abs(gradient[:, 0]).sum((2, 3)) > 0
    places = np.arange(32)
    own = (places[:, None] < 20) == (places[None] < 20)
    np.testing.assert_array_equal(seen, own & (places[None] <= places[:, None]))


def test_unsupported_arguments_are_refused():
    q, k, v, starts, _ = arrays(32, 256)
    for wrong, how in [((q[:, :8], k, v, starts), {}), ((q[:, :, :3], k, v, starts), {}), ((q, k, v, starts[0]), {}),
                       ((q, k, v, starts), {"implementation": "mosaic"})]:  # fmt: skip
        with pytest.raises(ShapeError) as error:
            document_attention(*wrong, **how)
        assert error.value.field == "q_BTHK"
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
    length = 8192
    shapes = jax.eval_shape(lambda: arrays(length, 128, heads=8, rows=1))
    compiled, report = aot.compile_for(jax.jit(run), *shapes, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    # Less than one bit per pair of query and key.
    assert compiled.memory_analysis().temp_size_in_bytes < length * length
