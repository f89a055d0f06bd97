"""Text generation: drawn tokens, with and without a cache, and the end of a text."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph.errors import ConfigError
from jgraph.inference import generate as generating
from jgraph.inference.generate import ENDED
from jgraph.moe import MoEConfig
from jgraph.train import _validation
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.xla import check_identity
from jgraph_models.gpt import GPT, GPTConfig

V = 11
PROMPTS = [[1, 2, 3], [7] * 20, [5]]
SIZES = {"num_layers": 2, "d_model": 32, "d_ff": 48, "vocab_size": 61, "compute_dtype": "float32"}
SIGMOID = MoEConfig(num_experts=5, experts_per_token=2, d_ff=24, shared_experts=1, router="sigmoid", weights_scale=2.5)
MODELS = {
    "gpt": {},
    "llama": {"mlp": "swiglu", "head": "untied", "num_kv_heads": 2, "rope_scaling": "llama3", "rope_original_length": 16},
    "qwen2, scanned": {"mlp": "swiglu", "attention_bias": "qkv", "scan_layers": True},
    "qwen3": {"mlp": "swiglu", "qk_norm": "head", "head_dim": 12, "num_kv_heads": 1},
    "mixture, scanned": {"mlp": "swiglu", "scan_layers": True, "moe": SIGMOID},
}


class Counting(nnx.Module):
    """Predicts the sum of all previous tokens and `step`, modulo V."""

    def __init__(self):
        self.step = nnx.Param(jnp.array(3))

    def logits(self, tokens_BT):
        return 100.0 * jax.nn.one_hot((jnp.cumsum(tokens_BT, axis=1) + self.step[...]) % V, V)


class Uniform(nnx.Module):
    def logits(self, tokens_BT):
        return jnp.zeros((*tokens_BT.shape, V))


@pytest.fixture(scope="module")
def counting():
    return jgraph.functional(Counting)


def gpt(**settings):
    """Returns a model and parameters with noise, so that each parameter affects the result."""
    config = GPTConfig(**SIZES | settings)
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    noise = lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape)  # noqa: E731
    return model, jax.jit(lambda: jax.tree.map(noise, model.init()[0]))()


def with_biases(carried):
    """Returns a random state, so that each expert's bias affects the result."""
    return jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(0), leaf.shape).astype(leaf.dtype), carried)


def uncached(model):
    return dataclasses.replace(model, decoder=None)


def rows(found):
    return [row.tolist() for row in found]


# --- A model that has only logits ---


def expected(step, prompt, num_tokens, window):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append((sum(tokens[-window:]) + step) % V)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", [1, 3, 16, 40])
def test_each_token_is_drawn_from_the_logits_of_the_last_token(counting, window):
    prompts = [prompt for prompt in ([5], [1, 2, 3], [4] * 30) if len(prompt) <= window]
    found = jgraph.generate(counting, {"step": jnp.array(3)}, prompts, max_tokens=20, window=window)
    assert rows(found) == [expected(3, prompt, 20, window) for prompt in prompts]


def test_seeds_reproduce_and_differ():
    uniform = jgraph.functional(Uniform)
    draws = [rows(jgraph.generate(uniform, {}, [[0], [0]], max_tokens=64, key=key)) for key in (0, jax.random.key(0), 1)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]
    assert set(draws[0][0]) == set(range(V))


def test_draws_of_a_text_use_different_keys():
    texts = rows(jgraph.generate(jgraph.functional(Uniform), {}, [[0]] * 32, max_tokens=4))
    for one, other in itertools.combinations(zip(*texts, strict=True), 2):
        assert one != other


# --- A cache of keys and values ---


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long, pytest.mark.once] * (kind != "llama")) for kind in MODELS]
)
def test_greedy_text_is_the_same_with_and_without_a_cache_and_for_single_prompts(kind):
    model, params = gpt(**MODELS[kind])
    choices = {"max_tokens": 12, "temperature": 0, "carried": with_biases(model.new_state())}
    found = rows(jgraph.generate(model, params, PROMPTS, **choices))
    assert found == rows(jgraph.generate(uncached(model), params, PROMPTS, **choices))
    assert len(set(itertools.chain(*found))) > 3
    alone = [rows(jgraph.generate(model, params, [prompt], **choices))[0] for prompt in PROMPTS]
    assert found == alone


@pytest.mark.long
@pytest.mark.once
def test_a_run_samples_with_the_biases_of_its_router():
    sizes = SIZES | {"num_layers": 1, "mlp": "swiglu", "moe": SIGMOID}
    setup = TrainSetup.from_config(TrainConfig.from_fields(model=GPTConfig(**sizes), batch_size=1, seq_len=8))
    state = setup.init()
    state = dataclasses.replace(state, carried=with_biases(state.carried))
    (token,) = rows(jgraph.generate(_validation.decoder(setup), state, PROMPTS[:1], max_tokens=1, temperature=0))[0]
    assert token == int(jnp.argmax(_validation.logits(setup, state, jnp.array(PROMPTS[:1]))[0, -1]))


@pytest.mark.long
@pytest.mark.once
def test_a_model_with_router_biases_needs_its_state():
    model, params = gpt(num_layers=1, mlp="swiglu", moe=SIGMOID)
    with pytest.raises(ConfigError) as error:
        jgraph.generate(model, params, PROMPTS, max_tokens=1)
    assert error.value.field == "carried"


@pytest.mark.long
@pytest.mark.once
def test_sampled_text_is_the_same_with_and_without_a_cache():
    model, params = gpt()
    choices = {"max_tokens": 12, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "key": 5}
    found = rows(jgraph.generate(model, params, PROMPTS, **choices))
    assert found == rows(jgraph.generate(uncached(model), params, PROMPTS, **choices))


