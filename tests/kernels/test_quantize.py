"""Quantization: compares the kernels, interpreted on the CPU, with plain JAX, and plain JAX with the FP8 types of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jgraph
from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import cast_transpose
from jgraph.kernels.elementwise import Computed, Elementwise
from jgraph.kernels.quantize import choose
from jgraph.xla import aot

DTYPES = ("float8_e4m3fn", "float8_e5m2")
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic of jax 0.10 cannot compile the kernel, so it is never chosen"
)
ODD = (0.0, -0.0, np.inf, -np.inf, np.nan, 448, 449, 464, 465, -1e30, 57344, 61440, 6e4, 1e-40)
ODD += (2**-9, 2**-10, 1.5 * 2**-10, 2**-16, 2**-17)


def values(shape, dtype, odd=True):
    """Returns values over and beyond the range of FP8, with special values at random positions."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 18, shape)
    if odd:
        x.flat[rng.choice(x.size, len(ODD), replace=False)] = ODD
    return jnp.asarray(x, dtype)


def bits(x):
    return np.atleast_1d(np.asarray(x)).view(np.uint8)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        nan = np.isnan(b.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), nan)
        np.testing.assert_array_equal(bits(np.where(nan, 0, a)), bits(np.where(nan, 0, b)))


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_jax_rounds_to_nearest_even_clips_and_turns_infinity_into_nan(source, dtype):
    x, target = values((64, 48), source), getattr(ml_dtypes, dtype)
    rows, columns, amax = cast_transpose(x, jnp.float32(0.375), dtype, implementation="xla")
    scaled = np.asarray(x, np.float32) * np.float32(0.375)
    top = float(ml_dtypes.finfo(target).max)
    expected = np.where(np.isfinite(scaled), np.clip(scaled, -top, top), np.nan).astype(target)
    assert_same((rows, columns, amax), (expected, expected.T, np.float32(np.nan)))
    finite = values((64, 48), source, odd=False)
    amax = cast_transpose(finite, jnp.float32(3), dtype, implementation="xla").amax
    assert amax == np.abs(np.asarray(finite, np.float32)).max()


@needs_mosaic
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "odd"), [((256, 192), True), ((128, 64), False)])
def test_the_interpreted_kernel_equals_plain_jax_bit_for_bit(source, dtype, shape, odd):
    x, scale = values(shape, source, odd), jnp.float32(0.7)
    found = cast_transpose(x, scale, dtype, implementation="mosaic")
    expected = cast_transpose(x, scale, dtype, implementation="xla")
    # On CPUs the maximum of an interpreted kernel may lose a NaN. tests/gpu checks it on a GPU.
    assert_same(found[:2] if odd else found, expected[:2] if odd else expected)


def steps(name):
    """Returns elementwise functions: activations and their gradients."""
    gelu = (("mul", (0, 0)), ("mul", (1, 0.044715)), ("add", (2, 1.0)), ("mul", (3, 0)), ("mul", (4, 0.79788)), ("tanh", (5,)))
    swiglu = (("logistic", (0,)), ("mul", (0, 3)), ("mul", (4, 1)), ("mul", (5, 2)))
    return {
        "gelu": Elementwise(1, (*gelu, ("add", (6, 1.0)), ("mul", (7, 0)), ("mul", (8, 0.5)))),
        "swiglu": Elementwise(3, swiglu),
        "erf": Elementwise(1, (("erf", (0,)), ("mul", (0, 1)))),
        "norm": Elementwise(4, (("sub", (0, 1)), ("mul", (2, 3)), ("mul", (4, 5)))),
        "roots": Elementwise(2, (("abs", (0,)), ("add", (2, 1.0)), ("rsqrt", (3,)), ("max", (4, 1)), ("neg", (5,)))),
    }[name]


FUNCTIONS = ("gelu", "swiglu", "erf", "norm", "roots")


def inputs_of(name, shape=(256, 192)):
    shapes = [shape, (shape[0], 1), (shape[0], 1), (1, shape[1])] if name == "norm" else [shape] * steps(name).inputs
    dtypes = [jnp.bfloat16, jnp.float32, jnp.float32, jnp.bfloat16]
    return tuple(
        3 * jax.random.normal(jax.random.key(i), shape, dtype if name == "norm" else jnp.bfloat16)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    )


def assert_within_one_step(found, expected):
    """Checks that FP8 values differ by at most one step. FP8 values of one sign are ordered like their bits."""
    for a, b in zip(found[:2], expected[:2], strict=True):
        a, b = bits(a).astype(int), bits(b).astype(int)
        ordered = [np.where(x >= 128, 128 - x, x) for x in (a, b)]
        assert np.abs(ordered[0] - ordered[1]).max() <= 1
    np.testing.assert_allclose(found.amax, expected.amax, rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_quantizing_a_function_equals_quantizing_its_result(name):
    fn, scale = steps(name), jnp.float32(4)
    inputs = inputs_of(name)
    result = fn(*inputs)
    expected = {
        "gelu": lambda x: jax.nn.gelu(x),
        "swiglu": lambda x, y, z: jax.nn.silu(x) * y * z,
        "erf": lambda x: x * jax.lax.erf(x),
        "norm": lambda x, mean, root, scale: (x - mean) * (root * scale),
        "roots": lambda x, y: -jnp.maximum(jax.lax.rsqrt(abs(x) + 1), y),
    }[name](*(x.astype(jnp.float32) for x in inputs))
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=1e-5)
    found = cast_transpose(Computed(fn, inputs), scale, implementation="xla")
    assert_same(found, cast_transpose(result, scale, implementation="xla"))


