"""Rotated heads: results and gradients against autodiff, and the kernel that quantizes their gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.errors import ShapeError
from jgraph.kernels import cast_transpose
from jgraph.kernels.quantize import RotatedBack
from jgraph.kernels.rotary import GRADIENT, rotated_heads
from jgraph.precision._fuse import fused
from jgraph.xla import aot
from jgraph_models.rotary import halves, rotary, rotate

B, T, H, G = 2, 128, 2, 1
HEADS = {"num_heads": H, "num_kv_heads": G}
needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic of jax 0.10 cannot compile the kernel")


def heads(K, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), (B, T, H + 2 * G, K), dtype)


def reference(qkv, tables):
    q, k, v = jnp.split(qkv, [H, H + G], axis=2)
    return rotate(q, tables), rotate(k, tables), v


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_and_gradients_equal_those_of_separate_rotations(dtype):
    qkv, tables = heads(16, dtype), rotary(T, 16, 1e4)
    dy = reference(heads(16, dtype, seed=1), tables)

    def run(fn):
        y, pull_back = jax.vjp(fn, qkv)
        return y, pull_back(dy)

    found = run(lambda qkv: rotated_heads(qkv, *halves(tables), **HEADS))
    jax.tree.map(np.testing.assert_array_equal, found, run(lambda qkv: reference(qkv, tables)))


def gradient(K):
    """Returns a `RotatedBack` with tables that bfloat16 represents exactly."""
    cos, sin = (jnp.asarray(table, jnp.bfloat16).astype(jnp.float32) for table in halves(rotary(T, K, 1e4)))
    return RotatedBack(*(part.reshape(B * T, -1) for part in jnp.split(heads(K), [H, H + G], axis=2)), cos, sin)


@needs_mosaic
@pytest.mark.parametrize("K", [64, 128])
def test_the_interpreted_kernel_quantizes_the_gradient_without_rounding_it_to_bfloat16(K):
    x, scale = gradient(K), jnp.float32(512)
    found = cast_transpose(x, scale, jnp.float8_e5m2, implementation="mosaic")
    exact = x._replace(**{name: part.astype(jnp.float32) for name, part in x._asdict().items()})
    expected = cast_transpose(exact, scale, jnp.float8_e5m2, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, found[:2], expected[:2])
    assert found.amax == pytest.approx(float(expected.amax), rel=1e-6)


@pytest.mark.long
def test_a_length_that_the_kernel_does_not_support_is_quantized_in_plain_jax():
    x = gradient(64)
    x = x._replace(cos=x.cos[:96], sin=x.sin[:96], **{n: getattr(x, n)[:192] for n in ("dq", "dk", "dv")})
    with pytest.raises(ShapeError):
        cast_transpose(x, jnp.float32(1), implementation="mosaic")
    found, expected = (cast_transpose(y, jnp.float32(1)) for y in (x, x.array()))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_quantization_of_the_gradient_rotates_it():
    tables, qkv = halves(rotary(T, 64, 1e4)), heads(64)

    def run(qkv, *dy):
        (dqkv,) = jax.vjp(lambda qkv: rotated_heads(qkv, *tables, **HEADS), qkv)[1](dy)
        return cast_transpose(dqkv.reshape(B * T, -1), jnp.float32(512), jnp.float8_e5m2)

    dy = reference(heads(64, seed=1), rotary(T, 64, 1e4))
    fuse = functools.partial(fused, implementation="xla")
    assert GRADIENT in str(jax.make_jaxpr(run)(qkv, *dy))
    assert GRADIENT not in str(jax.make_jaxpr(fuse(run))(qkv, *dy))
    jax.tree.map(np.testing.assert_array_equal, fuse(run)(qkv, *dy), run(qkv, *dy))


def test_fused_gradients_share_the_tables():
    tables = halves(rotary(T, 64, 1e4))

    def run(qkv, *dy):
        (dqkv,) = jax.vjp(lambda qkv: rotated_heads(qkv, *tables, **HEADS), qkv)[1](dy)
        return [cast_transpose(dqkv.reshape(B * T, -1), jnp.float32(scale)) for scale in (256, 512)]

    dy = reference(heads(64, seed=1), rotary(T, 64, 1e4))
    assert len(jax.make_jaxpr(fused(run, "xla"))(heads(64), *dy).consts) == 2


def test_a_gradient_with_another_reader_is_not_rotated_in_the_kernel():
    tables, qkv = halves(rotary(T, 64, 1e4)), heads(64)

    def run(qkv, *dy):
        (dqkv,) = jax.vjp(lambda qkv: rotated_heads(qkv, *tables, **HEADS), qkv)[1](dy)
        return cast_transpose(dqkv.reshape(B * T, -1), jnp.float32(512)), dqkv.sum()

    dy = reference(heads(64, seed=1), rotary(T, 64, 1e4))
    assert GRADIENT in str(jax.make_jaxpr(fused(run, "xla"))(qkv, *dy))


@pytest.mark.parametrize(("rows", "call"), [(2 * B * T, lambda fn: fn), (B * T, jax.jit)], ids=["shape", "function"])
def test_a_gradient_in_another_shape_or_of_arrays_inside_a_function_is_not_rotated_in_the_kernel(rows, call):
    tables, qkv = halves(rotary(T, 64, 1e4)), heads(64)

    @call
    def gradient(qkv, *dy):
        return jax.vjp(lambda qkv: rotated_heads(qkv, *tables, **HEADS), qkv)[1](dy)[0]

    def run(qkv, *dy):
        return cast_transpose(gradient(qkv, *dy).reshape(rows, -1), jnp.float32(512))

    dy = reference(heads(64, seed=1), rotary(T, 64, 1e4))
    found = jax.make_jaxpr(fused(run, "xla"))(qkv, *dy)
    assert GRADIENT in str(found)
    assert found.out_avals == jax.make_jaxpr(run)(qkv, *dy).out_avals


def test_heads_and_tables_of_another_shape_are_refused():
    tables = halves(rotary(T, 16, 1e4))
    for wrong, field in [((heads(16)[:, :, 1:], *tables), "qkv_BTHK"), ((heads(16), tables[0][1:], tables[1]), "cos_TP")]:
        with pytest.raises(ShapeError) as error:
            rotated_heads(*wrong, **HEADS)
        assert error.value.field == field


@needs_mosaic
@pytest.mark.target
@pytest.mark.parametrize(("heads", "K"), [(16, 128), (12, 64)])
def test_the_kernel_compiles_for_an_h200(h200, heads, K):
    parts = [jax.ShapeDtypeStruct((4096, heads * K), jnp.bfloat16)] * 3
    tables = [jax.ShapeDtypeStruct((2048, K // 2), jnp.float32)] * 2

    def run(*parts):
        return jgraph.kernels.cast_transpose(RotatedBack(*parts), jnp.float32(1), jnp.float8_e5m2)

    compiled, report = aot.compile_for(jax.jit(run), *parts, *tables, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured) == (1, report.total)
    # The rotated gradient, 2 bytes per element, is not written.
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 3 * heads * K
