"""Tasks of lm-eval have the results of its own model for `transformers`, per request."""

import json
import shutil
import types
import warnings

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import jgraph
from jgraph import evaluate
from jgraph.errors import ConfigError, DataError
from jgraph.train.harness import score_tasks

pytestmark = [pytest.mark.finetune, pytest.mark.filterwarnings("ignore")]

WINDOW = 48
TEXTS = ["ab cd", "the cat sat on the mat " * 5, " a leading space", "q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes a Llama with a tokenizer of characters that adds a begin-of-text token."""
    from tests.parity import folders

    path = folders.save("llama", tmp_path_factory.mktemp("folders") / "llama")
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz .?:\n0123456789ABCDEFGHIJKLMN", "th", "the"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [("t", "h"), ("th", "e")], unk_token="<unk>")
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(" ", "merged_with_next"), decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    """Returns lm-eval's model for `transformers`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.models.huggingface import HFLM

        from tests.parity.folders import load, transformers

        tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
        return HFLM(load(folder), tokenizer=tokenizer, batch_size=3, max_length=WINDOW)


@pytest.fixture(scope="module")
def ours(folder):
    return jgraph.lm_eval_model(jgraph.load(folder), batch_size=3, max_length=WINDOW)


def requests(*args):
    return [types.SimpleNamespace(args=own, task_name="") for own in args]


def test_log_probabilities_equal_those_of_the_hf_model(ours, theirs):
    own = [(context, " the end") for context in (*TEXTS, "trailing  ", "", "<s>a")]
    # Around the longest request that fits, and a continuation that greedy decoding produces.
    own += [("x" * n, "ab") for n in range(WINDOW - 4, WINDOW + 2)]
    own += [("cat", letter) for letter in "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMN"]
    expected, found = theirs.loglikelihood(requests(*own)), ours.loglikelihood(requests(*own))
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-4)
    assert [one[1] for one in found] == [one[1] for one in expected]
    assert {one[1] for one in found} == {True, False}


def test_a_begin_of_text_token_that_is_only_declared_is_the_prefix(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    fields = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(fields | {"post_processor": None}))
    model = jgraph.lm_eval_model(jgraph.load(copy), max_length=WINDOW)
    assert (model.prefix_token_id, model.eot_token_id) == (1, 2)
    assert 1 not in model.tok_encode("ab")


def test_a_tokenizer_without_any_token_for_an_end_is_refused_in_one_line(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    words = Tokenizer(models.WordLevel({"a": 0}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(copy / "tokenizer.json"))
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match=r"has no token for the end of a text or a newline.*declare `eos_token`"):
        jgraph.lm_eval_model(jgraph.load(copy))


def test_rolling_log_probabilities_equal_those_of_the_hf_model(ours, theirs):
    own = [(text,) for text in TEXTS]
    expected = theirs.loglikelihood_rolling(requests(*own))
    assert ours.loglikelihood_rolling(requests(*own)) == pytest.approx(expected, abs=1e-4)


def test_greedy_texts_equal_those_of_the_hf_model(ours, theirs):
    free = [(text, {"until": [], "max_gen_toks": 20}) for text in TEXTS]
    texts = ours.generate_until(requests(*free))
    assert texts == theirs.generate_until(requests(*free))
    # Texts that end at a stop text in the middle, and in groups of different settings.
    ended = [(prompt, {"until": ["~", text[8:10]], "max_gen_toks": 20}) for prompt, text in zip(TEXTS, texts, strict=True)]
    found = ours.generate_until(requests(*ended))
    assert found == theirs.generate_until(requests(*ended))
    assert [len(text) <= 8 for text in found] == [True] * len(TEXTS)


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [({"max_gen_toks": WINDOW}, "max_gen_toks"), ({"max_gen_toks": 2, "num_beams": 2}, "generation_kwargs")],
)
def test_generation_settings_that_are_not_supported_are_refused_in_one_line(ours, kwargs, field):
    with pytest.raises(ConfigError) as error:
        ours.generate_until(requests(("a", {"until": ["b"]} | kwargs)))
    assert error.value.field == field
    assert "\n" not in str(error.value)


# --- Tasks ---


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Writes a folder with a multiple-choice task, a perplexity task and a generation task."""
    path = tmp_path_factory.mktemp("tasks")
    words = ["cat", "dog", "mat", "hat", "the"]
    documents = [
        {"question": f"which {one} ", "choices": words[:3], "answer": i % 3, "text": f"{one} {two} on the {one}"}
        for i, (one, two) in enumerate((one, two) for one in words for two in words)
    ]
    (path / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path / "documents.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
    }
    own = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "roll": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, fields in own.items():
        (path / f"{name}.yaml").write_text(json.dumps({"task": name} | common | fields))  # JSON is YAML
    return path


def test_metrics_of_tasks_equal_those_of_the_hf_model(folder, tasks, theirs):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    expected = simple_evaluate(theirs, tasks=["choose", "roll", "write"], task_manager=manager)["results"]
    found = score_tasks(jgraph.load(folder), [str(tasks)], batch_size=3, seq_len=WINDOW)
    assert {(one.task, one.metric) for one in found} == {
        ("choose", "acc"),
        ("choose", "acc_norm"),
        ("roll", "word_perplexity"),
        ("roll", "bits_per_byte"),
        ("write", "exact_match"),
    }
    for one in found:
        assert one.value == pytest.approx(expected[one.task][f"{one.metric},none"], rel=1e-5)
        stderr = expected[one.task].get(f"{one.metric}_stderr,none")
        assert one.stderr == (stderr if isinstance(stderr, float) else None)
    assert 0 < next(one.value for one in found if one.metric == "acc") < 1


def test_the_command_prints_and_writes_the_metrics(folder, tasks, tmp_path, capsys):
    flags = ["--limit", "6", "--num-fewshot", "1", "--batch-size", "4", "--json", str(tmp_path / "scores.json")]
    assert evaluate.main([str(folder), "--tasks", str(tasks / "choose.yaml"), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "scores.json").read_text())
    assert (written["source"], written["limit"], written["num_fewshot"]) == (str(folder), 6, 1)
    assert [one["metric"] for one in written["results"]] == ["acc", "acc_norm"]
    acc = written["results"][0]
    assert acc["value"] * 6 == pytest.approx(round(acc["value"] * 6))
    assert lines[0] == f"model  {folder}"
    assert lines[1].split() == ["task", "metric", "value", "stderr"]
    assert lines[2].split() == ["choose", "acc", f"{acc['value']:.4f}", f"{acc['stderr']:.4f}"]


def test_unknown_and_broken_tasks_are_refused_in_one_line(folder, tasks, tmp_path):
    loaded = jgraph.load(folder)
    with pytest.raises(ConfigError, match=r"`tasks` is arc_eazy: .*; did you mean arc_easy\?") as error:
        score_tasks(loaded, ["arc_eazy"])
    assert error.value.field == "tasks"
    with pytest.raises(ConfigError, match="must be a folder with YAML files of tasks"):
        score_tasks(loaded, [str(tmp_path)])
    broken = json.loads((tasks / "choose.yaml").read_text()) | {"dataset_kwargs": {"data_files": {"test": "missing.jsonl"}}}
    (tmp_path / "broken.yaml").write_text(json.dumps(broken))
    with pytest.raises(DataError, match=r"lm-eval cannot load .*broken\.yaml") as error:
        score_tasks(loaded, [str(tmp_path / "broken.yaml")])
    assert "\n" not in str(error.value)


def test_a_run_of_a_byte_model_is_scored_from_a_newline(tmp_path):
    from tests import tiny

    assert tiny.train(tmp_path / "run", "--steps", "1") == 0
    model = jgraph.lm_eval_model(jgraph.load(tmp_path / "run"))
    assert (model.max_length, model.prefix_token_id) == (32, ord("\n"))
    # An empty context, and white space, which lm-eval moves to the continuation.
    found = [log_prob for log_prob, _ in model.loglikelihood(requests(("", "ab"), ("\n", "ab")))]
    assert found == pytest.approx(model.loglikelihood_rolling(requests(("ab",), ("\nab",))), abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=0.1)
    (text,) = model.generate_until(requests(("", {"until": [], "max_gen_toks": 4})))
    (same,) = model.generate_until(requests(("\n", {"until": [], "max_gen_toks": 4})))
    assert text == same != ""
