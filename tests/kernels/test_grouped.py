"""Grouped matmuls: compares them with a loop over the groups in float64, and compiles the kernels for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.kernels import _grouped_mosaic, grouped
from jgraph.kernels.grouped import grouped_dot, grouped_dot_fp8, grouped_wgrad
from jgraph.kernels.quantize import cast_transpose
from jgraph.xla import aot
from tests.kernels.test_quantize import needs_mosaic

ROWS = 1024
SIZES = {
    "some": (300, 0, 261, 400, 63),
    "aligned": (256, 128, 384, 0, 256),
    "one": (0, ROWS, 0, 0, 0),
    "beyond": (5, 0, 700, 1, 0),
    "none": (0, 0, 0, 0, 0),
}


def arrays(sizes, dtype, K=64, N=128, M=ROWS):
    """Returns x, weights, sizes, dy, and a float32 sum of weight gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    G = len(sizes)
    x, dy = (jax.random.normal(key, (M, size), dtype) for key, size in zip(keys, (K, N), strict=False))
    weights = jax.random.normal(keys[2], (G, K, N), dtype) / 8
    return x, weights, jnp.asarray(sizes, jnp.int32), dy, jax.random.normal(keys[3], (G, K, N), jnp.float32)


def run(x, weights, sizes, dy, add, **how):
    """Returns y, dx, dw, dw in float32, and the sum of `add` and dw in float32."""
    y, pull = jax.vjp(lambda x, weights: grouped_dot(x, weights, sizes, **how), x, weights)
    dw = grouped_wgrad(x, dy, sizes, dtype=jnp.float32, **how)
    return y, *pull(dy), dw, grouped_wgrad(x, dy, sizes, dtype=jnp.float32, add_GKN=add, **how)


def loop(x, weights, sizes, dy, add):
    """Computes the expected results of `run` in float64."""
    x, weights, dy, add = (np.asarray(array, np.float64) for array in (x, weights, dy, add))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(weights)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + int(size))
        y[rows], dx[rows], dw[group] = x[rows] @ weights[group], dy[rows] @ weights[group].T, x[rows].T @ dy[rows]
        begin += int(size)
    return y, dx, dw, dw, dw + add


def assert_near(found, expected):
    for name, one, other in zip(("y", "dx", "dw", "dw in float32", "sum"), found, expected, strict=True):
        # One rounding of the result, and another order of summation.
        atol = 1e-5 * np.abs(other).max()
        np.testing.assert_allclose(
            np.asarray(one, np.float64), other, rtol=float(jnp.finfo(one.dtype).eps), atol=atol, err_msg=name
        )


@pytest.mark.parametrize("implementation", ["tiles", "xla"])
@pytest.mark.parametrize(("case", "dtype"), [*((case, "float32") for case in SIZES), ("some", "bfloat16")])
def test_every_group_is_multiplied_by_its_own_matrix(case, dtype, implementation):
    args = arrays(SIZES[case], dtype)
    found = jax.jit(run, static_argnames="implementation")(*args, implementation=implementation)
    assert [one.dtype for one in found] == [dtype] * 3 + ["float32"] * 2
    with jax.default_matmul_precision("highest"):
        assert_near(found, loop(*args))


@needs_mosaic
@pytest.mark.long
def test_the_interpreted_kernels_multiply_every_group_by_its_own_matrix(monkeypatch):
    monkeypatch.setattr(_grouped_mosaic, "_CLUSTERS", 1)  # gives each block several tiles
    jax.clear_caches()
    # Groups inside a tile and across tiles, a smaller last tile of columns, and rows beyond the groups.
    args = arrays((30, 0, 150, 7, 41), jnp.bfloat16, 128, 320, 256)
    assert_near(run(*args, implementation="mosaic"), loop(*args))


@needs_mosaic
@pytest.mark.long
def test_the_interpreted_weight_gradient_of_small_groups_has_the_right_rows_in_every_tile(monkeypatch):
    monkeypatch.setattr(_grouped_mosaic, "_CLUSTERS", 1)
    jax.clear_caches()
    # dy stays in shared memory for the tiles of the small groups, but not of the first group.
    x, weights, sizes, dy, add = arrays((270, 0, 5, 64), jnp.bfloat16, 1024, 64, 352)
    found = grouped_wgrad(x, dy, sizes, dtype="float32", implementation="mosaic")
    np.testing.assert_allclose(found, loop(x, weights, sizes, dy, add)[2], rtol=1e-5, atol=1e-3)


