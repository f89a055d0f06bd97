"""Logits, and scores of continuations, equal those computed by the model for each text alone."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph import evaluate
from jgraph.errors import ConfigError
from jgraph.inference import score
from jgraph.inference.score import scores
from jgraph_models.gpt import GPT, GPTConfig
from tests.interop.test_interop import make

pytestmark = pytest.mark.once

CONFIG = GPTConfig(num_layers=1, d_model=16, d_ff=32, num_heads=2, num_kv_heads=1, vocab_size=11, compute_dtype="float32")
SIZES = [(1, 3), (20, 1), (70, 2)]  # tokens of contexts and continuations


@pytest.fixture(scope="module")
def model():
    return jgraph.functional(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def params(model):
    return jax.tree.map(lambda leaf: 10 * leaf, model.init()[0])  # far from uniform probabilities


@pytest.fixture(scope="module")
def logits(model, params):
    """Returns a function that computes the logits at each position of one row without padding."""
    compiled = jax.jit(lambda tokens_BT: model.evaluate("logits", params, {}, tokens_BT))
    return lambda row: np.asarray(compiled(np.array([row], np.int32))[0])


def close(log_prob):
    # A change of each weight by one unit in the last place changes a sum of -23 by 7e-5, and one of -0.06 by 1e-6.
    return pytest.approx(log_prob, rel=1e-5, abs=1e-5)


def expected(logits, context, continuation):
    own = logits([*context, *continuation][:-1])[-len(continuation) :]
    log_probs = own - np.log(np.exp(own).sum(-1, keepdims=True))
    return sum(log_probs[i, token] for i, token in enumerate(continuation)), own.argmax(-1).tolist() == list(continuation)


def test_scores_of_a_padded_batch_equal_those_of_each_pair_alone(model, params, logits):
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(11, size=length).tolist(), rng.integers(11, size=count).tolist()) for length, count in SIZES]
    greedy = int(logits(pairs[1][0])[-1].argmax())
    pairs += [(pairs[1][0], [greedy]), (pairs[1][0], [(greedy + 1) % 11]), (pairs[1][0], [greedy, 3, 5])]
    found = dict(scores(model, params, pairs, batch_size=4))
    assert found.keys() == set(range(len(pairs)))
    for index, pair in enumerate(pairs):
        log_prob, is_greedy = expected(logits, *pair)
        assert found[index].log_prob == close(log_prob)
        assert found[index].is_greedy == is_greedy
    assert (found[len(SIZES)].is_greedy, found[len(SIZES) + 1].is_greedy) == (True, False)


def test_a_pair_longer_than_the_window_loses_tokens_at_the_start_of_its_context(model, params, logits):
    context = np.random.default_rng(1).integers(11, size=9).tolist()
    for length in (6, 7, 8, 9):
        kept = context[:length][-7:]  # the model reads all tokens but the last
        ((_, found),) = scores(model, params, [(context[:length], [1, 2])], window=8)
        assert found.log_prob == close(expected(logits, kept, [1, 2])[0])


def test_an_empty_continuation_is_certain(model, params):
    assert list(scores(model, params, [([1], []), ([2, 3], [])])) == [(1, (0.0, True)), (0, (0.0, True))]


class Averaging(nnx.Module):
    """Has the same logits for every token: a running mean, negated."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def logits(self, tokens_BT):
        return self.norm(jnp.zeros((*tokens_BT.shape, 3)), use_running_average=True)


def test_scores_use_the_running_statistics_that_are_given():
    model = jgraph.functional(lambda: Averaging(nnx.Rngs(0)))
    params, carried = model.init()
    carried["norm"]["mean"] = jnp.asarray([0.0, 1.0, 2.0])
    ((_, found),) = scores(model, params, [([0], [2])], carried=carried)
    assert found.log_prob == pytest.approx(float(jax.nn.log_softmax(-carried["norm"]["mean"])[2]), abs=1e-3)


@pytest.mark.parametrize("window", [None, 9])
def test_logits_of_a_padded_batch_equal_those_of_each_text_alone(model, params, logits, window):
    texts = [[1, 2, 3], [4], list(range(9))]
    found = score.logits(model, params, texts, window=window)
    assert (found.shape, found.dtype) == ((3, 9, 11), jnp.float32)
    for own, text in zip(found, texts, strict=True):
        np.testing.assert_allclose(own[: len(text)], logits(text), rtol=1e-4, atol=1e-4)


def test_logits_of_one_text_have_no_axis_of_texts(model, params):
    ids = np.array([3, 1, 4])
    assert score.logits(model, params, ids).shape == (3, 11)
    assert (score.logits(model, params, ids) == score.logits(model, params, ids[None])[0]).all()


def test_texts_of_similar_length_share_a_program_of_logits(model, params):
    before = score._logits._cache_size()
    for length in (5, 33, 64):
        score.logits(model, params, [[1] * length] * 4)
    assert score._logits._cache_size() == before + 1


@pytest.mark.parametrize("ids", [[], [[]], [[1], []], 3 * [[[1]]], [0.5], [11], "text", [1, 2, 3]])
def test_wrong_ids_are_refused_in_one_line(model, params, ids):
    with pytest.raises(ConfigError) as error:
        score.logits(model, params, ids, window=2)
    assert error.value.field == "ids"
    assert "\n" not in str(error.value)


def test_rows_are_padded_to_a_power_of_two_and_at_most_the_window():
    assert [score._row_length(length, None) for length in (1, 64, 65, 128, 129)] == [64, 64, 128, 128, 256]
    assert [score._row_length(70, window) for window in (100, 200)] == [100, 128]


def test_pairs_of_similar_length_share_a_program(model, params):
    before = score._scores._cache_size()
    list(scores(model, params, [([1] * n, [2]) for n in range(128, 64, -7)], batch_size=3))
    assert score._scores._cache_size() == before + 1


@pytest.mark.parametrize(
    ("pairs", "choices", "field"),
    [
        ([([1], [2]), ([], [2])], {}, "pairs"),
        ([([1], [2, 3, 4])], {"window": 2}, "pairs"),
        ([([1], [11])], {}, "pairs"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(model, params, pairs, choices, field):
    with pytest.raises(ConfigError) as error:
        list(scores(model, params, pairs, **choices))
    assert error.value.field == field
    assert "\n" not in str(error.value)


# --- The command line ---


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--limit 3", "--limit is 3: must be used with --tasks"),
        ("--num-fewshot 0", "--num-fewshot is 0: must be used with --tasks"),
        ("--tasks a --data book.txt more.txt", "--data is book.txt more.txt: must be left out with --tasks"),
        ("--tasks a --fsdp 2", "--fsdp is 2: must be left out with --tasks"),
        ("--tasks a --limit 0", "--limit is 0: must be positive"),
        ("--tasks a --batch-size 0", "--batch-size is 0: must be positive"),
        ("--tasks a --seq-len 0", "--seq-len is 0: must be positive"),
        ("--tasks a", "needs the lm_eval library: pip install 'jgraph[lm-eval]'"),
    ],
)
def test_wrong_flags_of_tasks_are_refused_in_one_line(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it is not installed
    make(tmp_path / "folder")
    assert evaluate.main([str(tmp_path / "folder"), *flags.split()]) == 2
    err = re.sub(r"^loading the model: \d+\.\d s\n", "", capsys.readouterr().err)
    assert err == f"jgraph.evaluate: error: {message}\n"
