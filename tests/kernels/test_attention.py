"""Attention of short sequences: compares the kernel, interpreted on the CPU, with plain JAX, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import rotary_attention
from jgraph.kernels.attention import choose
from jgraph.xla import aot
from jgraph_models.rotary import halves, rotary

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic of jax 0.10 does not interpret these matmuls")


def arrays(length, size, heads=2):
    shapes = (1, length, 3 * heads, size), (1, length, heads, size)
    return [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]


def run(x, dy, **how):
    tables = halves(rotary(x.shape[1], x.shape[3], 10_000.0))
    y, vjp = jax.vjp(lambda x: rotary_attention(x, *tables, **how), x)
    return y, *vjp(dy.astype(x.dtype))


@needs_mosaic
@pytest.mark.parametrize(("length", "size"), [(64, 128), (128, 64)])
def test_the_kernel_is_as_accurate_as_plain_jax(length, size):
    x, dy = arrays(length, size)
    exact = run(x.astype(jnp.float32), dy, implementation="xla")
    found, plain = run(x, dy, implementation="mosaic"), run(x, dy, implementation="xla")
    for one, other, expected in zip(found, plain, exact, strict=True):
        assert one.dtype == jnp.bfloat16
        off = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert off[0] <= 1.1 * off[1]


@pytest.mark.long
def test_plain_jax_is_used_for_unsupported_shapes():
    assert choose((2, 128, 12, 64), jnp.bfloat16) == "xla"
    x, dy = arrays(24, 16)
    for one, other in zip(run(x, dy), run(x, dy, implementation="xla"), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unsupported_attention_arguments_are_refused():
    x, _ = arrays(64, 64)
    tables = halves(rotary(64, 64, 10_000.0))
    for wrong, how in [(x[:, :, :5], {}), (x[0], {}), (x[:, :32], {}), (x.astype(jnp.float32), {"implementation": "mosaic"})]:
        with pytest.raises(ShapeError) as error:
            rotary_attention(wrong, *tables, **how)
        assert error.value.field == "qkv_BTNK"
    with pytest.raises(ConfigError) as error:
        rotary_attention(x, *tables, implementation="cuda")
    assert error.value.field == "implementation"


@needs_mosaic
@pytest.mark.target
def test_the_kernel_is_chosen_and_captured_on_an_h200(h200):
    with aot.lowering_for("h200"):
        assert choose((2, 128, 12, 64), jnp.bfloat16) == "mosaic"
        assert choose((2, 256, 12, 64), jnp.bfloat16) == "xla"
        assert choose((2, 128, 12, 64), jnp.float32) == "xla"
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(128, 64)]
    compiled, report = aot.compile_for(jax.jit(run), *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    # One forward kernel and one backward kernel.
    assert (report.command_buffers, report.captured, report.total) == (1, 2, 2)
    assert "copy(" not in compiled.as_text()
