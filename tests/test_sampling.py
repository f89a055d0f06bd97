"""Which tokens may be drawn: top-k and top-p against a plain sort, and by many draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jgraph.inference.sampling import draw, likely, settings_of

pytestmark = pytest.mark.once

LOGITS = np.log(np.array([0.02, 0.4, 0.08, 0.25, 0.05, 0.2], np.float32))


def reference(logits, temperature, top_k, top_p):
    """Which tokens may be drawn, by sorting; in float64."""
    logits = logits.astype(np.float64) / temperature
    kept = np.ones(len(logits), bool)
    if top_k:
        kept &= logits >= np.sort(logits)[-min(top_k, len(logits))]
    shares = np.where(kept, np.exp(logits - logits.max()), 0)
    shares /= shares.sum()
    likelier = np.array([shares[logits > one].sum() for one in logits])
    return kept & (likelier < top_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (3, 1.0), (99, 1.0), (0, 0.3), (0, 0.7), (0, 0.96), (3, 0.6)])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_tokens_that_may_be_drawn_are_those_of_a_sort(temperature, top_k, top_p):
    kept = likely(jnp.asarray(LOGITS)[None] / temperature, settings_of(temperature, top_k, top_p))[0] > -jnp.inf
    assert np.asarray(kept).tolist() == reference(LOGITS, temperature, top_k, top_p).tolist()


# Multiples of 1/8: no two are equal in one precision and not in the other.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(arrays(np.int32, 16, elements=st.integers(-60, 60)), st.integers(1, 16))
def test_as_many_of_the_likeliest_are_kept_as_asked_for_and_what_is_as_likely(eighths, top_k):
    logits = eighths.astype(np.float32) / 8
    kept = likely(jnp.asarray(logits)[None], {"top_k": float(top_k)})[0] > -jnp.inf
    assert np.asarray(kept).tolist() == (logits >= np.sort(logits)[-top_k]).tolist()


def test_rows_are_cut_each_by_itself():
    logits = jnp.stack([jnp.arange(5.0), -jnp.arange(5.0)])
    kept = np.asarray(likely(logits, {"top_k": 2.0}) > -jnp.inf)
    assert kept.tolist() == [[False, False, False, True, True], [True, True, False, False, False]]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7)])
def test_many_draws_have_the_probabilities_of_what_is_kept_and_nothing_else(top_k, top_p):
    count, sampling = 40_000, settings_of(1.0, top_k, top_p)
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(draw)(jnp.broadcast_to(LOGITS, (count, len(LOGITS))), sampling, keys)
    shares = np.bincount(np.asarray(drawn), minlength=len(LOGITS)) / count
    kept = reference(LOGITS, 1.0, top_k, top_p)
    wanted = np.where(kept, np.exp(LOGITS), 0)
    assert not shares[~kept].any()
    np.testing.assert_allclose(shares, wanted / wanted.sum(), atol=5 * 0.5 / count**0.5)


def test_temperature_zero_takes_the_likeliest_whatever_the_key():
    keys = jax.random.split(jax.random.key(0), 8)
    drawn = draw(jnp.broadcast_to(LOGITS, (8, len(LOGITS))), settings_of(0.0, 0, 1.0), keys)
    assert set(np.asarray(drawn).tolist()) == {1}
