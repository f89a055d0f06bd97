"""RMS norm with a residual sum: compares the kernel, interpreted on the CPU, with plain JAX, and plain JAX with Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import norm
from jgraph.xla import aot

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels of Mosaic are chosen on jax 0.11 or newer")


def arrays(shape, dtype=jnp.bfloat16):
    """Returns x, an addend, the gradients of both results, and a scale."""
    four = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)]
    return *four, 1 + jax.random.normal(jax.random.key(4), shape[-1:]) / 8


def run(x, add, dx, dy, scale, **how):
    def fn(x, scale, *add):
        return jgraph.rms_norm(x, scale, add=add[0] if add else None, epsilon=1e-5, **how)

    results, vjp = jax.vjp(fn, x, scale, *([] if add is None else [add]))
    return *results, *vjp((dx, dy))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_jax_equals_flax(dtype):
    x, add, *_, scale = arrays((3, 5, 32), dtype)
    module = nnx.RMSNorm(32, epsilon=1e-5, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    module.scale[...] = scale
    new, y = jgraph.rms_norm(x, scale, add=add, epsilon=1e-5)
    np.testing.assert_array_equal(new, x + add)
    for found, expected in ((y, module(x + add)), (jgraph.rms_norm(x, scale, epsilon=1e-5)[1], module(x))):
        assert found.dtype == expected.dtype
        # One rounding of the result.
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), rtol=float(2 * jnp.finfo(dtype).eps)
        )


@needs_mosaic
@pytest.mark.parametrize(("shape", "adds"), [((2, 8, 256), True), ((2, 8, 256), False), ((8, 768), True)])
def test_the_kernel_is_as_accurate_as_plain_jax(shape, adds, monkeypatch):
    monkeypatch.setattr(norm, "_BLOCKS", 2)  # gives each backward block two steps
    jax.clear_caches()
    x, add, *rest = arrays(shape)
    add = add if adds else None
    found, plain = (run(x, add, *rest, **how) for how in ({"implementation": "mosaic"}, {}))
    exact = run(*jax.tree.map(lambda array: array.astype(jnp.float32), (x, add, *rest)))
    for one, other, expected in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        off = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert off[0] <= 1.1 * off[1] + 1e-5 * float(jnp.linalg.norm(expected))


@needs_mosaic
@pytest.mark.parametrize("adds", [True, False])
def test_the_backward_kernel_alone_has_the_results_of_plain_jax_and_the_gradients_of_the_kernel(adds, monkeypatch):
    x, add, *rest = arrays((2, 8, 256))
    add = add if adds else None
    plain, kernel = (run(x, add, *rest, implementation=name) for name in ("xla", "mosaic"))
    monkeypatch.setattr(norm, "has_mosaic", lambda: True)
    found = run(x, add, *rest, implementation="backward")
    jax.tree.map(np.testing.assert_array_equal, found, (*plain[:2], *kernel[2:]))


def test_unsupported_norm_arguments_are_refused():
    x, add, _, _, scale = arrays((4, 256))
    for wrong, field in [
        ((x, scale[1:], add), "scale_D"),
        ((x, scale, add[1:]), "add"),
        ((x, scale, add.astype("float32")), "add"),
    ]:
        with pytest.raises(ShapeError) as error:
            jgraph.rms_norm(*wrong[:2], add=wrong[2])
        assert error.value.field == field
    with pytest.raises(ShapeError) as error:
        jgraph.rms_norm(x[:3], scale, implementation="mosaic")
    assert error.value.field == "x"
    with pytest.raises(ConfigError) as error:
        jgraph.rms_norm(x, scale, implementation="cuda")
    assert error.value.field == "implementation"


@needs_mosaic
@pytest.mark.target
def test_the_kernel_is_chosen_and_captured_on_an_h200(h200):
    with aot.lowering_for("h200"):
        for shape, dtype, is_kernel in [
            ((16, 1024, 2048), "bfloat16", True),
            ((16, 1024, 4096), "bfloat16", False),
            ((2, 256), "bfloat16", False),
            ((8, 256), "float32", False),
        ]:
            traced = jax.make_jaxpr(lambda *args: run(*args))(*jax.eval_shape(lambda: arrays(shape, dtype)))  # noqa: B023
            assert ("_jgraph_norm" in str(traced)) == is_kernel
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays((16384, 768))]
    compiled, report = aot.compile_for(jax.jit(run), *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    kernels = [line for line in compiled.as_text().splitlines() if "mosaic_gpu" in line and "custom-call(" in line]
    assert len(kernels) == 2
    # The partial gradients of the scale are much smaller than x.
    assert compiled.memory_analysis().temp_size_in_bytes < 16384 * 768 * 2 / 8
