"""Kernels on a GPU: compiled kernels match plain JAX, NaN included, and are captured."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jgraph.kernels import cast_transpose
from jgraph.kernels.elementwise import Computed
from jgraph.xla import compile_and_report
from tests.kernels import (
    test_attention as attention,
    test_documents as documents,
    test_grouped as grouped,
    test_norm as norm,
    test_swiglu as swiglu,
)
from tests.kernels.test_quantize import (
    DTYPES,
    FUNCTIONS,
    assert_same,
    assert_within_one_step,
    inputs_of,
    needs_mosaic,
    steps,
    values,
)

pytestmark = [pytest.mark.gpu, needs_mosaic]


def captured(fn, *args):
    compiled, report = compile_and_report(jax.jit(fn).lower(*args), {"xla_gpu_graph_min_graph_size": 1})
    assert report is not None
    assert (report.command_buffers, report.captured) == (1, report.total)
    return compiled


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_quantization_kernel_has_the_bits_of_plain_jax_and_is_captured(source, dtype):
    scale = jnp.float32(0.7)
    # The width of the last shape is an odd number of tiles.
    for shape, odd in (((2048, 1024), True), ((2048, 1024), False), ((256, 192), False)):
        x = values(shape, source, odd)
        compiled = captured(functools.partial(cast_transpose, dtype=dtype, implementation="mosaic"), x, scale)
        expected = jax.jit(functools.partial(cast_transpose, dtype=dtype, implementation="xla"))(x, scale)
        for _ in range(3):
            assert_same(compiled(x, scale), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_computed_in_the_quantization_kernel_are_within_one_step_of_fp8(name):
    fn, scale = steps(name), jnp.float32(4)
    inputs = inputs_of(name, (2048, 1024))
    compiled = captured(lambda x, scale: cast_transpose(Computed(fn, x), scale, implementation="mosaic"), inputs, scale)
    assert_within_one_step(compiled(inputs, scale), cast_transpose(Computed(fn, inputs), scale, implementation="xla"))


KERNELS = {
    "attention": (attention.run, lambda: attention.arrays(128, 64, heads=8)),
    "norm of 256": (norm.run, lambda: norm.arrays((4096, 256))),
    "norm of 2048": (norm.run, lambda: norm.arrays((4096, 2048))),
    "swiglu of 768": (swiglu.run, lambda: swiglu.arrays(4096, 768)),
    "swiglu of 2048": (swiglu.run, lambda: swiglu.arrays(4096, 2048)),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_as_close_to_float32_as_plain_jax(kernel):
    run, args = KERNELS[kernel][0], KERNELS[kernel][1]()
    exact = jax.jit(functools.partial(run, implementation="xla"))(*(x.astype(jnp.float32) for x in args))
    compiled = captured(functools.partial(run, implementation="mosaic"), *args)
    plain = jax.jit(functools.partial(run, implementation="xla"))(*args)
    for _ in range(3):
        for one, other, expected in zip(compiled(*args), plain, exact, strict=True):
            errors = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
            assert errors[0] <= 1.1 * errors[1] + 1e-5 * float(jnp.linalg.norm(expected))


@pytest.mark.parametrize(("length", "size"), [(2048, 128), (1000, 64)])
def test_attention_within_documents_is_as_close_to_float32_as_plain_jax(length, size):
    args = documents.arrays(length, size)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(documents.run, implementation="xla"))(
            *(x if x.dtype == jnp.int32 else x.astype(jnp.float32) for x in args)
        )
    compiled = captured(functools.partial(documents.run, implementation="mosaic"), *args)
    plain = jax.jit(functools.partial(documents.run, implementation="xla"))(*args)
    for one, other, expected in zip(compiled(*args), plain, exact, strict=True):
        errors = [float(jnp.linalg.norm(part.astype(jnp.float32) - expected)) for part in (one, other)]
        assert errors[0] <= 1.1 * errors[1] + 1e-5 * float(jnp.linalg.norm(expected))


@pytest.mark.parametrize("implementation", ["mosaic", "tiles"])
@pytest.mark.parametrize("case", grouped.SIZES)
def test_every_group_of_rows_is_multiplied_with_its_own_matrix(case, implementation):
    args = grouped.arrays(grouped.SIZES[case], jnp.bfloat16, 320, 448)
    run = functools.partial(grouped.run, implementation=implementation)
    compiled = captured(run, *args) if implementation == "mosaic" else jax.jit(run)  # a loop is captured in pieces
    expected = grouped.loop(*args)
    for _ in range(3):
        grouped.assert_near(compiled(*args), expected)


def test_groups_in_several_waves_of_blocks_are_multiplied_and_added_in_place():
    sizes = jax.random.randint(jax.random.key(1), (64,), 0, 500)
    args = grouped.arrays(sizes, jnp.bfloat16, 512, 1408, 32768)
    grouped.assert_near(jax.jit(functools.partial(grouped.run, implementation="mosaic"))(*args), grouped.loop(*args))
    x, _, _, dy, add = args
    expected = jnp.asarray(grouped.loop(*args)[-1])
    address = add.unsafe_buffer_pointer()
    found = jax.jit(
        functools.partial(grouped.grouped_wgrad, dtype=jnp.float32, implementation="mosaic"), donate_argnames="add_GKN"
    )(x, dy, sizes, add_GKN=add)
    assert found.unsafe_buffer_pointer() == address
    assert float(jnp.max(jnp.abs(found - expected))) <= 1e-5 * float(jnp.max(jnp.abs(expected)))


@pytest.mark.parametrize("dtypes", grouped.FP8 if jax.__version_info__ >= (0, 12) else grouped.FP8[:1])
def test_groups_of_fp8_rows_are_multiplied_with_both_weight_layouts(dtypes):
    for sizes in grouped.SIZES.values():
        args, expected = grouped.in_fp8(sizes, dtypes, 384, 512)
        compiled = captured(functools.partial(grouped.run_fp8, implementation="mosaic"), *args)
        for _ in range(3):
            grouped.assert_fp8(compiled(*args), expected)
