"""The matrix-vector kernel: compares it, interpreted on the CPU, with NumPy in float64, and compiles it for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ShapeError
from jgraph.kernels.matvec import has_matvec, matvec
from jgraph.xla import aot

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels of Mosaic need jax 0.11 or newer")


def arrays(D, F, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {"x_D": (D,), "weights_FD": (F, D), "scale_D": (D,), "add_F": (F,)}
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def gated(gate, up):
    return jax.nn.silu(gate) * up


def reference(x_D, weights_FD, scale_D=None, add_F=0.0, epsilon=0.0):
    x_D, weights_FD = np.asarray(x_D, np.float64), np.asarray(weights_FD, np.float64)
    if scale_D is not None:
        x_D = x_D / np.sqrt(np.mean(x_D**2) + epsilon) * np.asarray(scale_D, np.float64)
    return weights_FD @ x_D + np.asarray(add_F, np.float64)


# One piece, several pieces with a narrower last piece, and more pieces than are in flight.
@needs_mosaic
@pytest.mark.parametrize(
    ("D", "given"), [(128, ()), (256, ("scale_D",)), (640, ("add_F",)), (640, ("scale_D", "add_F")), (2432, ("scale_D",))]
)
def test_norm_matmul_and_sum_equal_numpy(D, given):
    every = arrays(D, 8)
    own = {name: every[name] for name in ("x_D", "weights_FD", *given)}
    choices = {"epsilon": 0.5} if "scale_D" in given else {}
    found = matvec(**own, **choices)
    np.testing.assert_allclose(found, reference(**own, **choices), atol=2e-5 * D**0.5)


@needs_mosaic
def test_the_activation_combines_the_parts_of_the_output():
    own = arrays(1280, 16)
    del own["scale_D"], own["add_F"]
    found = matvec(**own, activation=gated, parts=2)
    np.testing.assert_allclose(found, gated(*np.split(reference(**own).astype(np.float32), 2)), rtol=1e-4, atol=1e-4)


@needs_mosaic
def test_matvec_accumulates_in_float32_and_returns_the_requested_dtype():
    x_D, weights_FD = jnp.ones(2176, jnp.bfloat16), jnp.ones((4, 2176), jnp.bfloat16)
    assert matvec(x_D, weights_FD, dtype=jnp.float32).tolist() == [2176.0] * 4
    assert matvec(x_D, weights_FD).dtype == jnp.bfloat16


@pytest.mark.parametrize(("D", "F", "parts"), [(64, 8, 1), (128, 6, 1), (128, 12, 2)])
def test_unsupported_sizes_are_refused(D, F, parts):
    own = arrays(D, F)
    with pytest.raises(ShapeError) as error:
        matvec(own["x_D"], own["weights_FD"], parts=parts)
    assert error.value.field == "weights_FD"


@needs_mosaic
@pytest.mark.target
@pytest.mark.parametrize(
    ("D", "activation"), [(2048, jax.nn.gelu), (2048, gated), (5504, gated)], ids=["16 bytes", "two parts", "8 bytes"]
)
def test_matvec_is_one_kernel_on_an_h200(h200, D, activation):
    own = jax.eval_shape(lambda: arrays(D, 8192, "bfloat16"))
    del own["add_F"]
    parts = 2 if activation is gated else 1
    _, report = aot.compile_for(jax.jit(lambda own: matvec(**own, activation=activation, parts=parts)), own)
    assert report.total == 1


@pytest.mark.target
def test_the_kernel_is_selected_by_device_and_shape(h200):
    weights = jnp.zeros((8, 256))
    assert not has_matvec(weights[0], weights)  # a CPU
    with aot.lowering_for("h200"):
        assert has_matvec(weights[0], weights) == (jax.__version_info__ >= (0, 11))
        assert not has_matvec(weights[0, :64], weights[:, :64])
