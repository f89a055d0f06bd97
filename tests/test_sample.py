import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.inference.generate import generate

V = 11


def counting(step, tokens_BT):
    """A model that is sure of the sum, modulo V, of all tokens it sees so far and `step`."""
    sums_BT = (jnp.cumsum(tokens_BT, axis=1) + step) % V
    return 100.0 * jax.nn.one_hot(sums_BT, V)


def expected(step: int, prompt: list[int], num_tokens: int, window: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((sum(tokens[-window:]) + step) % V)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", [1, 3, 4, 16, 40])
@pytest.mark.parametrize("prompt", [[5], [1, 2, 3, 4, 5]])
def test_each_token_is_drawn_from_the_logits_after_the_last_real_one(prompt, window):
    tokens = generate(counting, 3, jnp.array(prompt), jax.random.key(0), num_tokens=20, window=window)
    assert np.asarray(tokens).tolist() == expected(3, prompt, 20, window)


def uniform(params, tokens_BT):
    return jnp.zeros((*tokens_BT.shape, V))


def test_the_key_decides_what_is_drawn():
    draws = [
        np.asarray(generate(uniform, None, jnp.array([0]), jax.random.key(seed), num_tokens=64, window=8)).tolist()
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert set(draws[0]) == set(range(V))


def test_a_token_that_is_far_likelier_than_all_others_is_drawn():
    def steep(params, tokens_BT):
        return jnp.broadcast_to(1e3 * jnp.arange(V), (*tokens_BT.shape, V))

    tokens = generate(steep, None, jnp.array([0]), jax.random.key(0), num_tokens=50, window=8)
    assert set(np.asarray(tokens).tolist()) == {V - 1}
