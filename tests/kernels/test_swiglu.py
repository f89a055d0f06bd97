"""SwiGLU of weighted rows: compares the kernel, interpreted on the CPU, with plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels.swiglu import swiglu, weighted_swiglu
from jgraph.xla import aot

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels of Mosaic are chosen on jax 0.11 or newer")


def arrays(rows, hidden):
    """Returns rows with gate and up halves, row weights, and the output gradient."""
    both, dy = (jax.random.normal(jax.random.key(i), (rows, n), jnp.bfloat16) for i, n in enumerate((2 * hidden, hidden)))
    return both, jax.random.uniform(jax.random.key(2), (rows,)), dy


def run(both, weights, dy, **how):
    result, vjp = jax.vjp(lambda both, weights: weighted_swiglu(both, weights, **how), both, weights)
    return result, *vjp(dy)


def test_a_zero_gate_gives_zero_and_the_weight_scales_the_row():
    both = jnp.asarray([[0.0, 1.0, 5.0, 2.0]])
    np.testing.assert_allclose(swiglu(both, 3.0), [[0, 3 * 2 * jax.nn.silu(1.0)]], rtol=1e-6)
    np.testing.assert_allclose(weighted_swiglu(both, jnp.asarray([3.0])), swiglu(both, 3.0), rtol=1e-6)


@needs_mosaic
@pytest.mark.parametrize("hidden", [128, 768])
def test_the_kernel_is_as_accurate_as_plain_jax(hidden):
    args = arrays(8, hidden)
    found, plain = (run(*args, **how) for how in ({"implementation": "mosaic"}, {}))
    exact = run(*(array.astype(jnp.float32) for array in args))
    for one, other, expected in zip(found, plain, exact, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        off = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert off[0] <= 1.1 * off[1] + 1e-5 * float(jnp.linalg.norm(expected))


def test_unsupported_swiglu_arguments_are_refused():
    both, weights, _ = arrays(8, 128)
    for args, how, field in [
        ((both, weights[1:]), {}, "weights_R"),
        ((both[:, :-2], weights), {"implementation": "mosaic"}, "both_RF2"),
        ((both.astype("float32"), weights), {"implementation": "mosaic"}, "both_RF2"),
    ]:
        with pytest.raises(ShapeError) as error:
            weighted_swiglu(*args, **how)
        assert error.value.field == field
    with pytest.raises(ConfigError):
        weighted_swiglu(both, weights, implementation="cuda")


@needs_mosaic
@pytest.mark.target
def test_the_kernel_is_chosen_and_captured_on_an_h200(h200):
    with aot.lowering_for("h200"):
        for rows, dtype, is_kernel in [(32768, jnp.bfloat16, True), (32768, jnp.float32, False), (30, jnp.bfloat16, False)]:
            both, weights, dy = jax.eval_shape(lambda: arrays(rows, 2048))  # noqa: B023
            traced = jax.make_jaxpr(lambda *args: run(*args))(both.update(dtype=dtype), weights, dy.update(dtype=dtype))
            assert ("_jgraph_swiglu_backward" in str(traced)) == is_kernel
    args = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays(4096, 2048)]
    compiled, report = aot.compile_for(jax.jit(run), *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    assert compiled.as_text().count("mosaic_gpu_v2") or compiled.as_text().count("mosaic_gpu")
