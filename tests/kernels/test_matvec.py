"""The matrix-vector kernel: compares it, interpreted on the CPU, with NumPy in float64, and compiles it for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ShapeError
from jgraph.kernels import matvec as module
from jgraph.kernels.matvec import matvec
from jgraph.xla import aot


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


# One full piece, one partial piece, and several pieces with a partial last piece.
@pytest.mark.parametrize(
    ("D", "given"), [(64, ()), (64, ("scale_D",)), (240, ("add_F",)), (240, ("scale_D", "add_F")), (4112, ("scale_D", "add_F"))]
)
def test_norm_matmul_and_sum_equal_numpy(D, given):
    every = arrays(D, 8)
    own = {name: every[name] for name in ("x_D", "weights_FD", *given)}
    choices = {"epsilon": 0.5} if "scale_D" in given else {}
    found = matvec(**own, **choices)
    np.testing.assert_allclose(found, reference(**own, **choices), atol=2e-5 * D**0.5)


@pytest.mark.parametrize(("D", "turns"), [(64, 32), (240, 2)])
def test_blocks_with_several_tiles_sum_every_row_once(monkeypatch, D, turns):
    monkeypatch.setattr(module, "_BLOCKS", 3)
    monkeypatch.setattr(module, "_TURNS", turns)
    jax.clear_caches()
    own = arrays(D, 40)
    np.testing.assert_allclose(matvec(**own), reference(**own), atol=2e-5 * D**0.5)


def test_the_activation_combines_the_parts_of_the_output():
    own = arrays(64, 16)
    del own["scale_D"], own["add_F"]
    found = matvec(**own, activation=gated, parts=2)
    np.testing.assert_allclose(found, gated(*np.split(reference(**own).astype(np.float32), 2)), rtol=1e-4, atol=1e-4)


def test_matvec_accumulates_in_float32_and_returns_the_requested_dtype():
    x_D, weights_FD = jnp.ones(2064, jnp.bfloat16), jnp.ones((4, 2064), jnp.bfloat16)
    assert matvec(x_D, weights_FD, dtype=jnp.float32).tolist() == [2064.0] * 4
    assert matvec(x_D, weights_FD).dtype == jnp.bfloat16


@pytest.mark.parametrize(("D", "F", "parts"), [(60, 8, 1), (64, 6, 1), (64, 12, 2)])
def test_unsupported_sizes_are_refused(D, F, parts):
    own = arrays(D, F)
    with pytest.raises(ShapeError) as error:
        matvec(own["x_D"], own["weights_FD"], parts=parts)
    assert error.value.field == "weights_FD"


@pytest.mark.target
@pytest.mark.parametrize("activation", [jax.nn.gelu, gated])
def test_matvec_is_one_kernel_on_an_h200(h200, activation):
    own = jax.eval_shape(lambda: arrays(2048, 8192, "bfloat16"))
    del own["add_F"]
    parts = 2 if activation is gated else 1
    _, report = aot.compile_for(jax.jit(lambda own: matvec(**own, activation=activation, parts=parts)), own)
    assert report.total == 1
