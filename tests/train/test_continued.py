"""Runs with `continue_from`: their initial state on any devices, and configurations that are refused."""

import dataclasses
import json
import shutil
from functools import partial

import jax
import numpy as np
import pytest
import transformers

import jgraph
from jgraph import evaluate
from jgraph.checkpoint import Checkpoints, store
from jgraph.data import Batches, Tokenizer, load as load_corpus
from jgraph.errors import CheckpointError, ConfigError
from jgraph.precision.config import FP8Config
from jgraph.report import __main__ as report
from jgraph.train.__main__ import parse
from jgraph.train.config import TrainConfig
from jgraph.train.initial import copied_folder, initial_weights, tokenizer_of, write_origin
from jgraph.train.presets import preset
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from tests import chats, tiny
from tests.train.test_pipeline_training import config_of
from tests.train.test_resharding import assert_same_bits

pytestmark = [pytest.mark.once, pytest.mark.long]

CORPUS = {"name": "text", "fingerprint": "0" * 64, "train_tokens": 9, "heldout_tokens": 1}
DELAYED = FP8Config(recipe="delayed", history=4)
FIELDS = {"num_layers": 2, "num_microbatches": 2}


def random_state(setup):
    """Returns a state in the canonical layout with different random values in every leaf."""
    random = np.random.default_rng(0)

    def leaf(like):
        return jax.device_put(np.asarray(random.uniform(1, 9, like.shape)).astype(like.dtype), like.sharding)

    return jax.tree.map(leaf, setup.step.canonical.shapes())


def write_run(path, config):
    """Writes the directory of a finished run without training. Returns its state."""
    setup = TrainSetup.from_config(config)
    state = random_state(setup)
    RunDir(path).write(config, CORPUS, {})
    checkpoints = Checkpoints(RunDir(path).checkpoints, 1)
    checkpoints.save(7, state)
    checkpoints.close()
    return state


def initial_state(path, config, **fields):
    """Returns the canonical initial state of a run that continues from the run at `path`."""
    config = config.changed(continue_from=str(path), run_dir=f"{path}-more", **fields)
    weights = initial_weights(config)
    assert weights is not None
    setup = TrainSetup.from_config(config)
    try:
        return setup.step.canonical.of(weights.load(setup))
    finally:
        weights.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "one"
    return path, write_run(path, config_of(**FIELDS))


@pytest.mark.parametrize("layout", [{}, {"fsdp": 2, "dp": 2}, {"pp": 2}])
def test_the_optimizer_state_of_another_run_is_loaded_bit_for_bit(finished, layout):
    path, there = finished
    here = initial_state(path, config_of(**FIELDS), continue_with="optimizer", **layout)
    assert_same_bits(here.params, there.params)
    (adam, decay, rate), (their_adam, _, _) = here.opt_state, there.opt_state
    assert_same_bits(adam, their_adam)
    assert jax.tree.leaves(decay) == []
    assert (int(rate.count), int(here.step), int(here.skipped)) == (0, 0, 0)


def test_weights_alone_are_loaded_in_another_dtype(finished):
    path, there = finished
    here = initial_state(path, config_of(**FIELDS), main_params_dtype="bfloat16", main_grads_dtype="bfloat16")
    assert_same_bits(here.params, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), there.params))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((here.opt_state, here.step)))


@pytest.mark.parametrize("before", [{"fsdp": 2}, {"pp": 2, "fsdp": 2}])
def test_a_run_on_several_devices_can_be_continued_on_one(tmp_path, before):
    there = write_run(tmp_path / "run", config_of(**FIELDS, **before))
    here = initial_state(tmp_path / "run", config_of(**FIELDS), continue_with="optimizer")
    assert_same_bits((here.params, here.opt_state[0]), jax.device_get((there.params, there.opt_state[0])))


@pytest.mark.parametrize("which", ["weights", "optimizer"])
def test_carried_state_is_loaded_with_the_weights(tmp_path, which):
    config = TrainConfig.from_fields(module="tests.own:Normed", batch_size=4, seq_len=16)
    there = write_run(tmp_path / "run", config)
    assert_same_bits(initial_state(tmp_path / "run", config, continue_with=which).carried, there.carried)