FP8 = [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn")]


def in_fp8(sizes, dtypes, K, N, M=ROWS):
    """Returns the arguments of `run_fp8` (quantized x, dy and weights, sizes, scale) and its expected results."""
    x, weights, sizes, dy, add = arrays(sizes, jnp.float32, K, N, M)
    x, dy, one = x.astype(dtypes[0]), dy.astype(dtypes[0]), jnp.float32(1)
    found = cast_transpose(weights.reshape(-1, N), one, dtypes[1])
    G, rows = len(sizes), found.rows.reshape(weights.shape)
    expected = loop(x.astype("float32"), rows.astype("float32"), sizes, dy.astype("float32"), add)
    return (x, dy, rows, found.columns.reshape(N, G, K), sizes, jnp.float32(0.25)), [one / 4 for one in expected[:2]]


def run_fp8(x, dy, rows, columns, sizes, scale, **how):
    """Returns y and dx."""
    y = grouped_dot_fp8(x, columns, sizes, scale, order="NGK", **how)
    return y, grouped_dot_fp8(dy, rows, sizes, scale, order="GNK", **how)


def assert_fp8(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        # One rounding of the result, and accumulation in about 14 bits.
        atol = 2**-10 * np.abs(other).max()
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=float(jnp.finfo(one.dtype).eps), atol=atol)


@pytest.mark.parametrize("dtypes", FP8)
@pytest.mark.parametrize("implementation", ["tiles", "xla"])
def test_fp8_rows_are_multiplied_by_both_layouts_of_quantized_weights(implementation, dtypes):
    args, expected = in_fp8(SIZES["beyond"], dtypes, 64, 128)
    assert_fp8(run_fp8(*args, implementation=implementation), expected)


@needs_mosaic
@pytest.mark.long
def test_the_interpreted_kernel_supports_both_layouts_of_fp8_weights(monkeypatch):
    monkeypatch.setattr(_grouped_mosaic, "_CLUSTERS", 1)
    jax.clear_caches()
    args, expected = in_fp8((30, 0, 150, 7, 41), FP8[0], 256, 384, 256)
    assert_fp8(run_fp8(*args, implementation="mosaic"), expected)


def test_unsupported_fp8_arguments_are_refused_by_name():
    (x, _, rows, columns, sizes, scale), _ = in_fp8(SIZES["some"], FP8[0], 64, 128)
    for field, changed in [
        ("x_MK", {"x_MK": x.astype("float32")}),
        ("weights", {"weights": rows}),
        ("weights", {"weights": columns[:, 1:]}),
        ("weights", {"x_MK": x.astype("float8_e5m2"), "weights": columns.astype("float8_e5m2")}),
        ("sizes_G", {"sizes_G": sizes[None]}),
        ("scale", {"scale": scale[None]}),
        ("x_MK", {"implementation": "mosaic"}),
    ]:
        with pytest.raises(ShapeError) as error:
            grouped_dot_fp8(**({"x_MK": x, "weights": columns, "sizes_G": sizes, "scale": scale, "order": "NGK"} | changed))
        assert error.value.field == field
    with pytest.raises(ConfigError) as error:
        grouped_dot_fp8(x, columns, sizes, scale, order="KNG")
    assert error.value.field == "order"


@needs_mosaic
@pytest.mark.target
@pytest.mark.parametrize("dtypes", FP8 if jax.__version_info__ >= (0, 12) else FP8[:1])
def test_fp8_forward_and_dgrad_are_one_kernel_each_on_an_h200(h200, dtypes):
    args, _ = in_fp8((512,) * 8, dtypes, 256, 384, 4096)
    args = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in args]
    compiled, report = aot.compile_for(jax.jit(run_fp8), *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert (report.command_buffers, report.captured, report.total) == (1, 2, 2)
    assert compiled.as_text().count("mosaic_gpu") >= 2


def test_rows_beyond_the_group_sizes_do_not_affect_the_weight_gradient():
    x, _, sizes, dy, add = arrays(SIZES["beyond"], jnp.float32)
    beyond = jnp.arange(ROWS)[:, None] >= sum(SIZES["beyond"])
    for x_used in (x, jnp.where(beyond, jnp.nan, x)):
        found = grouped_wgrad(x_used, dy, sizes, dtype="float32", add_GKN=add, implementation="tiles")
        np.testing.assert_allclose(found, loop(x, add, sizes, dy, add)[-1], rtol=1e-5, atol=1e-3)


def test_unsupported_grouped_arguments_are_refused_by_name():
    x, weights, sizes, dy, add = arrays(SIZES["some"], jnp.float32)
    products = [
        ("x_MK", x[0], weights, sizes),
        ("x_MK", x.astype("float16"), weights, sizes),
        ("weights_GKN", x, weights[0], sizes),
        ("weights_GKN", x, weights[1:], sizes),
        ("weights_GKN", x, weights[:, 1:], sizes),
        ("weights_GKN", x, weights.astype("bfloat16"), sizes),
        ("sizes_G", x, weights, sizes.astype("float32")),
        ("sizes_G", x, weights, sizes[None]),
    ]
    for field, *args in products:
        with pytest.raises(ShapeError) as error:
            grouped_dot(*args)
        assert error.value.field == field
    for field, changed in [("dy_MN", {"dy_MN": dy[1:]}), ("add_GKN", {"add_GKN": add[1:]})]:
        with pytest.raises(ShapeError) as error:
            grouped_wgrad(**({"x_MK": x, "dy_MN": dy, "sizes_G": sizes, "dtype": "float32"} | changed))
        assert error.value.field == field
    for field, dtype, implementation in [("dtype", "float16", "auto"), ("implementation", "float32", "cuda")]:
        with pytest.raises(ConfigError) as error:
            grouped_wgrad(x, dy, sizes, dtype=dtype, implementation=implementation)
        assert error.value.field == field
    with pytest.raises(ShapeError, match="multiples of 8, 64 and 64") as error:
        grouped_dot(x, weights, sizes, implementation="mosaic")
    assert error.value.field == "x_MK"


@pytest.mark.target
def test_the_implementation_depends_on_gpu_shape_and_dtype(h200):
    def choose(shape, dtype):
        return grouped._chosen("auto", shape, jax.ShapeDtypeStruct(shape[:2], dtype))

    assert choose((4096, 128, 192), "bfloat16") == "xla"
    newest = "mosaic" if jax.__version_info__ >= (0, 11) else "tiles"
    for gpu, shape, dtype, expected in [
        ("h200", (4096, 128, 192), "bfloat16", newest),
        ("h100", (4096, 128, 192), "bfloat16", newest),
        ("b200", (4096, 128, 192), "bfloat16", "tiles"),
        ("h200", (4096, 128, 192), "float32", "tiles"),
        ("h200", (4095, 128, 192), "bfloat16", "tiles"),
        ("h200", (4096, 96, 192), "bfloat16", "tiles"),
    ]:
        with aot.lowering_for(gpu):
            assert choose(shape, dtype) == expected


@needs_mosaic
@pytest.mark.target
def test_forward_and_backward_are_three_kernels_that_accumulate_in_place_on_an_h200(h200):
    def program(x, weights, sizes, dy, add):
        y, pull = jax.vjp(lambda x: grouped_dot(x, weights, sizes), x)
        return y, *pull(dy), grouped_wgrad(x, dy, sizes, dtype=jnp.float32, add_GKN=add)

    args = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays((512,) * 8, jnp.bfloat16, 256, 320, 4096)]
    options = {"xla_gpu_graph_min_graph_size": 1}
    compiled, report = aot.compile_for(jax.jit(program, donate_argnums=4), *args, compiler_options=options)
    assert (report.command_buffers, report.captured) == (1, report.total)
    kernels = [line for line in compiled.as_text().splitlines() if "mosaic_gpu" in line and "custom-call(" in line]
    assert len(kernels) == 3
    assert "{2}: (4, {}, may-alias)" in compiled.as_text()
    assert "ragged" not in compiled.as_text()
    # No kernel computes tables of tiles, and neither the weights nor the sum are copied.
    assert report.total == 3
    assert compiled.memory_analysis().temp_size_in_bytes < 1000
