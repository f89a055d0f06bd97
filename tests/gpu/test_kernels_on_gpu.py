"""What only a GPU can show of the kernels: that what is compiled gives the bits of plain jax, NaN included, and is captured."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jgraph.kernels import cast_transpose
from jgraph.xla import compile_and_report
from tests.kernels.test_quantize import DTYPES, assert_same, values

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")]


@pytest.mark.parametrize("kernel", ["mosaic", "triton"])
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_gives_the_bits_of_plain_jax_and_is_captured(kernel, source, dtype):
    if kernel == "mosaic" and jax.__version_info__ < (0, 11):
        pytest.skip("Mosaic of jax 0.10 cannot compile the kernel")
    scale = jnp.float32(0.7)
    # The last has a width of an odd number of tiles.
    for shape, odd in (((2048, 1024), True), ((2048, 1024), False), ((256, 192), False)):
        x = values(shape, source, odd)
        fn = functools.partial(cast_transpose, dtype=dtype, implementation=kernel)
        compiled, report = compile_and_report(jax.jit(fn).lower(x, scale), {"xla_gpu_graph_min_graph_size": 1})
        assert report is not None
        assert (report.command_buffers, report.captured) == (1, report.total)
        wanted = jax.jit(functools.partial(cast_transpose, dtype=dtype, implementation="xla"))(x, scale)
        for _ in range(3):
            assert_same(compiled(x, scale), wanted)


def test_masked_blocks_give_the_bits_of_plain_jax():
    x, scale = values((1040, 400), "bfloat16", odd=False), jnp.float32(0.7)
    found = jax.jit(functools.partial(cast_transpose, implementation="triton"))(x, scale)
    assert_same(found, cast_transpose(x, scale, implementation="xla"))