@pytest.mark.parametrize("which", ["weights", "optimizer"])
def test_amax_histories_are_loaded_only_with_the_same_recipe(tmp_path, which):
    config = config_of(**FIELDS, precision="fp8", fp8=DELAYED)
    there = write_run(tmp_path / "run", config)
    assert_same_bits(initial_state(tmp_path / "run", config, continue_with=which).carried, there.carried)
    other = initial_state(tmp_path / "run", config, continue_with=which, fp8=dataclasses.replace(DELAYED, margin=1))
    assert jax.tree.structure(other.carried) == jax.tree.structure(there.carried)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(other.carried))


def test_a_run_can_switch_fp8_on_or_off_when_it_continues_another(finished, tmp_path):
    path, there = finished
    here = initial_state(path, config_of(**FIELDS), precision="fp8", fp8=DELAYED, continue_with="optimizer")
    assert_same_bits(here.params, there.params)
    write_run(tmp_path / "run", config_of(**FIELDS, precision="fp8", fp8=DELAYED))
    assert initial_state(tmp_path / "run", config_of(**FIELDS), continue_with="optimizer").carried == {}


def test_weights_with_a_wrong_checksum_are_refused(tmp_path, monkeypatch):
    original = store.checksums
    with monkeypatch.context() as patch:
        patch.setattr(store, "checksums", lambda *args: [checksum ^ 1 for checksum in original(*args)])
        write_run(tmp_path / "run", config_of(**FIELDS))
    with pytest.raises(CheckpointError, match="has checksum") as error:
        initial_state(tmp_path / "run", config_of(**FIELDS))
    assert error.value.field == "continue_from"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"continue_from": "RUN/checkpoints/5"}, "continue_from"),
        ({"continue_from": "RUN/none"}, "continue_from"),
        ({"continue_from": "RUN/checkpoints/7", "run_dir": "RUN"}, "run_dir"),
        ({"module": "tests.odd:WithoutLogits"}, "module"),
        ({"model": config_of(num_layers=3).model}, "model.num_layers"),
        ({"init_from": "folder"}, "continue_from"),
        ({"continue_from": "", "continue_with": "optimizer"}, "continue_with"),
    ],
)
def test_a_run_that_cannot_be_continued_is_refused_with_the_field_to_change(finished, fields, field):
    path, _ = finished
    changes = {name: value.replace("RUN", str(path)) if isinstance(value, str) else value for name, value in fields.items()}
    fields = {"continue_from": str(path)} | changes
    with pytest.raises((ConfigError, CheckpointError)) as error:
        initial_weights(config_of(**FIELDS).changed(**fields))
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_another_compute_dtype_is_allowed(finished):
    config = config_of(**FIELDS)
    model = dataclasses.replace(config.model, compute_dtype="bfloat16")
    weights = initial_weights(config.changed(model=model, continue_from=str(finished[0])))
    assert weights is not None
    weights.close()


def test_the_model_comes_from_the_run_and_other_settings_from_flags(finished, tmp_path):
    path, _ = finished
    flags = ["--run-dir", str(tmp_path / "new"), "--steps", "5"]
    config = parse(["--continue-from", str(path / "checkpoints" / "7"), *flags])
    assert config.model == config_of(**FIELDS).model
    assert (config.steps, config.input.batch_size, config.preset) == (5, preset("cpu-tiny").input.batch_size, "cpu-tiny")
    with pytest.raises(ConfigError) as error:
        parse(["--continue-from", str(path.with_name("none")), *flags])
    assert error.value.field == "continue_from"


