"""Models of runs are loaded from any layout and generate text, by code and by the command line."""

import io
import re
import shlex
import sys
from functools import partial

import jax
import numpy as np
import pytest

import jgraph
from jgraph import sample
from jgraph.data import Tokenizer
from jgraph.errors import CheckpointError, ConfigError, DataError
from jgraph.inference.text import TextStream
from jgraph.train.__main__ import main
from tests import tiny

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "plain"
    assert tiny.train(path, "--steps", "4", "--checkpoint-every", "2", "--sample-tokens", "0") == 0
    return path


@pytest.fixture(scope="module")
def loaded(run_dir):
    return jgraph.load(run_dir)


# --- Loading ---


@pytest.mark.long
def test_a_run_of_any_layout_is_loaded_onto_one_device(run_dir, loaded, tmp_path):
    flags = shlex.split("--steps 4 --sample-tokens 0 --fsdp 2 --pp 2 --model.num-layers 2 --num-microbatches 2")
    assert tiny.train(tmp_path / "spread", *flags) == 0
    spread = jgraph.load(tmp_path / "spread")
    for one in (loaded, spread):
        leaves = jax.tree.leaves(one.params)
        assert {leaf.device for leaf in leaves} == {jax.devices()[0]}
        assert jax.tree.map(lambda leaf: leaf.shape, one.params) == jax.tree.map(lambda leaf: leaf.shape, one.model.shapes)
        assert len(one.tokenizer.encode(one.generate("The ", max_tokens=5))) >= 1


@pytest.mark.long
def test_load_reads_the_requested_step(run_dir, loaded):
    batch = np.asarray(loaded.tokenizer.encode("The with statement is used to wrap"))[None, :33].astype(np.int32)
    earlier = jgraph.load(run_dir, step=2)
    loss = jax.jit(partial(loaded.model.evaluate, "loss"))
    losses = [float(loss(one.params, {}, batch)) for one in (earlier, loaded)]
    assert losses[1] < losses[0]  # training reduces the loss


@pytest.mark.long
def test_the_repr_names_run_step_parameters_tokenizer_and_window(run_dir, loaded):
    parameters = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert repr(loaded) == f"GPT of {run_dir} after 4 steps: {parameters:,} parameters, tokenizer bytes, window 32"


def test_the_logits_of_a_loaded_model_give_its_greedy_text(loaded):
    ids = loaded.tokenizer.encode("The with")
    expected = jax.jit(partial(loaded.model.evaluate, "logits"))(loaded.params, {}, np.array([ids], np.int32))[0]
    found = loaded.logits(ids)
    assert found.shape == (len(ids), 256)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert loaded.tokenizer.decode([int(found[-1].argmax())]) == loaded.generate("The with", max_tokens=1, temperature=0)


@pytest.mark.long
def test_a_batch_of_prompts_has_the_texts_of_separate_prompts(loaded):
    prompts = ["The ", "An iterator is"]
    choices = {"max_tokens": 8, "temperature": 0}
    assert loaded.generate(prompts, **choices) == [loaded.generate(prompt, **choices) for prompt in prompts]


@pytest.mark.parametrize(("length", "settings"), [(33, {}), (9, {"window": 8})])
def test_a_prompt_longer_than_the_window_of_the_run_or_of_the_call_is_refused(loaded, length, settings):
    with pytest.raises(ConfigError) as error:
        loaded.generate("a" * length, max_tokens=1, **settings)
    assert error.value.field == "prompts"


@pytest.mark.long
def test_the_pieces_of_a_stream_join_to_the_generated_text(loaded):
    pieces = list(loaded.stream(["The ", "def"], max_tokens=20, key=3))
    texts = ["".join(piece for number, piece in pieces if number == own) for own in range(2)]
    assert texts == loaded.generate(["The ", "def"], max_tokens=20, key=3)


def test_a_stop_text_ends_the_continuation(loaded):
    whole = loaded.generate("The ", max_tokens=28, key=3)
    stop = whole[5:7]
    assert loaded.generate("The ", max_tokens=28, key=3, stop=[stop]) == whole[: whole.index(stop)]