@pytest.mark.long
@pytest.mark.once
def test_one_layer_beyond_the_window_attends_to_the_last_tokens_only():
    model, params = gpt(num_layers=1)
    choices = {"max_tokens": 30, "temperature": 0, "window": 21}
    found = rows(jgraph.generate(model, params, PROMPTS, **choices))
    assert found == rows(jgraph.generate(uncached(model), params, PROMPTS, **choices))


@pytest.mark.long
@pytest.mark.once
def test_several_layers_beyond_the_window_have_sliding_window_attention(monkeypatch):
    # Differs from recomputing the window: keys of the second layer depend on tokens outside it.
    model, params = gpt()
    choices = {"max_tokens": 30, "temperature": 0}
    found = rows(jgraph.generate(model, params, PROMPTS, window=21, **choices))
    assert found != rows(jgraph.generate(uncached(model), params, PROMPTS, window=21, **choices))
    sliding = functools.partial(jax.nn.dot_product_attention, local_window_size=(20, 0))
    monkeypatch.setattr(jax.nn, "dot_product_attention", sliding)
    assert found == rows(jgraph.generate(uncached(model), params, PROMPTS, **choices))


def carry_of(model, params, sampling):
    weights = model.decoder.prepare(params, {})
    sizes = {"slots": 64, "length": 64, "where": None}
    tokens, key = np.zeros((2, 8), np.int32), jax.random.key(0)
    stop = np.zeros(0, np.int32)
    carry = generating._begin(weights, tokens, np.array([3, 8]), key, sampling, stop, decoder=model.decoder, **sizes)
    return carry, weights, stop


@pytest.mark.long
def test_a_token_updates_cache_and_position_in_place():
    model, params = gpt()
    sampling = {"temperature": 1.0}
    carry, weights, stop = carry_of(model, params, sampling)
    compiled = generating._next_token.lower(carry, weights, sampling, stop, decoder=model.decoder, where=None).compile()
    check_identity(compiled, carry)


def test_a_second_call_does_not_trace_again():
    traces = []
    decoder = generating.windowed(lambda weights, tokens_BT: traces.append(1) or jax.nn.one_hot(tokens_BT, V))
    for _ in range(2):
        before = len(traces)
        jgraph.generate(decoder, {}, [[1, 2]], max_tokens=3)
    assert len(traces) == before > 0


def test_weights_are_cast_before_the_first_token():
    model, params = gpt(compute_dtype="bfloat16")
    weights = jax.eval_shape(model.decoder.prepare, params, {})
    sizes = {leaf.ndim: leaf.dtype for leaf in jax.tree.leaves(weights)}
    assert sizes == {1: jnp.float32, 2: jnp.bfloat16}  # scales of norms are read in float32


# --- The end of a text ---


def test_a_stop_token_ends_only_its_text_and_is_not_returned(counting):
    params, prompts = {"step": jnp.array(3)}, [[5], [1, 2, 3]]
    whole = [expected(3, prompt, 20, 99) for prompt in prompts]
    stop = [token for token in whole[0] if token not in whole[1][:8]][:1]
    found = rows(jgraph.generate(counting, params, prompts, max_tokens=20, stop=stop))
    assert found == [list(itertools.takewhile(lambda token: token != stop[0], row)) for row in whole]


def test_a_text_can_be_empty(counting):
    (found,) = jgraph.generate(counting, {"step": jnp.array(3)}, [[5]], stop=[8])
    assert found.tolist() == []


def test_a_stream_yields_the_tokens_of_generate_and_marks_ended_texts(counting):
    params, prompts = {"step": jnp.array(3)}, [[5], [1, 2, 3]]
    steps = np.stack(list(jgraph.stream(counting, params, prompts, max_tokens=9, stop=[expected(3, [5], 3, 99)[-1]])), 1)
    found = jgraph.generate(counting, params, prompts, max_tokens=9, stop=[expected(3, [5], 3, 99)[-1]])
    assert [row[row != ENDED].tolist() for row in steps] == rows(found)
    assert steps[0].tolist() == [*found[0].tolist(), *[ENDED] * (9 - len(found[0]))]


class NextId(nnx.Module):
    """Continues every text with the id after its last one."""

    def logits(self, tokens_BT):
        return 100.0 * jax.nn.one_hot(tokens_BT + 1, V)


def test_a_text_does_not_continue_after_a_stop_token():
    # The second text has not ended. The model would continue the first text at 1.
    found = jgraph.generate(jgraph.functional(NextId), {}, [[1], [5]], max_tokens=5, temperature=0, stop=[3])
    assert rows(found) == [[2], [6, 7, 8, 9, 10]]


# --- Errors ---


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("prompts", {"prompts": []}),
        ("prompts", {"prompts": [[1], []]}),
        ("prompts", {"prompts": [1, 2]}),
        ("prompts", {"prompts": [[0.5]]}),
        ("prompts", {"prompts": [[1, V]]}),
        ("prompts", {"prompts": [[-1]]}),
        ("prompts", {"prompts": [[1] * 9], "window": 8}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": float("nan")}),
        ("temperature", {"temperature": 1e39}),
        ("top_k", {"top_k": -1}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.5}),
        ("window", {"window": 0}),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_before_sampling(counting, field, wrong):
    with pytest.raises(ConfigError) as error:
        jgraph.stream(counting, {"step": jnp.array(3)}, **{"prompts": [[1]]} | wrong)
    assert error.value.field == field
    assert "\n" not in str(error.value)
