"""Runs on chat records: the loss counts the assistant's tokens only, on any devices and after a resume."""

import dataclasses
import json
import re
import shutil
import types
from functools import partial

import jax
import numpy as np
import pytest

import jgraph
from jgraph import evaluate, sample
from jgraph.data import Batches, load
from jgraph.data._texts import count_heldout
from jgraph.data.chat import ChatReader
from jgraph.errors import ConfigError, DataError
from jgraph.train import _validation, evaluation
from jgraph.train.__main__ import main, parse
from jgraph.train._functional import functional_model
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from tests import chats, tiny
from tests.interop.test_interop import LLAMA, make
from tests.train.test_continued import write_run

pytestmark = pytest.mark.once
T = 96
MODEL = dataclasses.replace(LLAMA, vocab_size=400)
TEMPLATE = """
{%- for m in messages %}<{{ m.role }}>
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}
    {%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def turn(number: int) -> list[dict[str, str]]:
    return [chats.message("user", f"{number} + 1?"), chats.message("assistant", f"= {number + 1}")]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "sums.jsonl"
    records = [{"messages": [one for k in range(1 + i % 3) for one in turn(7 * i + k)]} for i in range(40)]
    records += [{"prompt": f"{i} - 1 =", "completion": f" {i - 1}"} for i in range(10, 20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (path.parent / "template.jinja").write_text(TEMPLATE)
    return path


def flags(data, **changed: object) -> list[str]:
    options = {"data": data, "data.format": "chat", "data.template": data.parent / "template.jinja", "seq-len": T} | changed
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def by_hand(model, params, data) -> tuple[float, int]:
    """Returns the mean loss of the trained tokens of all training conversations, each alone, and their number."""
    conversations = sorted(ChatReader(None, data.parent / "template.jinja").read([str(data)]), key=lambda one: one.digest)
    losses, logits = [], jax.jit(partial(model.evaluate, "logits"))
    for one in conversations[count_heldout([one.digest for one in conversations]) :]:
        length = min(len(one.ids), T + 1)
        ids = np.pad(one.ids[:length], (0, T + 1 - length)).astype(np.int32)  # causal, so padding changes no earlier logits
        logp = np.asarray(jax.nn.log_softmax(logits(params, {}, ids[None, :-1])[0]))
        losses += [-float(logp[t, ids[t + 1]]) for t in range(length - 1) if one.trained[t + 1]]
    return float(np.mean(losses)), len(losses)


@pytest.mark.long
def test_the_loss_is_the_mean_over_the_assistants_tokens_of_conversations_alone(tmp_path, data):
    corpus = load(str(data), seq_len=T, vocab_size=None, format="chat", template=data.parent / "template.jinja")
    rows = corpus.sources[0].num_rows(T)
    assert tiny.train(tmp_path / "run", *flags(data, steps=1, **{"batch-size": rows})) == 0
    model = functional_model(RunDir(tmp_path / "run").saved_config(field="run"))
    expected, count = by_hand(model, model.init()[0], data)
    (entry,) = tiny.entries(tmp_path / "run")
    assert entry["loss"] == pytest.approx(expected, rel=1e-5)
    assert entry["trained_tokens"] == count


KEYS = ("step", "loss", "eval_loss", "trained_tokens")
STEPS = {"steps": 6, "log-every": 3, "eval-every": 4, "checkpoint-every": 2, "checkpoint-keep": 9}
STEPS |= {"model.num-layers": 2, "num-microbatches": 2}  # for the pipeline


def numbers(run_dir) -> list[list[float | None]]:
    return [[entry.get(key) for key in KEYS] for entry in tiny.entries(run_dir)]


def assert_near(found: list[list[float | None]], expected: list[list[float | None]]):
    np.testing.assert_allclose(np.array(found, float), np.array(expected, float), rtol=1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert tiny.train(path, *flags(data, **STEPS)) == 0
    return path


@pytest.mark.long
def test_the_log_counts_the_trained_tokens_of_each_interval(whole, data, capsys):
    config = RunDir(whole).saved_config(field="run")
    assert config.input.data_documents == "separate"
    corpus = load(str(data), template=data.parent / "template.jinja", **config.data_options)
    batches = Batches(corpus.sources, batch_size=4, seq_len=T, seed=0, documents="separate")
    expected = [[np.count_nonzero(batches[step]["weights"]) for step in steps] for steps in ([0], [1, 2], [3], [4, 5])]
    assert [entry["step"] for entry in tiny.entries(whole)] == [1, 3, 4, 6]
    assert [entry["trained_tokens"] for entry in tiny.entries(whole)] == [sum(steps) for steps in expected]


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_without_its_template_file(tmp_path, data, whole, capsys):
    own = tmp_path / data.name
    shutil.copyfile(data, own)
    shutil.copyfile(data.parent / "template.jinja", tmp_path / "template.jinja")
    assert tiny.train(tmp_path / "run", *flags(own, **STEPS, dp=2)) == 0
    assert "trained tokens" in capsys.readouterr().out
    expected = numbers(tmp_path / "run")
    assert_near(expected, numbers(whole))
    (tmp_path / "template.jinja").unlink()
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert tiny.train(tmp_path / "run", *flags(own, **STEPS, dp=2)) == 0
    out = capsys.readouterr().out
    assert "resumed from step 2" in out
    assert numbers(tmp_path / "run") == expected


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"cp": 2}, {"pp": 2}])
def test_other_layouts_have_the_losses_of_one_device(tmp_path, data, whole, layout):
    assert tiny.train(tmp_path / "run", *flags(data, **STEPS, **layout)) == 0
    assert_near(numbers(tmp_path / "run"), numbers(whole))


@pytest.mark.long
def test_an_evaluation_has_the_loss_of_the_run_and_counts_trained_tokens(whole, data, tmp_path):
    found = evaluation.evaluate(whole)
    assert found.loss == pytest.approx(tiny.entries(whole)[-1]["eval_loss"], rel=1e-6)
    config = RunDir(whole).saved_config(field="run")
    corpus = load(str(data), template=data.parent / "template.jinja", **config.data_options)
    assert corpus.heldout_sources[0].num_rows(T) <= 8  # all of them are evaluated
    assert found.tokens == found.bytes == corpus.heldout_sources[0].packed.trained.sum()
    text = tmp_path / "chat.jsonl"
    text.write_text("".join(json.dumps({"prompt": "a" * i, "completion": "b" * i}) + "\n" for i in range(1, 40)))
    assert evaluate.main([str(whole), "--data", str(text), "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["data"] == str(text)


@pytest.mark.long
def test_a_folder_is_fine_tuned_evaluated_and_sampled_with_its_template(tmp_path, data, capsys):
    make(tmp_path / "folder", MODEL)
    chats.save_tokenizer(tmp_path / "folder", chats.CHATML)
    (tmp_path / "folder" / "generation_config.json").write_text('{"eos_token_id": 2}')
    options = flags(data, steps=2, **{"init-from": tmp_path / "folder", "data.template": ""})
    options += ["--run-dir", str(tmp_path / "run"), "--batch-size", "4", "--eval-batches", "2", "--sample-tokens", "4"]
    assert main(options) == 0
    assert f"to generate more: python -m jgraph.sample {tmp_path / 'run'} --chat --prompt 'Hello'" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "folder")
    assert evaluation.evaluate(tmp_path / "run").loss == pytest.approx(
        tiny.entries(tmp_path / "run")[-1]["eval_loss"], rel=1e-6
    )
    capsys.readouterr()
    assert sample.main([str(tmp_path / "run"), "--chat", "--system", "Brief.", "--prompt", "Hi", "--temperature", "0"]) == 0
    messages = [chats.message("system", "Brief."), chats.message("user", "Hi")]
    assert capsys.readouterr().out == jgraph.load(tmp_path / "run").chat(messages, temperature=0) + "\n"


@pytest.fixture
def folder(tmp_path):
    make(tmp_path / "folder", MODEL)
    chats.save_tokenizer(tmp_path / "folder", "{{ bos_token }}" + chats.CHATML.strip(), adds_bos=True)
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("end", "file"),
    [
        ("<|im_end|>", ""),  # of the template
        ("</s>", ""),  # of the tokenizer
        ("<|eot_id|>", "generation_config.json"),
        ("<|eot_id|>", "config.json"),
        ("enough", ""),  # of the caller
    ],
)
def test_an_answer_ends_at_the_end_of_a_turn_or_an_end_token(folder, monkeypatch, end, file):
    if file:
        fields = json.loads((folder / file).read_text()) if file == "config.json" else {}
        (folder / file).write_text(json.dumps(fields | {"eos_token_id": [chats.SPECIAL.index("<|eot_id|>")]}))
    loaded = jgraph.load(folder)
    assert loaded.tokenizer.encode("Hi")[0] == chats.SPECIAL.index("<s>")
    given = {}

    def stream(model, params, rows, *, stop, **settings):
        given["rows"], given["stop"] = rows, stop
        for token in loaded.tokenizer.encode(f"Hello!{end} more", special=False):
            if token in stop:
                return
            yield np.array([token])

    monkeypatch.setattr("jgraph.train.loaded.stream", stream)
    assert loaded.chat([chats.message("user", "Hi")], stop=["enough"] if end == "enough" else []) == "Hello!"
    (row,) = given["rows"]
    assert loaded.tokenizer.decode(row) == "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert row.count(chats.SPECIAL.index("<s>")) == 1


@pytest.mark.long
def test_a_trained_model_answers_with_the_trained_text(tmp_path, capsys):
    data = tmp_path / "hello.jsonl"
    records = [{"messages": [chats.message("user", f"Hi {i}"), chats.message("assistant", "Yo!")]} for i in range(9)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    assert tiny.train(tmp_path / "run", *flags(data, steps=60)) == 0
    capsys.readouterr()
    assert sample.main([str(tmp_path / "run"), "--chat", "--prompt", "Hi 3", "--prompt", "Hi 4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Yo!\n\nYo!\n"


@pytest.mark.long
def test_a_model_without_a_template_refuses_to_chat(tmp_path, capsys):
    write_run(tmp_path / "run", TrainConfig.from_fields(run_dir=str(tmp_path / "run")))
    with pytest.raises(DataError, match="must be a run or folder with a chat template"):
        jgraph.load(tmp_path / "run").chat([chats.message("user", "Hi")])
    assert sample.main([str(tmp_path / "run"), "--prompt", "a", "--system", "b"]) == 2
    assert "--system is b: must be empty without" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"data_template": "a.jinja"}, "data_template"),
        ({"data_truncate": "drop"}, "data_truncate"),
        ({"data_format": "chat", "data_shuffle": "documents"}, "data_shuffle"),
        ({"data_format": "other"}, "data_format"),
    ],
)
def test_settings_of_chat_data_are_checked(fields, field):
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_fields(**fields)
    assert error.value.field == field


def test_chat_records_are_recognized_by_their_fields(tmp_path, data):
    (tmp_path / "text.jsonl").write_text('{"text": "a", "messages": []}\n{"messages": []}\n')
    (tmp_path / "bad.jsonl").write_text("{")
    for name, flags, expected in (
        (data, (), "chat"),
        (f"{data}:2", (), "chat"),
        (data, ("--data.format", "text"), "text"),
        (tmp_path / "text.jsonl", (), "text"),
        (tmp_path / "text.jsonl", ("--data.field", "other"), "chat"),
        (tmp_path / "bad.jsonl", (), "text"),
        ("python-docs", (), "text"),
    ):
        config = parse(["--data", str(name), *flags, "--run-dir", str(tmp_path / "run")])
        assert config.input.data_format == expected
    assert parse(["--data", str(data), "--data.truncate", "drop"]).input.data_truncate == "drop"


@pytest.mark.long
def test_the_sample_of_a_chat_run_begins_with_a_conversation_up_to_the_first_turn_of_the_assistant(data, monkeypatch):
    corpus = load(str(data), seq_len=T, vocab_size=None, format="chat", template=data.parent / "template.jinja")
    monkeypatch.setattr("jgraph.train._validation.generate", lambda *args, **options: [args[2][0][:0]])
    monkeypatch.setattr("jgraph.train._validation.decoder", lambda setup: None)
    config = TrainConfig.from_fields(seq_len=T, data=str(data), data_format="chat", sample_tokens=4)
    prompt, _ = _validation.sample(types.SimpleNamespace(config=config), None, corpus)  # pyright: ignore[reportArgumentType]
    assert re.fullmatch(r"<user>\d+ \+ 1\?</s><assistant>", prompt)


def test_a_text_run_on_chat_records_is_refused_with_the_flag(tmp_path, data, capsys):
    assert tiny.train(tmp_path / "run", "--data", str(data), "--data.format", "text") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "set --data.format to chat" in err