@pytest.mark.long
def test_a_user_model_is_loaded_with_running_statistics_and_needs_logits_for_text(tmp_path):
    flags = "--model.module tests.own:Normed --steps 2 --batch-size 4 --seq-len 16 --eval-batches 1 --sample-tokens 0"
    assert main([*shlex.split(flags), "--run-dir", str(tmp_path / "own")]) == 0
    loaded = jgraph.load(tmp_path / "own", module="tests.own:Normed")
    assert np.abs(loaded.carried["norm"]["mean"]).max() > 0
    with pytest.raises(ConfigError) as error:
        loaded.generate("ab")
    assert error.value.field == "model"


@pytest.mark.parametrize(("step", "kind"), [(None, ConfigError), (3, CheckpointError)])
def test_a_missing_run_or_step_is_refused_in_one_line(run_dir, tmp_path, step, kind):
    with pytest.raises(kind) as error:
        jgraph.load(run_dir if step else tmp_path / "none", step=step)
    assert error.value.field == ("step" if step else "run")
    assert "\n" not in str(error.value)


def test_encoding_a_text_needs_a_tokenizer():
    numbers = Tokenizer(without="runs/first has no tokenizer")
    assert numbers.decode([5, 17]) == "5 17 "
    with pytest.raises(DataError):
        numbers.encode("text")


# --- Streamed text ---


def streamed(ids, stop=()):
    text = TextStream(Tokenizer().decode, [], stop)
    return [*(text.push(token) for token in ids), text.finish()]


def test_a_character_is_streamed_after_its_last_byte():
    assert streamed("aé€b".encode()) == ["a", "", "é", "", "", "€", "b", ""]


def test_a_character_that_begins_in_the_prompt_is_streamed():
    text = TextStream(Tokenizer().decode, "aé".encode()[:-1])
    assert text.push("é".encode()[-1]) == "é"


def test_invalid_utf8_does_not_hold_back_the_rest():
    assert "".join(streamed(b"a\xffb\xe2\x82")) == "a\ufffdb\ufffd"


def test_a_possible_start_of_a_stop_text_is_held_back_until_it_is_decided():
    assert streamed(b"ab12x", stop=["123"]) == ["a", "b", "", "", "12x", ""]
    assert streamed(b"ab123x", stop=["123", "zz"]) == ["a", "b", "", "", "", "", ""]


# --- The command line ---


def run(*args):
    return sample.main([str(arg) for arg in args])


def test_prompts_and_standard_input_are_printed_with_their_continuations(run_dir, loaded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def f")))
    assert run(run_dir, "--prompt", "The ", "--prompt", "-", "--max-tokens", 6, "--temperature", 0) == 0
    first, second = loaded.generate(["The ", "def f"], max_tokens=6, temperature=0)
    assert capsys.readouterr().out == f"The {first}\n\ndef f{second}\n"


def test_compilation_is_announced_on_stderr_by_the_command_line_only(run_dir, loaded, capsys):
    assert run(run_dir, "--prompt", "The ", "--max-tokens", 6, "--temperature", 0) == 0
    assert re.fullmatch(
        r"loading the model: \d+\.\d s\ncompiling the prompt and token programs: \d+\.\d s\n", capsys.readouterr().err
    )
    loaded.generate("The ", max_tokens=6, temperature=0)
    assert capsys.readouterr() == ("", "")


def test_a_temperature_that_is_zero_in_float32_is_greedy(run_dir, loaded, capsys):
    assert run(run_dir, "--prompt", "The ", "--max-tokens", 6, "--temperature", "1e-39") == 0
    assert capsys.readouterr().out == f"The {loaded.generate('The ', max_tokens=6, temperature=0)}\n"


@pytest.mark.parametrize(
    ("flag", "args"),
    [
        ("--prompt", []),
        ("--prompt", ["--prompt", ""]),
        ("--prompt", ["--prompt", "x" * 40]),
        ("--top-p", ["--prompt", "x", "--top-p", "1.5"]),
        ("--temperature", ["--prompt", "x", "--temperature", "-1"]),
        ("--temperature", ["--prompt", "x", "--temperature", "1e39"]),
        ("--stop", ["--prompt", "x", "--stop", ""]),
        ("--step", ["--prompt", "x", "--step", "3"]),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_with_its_name(run_dir, capsys, flag, args):
    assert run(run_dir, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jgraph.sample: error: {flag} ")
    assert err.count("\n") == 1


def test_loading_an_id_of_the_hugging_face_hub_is_refused_with_the_download_command():
    with pytest.raises(ConfigError, match=r"no such folder; .* hf download Qwen/Qwen3-0\.6B --local-dir") as error:
        jgraph.load("Qwen/Qwen3-0.6B")
    assert error.value.field == "run"
