"""Tests of temperature, top-k and top-p: against a sort, by the frequencies of many draws, and at the limits of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

import jgraph
from jgraph.inference.generate import draw, filtered_logits, settings_of

pytestmark = pytest.mark.once

LOGITS = np.log(np.array([0.02, 0.4, 0.08, 0.25, 0.05, 0.2], np.float32))


class Fixed(nnx.Module):
    """Returns the same logits after every token, with the largest at id 7."""

    def logits(self, tokens_BT):
        logits_V = jnp.array([0.0, 90.0, 99.5, -5.0, 50.0, 0.0, 0.0, 100.0, 1e-9])
        return jnp.broadcast_to(logits_V, (*tokens_BT.shape, logits_V.size))


def kept(logits_BV, temperature=1.0, top_k=0, top_p=1.0):
    """Returns a mask of the tokens that can be drawn."""
    settings = settings_of(temperature, top_k, top_p)
    return np.asarray(jax.jit(filtered_logits)(jnp.asarray(logits_BV), settings)) > -np.inf


def reference(logits, temperature, top_k, top_p):
    """Returns the same mask for one row, computed by sorting in float64."""
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
def test_top_k_and_top_p_keep_the_same_tokens_as_a_sort(temperature, top_k, top_p):
    found = kept(LOGITS[None], temperature, top_k, top_p)[0]
    assert found.tolist() == reference(LOGITS, temperature, top_k, top_p).tolist()


# Multiples of 1/8 are exact in float32 and float64, so both precisions have the same ties.
@settings(max_examples=60)
@given(arrays(np.int32, 16, elements=st.integers(-60, 60)), st.integers(1, 16))
def test_top_k_keeps_the_k_largest_logits_and_ties_with_the_last(eighths, top_k):
    logits = eighths.astype(np.float32) / 8
    assert kept(logits[None], top_k=top_k)[0].tolist() == (logits >= np.sort(logits)[-top_k]).tolist()


def test_negative_zero_ties_with_zero():
    assert kept(np.array([[0.0, -0.0, -1.0]], np.float32), top_k=1).tolist() == [[True, True, False]]


def test_each_row_is_filtered_on_its_own():
    logits = jnp.stack([jnp.arange(5.0), -jnp.arange(5.0)])
    assert kept(logits, top_k=2).tolist() == [[False, False, False, True, True], [True, True, False, False, False]]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [pytest.param(0, 1.0, marks=pytest.mark.long), pytest.param(3, 1.0, marks=pytest.mark.long), (0, 0.7)]
)
def test_draws_have_the_probabilities_of_the_kept_tokens(top_k, top_p):
    count, sampling = 40_000, settings_of(1.0, top_k, top_p)
    keys = jax.random.split(jax.random.key(0), count)
    drawn = jax.jit(draw)(jnp.broadcast_to(LOGITS, (count, len(LOGITS))), sampling, keys)
    shares = np.bincount(np.asarray(drawn), minlength=len(LOGITS)) / count
    allowed = reference(LOGITS, 1.0, top_k, top_p)
    expected = np.where(allowed, np.exp(LOGITS), 0)
    assert not shares[~allowed].any()
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=5 * 0.5 / count**0.5)


# --- At the limits of float32 ---


@pytest.fixture(scope="module")
def fixed():
    return jgraph.functional(Fixed)


def drawn_ids(model, **sampling):
    """Returns the set of the ids drawn after eight prompts, two tokens each."""
    return set(np.concatenate(jgraph.generate(model, {}, [[1]] * 8, max_tokens=2, **sampling)).tolist())


# 1e-50 is 0 in float32, 1e-39 a subnormal number, 1.2e-38 just above them; 100 / 1e-37 overflows.
@pytest.mark.parametrize("temperature", [0, 1e-50, 1e-39, 1.2e-38, 1e-37, 1e-3])
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.9}], ids=str)
def test_low_temperatures_draw_the_largest_logit(fixed, temperature, filters):
    assert drawn_ids(fixed, temperature=temperature, **filters) == {7}


# At 3e38 all logits / temperature are 0 in float32.
@pytest.mark.parametrize("temperature", [1.0, 3e38])
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-39}, {"top_p": 1e-50}], ids=str)
def test_the_narrowest_filters_draw_the_largest_logit_at_any_temperature(fixed, temperature, filters):
    assert drawn_ids(fixed, temperature=temperature, **filters) == {7}
