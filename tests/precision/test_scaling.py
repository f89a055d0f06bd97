"""Scales are powers of two, histories follow the arrays, and nonfinite arrays stay visible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jgraph import FP8Config
from jgraph.errors import ConfigError
from jgraph.precision.scaling import AmaxHistory, observe, scale_for

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
DTYPES = (E4M3, E4M3, E5M2)


@given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([E4M3, E5M2]))
def test_a_scale_is_the_largest_power_of_two_in_range(amax, dtype):
    scale = float(scale_for(jnp.float32(amax), dtype))
    assert np.frexp(scale)[0] == 0.5
    assert amax * scale <= float(jnp.finfo(dtype).max) < 2 * amax * scale


def test_a_margin_divides_the_scale_by_a_power_of_two():
    assert float(scale_for(jnp.float32(3), E4M3, 2)) == float(scale_for(jnp.float32(3), E4M3)) / 4


def test_the_scale_of_zeros_is_one():
    assert float(scale_for(jnp.float32(0), E4M3)) == 1


def run(config, amaxes, num_losses=1):
    """Returns the scales of every step and the final history, for amaxes [steps, S, 3]."""
    history, found = AmaxHistory.zeros(amaxes.shape[1], config.history), []
    for amax in amaxes:

        def loss(history, amax=amax):
            scales, taps = observe(history, config, DTYPES, num_losses)
            return jnp.sum(jnp.array([jnp.stack(tap) for tap in taps]) * amax), jnp.stack(scales)

        after, scales = jax.grad(loss, has_aux=True)(history)
        found.append(scales)
        history = after
    return np.stack(found), history


@pytest.mark.long
def test_the_scale_of_a_step_depends_on_earlier_steps_only():
    amaxes = jnp.array([1.0, 100.0, 1.0, 1.0, 1.0])[:, None, None] * jnp.ones((1, 3))
    by_max, history = run(FP8Config(recipe="delayed", history=2), amaxes)
    assert by_max[:, 0, 0].tolist() == [1, 256, 4, 4, 256]
    assert history.window[:, 0, 0].tolist() == [1, 1]
    latest, _ = run(FP8Config(recipe="delayed", history=2, amax="most_recent"), amaxes)
    assert latest[:, 0, 0].tolist() == [1, 256, 4, 256, 256]


@pytest.mark.parametrize("num_losses", [1, 2, 3, 6, 8])
def test_the_amax_of_output_gradients_is_stored_for_the_mean_of_all_losses(num_losses):
    amax = jnp.array([1.0, 3.0, 3.5 * num_losses])  # 3.5 scales to the largest E5M2 value
    scales, history = run(FP8Config(recipe="delayed", history=2), jnp.stack([amax] * 2)[:, None], num_losses)
    np.testing.assert_allclose(history.window[:, 0], [[1, 3, 3.5]] * 2, rtol=1e-6)
    top = float(jnp.finfo(E5M2).max)
    assert top / 4 < amax[2] * scales[1, 0, 2] <= top
    assert scales[1, 0, :2].tolist() == [256, 128]


def test_a_zero_amax_does_not_change_the_scale():
    amaxes = jnp.array([1.0, 0.0, 0.0])[:, None, None] * jnp.ones((1, 3))
    scales, _ = run(FP8Config(recipe="delayed", history=1), amaxes)
    assert scales[:, 0, 0].tolist() == [1, 256, 256]


def test_the_histories_of_microbatches_are_combined_by_maximum():
    config = FP8Config(recipe="delayed", history=3)
    amaxes = jnp.arange(1.0, 13).reshape(2, 2, 3)
    history = AmaxHistory(jnp.arange(18.0).reshape(3, 2, 3), jnp.ones((2, 3)))
    both = jax.tree.map(jnp.maximum, history.updated(amaxes[0], config), history.updated(amaxes[1], config))
    jax.tree.map(np.testing.assert_array_equal, both, history.updated(jnp.max(amaxes, 0), config))


@pytest.mark.parametrize(
    ("field", "value"), [("recipe", "dynamic"), ("history", 0), ("margin", -1), ("keep", "head"), ("blocks", "some")]
)
def test_an_invalid_recipe_is_refused_with_its_field(field, value):
    with pytest.raises(ConfigError) as error:
        FP8Config(**{field: value})
    assert error.value.field == f"fp8.{field}"
