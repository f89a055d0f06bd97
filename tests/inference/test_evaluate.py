"""`python -m jgraph.evaluate`: the losses of a run's own evaluations, for any run or folder, on any devices."""

import json
import math
import types

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

import jgraph
from jgraph import evaluate, sample
from jgraph.data import Tokenizer, heldout_batches, load as load_corpus
from jgraph.errors import ConfigError, DataError
from jgraph.train import evaluation
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from tests import tiny
from tests.interop.test_interop import MIXTRAL, byte_tokenizer, make
from tests.train.test_continued import write_run

pytestmark = [pytest.mark.once, pytest.mark.long]
SIZES = ("--num-microbatches", "2", "--eval-batches", "3", "--sample-tokens", "0", "--steps", "2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "sharded"
    assert tiny.train(path, *SIZES, "--fsdp", "2") == 0
    return path


def test_evaluate_has_the_loss_of_the_run_on_its_devices_and_on_others(run_dir):
    expected = tiny.entries(run_dir)[-1]["eval_loss"]
    assert evaluation.evaluate(run_dir, fsdp=2).loss == expected
    for layout in ({}, {"dp": 2}):
        assert evaluation.evaluate(run_dir, **layout).loss == pytest.approx(expected, rel=1e-6)


def test_a_run_with_tensor_and_context_parallelism_is_evaluated_and_sampled_as_on_one_device(tmp_path, capsys):
    run_dirs = {name: tmp_path / name for name in ("split", "whole")}
    assert tiny.train(run_dirs["split"], *SIZES, "--tp", "2", "--cp", "2", "--sample-tokens", "4") == 0
    assert tiny.train(run_dirs["whole"], *SIZES, "--sample-tokens", "4") == 0
    expected = tiny.entries(run_dirs["whole"])[-1]["eval_loss"]
    assert tiny.entries(run_dirs["split"])[-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)
    texts = [RunDir(run_dir).read_samples()[0]["text"] for run_dir in run_dirs.values()]
    assert texts[0] == texts[1]
    for flags, devices in ((("--tp", "2", "--fsdp", "2"), 4), ((), 1)):
        assert evaluate.main([str(run_dirs["split"]), *flags, "--json", str(tmp_path / "n.json")]) == 0
        numbers = json.loads((tmp_path / "n.json").read_text())
        assert numbers["loss"] == pytest.approx(expected, rel=1e-5)
        assert numbers["devices"] == devices
    capsys.readouterr()
    for run_dir in run_dirs.values():
        assert sample.main([str(run_dir), "--prompt", "The", "--max-tokens", "8", "--temperature", "0"]) == 0
    sampled = capsys.readouterr().out.split("The")[1:]
    assert len(sampled) == 2
    assert sampled[0].strip() == sampled[1].strip()


def test_the_command_prints_and_writes_loss_perplexity_and_bits_per_byte(run_dir, tmp_path, capsys):
    flags = (
        "--data",
        "synthetic",
        "--seq-len",
        "16",
        "--batch-size",
        "4",
        "--eval-batches",
        "2",
        "--json",
        tmp_path / "n.json",
    )
    assert evaluate.main([str(flag) for flag in (run_dir, *flags)]) == 0
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "n.json").read_text())
    assert (numbers["tokens"], numbers["bytes"], numbers["data"]) == (2 * 4 * 16, 2 * 4 * 16, "synthetic")
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    assert numbers["bits_per_byte"] == pytest.approx(numbers["loss"] / math.log(2))
    for text in (str(run_dir), f"{numbers['loss']:.4f} nats/token", f"{numbers['bits_per_byte']:.4f}", "2 x 4 x 16 tokens"):
        assert text in out


def test_a_folder_is_evaluated_with_its_tokenizer(tmp_path):
    make(tmp_path / "folder", MIXTRAL)
    byte_tokenizer().save(str(tmp_path / "folder" / "tokenizer.json"))
    found = evaluation.evaluate(tmp_path / "folder", data="python-docs", batch_size=4, seq_len=32, eval_batches=2)
    loaded = jgraph.load(tmp_path / "folder")
    corpus = load_corpus("python-docs", seq_len=32, vocab_size=256, tokenizer=tmp_path / "folder" / "tokenizer.json")
    batches = heldout_batches(corpus.heldout, batch_size=4, seq_len=32, limit=2)
    loss = jax.jit(lambda params, batch: loaded.model.evaluate("loss", params, loaded.carried, batch))
    losses = [float(loss(loaded.params, batch)) for batch in batches]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert (found.tokens, found.bytes) == (256, 256)


def test_a_model_is_evaluated_with_its_carried_state(tmp_path):
    config = TrainConfig.from_fields(
        module="tests.own:Normed", batch_size=4, seq_len=16, eval_batches=1, run_dir=str(tmp_path / "run")
    )
    write_run(tmp_path / "run", config)
    loaded = jgraph.load(tmp_path / "run", module=config.module)
    (batch,) = heldout_batches(
        load_corpus("python-docs", seq_len=16, vocab_size=None).heldout, batch_size=4, seq_len=16, limit=1
    )
    expected = float(loaded.model.evaluate("loss", loaded.params, loaded.carried, batch))
    assert evaluation.evaluate(tmp_path / "run", module=config.module).loss == pytest.approx(expected, rel=1e-6)


def test_bytes_are_counted_over_the_predicted_text(tmp_path):
    file = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "€": 1, "three": 2, "</s>": 3}, unk_token="a")).save(str(file))
    corpus = types.SimpleNamespace(name="text", train=np.zeros(9, np.uint16), tokenizer=Tokenizer.of(file))
    rows = [np.array([[2, 0, 1, 3, 2], [3, 2, 3, 0, 0]])]
    decoded = (len(" a € three"), len("three a a"))  # the tokenizer joins tokens with blanks
    assert evaluation._bytes(corpus, rows) == decoded[0] + 2 + decoded[1]
    corpus.tokenizer = Tokenizer(without="no tokenizer")
    assert evaluation._bytes(corpus, rows) is None


@pytest.mark.parametrize(
    ("source", "options", "kind", "field"),
    [
        ("none", {}, ConfigError, "run"),
        ("folder", {}, ConfigError, "data"),
        ("folder", {"data": "python-docs"}, DataError, ""),
        ("run", {"seq_len": 0}, ConfigError, "seq_len"),
        ("run", {"fsdp": 16}, ConfigError, "dp"),  # too few devices, before a batch of 4
    ],
)
def test_wrong_arguments_are_refused_in_one_line(run_dir, tmp_path, source, options, kind, field):
    if source == "folder":
        make(tmp_path / "folder")
    with pytest.raises(kind) as error:
        evaluation.evaluate(run_dir if source == "run" else tmp_path / source, **options)
    assert error.value.field == field
    assert "\n" not in str(error.value)