def test_the_tokenizer_is_copied_with_the_weights_and_beats_that_of_the_data(tmp_path):
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    file = chats.save_tokenizer(tmp_path / "origin", chats.CHATML)
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    (file.parent / "generation_config.json").write_text("{}")
    (file.parent / "added_tokens.json").write_text("{}")
    (file.parent / "additional_chat_templates").mkdir()
    (file.parent / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (file.parent / "unrelated.json").write_text("{}")
    first.path.mkdir()
    file.parent.rename(first.origin)
    tokens = chats.save_tokenizer(tmp_path / "tokens").parent
    (tokens / "train-0.bin").touch()
    (tokens / "tokenizer.json").write_text("{}")
    config = TrainConfig.from_fields(continue_from=str(first.path), data=str(tokens))
    second.path.mkdir()
    write_origin(config, second)

    def files(run_dir):
        found = (path for path in run_dir.origin.rglob("*") if path.is_file() and path.name != "unrelated.json")
        return {str(path.relative_to(run_dir.origin)): path.read_bytes() for path in found}

    assert files(second) == files(first)
    assert len(files(first)) == 7
    for copies in (None, second.origin):
        assert tokenizer_of(config, copies).chat([])["chat_template"] == "tools"
    # The template of the data replaces all templates of the weights, also in a run that resumes.
    (tmp_path / "own.jinja").write_text("own")
    config = config.changed(data_format="chat", data_template=str(tmp_path / "own.jinja"))
    write_origin(config, second)
    assert (second.origin / "chat_template.jinja").read_text() == "own"
    for copies in (None, second.origin):
        assert {tokenizer_of(config, copies).chat(tools)["chat_template"] for tools in (None, [])} == {"own"}


def test_a_tokenizer_of_token_files_is_declared_for_transformers(tmp_path):
    tokens, run_dir = chats.save_tokenizer(tmp_path / "tokens").parent, RunDir(tmp_path / "run")
    (tokens / "tokenizer_config.json").unlink()
    (tokens / "train-0.bin").touch()
    run_dir.path.mkdir()
    write_origin(TrainConfig.from_fields(data=str(tokens)), run_dir)
    assert copied_folder(run_dir) is None
    theirs = transformers.AutoTokenizer.from_pretrained(run_dir.origin)
    ours = Tokenizer.of(tokens)
    assert [theirs.eos_token_id] == ours.document_end == Tokenizer.of(run_dir.origin).document_end
    assert theirs("Hi <s>").input_ids == ours.encode("Hi <s>")


# --- Runs ---

FLAGS = ("--eval-every", "100", "--sample-tokens", "0", "--steps", "2", "--model.compute-dtype", "float32")


def test_a_run_continues_another_on_other_devices_and_resumes_without_it(tmp_path, capsys):
    """Continues from one device on two and back, with other data, learning rate and batch size."""
    assert tiny.train(tmp_path / "0", *FLAGS) == 0
    begin = (*FLAGS, "--data", "synthetic", "--optimizer.learning-rate", "2e-3", "--batch-size", "8", "--checkpoint-every", "1")
    for number, layout in enumerate((("--fsdp", "2"), ()), 1):
        before = tmp_path / str(number - 1)
        assert tiny.train(tmp_path / str(number), *begin, *layout, "--continue-from", str(before)) == 0
        assert f"started with the weights of {before} after 2 steps" in capsys.readouterr().out.replace("\n", "")
        corpus = load_corpus("synthetic", seq_len=32, vocab_size=256)
        loaded, batch = jgraph.load(before), Batches(corpus.train, batch_size=8, seq_len=32, seed=0)[0]
        expected = float(jax.jit(partial(loaded.model.evaluate, "loss"))(loaded.params, {}, batch))
        assert tiny.entries(tmp_path / str(number))[0]["loss"] == pytest.approx(expected, rel=1e-6)
    last, losses = tmp_path / "2", tiny.losses(tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(last / "checkpoints" / "2")
    assert tiny.train(last, *begin, "--continue-from", str(tmp_path / "1")) == 0
    assert tiny.losses(last) == losses


def test_a_run_can_be_extended_continued_on_other_data_evaluated_and_reported(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ("--fsdp", "2", "--eval-every", "20")
    assert tiny.train(first, *flags, "--steps", "20") == 0
    assert tiny.train(first, *flags, "--steps", "40", "--optimizer.extend", "constant") == 0
    assert [entry["step"] for entry in tiny.entries(first)] == list(range(1, 41))
    assert tiny.train(second, *flags, "--steps", "10", "--continue-from", str(first), "--data", "synthetic") == 0
    assert f"started with the weights of {first} after 40 steps" in capsys.readouterr().out
    assert evaluate.main([str(second), "--json", str(tmp_path / "numbers.json")]) == 0
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["loss"] == pytest.approx(tiny.entries(second)[-1]["eval_loss"], rel=1e-5)
    assert report.main([str(first), str(second), "--to", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert all(name in page for name in ("first", "second", "continue_from", "synthetic"))
