"""Attention among documents: the kernel's body, interpreted on the CPU, against plain jax; compiled for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import document_attention
from jgraph.kernels.documents import choose
from jgraph.xla import aot


def arrays(length, size, heads=4, groups=2, rows=2, dtype=jnp.bfloat16):
    shapes = [(rows, length, n, size) for n in (heads, groups, groups, heads)]
    q, k, v, dy = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    # Of a few tokens, of several blocks, from the last token of a block on, of one token; in the last row, one document.
    begins = np.zeros((rows, length), int)
    for place in (3, 17, 63, length // 2 + 20, length - 1):
        begins[:-1, place % length] = place % length
    return q, k, v, jnp.asarray(np.maximum.accumulate(begins, axis=1), jnp.int32), dy


def run(q, k, v, starts, dy, **how):
    y, vjp = jax.vjp(lambda q, k, v: document_attention(q, k, v, starts, **how), q, k, v)
    return y, *vjp(dy)


# Of several blocks forward and backward; of one that is padded, and heads that are.
@pytest.mark.long
@pytest.mark.parametrize(("length", "size"), [(256, 16), (100, 24)])
def test_the_kernel_gives_what_plain_jax_gives_with_a_mask(length, size):
    given = arrays(length, size)
    found, wanted = run(*given, implementation="triton", interpret=True), run(*given, implementation="xla")
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_token_sees_its_own_document_up_to_itself():
    q, k, v, starts, _ = arrays(32, 16, rows=1)
    starts = starts.at[:].set(jnp.where(jnp.arange(32) < 20, 0, 20))
    gradient = jax.jacobian(lambda v: document_attention(q, k, v, starts)[0].sum((1, 2)))(v)
    seen = np.abs(gradient[:, 0]).sum((2, 3)) > 0
    places = np.arange(32)
    own = (places[:, None] < 20) == (places[None] < 20)
    np.testing.assert_array_equal(seen, own & (places[None] <= places[:, None]))


def test_what_cannot_be_attended_to_is_refused():
    q, k, v, starts, _ = arrays(32, 256)
    for wrong, how in [((q[:, :8], k, v, starts), {}), ((q[:, :, :3], k, v, starts), {}), ((q, k, v, starts[0]), {}),
                       ((q, k, v, starts), {"implementation": "triton"})]:  # fmt: skip
        with pytest.raises(ShapeError) as error:
            document_attention(*wrong, **how)
        assert error.value.field == "q_BTHK"
    with pytest.raises(ConfigError) as refused:
        document_attention(q, k, v, starts, implementation="cudnn")
    assert refused.value.field == "implementation"


@pytest.mark.target
def test_long_rows_are_captured_on_an_h200_and_have_no_array_of_their_scores(h200):
    with aot.lowering_for("h200"):
        assert choose(128) == "triton"
    length = 8192
    shapes = jax.eval_shape(lambda: arrays(length, 128, heads=8, rows=1, dtype=jnp.bfloat16))
    compiled, report = aot.compile_for(jax.jit(run), *shapes, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    # Far less than a bit for each pair of a query and a key of one head.
    assert compiled.memory_analysis().temp_size_in_bytes < length * length