@needs_mosaic
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("want", ["both", "amax"])
def test_the_kernel_computes_the_function_that_it_quantizes(name, want):
    fn, scale = steps(name), jnp.float32(4)
    found = cast_transpose(Computed(fn, inputs_of(name)), scale, want=want, implementation="mosaic")
    expected = cast_transpose(Computed(fn, inputs_of(name)), scale, implementation="xla")
    if want == "both":
        assert_within_one_step(found, expected)
    else:
        assert found[:2] == (None, None)
        np.testing.assert_allclose(found.amax, expected.amax, rtol=1e-5)


@pytest.mark.parametrize("kernel", ["xla", pytest.param("mosaic", marks=needs_mosaic)])
@pytest.mark.parametrize("want", ["rows", "columns"])
def test_only_the_requested_outputs_are_written(kernel, want):
    x, scale = values((128, 64), "bfloat16", odd=False), jnp.float32(1)
    both = cast_transpose(x, scale, implementation="xla")
    found = cast_transpose(x, scale, want=want, implementation=kernel)
    absent = {"rows": found.columns, "columns": found.rows}[want]
    assert absent is None
    kept = {"rows": (found.rows, both.rows), "columns": (found.columns, both.columns)}[want]
    assert_same((kept[0], found.amax), (kept[1], both.amax))


def test_unsupported_quantize_arguments_are_refused_by_name():
    x, scale = jnp.ones((32, 16)), jnp.float32(1)
    wrong = {
        "x_MN": [(x[:8], scale), (x[0], scale), (x.astype(jnp.float16), scale)],
        "inverse_scale": [(x, scale[None]), (x, scale.astype(jnp.bfloat16))],
    }
    for field, cases in wrong.items():
        for case in cases:
            with pytest.raises(ShapeError) as error:
                cast_transpose(*case)
            assert error.value.field == field
    with pytest.raises(ShapeError, match="multiples of 128 x 64") as error:
        cast_transpose(x, scale, implementation="mosaic")
    assert error.value.field == "x_MN"
    for field, value in {"dtype": "float8_e4m3b11fnuz", "want": "all", "implementation": "cuda"}.items():
        with pytest.raises(ConfigError) as error:
            cast_transpose(x, scale, **{field: value})
        assert error.value.field == field


def test_plain_jax_is_used_on_devices_without_fp8():
    assert choose((128, 128)) == "xla"


@pytest.mark.target
def test_the_kernel_is_chosen_for_the_compilation_target(h200):
    with aot.lowering_for("h200"):
        assert choose((128, 192)) == ("mosaic" if jax.__version_info__ >= (0, 11) else "xla")
        assert choose((144, 192)) == "xla"


@needs_mosaic
@pytest.mark.target
@pytest.mark.parametrize(("source", "dtype"), [("bfloat16", "float8_e5m2"), ("float32", "float8_e4m3fn")])
def test_the_kernel_is_captured_on_an_h200_without_output_copies(h200, source, dtype):
    fn = functools.partial(cast_transpose, dtype=dtype, implementation="mosaic")
    args = jax.ShapeDtypeStruct((256, 320), source), jax.ShapeDtypeStruct((), jnp.float32)
    compiled, report = aot.compile_for(jax.jit(fn), *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    # The kernel and the maximum over its blocks.
    assert (report.command_buffers, report.captured, report.total) == (1, 2, 2)
    assert "copy(" not in compiled.as_text()


@needs_mosaic
@pytest.mark.target
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernel_with_a_function_compiles_for_an_h200(h200, name):
    args = inputs_of(name), jnp.float32(1)

    def fn(inputs, scale):
        return cast_transpose(Computed(steps(name), inputs), scale, implementation="mosaic")

    _, report = aot.compile_for(jax.jit(fn), *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))
    assert report.total == 2


@pytest.mark.long
@needs_mosaic
@pytest.mark.target
def test_explain_reports_one_command_buffer_for_a_program_with_the_kernel(h200):
    def program(x, w):
        rows, _, amax = cast_transpose(jnp.tanh(x @ w), jnp.float32(2))
        return jnp.sin(jnp.tanh(rows.astype(jnp.bfloat16) @ w) @ w) / amax.astype(jnp.bfloat16)

    x, w = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    explanation = jgraph.explain(program, x, w, target="h200")
    assert explanation.capture.command_buffers == 1
    assert explanation.capture.captured == explanation.capture.total
